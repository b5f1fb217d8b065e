"""Files that are on the disk, whole and with their names, before something else relies on them; and what is said where
the disk has no room for them."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger("fullbatch")


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Whole or not at all, and on the disk when this returns, with its name."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # a name that ``Folder.sweep`` knows
    try:
        with told_if_full(path), unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def replace_array(path: Path, array: npt.NDArray[Any]) -> None:
    """As .npy.  What NumPy takes for a file of the system it writes to by itself, and where that fails it says how much
    was written, but neither why nor to which file; so it is shown only how to write."""

    def write(file: IO[bytes]) -> None:
        shown: Any = SimpleNamespace(write=file.write)
        np.save(shown, array, allow_pickle=False)

    replace_file(path, write)


def make_folder(path: Path) -> None:
    """With those it lies in.  Their names are on the disk when this returns: else a power failure could take along all
    that is written, and synced, below them."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names: on the disk, not only on their way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # which does not say of which file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Python does not say which file found no room, or could not be written to the disk."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        what = full_disk(path, shutil.disk_usage(path.parent).free)
        raise OSError(f"{what}. What was saved before is safe: free some space, then go on.") from error


def is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def full_disk(path: Path, free: int) -> str:
    return f"The disk is full: {path} could not be written, {free / 1e6:,.1f} MB are free"


def read_lines(path: Path, numbers: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """Of metrics.jsonl or losses.jsonl; a line that was cut off, is damaged or lacks one of the ``numbers`` is left
    out."""
    lines, texts = [], path.read_text(encoding="utf-8", errors="replace").splitlines()
    for text in texts:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and all(isinstance(line.get(name), int) for name in numbers):
                lines.append(line)
    if len(lines) < len(texts):
        log.warning("%s: %d of %d lines cannot be read and are left out", path, len(texts) - len(lines), len(texts))
    return lines
