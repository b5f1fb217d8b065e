"""What a checkpoint of a sharded run costs each rank, on real gloo ranks; on one rank, that of a run that is not.

    python benchmarks/sharded_checkpoints.py FOLDER                # a ViT-B-32 on 1, 2 and 4 processes
    python benchmarks/sharded_checkpoints.py FOLDER --ranks 8 --model tiny.json

The state is that of a run with AdamW and averaged weights, four times the weights.  Counted: what a rank copies, the
milliseconds for which training waits (the copy; another thread writes), the seconds until the checkpoint has its name,
the largest file, and by how much the process grows at most while it saves and while it loads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

import fullbatch as fb
from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer
from fullbatch.distributed import towers
from fullbatch.distributed.shards import mapped
from fullbatch.models.build import build_model
from fullbatch.training import checkpoint
from fullbatch.training.optimizer import WeightAverage, make_optimizer
from fullbatch.training.state import Position, TrainingState


@dataclass(frozen=True)
class Cost:
    copied: float  # MB
    waited: float  # ms
    written: float  # s
    largest: float  # MB, of the files
    saving: float  # MB
    loading: float  # MB


class Growth:
    """Of this process, at most, since it was made; MB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak
        self.before = self._read("VmRSS")

    def _read(self, name: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return float(line.split()[1]) * 1024 / 1e6

    def __call__(self) -> float:
        return self._read("VmHWM") - self.before


def make_state(model_name: str) -> TrainingState:
    """As after a first step."""
    model = towers.sharded(build_model(Model(model=model_name), None), torch.device("cpu"))
    optimizer = make_optimizer(model, Optimizer(), "cpu")
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    objective = fb.make_objective("openclip")
    return TrainingState(model, WeightAverage(model, 0.9), optimizer, None, objective, scaler, Position())


def bytes_in(captured: checkpoint.Captured) -> int:
    sizes = [shard.to_local().nbytes for shard in captured.shards.values() if isinstance(shard, DTensor)]
    mapped(captured.parts, lambda place, tensor: sizes.append(0 if tensor.is_meta else tensor.nbytes))
    return sum(sizes)


def count(rank: int, world: int, port: int, folder: Path, model: str, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    state, writer = make_state(model), checkpoint.Writer(folder, keep=1)
    dist.barrier()
    grown, start = Growth(), time.monotonic()
    captured = state.capture(keep=rank == 0)
    waited, copied = time.monotonic() - start, bytes_in(captured)
    writer.save(1, captured, 0.0)
    del captured
    writer.wait()
    written, saving = time.monotonic() - start, grown()
    dist.barrier()
    grown, saved = Growth(), checkpoint.folder_of(folder, 1)
    state.restore(checkpoint.read(saved, checked=True, empty=towers.empty_as_in(state.model)))
    largest = max(path.stat().st_size for path in saved.iterdir())
    results[rank] = Cost(copied / 1e6, waited * 1e3, written, largest / 1e6, saving, grown())
    dist.destroy_process_group()


def measured(world: int, folder: Path, model: str) -> Cost:
    """The worst of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(count, (world, port, folder, model, results), nprocs=world)  # type: ignore[no-untyped-call]
        return Cost(*map(max, zip(*map(astuple, results.values()), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to write to; it must not be there yet")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="ViT-B-32")
    options = parser.parse_args()
    print(f"{options.model}, float32, torch {torch.__version__}; the most of all ranks\n")
    print("| ranks | copied, MB | training waits, ms | written, s | largest file, MB | saving, MB | loading, MB |")
    print("|---|---|---|---|---|---|---|")
    for world in options.ranks:
        options.folder.mkdir(parents=True)
        try:
            cost = measured(world, options.folder, options.model)
        finally:
            shutil.rmtree(options.folder)
        print(f"| {world} | {' | '.join(f'{value:,.1f}' for value in astuple(cost))} |", flush=True)


if __name__ == "__main__":
    main()
