"""A base of one layer, and a config that tunes it in a second: a recovery of 5 steps, then epochs of 5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer, Recovery
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation, Training
from fullbatch.loading import load_trained
from fullbatch.training_run import train
from tests.training.small import small_config

TIMES = ("cost",)


def make_base(folder: Path, steps: int, lr: float) -> Path:
    """A run, and what `fullbatch export` writes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(small_config(folder, "openclip", name="trained", steps=steps), optimizer=Optimizer(lr=lr))
    return load_trained(train(config).folder).export(folder / "exported", "safetensors")


def tuning_config(
    folder: Path, base: Path | str, epochs: int = 3, lr: float = 1e-3, recovery: Recovery | None = None, **training: Any
) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(folder, "tuneclip")
    task = f"retrieval:{config.data.data[0]}"
    return replace(
        config,
        model=Model(model=str(base)),
        training=Training(batch_size=8, epochs=epochs, device="cpu", **training),
        optimizer=Optimizer(lr=lr, weight_decay=0.02),
        recovery=Recovery(recovery_epochs=1) if recovery is None else recovery,
        evaluation=Evaluation(evaluate=(task,), eval_batch=16, audit_every=0),
        run=replace(config.run, save_every=4),
    )


def said(run: Path) -> dict[str, Any]:
    """finetune.json without what a clock measured."""
    read: dict[str, Any] = json.loads((run / "finetune.json").read_text())
    return {key: value for key, value in read.items() if key not in TIMES}
