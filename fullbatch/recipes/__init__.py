"""Recipes: YAML files that open with their command, hardware, hours and result.  Those in this folder are of runs, for
`fullbatch train`; those in search/ are plans, for `fullbatch search`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fullbatch.config.messages import listed, nearest
from fullbatch.config.tree import read_yaml

_FOLDERS = {"recipe": Path(__file__).parent, "search": Path(__file__).parent / "search"}
_NAMES = {kind: tuple(sorted(path.stem for path in folder.glob("*.yaml"))) for kind, folder in _FOLDERS.items()}
RECIPES, SEARCHES = _NAMES["recipe"], _NAMES["search"]
DEFAULT_RECIPE = "emoji"


def _path(kind: str, name: str) -> Path:
    names = _NAMES[kind]
    if name not in names:
        raise ValueError(f"There is no {kind} {name!r}{nearest(name, names)} They are {listed(names)}.")
    return _FOLDERS[kind] / f"{name}.yaml"


def recipe_text(name: str) -> str:
    return _path("recipe", name).read_text(encoding="utf-8")


def search_text(name: str) -> str:
    return _path("search", name).read_text(encoding="utf-8")


def first_line(text: str) -> str:
    """Of a recipe: what it is."""
    return text.splitlines()[0].lstrip("# ")


def recipe_values(name: str) -> dict[str, Any]:
    """With no more data workers than there are cores here: a recipe names those of the machine it is written for."""
    values = read_yaml(_path("recipe", name))
    if "workers" in values.get("data", {}):
        values["data"]["workers"] = min(values["data"]["workers"], cores())
    return values


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search_recipe(name: str) -> dict[str, Any]:
    """The values of a plan, as `read_plan` gives them of a user's file."""
    return read_yaml(_path("search", name))
