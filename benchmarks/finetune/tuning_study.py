"""The fine-tuning study: a small CLIP that knows one kind of icons is tuned on another, by what TuneCLIP compares.

    python benchmarks/finetune/icon_parts.py icons.tar DATA
    python benchmarks/finetune/held_out.py unpack held_out.tar DATA
    python benchmarks/finetune/tuning_study.py base DATA OUT --jobs 2     # trains the base; the better of two rates
    python benchmarks/finetune/tuning_study.py rates DATA OUT --jobs 8    # three learning rates for each way of tuning
    python benchmarks/finetune/tuning_study.py race DATA OUT --jobs 8     # with the best of them
    python benchmarks/finetune/tuning_study.py gather OUT docs/studies/finetune/runs

``decode``, before them, fills the cache with many processes.  The stages write a plan for ``fullbatch compare`` and
start it; killed, they go on where they were.  The runs of ``race`` are in the order of what is asked first; see
``blocks``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullbatch.cli import main as fullbatch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))
from comparing import compare
from study import score_of

MODEL = os.path.relpath(Path(__file__).parent.parent / "icons" / "vit.json")
BASE_SAMPLES, BASE_BATCH, BASE_RATES = 2_000_000, 1024, (1e-3, 2e-3)
BATCH, EPOCHS = 256, 5
TUNING_SEED = 100  # not one of those that are reported
RATES = (3e-5, 1e-4, 3e-4)
SGD_RATES = (0.01, 0.1, 1.0)  # its updates are the gradient's size, thousands of times below those of AdamW
MARGINS = (0.01, 0.05, 0.1, 0.2, 0.4)
MORE_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
PARTS = ("base", "tune", "tune-once", "tune-often", "tune-noisy", "emoji-once")  # what runs train on

Row = dict[str, Any]


def tasks(data: Path) -> dict[str, str]:
    """What is measured, by the names it has in the tables.  Only the first is of the part that is tuned on."""
    return {
        "tuning part": f"retrieval:{data}/tune-test.tar",
        "base part": f"retrieval:{data}/base-test.tar",
        "emoji": "retrieval:emoji?split=new_style",
        "OpenClipart": f"retrieval:{data}/openclipart.tar",
        "CIFAR-10": f"zero_shot:{data}/cifar10.tar",
    }


def checks(data: Path) -> tuple[str, str]:
    """What rates and epochs are chosen by: what tuning should teach, and what it should leave alone."""
    return f"retrieval:{data}/tune-check.tar", f"retrieval:{data}/base-check.tar"


def ways(epochs: int) -> dict[str, tuple[Row, tuple[float, ...]]]:
    """The ways of tuning whose learning rate is chosen, with the rates tried.  The temperature is the base's."""
    osr = {"recovery_epochs": float(epochs)}
    # SGD adds the decay to the gradient; and its steps cannot be recorded.
    sgd = {"optimizer": "sgd", "weight_decay": 1e-5, "graphs": False}
    return {
        "openclip": ({"method": "openclip"}, RATES),
        "fastclip_v3": ({"method": "fastclip_v3", "settings": {"gamma_epochs": epochs / 2}}, RATES),
        "tuneclip": ({"method": "tuneclip", **osr}, RATES),
        "GCL + OSR": ({"method": "tuneclip", "pairwise": "identity", **osr}, RATES),
        "OSR + SGD": ({"method": "tuneclip", **sgd, **osr}, SGD_RATES),
    }


def shared(data: Path, on: str, device: str) -> dict[str, Any]:
    """What all runs have in common.  On a CPU, for a rehearsal, without what only a GPU can do."""
    gpu = device == "cuda"
    return {
        "data": {"data": [f"{data}/{on}.tar"], "workers": 0, "in_memory": True, "crop": [0.8, 1.0]},
        "training": {"precision": "bf16" if gpu else "fp32", "graphs": gpu, "device": device},
        "evaluation": {"eval_batch": 2048, "audit_every": 0},
        "run": {"tensorboard": False, "keep": 1, "log_every": 50, "save_minutes": None, "quiet": True},
    }


def base_plan(data: Path, samples: int, device: str, model: str = MODEL) -> dict[str, Any]:
    plan = shared(data, "base", device)
    plan["model"] = {"model": model}
    plan["training"]["samples"] = samples
    plan["optimizer"] = {"weight_decay": 0.1, "beta2": 0.98, "eps": 1e-6, "temperature_lr": 1e-3}
    plan["schedule"] = {"warmup_share": 0.1}
    plan["evaluation"]["evaluate"] = [checks(data)[1]]
    return {
        "name": "pretraining",
        "base": plan,
        "methods": [{"name": f"lr={rate:g}", "method": "openclip", "lr": rate} for rate in BASE_RATES],
        "batch_sizes": [BASE_BATCH],
        "seeds": [0],
        "baseline": f"lr={BASE_RATES[0]:g}",
        "metric": "mean_r1",
    }


