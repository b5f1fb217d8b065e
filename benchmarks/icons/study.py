"""The icon study: what the papers claim, on one GPU, with one small ViT and the same samples seen by every method.

    python benchmarks/icons/unpack.py icons.tar DATA --captions name
    python benchmarks/icons/study.py tune DATA OUT --jobs 8     # nine runs a method, on a shard kept out of training
    python benchmarks/icons/study.py race DATA OUT --jobs 8     # with the best settings, on the test pairs
    python benchmarks/icons/study.py gather OUT docs/studies/icons

``tune`` and ``race`` write a plan for ``fullbatch compare`` and start it; killed, they go on where they were.  The runs
of ``race`` are in the order of what is asked first: batch sizes 128 and 512 with three seeds, a tenth of the data, the
other batch sizes, the ablations of NeuCLIP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fullbatch.cli import main as fullbatch

MODEL = os.path.relpath(Path(__file__).with_name("vit.json"))
SAMPLES = 420_000
TUNING_SAMPLES = 210_000
TUNING_SEED = 100  # not one of those that are reported
LAST_SHARD = 19  # of training: the one that tuning is judged on

# What is the same for a method whatever is tried.  The schedules of gamma, of AmorLIP's rho and of its blend are spread
# over the run's four and a half epochs as their authors' are over theirs.
FIXED: Mapping[str, Mapping[str, Any]] = {
    "openclip": {},
    "siglip": {},
    "sogclr": {},
    "fastclip_v3": {"gamma_epochs": 2.0, "temperature": 0.05, "rho": 6.0},
    "amorlip": {"blend_epochs": 2.0, "rho_late_epoch": 1.0, "temperature": 0.05},
    "neuclip": {"temperature": 0.05, "rho": 6.0},
}
RATES = (5e-4, 1e-3, 2e-3)  # tried first, with the settings above
# Then six settings each, at the best rate; "temperature_lr" is the optimizer's, the others are the method's own.
TRIED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "openclip": {"temperature": (0.07, 0.05), "temperature_lr": (1.25e-4, 1e-3, 1e-2)},
    "siglip": {"bias": (-10.0, -5.0), "temperature_lr": (1.25e-4, 1e-3, 1e-2)},
    "sogclr": {"temperature": (0.03, 0.05, 0.07), "gamma": (0.3, 0.8)},
    "fastclip_v3": {"gamma": (0.2, 0.8), "temperature_lr": (1e-6, 1.25e-4, 1e-3)},
    "amorlip": {"rho": (8.5, 4.0), "temperature_lr": (1e-6, 1.25e-4, 1e-3)},
    "neuclip": {"prototype_lr": (0.003125, 0.02), "temperature_lr": (1e-6, 1.25e-4, 1e-3)},
}


STAGES = {"rates": {method: {"lr": RATES} for method in TRIED}, "tuning": TRIED}


def base(data: Path, shards: str, judged_on: str, samples: int, device: str) -> dict[str, Any]:
    """What every run shares.  On a CPU, for a rehearsal, without what only a GPU can do."""
    gpu = device == "cuda"
    return {
        "data": {"data": [f"{data}/train-{shards}.tar"], "workers": 0, "in_memory": True, "crop": [0.8, 1.0]},
        "model": {"model": MODEL},
        "training": {
            "samples": samples,
            "precision": "bf16" if gpu else "fp32",
            "graphs": gpu,
            "device": device,
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.98, "eps": 1e-6},
        "schedule": {"warmup_share": 0.1},
        "evaluation": {
            "evaluate": [f"retrieval:{data}/{judged_on}.tar"],
            "eval_batch": 2048,
            "audits": 5,
            "audit_anchors": 10_000,
            "audit_samples": 1_000_000,  # all there are
        },
        "run": {"tensorboard": False, "keep": 1, "log_every": 100, "save_minutes": None, "quiet": True},
    }


def row(name: str, method: str, chosen: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A row of a plan; AmorLIP's later rho is minus its first."""
    settings = {**FIXED[method], **chosen, **more.pop("settings", {})}
    if method == "amorlip" and "rho" in settings:
        settings["rho_late"] = -settings["rho"]
    rates = {name: settings.pop(name) for name in ("lr", "temperature_lr") if name in settings}
    return {"name": name, "method": method, "settings": settings, **rates, **more}


Tried = dict[str, dict[str, dict[str, float]]]  # method -> label -> settings


def labelled(grids: Mapping[str, Mapping[str, tuple[float, ...]]], beside: Mapping[str, Mapping[str, float]]) -> Tried:
    """Every combination of a method's grid, with what is settled already."""
    found: Tried = {}
    for method, grid in grids.items():
        combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        found[method] = {
            f"{method} {' '.join(f'{name}={value:g}' for name, value in each.items())}": {**beside[method], **each}
            for each in combinations
        }
    return found


def tuning_plan(name: str, tried: Tried, data: Path, samples: int, device: str) -> dict[str, Any]:
    rows = [row(label, method, chosen) for method in tried for label, chosen in tried[method].items()]
    shared = base(data, f"{{00000..{LAST_SHARD - 1:05d}}}", f"train-{LAST_SHARD:05d}", samples, device)
    shared["evaluation"] |= {"audits": None, "audit_every": 0}
    return {
        "name": name,
        "base": shared,
        "methods": rows,
        "batch_sizes": [128],
        "seeds": [TUNING_SEED],
        "baseline": rows[0]["name"],
        "metric": "mean_r1",
    }


