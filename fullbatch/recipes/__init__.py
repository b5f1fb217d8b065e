"""Recipes: YAML files that open with their command, hardware, hours and result."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fullbatch.config.tree import read_yaml
from fullbatch.config.words import listed, nearest

_FOLDER = Path(str(files(__package__ or "fullbatch.recipes")))
RECIPES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
DEFAULT_RECIPE = "emoji"


def _path(name: str) -> Path:
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}{nearest(name, RECIPES)} They are {listed(RECIPES)}.")
    return _FOLDER / f"{name}.yaml"


def recipe_text(name: str) -> str:
    return _path(name).read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """The first line."""
    return recipe_text(name).splitlines()[0].lstrip("# ")


def recipe_values(name: str) -> dict[str, Any]:
    return read_yaml(_path(name))
