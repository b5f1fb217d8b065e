"""Runs whose captions want to break the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fullbatch as fb
from fullbatch.config.data import Data
from fullbatch.config.model import Model
from fullbatch.config.training import Evaluation
from fullbatch.loading import load_trained
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from tests.data.making import captioned, write_shard
from tests.training.small import small_config

SCRIPT = "<script>alert(1)</script>"
HOSTILE = (
    SCRIPT,
    "</script><script>alert(2)</script>",
    '"><img src="https://example.org/x.png" onerror="alert(3)">',
    "<svg onload=alert(4)> &lt;b&gt; \u2028 line \u2029 end",
    "\u202eturned around\u202c and \x07 bell",
    "<iframe src=javascript:alert(5)></iframe><style>body{display:none}</style>",
    "word " * 2000,
    "x" * 10_000,
    '=HYPERLINK("http://example.org")',
    "😀 👩\u200d🚀 مرحبا 日本語",
)


def hostile_shard(folder: Path) -> Path:
    """Forty samples: hostile captions, three equal ones, and two of the same picture."""
    samples = captioned(40, (20, 16))
    for number, caption in enumerate(HOSTILE):
        samples[number][1]["txt"] = caption.encode()
        samples[number][1].pop("json")
    for number in (20, 25, 30):
        samples[number][1]["txt"] = b"the same thing"
        samples[number][1].pop("json")
    samples[35][1]["jpg"] = samples[36][1]["jpg"]
    samples[30][1]["jpg"] = samples[25][1]["jpg"]
    return write_shard(folder / "hostile.tar", samples)


def hostile_run(folder: Path, method: str = "sogclr", name: str = "run", **training: Any) -> Path:
    """A run of a second on the hostile shard, evaluated on it twice."""
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(folder, method, name=name, **training)
    shard = str(hostile_shard(folder))
    config = replace(
        config,
        data=Data(data=(shard,), workers=0),
        evaluation=Evaluation(evaluate=(f"retrieval:{shard}",), evaluate_every=2),
    )
    fb.train(config)
    run = folder / name
    with (run / "metrics.jsonl").open("a") as file:
        for step in (10, 20):
            audit = {"normalizer_error": 0.5 / step, "batch_error": 1.0 / step}
            file.write(json.dumps({"kind": "audit", "step": step, **audit}) + "\n")
    with (run / "log.txt").open("a") as file:
        file.write(f"2026-01-01 00:00:00,000 WARNING {SCRIPT} of a sample's name\n" * 100)
    return run


def cost_of(stages: dict[str, tuple[int | None, float]], devices: int = 1) -> dict[str, Any]:
    """As results.json has it: of each stage its steps, of eight pairs each, and its seconds."""
    written = [
        {
            "stage": name,
            "steps": steps,
            "samples": None if steps is None else 8 * steps,
            "seconds": seconds,
            "device_hours": devices * seconds / 3600.0,
        }
        for name, (steps, seconds) in stages.items()
    ]
    return {"devices": devices, "stages": written}


def finetuned_run(folder: Path, name: str = "tuned-run", outcome: str = "tuned", method: str = "tuneclip") -> Path:
    """A run as `fullbatch finetune` leaves it: eight steps of recovery and twelve of tuning, in three epochs."""
    run = hostile_run(folder, method, name=name)
    export(build_model(Model("tiny")), run / "base", "safetensors", 0.07, None)
    load_trained(run).export(run / "tuned", "safetensors")
    lines = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if "kind" not in line:
            line["stage"] = "recovery" if line["step"] <= 8 else "tuning"
        elif line["kind"] == "evaluation":
            line["seconds"] = 0.25
        lines.append(json.dumps(line))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (task,) = (json.loads((run / "results.json").read_text())["results"][0]["task"],)
    keys = {f"{task} mean_r1": 0.30, "zero_shot:<i>birds</i>.csv accuracy": 0.60, "wds:cars median_rank": 9.0}
    kept = outcome == "tuned"
    epochs = []
    for epoch, step in enumerate((0, 12, 16, 20)):
        moved = 0.02 * epoch
        values = dict(zip(keys, (0.30 + moved, 0.60 - moved / (4 if kept else 1), 9.0 - epoch), strict=True))
        epochs.append({"step": step, "epoch": epoch, "values": values, "score": 0.45 + moved / 4})
    tasks = [
        {
            "task": key.rpartition(" ")[0], "metric": key.rpartition(" ")[2], "base": base,
            "tuned": epochs[2]["values"][key], "change": epochs[2]["values"][key] - base,
            "chance": None if "rank" in key else 0.025,
            "regressed": not kept and key.startswith("zero_shot"),
        }
        for key, base in keys.items()
    ]  # fmt: skip
    cost = cost_of({"evaluation": (None, 2.0), "recovery": (8, 1.5), "tuning": (12, 100.0)}, devices=2)
    said = {
        "model": f"ViT-B-32 {SCRIPT}", "metric": "mean", "tolerance": 0.01, "epochs": epochs, "best_step": 16,
        "tasks": tasks, "outcome": outcome, "result": "tuned" if kept else "base", "cost": cost,
        "reasons": [] if kept else [f"{SCRIPT} fell from 60.00% to 56.00%", "cars fell too"],
    }  # fmt: skip
    (run / "finetune.json").write_text(json.dumps(said))
    return run


def interpolated(run: Path) -> None:
    """interpolation.json beside finetune.json, as `fullbatch interpolate` writes it."""
    said = json.loads((run / "finetune.json").read_text())
    base, tuned = (said["epochs"][at]["values"] for at in (0, 2))
    points = []
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        values = {key: (1.0 - alpha) * base[key] + alpha * tuned[key] for key in base}
        lost = [SCRIPT] if alpha > 0.5 else []
        points.append({"alpha": alpha, "values": values, "score": 0.45 + 0.02 * alpha, "regressed": lost})
    folders = {"base": str(run / "base"), "tuned": str(run / "tuned")}
    found = {**folders, "metric": "mean", "tolerance": 0.01, "points": points, "best_alpha": 0.5}
    (run / "interpolation.json").write_text(json.dumps({**found, "written": "interpolated"}))


def comparison_of(folder: Path, runs: list[Path]) -> Path:
    """comparison.json over runs of one method each at batch 8, as `fullbatch compare` writes it.

    Those at batch 16 have lost their folders, and one run failed.
    """
    metric = "retrieval:photos.csv mean_r1"
    rows: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        for size in (8, 16):
            name = run.name if size == 8 else f"{run.name}-b16"
            rows.append(
                {
                    "name": name, "folder": f"runs/{name}", "method": run.name, "settings": {}, "batch_size": size,
                    "seed": 0, "status": "done", "error": None, "steps": 20, "samples": 160, "seconds": 1.5 + place,
                    "samples_per_second": 100.0, "gpu_gib": None, "memory_gib": 0.5, "tau": 0.07,
                    "results": {metric: 0.0125 * size * (place + 1)}, "normalizer_error": 0.1 / (place + 1),
                }
            )  # fmt: skip
    cells = [(row["method"], row["batch_size"], row["results"][metric]) for row in rows]
    theirs = {size: value for name, size, value in cells if name == runs[0].name}
    failed = {"name": "broken-b16-seed1", "folder": "runs/broken-b16-seed1", "status": "failed", "error": SCRIPT}
    said = {
        "name": "race", "budget": {"samples": 160, "equal_time": None}, "tasks": ["retrieval:photos.csv"],
        "metric": metric, "baseline": runs[0].name, "runs": [*rows, {**rows[1], **failed, "results": {}}],
        "table": [
            {"method": name, "batch_size": size, "metric": metric, "mean": value, "sd": 0.01, "values": [value] * 2}
            for name, size, value in cells
        ],
        "differences": [
            {"method": name, "against": runs[0].name, "batch_size": size, "metric": metric,
             "mean": value - theirs[size], "sd": 0.01, "values": [value - theirs[size]] * 3}
            for name, size, value in cells if name != runs[0].name
        ],
        "matches": [{"method": "b", "batch_size": 8, "against": "a", "matches": None, "text": "b at 8 beats a"}],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(said))
    return folder
