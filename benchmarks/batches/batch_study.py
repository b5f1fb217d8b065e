"""The study of batches: which samples should meet, on CIFAR-10 with two views and on icons with captions.

    python benchmarks/batches/cifar.py unpack cifar10.tar DATA
    python benchmarks/batches/batch_study.py prepare DATA OUT --jobs 16    # fills the cache: pixels, corrupted pixels
    python benchmarks/batches/batch_study.py cifar DATA OUT --jobs 6       # the analogue of Cho et al.'s Tables 1, 2
    python benchmarks/icons/unpack.py icons.tar ICONS --captions name
    python benchmarks/batches/batch_study.py icons ICONS OUT --jobs 12     # spectral batches for CLIP and NeuCLIP
    python benchmarks/batches/batch_study.py gather OUT docs/studies/batches/runs

``cifar`` and ``icons`` write a plan for ``fullbatch compare`` and start it; killed, they go on where they were.  The
runs of ``cifar`` are in the order of what is asked first: SogCLR with uniform (SGD) and spectral batches (SC), three
seeds; SimCLR with both; ordered batches (OSGD) with both losses; then the other seeds of these.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from comparing import compare

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


def label(loss: str, batches: str) -> str:
    return f"{loss} {batches}"


def on_device(device: str, graphs: bool) -> dict[str, Any]:
    """On a CPU, for a rehearsal, without what only a GPU can do."""
    gpu = device == "cuda"
    return {"precision": "bf16" if gpu else "fp32", "graphs": gpu and graphs, "device": device}


QUIET = {"tensorboard": False, "keep": 1, "log_every": 200, "save_minutes": None, "quiet": True}


def cifar_plan(
    data: Path, epochs: int, device: str, graphs: bool, planners: int, tower: str = TOWER, layout: str = "first"
) -> dict[str, Any]:
    """Rows before the others have all seeds; the others come in blocks, in the order in which they are asked."""
    base = {
        "data": {"data": [f"{data}/train-{{00000..00004}}.tar"], "workers": 0, "in_memory": True},
        "model": {"view_tower": tower, "view_stem": "small", "projection": [2048, 128]},
        "selection": {"planners": planners},
        "training": {"epochs": epochs, "channels_last": layout == "last", **on_device(device, graphs)},
        "optimizer": {"optimizer": "lars", "lr": RATE, "weight_decay": 1e-6, "momentum": 0.9},
        "schedule": {"warmup_share": 0.1},
        "evaluation": {"evaluate": list(tasks(data).values()), "eval_batch": EVAL_BATCH, "audit_every": 0},
        "run": QUIET,
    }
    rows = {
        label(loss, batches): {"name": label(loss, batches), **LOSSES[loss], **BATCHES[batches]}
        for loss in LOSSES
        for batches in BATCHES
    }
    main = [label("SogCLR", "SGD"), label("SogCLR", "SC")]
    simclr = [label("SimCLR", "SGD"), label("SimCLR", "SC")]
    ordered = [label("SogCLR", "OSGD"), label("SimCLR", "OSGD")]
    further = [{**rows[name], "batch_sizes": []} for name in (*simclr, *ordered)]
    return {
        "name": "cifar",
        "base": base,
        "methods": [*(rows[name] for name in main), *further],
        "batch_sizes": [BATCH],
        "seeds": [0, 1, 2],
        "order": "seeds",
        "baseline": main[0],
        "metric": f"{tasks(data)['clean']} mean_r1",
        "runs": [
            {"methods": simclr, "batch_sizes": [BATCH], "seeds": [0]},
            {"methods": ordered, "batch_sizes": [BATCH], "seeds": [0]},
            {"methods": [*simclr, *ordered], "batch_sizes": [BATCH], "seeds": [1]},
            {"methods": [*simclr, *ordered], "batch_sizes": [BATCH], "seeds": [2]},
        ],
    }


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
            "selection": {"planners": planners, "block_batches": 10, "plan_ahead": False},
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


def gather(out: Path, target: Path) -> None:
    """What is worth keeping: the plans, the tables, each run's own lines, and how large its batches' losses were."""
    for name in ("cifar", "icons"):
        if not (out / name / "runs").is_dir():
            continue
        for kind in ("metrics", "losses"):
            (target / name / kind).mkdir(parents=True, exist_ok=True)
        for path in [out / name / "plan.yaml", *sorted((out / name).glob("comparison.*"))]:
            if path.is_file():
                shutil.copy(path, target / name / path.name)
        costs = {}
        for run in sorted((out / name / "runs").iterdir()):
            for file, kind in (("metrics.jsonl", "metrics"), ("batches/losses.jsonl", "losses")):
                if (run / file).is_file():
                    shutil.copy(run / file, target / name / kind / f"{run.name}.jsonl")
            if (run / "results.json").is_file():
                costs[run.name] = json.loads((run / "results.json").read_text()).get("cost")
        (target / name / "costs.json").write_text(json.dumps(costs, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the study of batches.")
    parser.add_argument("stage", choices=("prepare", "cifar", "icons", "gather"))
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
    match options.stage:
        case "prepare":
            prepare(options.source, options.jobs)
        case "cifar":
            compare(
                cifar_plan(options.source, options.epochs, *how, options.tower, options.channels), options.out, more
            )
        case "icons":
            compare(icons_plan(options.source, options.samples, *how), options.out, more)
        case "gather":
            gather(options.source, options.out)


if __name__ == "__main__":
    main()
