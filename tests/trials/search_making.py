"""Searches whose trials take a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.training.small import write_inputs


def small_search(folder: Path, **values: Any) -> Path:
    """A plan file; its search is folder/small."""
    data, model = write_inputs(folder)
    plan = {
        "name": "small",
        "base": {
            "data": {"data": [data], "workers": 0},
            "model": {"model": model},
            "training": {"samples": 80, "batch_size": 8, "device": "cpu"},
            "evaluation": {"evaluate": [f"retrieval:{data}", f"zero_shot:{data}"], "evaluations": 2, "audit_every": 0},
            "run": {"log_every": 2, "tensorboard": False, "save_every": 2},
        },
        "metrics": ["mean(text_to_image_r1, image_to_text_r1, accuracy)"],
        "methods": ["openclip", "sogclr"],
        "optimizers": ["adamw", "sgd"],
        "space": {"lr": {"low": 1e-4, "high": 1e-1, "log": True}, "gamma": {"low": 0.3, "high": 1.0}},
        "choices": {"trials": 3, "over": ["method", "optimizer", "lr"], "changes": {"samples": 40, "data_share": 0.5}},
        "grid": {"methods": 2, "optimizers": 1},
        "fine": {"trials": 2},
        "finals": {"best": 1, "seeds": [0, 1], "baselines": ["openclip"]},
        **values,
    }
    path = folder / "search.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def arguments(plan: Path, *more: str) -> list[str]:
    return ["search", "--plan", str(plan), "--searches", str(plan.parent), "--quiet", "--no-page", *more]
