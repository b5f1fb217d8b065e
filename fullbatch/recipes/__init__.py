"""Recipes: YAML files that open with their command, hardware, hours and result.

Those in this folder are of runs, for `fullbatch train`; those in search/ are plans, for `fullbatch search`.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from fullbatch.config.messages import listed, nearest
from fullbatch.config.tree import read_yaml

_FOLDER = Path(str(files(__package__ or "fullbatch.recipes")))


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


RECIPES: tuple[str, ...] = _names(_FOLDER)
SEARCHES: tuple[str, ...] = _names(_FOLDER / "search")
DEFAULT_RECIPE = "emoji"


def _path(name: str) -> Path:
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}{nearest(name, RECIPES)} They are {listed(RECIPES)}.")
    return _FOLDER / f"{name}.yaml"


def _search_path(name: str) -> Path:
    if name not in SEARCHES:
        raise ValueError(f"There is no search {name!r}{nearest(name, SEARCHES)} They are {listed(SEARCHES)}.")
    return _FOLDER / "search" / f"{name}.yaml"


def recipe_text(name: str) -> str:
    return _path(name).read_text(encoding="utf-8")


def search_text(name: str) -> str:
    return _search_path(name).read_text(encoding="utf-8")


def first_line(text: str) -> str:
    """Of a recipe: what it is."""
    return text.splitlines()[0].lstrip("# ")


def recipe_summary(name: str) -> str:
    return first_line(recipe_text(name))


def recipe_values(name: str) -> dict[str, Any]:
    """With no more data workers than there are cores here: a recipe names those of the machine it is written for."""
    values = read_yaml(_path(name))
    if "workers" in values.get("data", {}):
        values["data"]["workers"] = min(values["data"]["workers"], cores())
    return values


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search_recipe(name: str) -> dict[str, Any]:
    """The values of a plan, as `search.plan.read_search` gives them of a user's file."""
    return read_yaml(_search_path(name))
