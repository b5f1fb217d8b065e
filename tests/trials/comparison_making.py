"""Plans of runs that take a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.training.small import write_inputs

NEUCLIP = {"method": "neuclip", "settings": {"prototypes": 24, "updates": 2, "restart_every": 7}}


def small_plan(folder: Path, **values: Any) -> Path:
    """A plan file; its comparison is folder/small."""
    data, model = write_inputs(folder)
    plan = {
        "name": "small",
        "base": {
            "data": {"data": [data], "workers": 0},
            "model": {"model": model},
            "training": {"samples": 160, "device": "cpu"},
            "evaluation": {"evaluate": [f"retrieval:{data}", f"zero_shot:{data}"]},
            "run": {"log_every": 2, "tensorboard": False, "save_every": 4},
        },
        "methods": ["openclip", NEUCLIP],
        "batch_sizes": [8],
        "seeds": [0],
        **values,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def arguments(plan: Path, *more: str) -> list[str]:
    return ["compare", "--plan", str(plan), "--comparisons", str(plan.parent), "--quiet", "--no-page", *more]