def choose(comparison: Mapping[str, Any], tried: Tried) -> dict[str, dict[str, float]]:
    """The best of each method's settings by the mean R@1 on the shard kept out; a run that failed cannot win."""
    scores = {run["method"]: _score(run) for run in comparison["runs"] if run["status"] == "done"}
    best = {}
    for method, settings in tried.items():
        there = [label for label in settings if label in scores]
        if not there:
            raise SystemExit(f"error: no tuning run of {method} has ended well")
        best[method] = settings[max(there, key=lambda label: scores[label])]
    return best


def _score(run: Mapping[str, Any]) -> float:
    return float(next(value for name, value in run["results"].items() if name.endswith("mean_r1")))


def race_plan(data: Path, best: Mapping[str, Mapping[str, Any]], samples: int, device: str) -> dict[str, Any]:
    tenth = [f"{data}/train-{{00000..{(LAST_SHARD + 1) // 10 - 1:05d}}}.tar"]
    methods = list(FIXED)
    rows = [row(method, method, best[method]) for method in methods]
    rows += [row(f"{method} n/10", method, best[method], data=tenth, batch_sizes=[]) for method in methods]
    neuclip = best["neuclip"]
    without_lr = {name: value for name, value in neuclip.items() if name != "prototype_lr"}
    ablations = [
        row("neuclip separate", "neuclip", neuclip, settings={"fit": "separate"}),
        row("neuclip MLP", "neuclip", without_lr, normalizer="mlp"),
        row("neuclip MLP separate", "neuclip", without_lr, normalizer="mlp", settings={"fit": "separate"}),
        *(row(f"neuclip Tr={n or 'never'}", "neuclip", neuclip, settings={"restart_every": n}) for n in (100, 0)),
        *(row(f"neuclip Tu={n}", "neuclip", neuclip, settings={"updates": n}) for n in (0, 2, 5)),
        *(row(f"neuclip m={n}", "neuclip", neuclip, settings={"prototypes": n}) for n in (256, 1024)),
    ]
    rows += [{**each, "batch_sizes": []} for each in ablations]
    return {
        "name": "icons",
        "base": base(data, f"{{00000..{LAST_SHARD:05d}}}", "test-00000", samples, device),
        "methods": rows,
        "batch_sizes": [128, 512],
        "seeds": [0, 1, 2],
        "order": "seeds",
        "lr_scaling": "sqrt",
        "baseline": "openclip",
        "metric": "mean_r1",
        "runs": [
            {"methods": [f"{method} n/10" for method in methods], "batch_sizes": [128], "seeds": [0]},
            {"methods": methods, "batch_sizes": [64, 256, 1024], "seeds": [0]},
            {"methods": [each["name"] for each in ablations], "batch_sizes": [128], "seeds": [0]},
        ],
    }


def compare(plan: Mapping[str, Any], out: Path, more: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{plan['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(plan), sort_keys=False))
    fullbatch(["compare", "--plan", str(path), "--comparisons", str(out), "--quiet", "--no-page", *more])
    found = out / str(plan["name"]) / "comparison.json"
    runs = json.loads(found.read_text())["runs"] if found.is_file() else []
    left = sum(run["status"] == "open" for run in runs)
    if left or not runs:  # a run that failed is a result, one that has not ended is not
        raise SystemExit(f"{left or 'all'} runs of {plan['name']!r} have not ended: go on with the same command")


def gather(out: Path, target: Path) -> None:
    """What is worth keeping: the plans, the tables, and each run's own lines."""
    for name in (*STAGES, "icons"):
        (target / name / "metrics").mkdir(parents=True, exist_ok=True)
        for path in [out / name / "plan.yaml", *sorted((out / name).glob("comparison.*"))]:
            shutil.copy(path, target / name / path.name)
        for lines in sorted((out / name / "runs").glob("*/metrics.jsonl")):
            shutil.copy(lines, target / name / "metrics" / f"{lines.parent.name}.jsonl")
    shutil.copy(out / "chosen.json", target / "chosen.json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the icon study.")
    parser.add_argument("stage", choices=("tune", "race", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the shards; for gather, OUT")
    parser.add_argument("out", type=Path, help="the folder of the comparisons; for gather, where to put what is kept")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side on the GPU")
    parser.add_argument("--stop-after", type=float, default=None, help="minutes after which no run is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--samples", type=int, default=None, help="for a rehearsal: fewer samples a run")
    options = parser.parse_args()
    more = ["--jobs", str(options.jobs)]
    if options.stop_after is not None:
        more += ["--stop-after", str(options.stop_after)]
    match options.stage:
        case "tune":
            best: dict[str, dict[str, float]] = {method: {} for method in TRIED}
            for name, grids in STAGES.items():
                tried = labelled(grids, best)
                samples = options.samples or TUNING_SAMPLES
                compare(tuning_plan(name, tried, options.source, samples, options.device), options.out, more)
                best = choose(json.loads((options.out / name / "comparison.json").read_text()), tried)
            (options.out / "chosen.json").write_text(json.dumps(best, indent=1))
            print(json.dumps(best, indent=1))
        case "race":
            best = json.loads((options.out / "chosen.json").read_text())
            compare(race_plan(options.source, best, options.samples or SAMPLES, options.device), options.out, more)
        case "gather":
            gather(options.source, options.out)


if __name__ == "__main__":
    main()