def tuning_base(data: Path, pretrained: Path, epochs: int, device: str) -> dict[str, Any]:
    plan = shared(data, "tune", device)
    plan["model"] = {"pretrained": str(pretrained)}
    plan["training"]["epochs"] = epochs
    plan["optimizer"] = {"weight_decay": 0.02, "beta2": 0.98, "eps": 1e-6}
    return plan


def label(way: str, rate: float) -> str:
    return f"{way} lr={rate:g}"


def rates_plan(data: Path, pretrained: Path, epochs: int, device: str) -> dict[str, Any]:
    """A way's first rate before any way's second, so that a plan that is cut short is cut for all alike."""
    plan = tuning_base(data, pretrained, epochs, device)
    plan["evaluation"]["evaluate"] = list(checks(data))
    rows = [
        {"name": label(way, rates[place]), **row, "lr": rates[place]}
        for place in range(len(RATES))
        for way, (row, rates) in ways(epochs).items()
    ]
    return {
        "name": "rates",
        "base": plan,
        "methods": rows,
        "batch_sizes": [BATCH],
        "seeds": [TUNING_SEED],
        "baseline": rows[0]["name"],
        "metric": "mean_r1",
    }


def score(results: Mapping[str, float], data: Path) -> float:
    """Mean R@1 over both checks."""
    return sum(results[f"{task} mean_r1"] for task in checks(data)) / 2


def choose(comparison: Mapping[str, Any], data: Path, epochs: int) -> dict[str, float]:
    """The best rate of each way of tuning; a run that failed cannot win."""
    scores = {run["method"]: score(run["results"], data) for run in comparison["runs"] if run["status"] == "done"}
    best = {}
    for way, (_, rates) in ways(epochs).items():
        there = [rate for rate in rates if label(way, rate) in scores]
        if not there:
            raise SystemExit(f"error: no run of {way} has ended well")
        best[way] = max(there, key=lambda rate: scores[label(way, rate)])
    return best


def blocks(data: Path, best: Mapping[str, float], epochs: int) -> dict[str, list[Row]]:
    """The rows of each question, in the order in which the questions are asked."""
    found = ways(epochs)

    def row(name: str, way: str, **changes: Any) -> Row:
        return {"name": name, **found[way][0], "lr": best[way], **changes}

    def on(part: str) -> dict[str, Any]:
        return {"data": [f"{data}/{part}.tar"]}

    slow = {"epochs": 2 * epochs, "evaluate_every": 2}
    few = {**on("emoji-once"), **slow, "recovery_epochs": 2.0 * epochs}
    warm = {"recovery_epochs": 0.0, "warmup_epochs": 0.5, "warmup_from": best["OSR + SGD"] / 10}
    return {
        "main": [row(way, way) for way in ("openclip", "fastclip_v3", "tuneclip")],
        "Table 2": [row(f"carry {what}", "tuneclip", carry=what) for what in ("none", "moments", "memory")],
        "GCL": [row("GCL + OSR", "GCL + OSR"), row("GCL, carry none", "GCL + OSR", carry="none")],
        "margins": [row(f"margin {m:g}", "tuneclip", settings={"margin": m}) for m in MARGINS if m != 0.1],
        "Table 19": [
            row("SGD, warm-up", "OSR + SGD", **warm),
            row("larger frozen batches", "tuneclip", recovery_batch=2 * BATCH, carry="moments"),
            row("OSR + SGD", "OSR + SGD"),
        ],
        "equal compute": [row(f"{way}, twice as long", way, **slow) for way in ("openclip", "fastclip_v3")],
        "negatives": [
            row(f"{short} on {part}", way, **changes)
            for part, changes in (("emoji", few), ("names once", on("tune-once")), ("names often", on("tune-often")))
            for short, way in (("GCL", "GCL + OSR"), ("HGCL", "tuneclip"))
        ],
        "noise": [
            row(f"{way}, noisy captions", way, **on("tune-noisy"))
            for way in ("openclip", "fastclip_v3", "GCL + OSR", "tuneclip")
        ],
        "rates": [row(label("tuneclip", rate), "tuneclip", lr=rate) for rate in MORE_RATES if rate != best["tuneclip"]],
    }


