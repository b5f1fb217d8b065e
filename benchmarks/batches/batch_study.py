"""The study of batches: which samples should meet, on CIFAR-10 with two views and on icons with captions.

    python benchmarks/batches/cifar.py unpack cifar10.tar DATA
    python benchmarks/batches/batch_study.py prepare DATA OUT --jobs 16    # fills the cache: pixels, corrupted pixels
    python benchmarks/batches/batch_study.py cifar DATA OUT --jobs 6       # the analogue of Cho et al.'s Tables 1, 2
    python benchmarks/batches/batch_study.py further DATA OUT --jobs 10    # the seeds it lacks; variants of SC
    python benchmarks/batches/purity.py OUT/further                   # how much of their batches is of one class
    python benchmarks/icons/unpack.py icons.tar ICONS --captions name
    python benchmarks/batches/batch_study.py icons ICONS OUT --jobs 12     # spectral batches for CLIP and NeuCLIP
    python benchmarks/batches/batch_study.py gather OUT docs/studies/batches/runs

``cifar``, ``further`` and ``icons`` write a plan for ``fullbatch compare`` and start it; killed, they go on where they
were, and elsewhere after ``cp -r docs/studies/batches/runs OUT``, but for ``cifar``, of whose runs too little was kept.
Its runs are in the order of what is asked first: SogCLR with uniform (SGD) and spectral batches (SC), three
seeds; SimCLR with both; ordered batches (OSGD) with both losses.  ``further`` has the other seeds of these, and then
spectral batches of smaller blocks, in the last third of a run only, and with corrected normalizers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from comparing import compare, keep_runs

TOWER, PIXELS, BATCH, EPOCHS = "resnet18", 32, 32, 30
EVAL_BATCH = 500  # also the pieces in which corrupted images are kept
RATE = 0.075 * BATCH**0.5
ICON_MODEL = os.path.relpath(Path(__file__).parent.parent / "icons" / "vit.json")
ICON_SAMPLES, ICON_BATCH = 420_000, 128

Row = dict[str, Any]

# The paper's two losses.
LOSSES: Mapping[str, Row] = {
    "SogCLR": {"method": "sogclr_views", "settings": {"temperature": 0.1, "gamma": 0.9}},
    "SimCLR": {"method": "simclr", "settings": {"temperature": 0.1}},
}
# Its three ways of drawing batches, by its own names.
BATCHES: Mapping[str, Row] = {
    "SGD": {"batches": "uniform"},
    "SC": {"batches": "spectral", "block_batches": 40},
    "OSGD": {"batches": "ordered", "drawn_batches": 1500, "kept_batches": 150},
}


def tasks(data: Path) -> dict[str, str]:
    """What is measured, by the names it has in the tables."""
    train, test = f"{data}/train-{{00000..00004}}.tar", f"{data}/test.tar"
    return {
        "clean": f"views:{test}",
        "corrupted": f"corrupted_views:{test}",
        "k-NN": f"knn:{train}|{test}",
        "linear": f"linear:{train}|{test}",
    }


def on_device(device: str, graphs: bool) -> dict[str, Any]:
    """On a CPU, for a rehearsal, without what only a GPU can do."""
    gpu = device == "cuda"
    return {"precision": "bf16" if gpu else "fp32", "graphs": gpu and graphs, "device": device}


QUIET = {"tensorboard": False, "keep": 1, "log_every": 200, "save_minutes": None, "quiet": True}


@dataclass(frozen=True)
class Cifar:
    """data      the folder with the shards
    device    "cpu" for a rehearsal
    graphs    steps are recorded as CUDA graphs
    planners  processes that plan batches, of each run
    layout    "last": channels last
    """

    data: Path
    epochs: int = EPOCHS
    device: str = "cuda"
    graphs: bool = True
    planners: int = 2
    tower: str = TOWER
    layout: str = "first"


def cifar_rows(setting: Cifar) -> dict[str, Row]:
    """By the names that they have in the tables."""
    late = {**BATCHES["SC"], "uniform_epochs": setting.epochs - setting.epochs // 3}
    ways = {
        **BATCHES,
        "SC k 5": {**BATCHES["SC"], "block_batches": 5},
        "SC late": late,  # in the last third only
        "SC corrected": {**BATCHES["SC"], "correction": "normalizers"},
    }
    return {
        f"{loss} {batches}": {"name": f"{loss} {batches}", **LOSSES[loss], **way}
        for loss in LOSSES
        for batches, way in ways.items()
    }


def cifar_runs(name: str, setting: Cifar, blocks: Sequence[tuple[Sequence[str], Sequence[int]]]) -> dict[str, Any]:
    """A plan of blocks, names of rows and their seeds, in the order in which they are asked."""
    data, rows = setting.data, cifar_rows(setting)
    base = {
        "data": {"data": [f"{data}/train-{{00000..00004}}.tar"], "workers": 0, "in_memory": True},
        "model": {"view_tower": setting.tower, "view_stem": "small", "projection": [2048, 128]},
        "selection": {"planners": setting.planners, "correction": "none"},
        "training": {
            "epochs": setting.epochs,
            "channels_last": setting.layout == "last",
            **on_device(setting.device, setting.graphs),
        },
        "optimizer": {"optimizer": "lars", "lr": RATE, "weight_decay": 1e-6, "momentum": 0.9},
        "schedule": {"warmup_share": 0.1},
        "evaluation": {"evaluate": list(tasks(data).values()), "eval_batch": EVAL_BATCH, "audit_every": 0},
        "run": {**QUIET, "log_every": 1000},
    }
    asked = [row for names, _ in blocks for row in names]
    return {
        "name": name,
        "base": base,
        "methods": [{**rows[row], "batch_sizes": []} for row in dict.fromkeys(asked)],
        "batch_sizes": [BATCH],
        "seeds": [0, 1, 2],
        "baseline": asked[0],
        "metric": f"{tasks(data)['clean']} mean_r1",
        "runs": [
            {"methods": list(names), "batch_sizes": [BATCH], "seeds": [seed]}
            for names, seeds in blocks
            for seed in seeds
        ],
    }


def cifar_plan(setting: Cifar) -> dict[str, Any]:
    return cifar_runs(
        "cifar",
        setting,
        [
            (("SogCLR SGD", "SogCLR SC"), (0, 1, 2)),
            (("SimCLR SGD", "SimCLR SC"), (0,)),
            (("SogCLR OSGD", "SimCLR OSGD"), (0,)),
        ],
    )


def further_plan(setting: Cifar) -> dict[str, Any]:
    return cifar_runs(
        "further",
        setting,
        [
            (("SimCLR SGD", "SimCLR SC", "SogCLR OSGD", "SimCLR OSGD"), (1, 2)),
            (("SogCLR SC k 5", "SogCLR SC late", "SogCLR SC corrected"), (0, 1, 2)),
            (("SimCLR SC k 5", "SimCLR SC late"), (0, 1, 2)),
        ],
    )


# method -> its settings, and its learning rates
ICON_SETTINGS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "openclip": ({"temperature": 0.07}, {"lr": 5e-4, "temperature_lr": 1.25e-4}),
    "neuclip": ({"temperature": 0.05, "rho": 6.0, "prototype_lr": 0.02}, {"lr": 5e-4, "temperature_lr": 1e-6}),
}


def icons_plan(data: Path, samples: int, device: str, graphs: bool, planners: int) -> dict[str, Any]:
    """Uniform and spectral batches for CLIP's own loss and for NeuCLIP, with the settings a former icon study chose.

    Blocks of 10 batches of 128 have as many samples as the paper's of 40 batches of 32.  A run is four
    epochs, so training waits for its plans rather than to spend the second epoch on uniform batches too.
    """
    rows = []
    for method, (own, rates) in ICON_SETTINGS.items():
        for batches in ("uniform", "spectral"):
            name = f"{method} {batches}"
            rows.append({"name": name, "method": method, "settings": own, "batches": batches, **rates})
    return {
        "name": "icons",
        "base": {
            "data": {
                "data": [f"{data}/train-{{00000..00019}}.tar"],
                "workers": 0,
                "in_memory": True,
                "crop": [0.8, 1.0],
            },
            "model": {"model": ICON_MODEL},
            "selection": {"planners": planners, "block_batches": 10, "plan_ahead": False, "correction": "none"},
            "training": {"samples": samples, **on_device(device, graphs)},
            "optimizer": {"weight_decay": 0.1, "beta2": 0.98, "eps": 1e-6},
            "schedule": {"warmup_share": 0.1},
            "evaluation": {
                "evaluate": [f"retrieval:{data}/test-00000.tar"],
                "eval_batch": 2048,
                "audits": 5,
                "audit_anchors": 10_000,
                "audit_samples": 1_000_000,
            },
            "run": {**QUIET, "log_every": 50},
        },
        "methods": rows,
        "batch_sizes": [ICON_BATCH],
        "seeds": [0, 1, 2],
        "order": "seeds",
        "baseline": "neuclip uniform",
        "metric": "mean_r1",
    }


# ---------------------------------------------------------------------------------------------------------------------
# the stages


def prepare(data: Path, jobs: int) -> None:
    """Into the cache, with more processes than a run has: the training pixels and the corrupted test images."""
    from fullbatch.config.data import Data
    from fullbatch.data.images import EvalTransform
    from fullbatch.data.in_memory import decode_all, decoded_key
    from fullbatch.data.loader import open_pool

    source = Data(data=(f"{data}/train-{{00000..00004}}.tar",))
    pool, _ = open_pool(source)
    transform = EvalTransform(PIXELS, source.max_pixels)
    found = decode_all(pool, decoded_key(pool, source.sources, transform), transform, jobs)
    print(f"{len(found.captions):,} training photographs, {len(found.bad)} of them cannot be read", flush=True)
    test = str(data / "test.tar")
    pieces = -(-len(open_pool(Data(data=(test,)))[0]) // EVAL_BATCH)
    with ProcessPoolExecutor(jobs) as workers:
        made = sum(workers.map(corrupt_piece, [test] * pieces, range(pieces)))
    print(f"{made:,} corrupted photographs", flush=True)


def corrupt_piece(test: str, piece: int) -> int:
    """As an evaluation on one rank would, which then finds them."""
    from fullbatch.config.data import Data
    from fullbatch.data.images import EvalTransform, no_tokens
    from fullbatch.data.loader import EvaluationBatches, open_pool
    from fullbatch.evaluation.view_retrieval import every_corruption

    batches = EvaluationBatches(open_pool(Data(data=(test,)))[0], EVAL_BATCH, EvalTransform(PIXELS), no_tokens)
    return sum(len(images) for images in every_corruption(batches[piece], keep=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the study of batches.")
    parser.add_argument("stage", choices=("prepare", "cifar", "further", "icons", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the shards; for gather, OUT")
    parser.add_argument("out", type=Path, help="the folder of the comparisons; for gather, where to put what is kept")
    parser.add_argument("--jobs", type=int, default=6, help="runs side by side on the GPU; for prepare, processes")
    parser.add_argument("--stop-after", type=float, default=None, help="minutes after which no run is started")
    parser.add_argument("--planners", type=int, default=2, help="processes that plan batches, of each run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of cifar; for a rehearsal: fewer")
    parser.add_argument("--tower", default=TOWER, help="of cifar; for a rehearsal: a smaller one, such as test_resnet")
    parser.add_argument("--samples", type=int, default=ICON_SAMPLES, help="of icons; for a rehearsal: fewer")
    parser.add_argument(
        "--channels", choices=("first", "last"), default="first", help="of cifar: how images lie in memory"
    )
    parser.add_argument("--no-graphs", action="store_true", help="steps are not recorded as CUDA graphs")
    options = parser.parse_args()
    more = ["--jobs", str(options.jobs)]
    if options.stop_after is not None:
        more += ["--stop-after", str(options.stop_after)]
    how = (options.device, not options.no_graphs, options.planners)
    cifar = Cifar(options.source, options.epochs, *how, options.tower, options.channels)
    match options.stage:
        case "prepare":
            prepare(options.source, options.jobs)
        case "cifar":
            compare(cifar_plan(cifar), options.out, more)
        case "further":
            compare(further_plan(cifar), options.out, more)
        case "icons":
            compare(icons_plan(options.source, options.samples, *how), options.out, more)
        case "gather":
            keep_runs(options.source, options.out, ("cifar", "further", "icons"), most=50)


if __name__ == "__main__":
    main()
