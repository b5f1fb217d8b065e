"""The commands that are struck down, each with what it must come to: runs of a second, on forty pictures."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from fullbatch.config.run import RunConfig
from fullbatch.config.training import Selection
from fullbatch.config.tree import write_yaml
from fullbatch.selection.periods import numbered
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.find.making import write_pictures
from tests.finetuning.making import make_base, tuning_config
from tests.training.small import TOWERS, small_config
from tests.trials.comparison_making import small_plan
from tests.trials.search_making import small_search

TOWERS["text_cfg"] |= {"width": 4, "heads": 1}  # most of the weights are a vocabulary

Outcome = dict[str, str]  # what there is at the end: a name and the digest of it

# measured by a clock, or told of processes; and where a folder lies
TIMES = {"seconds", "samples_per_second", "waiting", "selection_stall", "selection_seconds", "cost", "memory_gib"}
TIMES |= {"device_hours", "started", "ended", "attempts", "worker", "since", "hours", "plan", "wall_hours"}


@dataclass(frozen=True)
class Case:
    name: str
    command: tuple[str, ...]
    again: tuple[str, ...]  # added where the same command is given again
    outcome: Callable[[Path], Outcome]
    deaths: int = 5  # at most, of one command, before it is left in peace


def digest(value: Any) -> str:
    """Of numbers, texts, tensors and arrays in lists and dicts, to the bit."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                hashed.update(f"{key}:".encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            hashed.update(f"[{len(part)}".encode())
            for inner in part:
                add(inner)
        elif isinstance(part, torch.Tensor):
            hashed.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hashed.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray):
            hashed.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        else:
            hashed.update(part if isinstance(part, bytes) else repr(part).encode())
        hashed.update(b";")

    add(value)
    return hashed.hexdigest()[:16]


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def of_run(run: Path, name: str = "") -> Outcome:
    """Weights and all other state of its checkpoints, every line, every plan, every number."""
    there = [step for step in checkpoint.checkpoints(run / "checkpoints") if checkpoint.is_good(step)]
    found = {f"{name}{step.name}": digest(checkpoint.read(step)) for step in there}
    if there:
        found[f"{name}last checkpoint"] = found[f"{name}{there[-1].name}"]
    for path in (run / "metrics.jsonl", run / "batches" / "losses.jsonl"):
        if path.is_file():
            lines = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
            found[f"{name}{path.name}"] = digest(lines)
    for first, path in numbered(run / "batches", "plan").items():
        found[f"{name}plan {first}"] = digest(np.load(path))
    for path in (run / "results.json", run / "finetune.json", run / "trial.json", run / "outcome.json"):
        if path.is_file():
            found[f"{name}{path.name}"] = digest(timeless(json.loads(path.read_text())))
    best = json.loads((run / "results.json").read_text()).get("best") if (run / "results.json").is_file() else None
    if best is not None:
        found[f"{name}best checkpoint"] = found.get(f"{name}{Path(best['checkpoint']).name}", "gone")
    for path in (run / "tuned" / "fullbatch.safetensors", run / "base" / "fullbatch.safetensors"):
        if path.is_file():
            found[f"{name}{path.parent.name}"] = digest(_weights(path))
    return found | {
        f"{name}{path.name}": "left behind" for path in run.rglob(".*") if not path.name.startswith(".lock")
    }


