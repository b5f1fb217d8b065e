"""How much of a batch is of one class?  Batches are chosen as a run's planner would next, by its last embeddings.

    python benchmarks/batches/purity.py OUT/further     # where the study was run, for its checkpoints

Purity: of the other samples in a sample's batch, the share that has its caption, which is the class.  Of each run with
spectral batches that has none yet it is written to purity.json, beside that of uniform batches.
"""

# P: places of an epoch   L: batches   B: rows of a batch   D: width

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fullbatch.data.loader import open_pool
from fullbatch.loading import load_trained
from fullbatch.selection.spectral import spectral_order
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder

Ints = npt.NDArray[np.int64]


def purity(class_LB: Ints) -> float:
    equal_LBB = class_LB[:, :, None] == class_LB[:, None, :]
    rows = class_LB.shape[1]
    return float((equal_LBB.sum(2) - 1).mean() / (rows - 1))


def measured(place: Path) -> dict[str, float] | None:
    """By this checkpoint; None: its run chose no spectral batches by the embeddings of its steps."""
    trained = load_trained(place)
    selection, size = trained.config.selection, trained.config.training.batch_size
    if selection.batches != "spectral" or not selection.keeps_table:
        return None
    pool, order = open_pool(trained.config.data)
    ids_P = order.ids(0, np.arange(order.epoch_size // size * size))
    image_PD, text_PD = checkpoint.read(place, ("table",))["table"]["rows"][ids_P].float().unbind(1)
    chosen_P = spectral_order(image_PD, text_PD, size, selection.block_batches, trained.temperature, seed=0)
    _, class_n = np.unique([pool.read(index).captions[0] for index in range(len(pool))], return_inverse=True)
    class_P = class_n[ids_P]
    return {"own": purity(class_P[chosen_P].reshape(-1, size)), "uniform": purity(class_P.reshape(-1, size))}


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of a batch is of one class?")
    parser.add_argument("stage", type=Path, help="the folder of a comparison")
    for run in sorted((parser.parse_args().stage / "runs").glob("*/results.json")):
        target, place = run.with_name("purity.json"), checkpoint.last_good(Folder(run.parent).checkpoints)
        if place is None or target.is_file():
            continue
        if (found := measured(place)) is not None:
            target.write_text(json.dumps(found) + "\n")
            print(f"{run.parent.name}: {found['own']:.1%}, of uniform batches {found['uniform']:.1%}", flush=True)


if __name__ == "__main__":
    main()
