"""Runs that take a second: 40 pictures of 16 pixels, towers of one layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fullbatch as fb
from fullbatch.config.data import Data
from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation, RunFolder, Training
from fullbatch.training import checkpoint
from tests.data.making import captioned, write_shard

TOWERS: dict[str, Any] = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
# Settings that make every part of a method move within twenty steps.
SETTINGS: dict[str, dict[str, Any]] = {
    "neuclip": {"prototypes": 24, "updates": 2, "restart_every": 7, "rho": 1.0},
    "rolling": {"prototypes": 24, "updates": 2, "rho": 1.0},
    "queue": {"prototypes": 24, "rho": 1.0},
    "xbm": {"queue": 24, "starts_after": 3},
    "amorlip": {"blend_epochs": 2.0, "rho_late_epoch": 2.0},
    "tempnet": {"centers": 8, "rho": 1.0},
}


def write_inputs(folder: Path) -> tuple[str, str]:
    """A shard and a model config; their paths."""
    model = folder / "towers.json"
    model.write_text(json.dumps(TOWERS))
    return str(write_shard(folder / "shard.tar", captioned(40, (20, 16)))), str(model)


def small_config(
    folder: Path, method: str = "neuclip", name: str = "run", steps: int = 20, **training: Any
) -> RunConfig:
    data, model = write_inputs(folder)
    known = fb.settings_of(fb.METHODS[method])
    settings = {key: value for key, value in SETTINGS.get(method, {}).items() if key in known}
    return RunConfig(
        objective=ObjectiveConfig(method=method, settings=settings),
        data=Data(data=(data,), workers=0),
        model=Model(model=model),
        training=Training(batch_size=8, samples=8 * steps, device="cpu", **training),
        evaluation=Evaluation(evaluate=()),
        run=RunFolder(runs=str(folder), name=name, save_every=10, keep=9, log_every=1, quiet=True, tensorboard=False),
    )


def renamed(config: RunConfig, name: str) -> RunConfig:
    return replace(config, run=replace(config.run, name=name))


def by_url(config: RunConfig, url: str, name: str) -> RunConfig:
    return replace(renamed(config, name), data=replace(config.data, data=(url,)))


def saved_state(run: Path, step: int) -> dict[str, Any]:
    return checkpoint.read(checkpoint.folder_of(run / "checkpoints", step))


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """The places where two states are not equal to the bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: keys differ"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: lengths differ"]
        both = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in both for found in differences(a, b, f"{where}[{i}]")]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same and torch.equal(one.nan_to_num(), other.nan_to_num()) else [where]
    return [] if one == other or (one != one and other != other) else [f"{where}: {one} != {other}"]