def race_plan(data: Path, pretrained: Path, best: Mapping[str, float], epochs: int, device: str) -> dict[str, Any]:
    plan = tuning_base(data, pretrained, epochs, device)
    measured = [*tasks(data).values(), *checks(data)]
    plan["evaluation"] |= {"evaluate": measured, "evaluate_every": 1, "evaluate_start": True}
    asked = blocks(data, best, epochs)
    further = [{**each, "batch_sizes": []} for name, rows in asked.items() for each in rows if name != "main"]
    return {
        "name": "race",
        "base": plan,
        "methods": [*asked["main"], *further],
        "batch_sizes": [BATCH],
        "seeds": [0, 1, 2],
        "order": "seeds",
        "baseline": "openclip",
        "metric": f"{measured[0]} mean_r1",
        "runs": [
            {"methods": [each["name"] for each in rows], "batch_sizes": [BATCH], "seeds": [0]}
            for name, rows in asked.items()
            if name != "main"
        ],
    }


# ---------------------------------------------------------------------------------------------------------------------
# the stages


def export_best(comparison: Mapping[str, Any], out: Path, stage: str = "pretraining", name: str = "base") -> Row:
    """OUT/base: the best base of a stage, as other programs and ``pretrained`` read it; OUT/base.json says which."""
    ended = [run for run in comparison["runs"] if run["status"] == "done"]
    if not ended:
        raise SystemExit("error: no run of the base has ended well")
    best: Row = max(ended, key=score_of)
    (out / f"{name}.json").write_text(json.dumps(best, indent=1))
    if not (out / name).is_dir():
        fullbatch(["export", str(out / stage / best["folder"]), str(out / name), "--format", "safetensors"])
    return best


def decode(data: Path, workers: int, parts: Sequence[str] = PARTS) -> None:
    """Fill the cache that runs with the data in memory read, with more processes than a run has."""
    from fullbatch.config.data import Data
    from fullbatch.data.images import EvalTransform
    from fullbatch.data.in_memory import decode_all, decoded_key
    from fullbatch.data.loader import open_pool

    pixels = json.loads(Path(MODEL).read_text())["vision_cfg"]["image_size"]
    for path in (data / f"{part}.tar" for part in parts):
        source = Data(data=(str(path),))
        pool, _ = open_pool(source)
        transform = EvalTransform(pixels, source.max_pixels)
        found = decode_all(pool, decoded_key(pool, source.sources, transform), transform, workers)
        print(f"{path}: {len(found.captions):,} pairs, {len(found.bad)} of them cannot be read", flush=True)


def gather(out: Path, target: Path) -> None:
    """What is worth keeping: the plans, the tables, each run's own lines, and what it cost."""
    for name in ("pretraining", "rates", "race"):
        if not (out / name).is_dir():
            continue
        (target / name / "metrics").mkdir(parents=True, exist_ok=True)
        for path in [out / name / "plan.yaml", *sorted((out / name).glob("comparison.*"))]:
            shutil.copy(path, target / name / path.name)
        costs = {}
        for run in sorted((out / name / "runs").iterdir()):
            if (run / "metrics.jsonl").is_file():
                shutil.copy(run / "metrics.jsonl", target / name / "metrics" / f"{run.name}.jsonl")
            if (run / "results.json").is_file():
                costs[run.name] = json.loads((run / "results.json").read_text()).get("cost")
        (target / name / "costs.json").write_text(json.dumps(costs, indent=1))
    for name in ("base.json", "chosen.json", "study.json", "similarities.json"):
        if (out / name).is_file():
            shutil.copy(out / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the fine-tuning study.")
    parser.add_argument("stage", choices=("decode", "base", "rates", "race", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the parts; for gather, OUT")
    parser.add_argument("out", type=Path, help="the folder of the comparisons; for gather, where to put what is kept")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side on the GPU; for decode, processes")
    parser.add_argument("--stop-after", type=float, default=None, help="minutes after which no run is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--samples", type=int, default=BASE_SAMPLES, help="for a rehearsal: fewer for the base")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="for a rehearsal: fewer epochs of each stage")
    parser.add_argument("--model", default=MODEL, help="for a rehearsal: a smaller one of the same input size")
    options = parser.parse_args()
    data, out, device = options.source, options.out, options.device
    more = ["--jobs", str(options.jobs)]
    if options.stop_after is not None:
        more += ["--stop-after", str(options.stop_after)]
    match options.stage:
        case "decode":
            decode(data, options.jobs)
        case "base":
            export_best(compare(base_plan(data, options.samples, device, options.model), out, more), out)
        case "rates":
            found = compare(rates_plan(data, out / "base", options.epochs, device), out, more)
            best = choose(found, data, options.epochs)
            (out / "chosen.json").write_text(json.dumps(best, indent=1))
            (out / "study.json").write_text(json.dumps({"data": str(data), "epochs": options.epochs}, indent=1))
            print(json.dumps(best, indent=1))
        case "race":
            best = json.loads((out / "chosen.json").read_text())
            compare(race_plan(data, out / "base", best, options.epochs, device), out, more)
        case "gather":
            gather(data, out)


if __name__ == "__main__":
    main()
