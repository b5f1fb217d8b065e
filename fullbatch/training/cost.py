"""What a run has cost, stage by stage: wall-clock seconds, and device-hours over all ranks (TuneCLIP, Tables 16-18)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fullbatch.training.run_folder import AUDIT, EVALUATION
from fullbatch.training.stages import RECOVERY, TRAINING, TUNING


def cost_of(lines: Iterable[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """From the lines of metrics.jsonl.  Training counts its seconds on over the stages, measuring is not in them."""
    lines = list(lines)
    stages: list[dict[str, Any]] = []
    steps = samples = 0
    seconds = 0.0
    for stage in (RECOVERY, TUNING, TRAINING):
        own = [line for line in lines if "kind" not in line and line.get("stage", TRAINING) == stage]
        if own:
            last = own[-1]
            until = float(last.get("seconds") or seconds)
            stages.append(_stage(stage, last["step"] - steps, last["samples"] - samples, until - seconds, devices))
            steps, samples, seconds = last["step"], last["samples"], until
    for kind in (EVALUATION, AUDIT):
        taken = [float(line.get("seconds") or 0.0) for line in lines if line.get("kind") == kind]
        if taken:
            stages.append(_stage(kind, None, None, sum(taken), devices))
    return {"devices": devices, "stages": stages}


def _stage(name: str, steps: int | None, samples: int | None, seconds: float, devices: int) -> dict[str, Any]:
    return {
        "stage": name,
        "steps": steps,
        "samples": samples,
        "seconds": seconds,
        "device_hours": seconds * devices / 3600.0,
    }
