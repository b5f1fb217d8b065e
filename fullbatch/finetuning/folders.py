"""Folders that hold a model: whole and synced, or not there at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fullbatch.training.checkpoint import sync


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a new folder, then put it in the old one's place.

    A folder cannot take another's name in one move; ``settle`` finishes what was cut off between the two it takes.
    """
    settle(folder)
    new, old = _beside(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(new)
    for path in (*new.rglob("*"), new):
        sync(path)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """After a kill: the old one is moved away only when the new one is complete."""
    new, old = _beside(folder)
    if not folder.exists() and old.exists():
        (new if new.exists() else old).rename(folder)
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