def _weights(path: Path) -> dict[str, Any]:
    """With what is said of them, which the file has in any order."""
    with safe_open(path, "pt") as file:
        return {"said": file.metadata(), **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118


def of_comparison(folder: Path) -> Outcome:
    found = {"comparison.json": digest(timeless(json.loads((folder / "comparison.json").read_text())))}
    found["comparison.csv"] = digest((folder / "comparison.csv").read_bytes())
    for run in sorted((folder / "runs").iterdir()):
        found |= of_run(run, f"{run.name} ")
    return found


def of_search(folder: Path) -> Outcome:
    summary = timeless(json.loads((folder / "search.json").read_text()))
    found = {"search.json": digest(summary), "best.yaml": digest((folder / "best.yaml").read_bytes())}
    with (folder / "search.csv").open(newline="") as file:
        found["search.csv"] = digest(timeless(list(csv.DictReader(file))))
    for run in sorted((folder / "trials").iterdir()):
        found |= of_run(run, f"{run.name} ")
    return found


def of_index(folder: Path) -> Outcome:
    """What it says of each file, and its row.  A batch that was cut in two is embedded in two, which changes the last
    digits."""
    said: dict[str, Any] = {}
    for line in map(json.loads, (folder / "files.jsonl").read_text().splitlines()):
        said[line["path"]] = line
    rows = np.fromfile(folder / "embeddings.f32", np.float32).reshape(-1, TOWERS["embed_dim"])
    told = {path: [line["digest"], line["bad"], np.round(rows[line["row"]], 3) + 0.0] for path, line in said.items()}
    return {"index": digest(told), "rows": str(len(rows))}


# -- the cases --------------------------------------------------------------------------------------------------------


def _training(inputs: Path, folder: Path, name: str, config: RunConfig, command: str = "train") -> Case:
    path = inputs / f"{name}.yaml"
    path.write_text(write_yaml(replace(config, run=replace(config.run, quiet=False))))
    given = (command, "--config", str(path), "--runs", str(folder), "--name", "run")
    return Case(name, given, ("--resume", "auto"), lambda place: of_run(place / "run"))


def make_inputs(inputs: Path) -> None:
    """Pictures and two models."""
    inputs.mkdir(parents=True)
    make_base(inputs / "base", steps=10, lr=1e-3)
    train(small_config(inputs, steps=2, name="model"))
    write_pictures(inputs / "pictures", 40)


def cases(inputs: Path, folder: Path) -> list[Case]:
    """What they read is in ``inputs``; what they write, in ``folder``, which is empty when each begins."""
    base = inputs / "base" / "exported"
    found = small_config(inputs, steps=16)
    measured = replace(found.evaluation, evaluate=(f"retrieval:{found.data.data[0]}",), evaluations=2)
    run = replace(found.run, save_every=3, keep=2)
    plain = replace(found, evaluation=replace(measured, keep_best="mean_r1"), run=run)
    workers = replace(small_config(inputs, "isogclr", steps=16), run=run)
    workers = replace(workers, data=replace(workers.data, workers=2))
    spectral = Selection(batches="spectral", planners=1, period_steps=2, block_batches=2)
    ordered = Selection(batches="ordered", planners=0, drawn_batches=5, kept_batches=3)
    tuned = tuning_config(inputs, base, epochs=2)
    bare = {"optimizers": ["adamw"], "choices": {"trials": 2}, "grid": None, "fine": None}
    (inputs / "compared").mkdir(exist_ok=True)
    (inputs / "searched").mkdir(exist_ok=True)
    comparison = small_plan(inputs / "compared")
    search = small_search(inputs / "searched", **bare, finals={"best": 1, "seeds": [0], "baselines": ["openclip"]})
    common = ("--name", "small", "--quiet", "--no-page")
    sogclr = replace(small_config(inputs, "sogclr", steps=16), run=run)
    return [
        _training(inputs, folder, "train", plain),
        _training(inputs, folder, "train, 2 data workers", workers),
        _training(inputs, folder, "train, spectral plans", replace(sogclr, selection=spectral)),
        _training(inputs, folder, "train, ordered plans", replace(sogclr, selection=ordered)),
        _training(inputs, folder, "finetune", tuned, "finetune"),
        Case(
            "compare",
            ("compare", "--plan", str(comparison), "--comparisons", str(folder), *common),
            (),
            lambda place: of_comparison(place / "small"),
            2,
        ),
        Case(
            "search",
            ("search", "--plan", str(search), "--searches", str(folder), *common),
            (),
            lambda place: of_search(place / "small"),
            2,
        ),
        Case(
            "find",
            ("find", str(inputs / "model"), str(inputs / "pictures"), "--index", str(folder / "index"))
            + ("--batch-size", "4", "--device", "cpu"),
            (),
            lambda place: of_index(place / "index"),
        ),
    ]
