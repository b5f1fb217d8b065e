"""Checkpoints on disk: a folder a step, a file a part, and a manifest with the length and SHA-256 of each.

The manifest also has the seconds trained so far: they are no part of the state, which two runs have equal to the bit.

A checkpoint appears whole or not at all: it is written under another name, synced, and renamed.  Writing happens in a
thread, from a copy in host memory, while training goes on.  Reading checks every file against the manifest, so a
damaged checkpoint is passed over and the one before it taken.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("fullbatch")

MANIFEST = "manifest.json"
_PREFIX = "step-"
_UNFINISHED, _DAMAGED = ".writing-", "damaged-"


def folder_of(root: Path, step: int) -> Path:
    return root / f"{_PREFIX}{step:09d}"


def checkpoints(root: Path) -> list[Path]:
    """Oldest first."""
    named = (path for path in root.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal())
    return sorted(path for path in named if path.is_dir())


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def write(
    root: Path, step: int, parts: dict[str, Any], keep: int, seconds: float = 0.0, best: int | None = None
) -> Path:
    """Save ``parts`` as the checkpoint of ``step``, then drop all but the ``keep`` newest and the ``best``."""
    final, unfinished = folder_of(root, step), root / f"{_UNFINISHED}{step:09d}"
    if final.exists():
        return final
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        files = {}
        for name, part in parts.items():
            torch.save(part, unfinished / f"{name}.pt")
            files[f"{name}.pt"] = _describe(unfinished / f"{name}.pt")
        manifest = {"step": step, "seconds": seconds, "files": files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(final)
        sync(root)
    except (OSError, RuntimeError) as error:  # torch.save answers a full disk with a RuntimeError
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(_advice(error, final, free)) from error
    drop_old(root, keep, best)
    return final


def drop_old(root: Path, keep: int, best: int | None = None) -> None:
    """All but the ``keep`` newest and the one of the step ``best``."""
    for old in checkpoints(root)[:-keep]:
        if step_of(old) != best:
            doomed = old.with_name(f"{_UNFINISHED}{old.name}")
            old.rename(doomed)  # never leave half a checkpoint under a good name
            shutil.rmtree(doomed, ignore_errors=True)


def _advice(error: Exception, path: Path, free: int) -> str:
    kept = checkpoints(path.parent)
    intact = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
    if _is_full(error) or free < 1 << 20:
        return f"{_full(path, free)}; {intact}. Free some space, then go on with --resume."
    return f"{path} could not be written ({error}); {intact}. Put that right, then go on with --resume."


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Python does not say which file found no room."""
    try:
        yield
    except OSError as error:
        if not _is_full(error):
            raise
        what = _full(path, shutil.disk_usage(path.parent).free)
        raise OSError(f"{what}. What was saved before is safe: free some space, then go on.") from error


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _full(path: Path, free: int) -> str:
    return f"The disk is full: {path} could not be written, {free / 1e6:,.1f} MB are free"


def read(folder: Path, only: tuple[str, ...] | None = None, checked: bool = False) -> dict[str, Any]:
    """The parts of a checkpoint, checked against its manifest unless they were; ValueError if it is damaged."""
    files = _manifest(folder)["files"]
    wanted = files if only is None else {f"{name}.pt": files[f"{name}.pt"] for name in only if f"{name}.pt" in files}
    parts = {}
    for name, expected in wanted.items():
        path = folder / name
        if not checked and not _matches(path, expected):
            raise ValueError(f"{path} is missing or differs from what was saved.")
        with understood(path):
            parts[path.stem] = dict(torch.load(path, map_location="cpu", weights_only=True))
    return parts


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """What is as it was written, but is no part of this run's state, becomes one sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, ValueError, OSError):
        raise
    except Exception as error:  # unpickling alone has a dozen ways to fail
        reason = (str(error).strip() or "nothing in it").splitlines()[0][:160]
        raise ValueError(f"{path} holds something else than this run ({type(error).__name__}: {reason}).") from None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        files["position.pt"], int(manifest["step"]), float(manifest.get("seconds", 0.0))
        if not all(Path(name).name == name and isinstance(said, dict) for name, said in files.items()):
            raise ValueError("it does not list the files of a checkpoint")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be read ({error}).") from None
    assert isinstance(manifest, dict)
    return manifest


def seconds_at(root: Path, step: int) -> float:
    """What the run had trained when the checkpoint of ``step`` was taken; 0.0 where nobody wrote it down."""
    folder = folder_of(root, step)
    return float(_manifest(folder).get("seconds", 0.0)) if folder.is_dir() else 0.0


def last_good(root: Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in the log."""
    return next((folder for folder in reversed(checkpoints(root)) if is_good(folder, "taking the one before it")), None)


def is_good(folder: Path, otherwise: str = "it is left out") -> bool:
    """Whether a checkpoint is whole; if not, the log says so and what is done ``otherwise``."""
    try:
        files = _manifest(folder)["files"]
        bad = [name for name, said in files.items() if not _matches(folder / name, said)]
    except ValueError as error:
        log.warning("the checkpoint %s is damaged (%s); %s", folder, str(error).rstrip("."), otherwise)
        return False
    if bad:
        log.warning("the checkpoint %s is damaged (%s); %s", folder, ", ".join(bad), otherwise)
    return not bad


def clean(root: Path, resumed: Path | None) -> None:
    """Before training goes on from ``resumed``: unfinished writes go, later (damaged) checkpoints get another name."""
    for path in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for folder in checkpoints(root):
        if resumed is None or folder.name > resumed.name:
            spoilt = folder.with_name(_DAMAGED + folder.name)
            shutil.rmtree(spoilt, ignore_errors=True)
            folder.rename(spoilt)


def _matches(path: Path, expected: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == expected.get("bytes") and _describe(path) == expected


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """On the disk, not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes checkpoints one at a time in a thread; what went wrong is raised at the next call.

    ``best`` is the step of a checkpoint that stays beside the ``keep`` newest.
    """

    def __init__(self, root: Path, keep: int, best: int | None = None) -> None:
        self.root, self.keep, self.best = root, keep, best
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, parts: dict[str, Any], seconds: float) -> None:
        """Returns at once, unless the write before is still going on."""
        self.finish_quietly()
        self._thread = threading.Thread(target=self._write, args=(step, parts, seconds), name="checkpoint")
        self._thread.start()

    def _write(self, step: int, parts: dict[str, Any], seconds: float) -> None:
        try:
            write(self.root, step, parts, self.keep, seconds, self.best)
        except BaseException as error:
            self._error = error

    def keep_best(self, step: int) -> None:
        """From now on this one stays, and the one before it goes."""
        self.finish_quietly()
        self.best = step
        drop_old(self.root, self.keep, step)

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish_quietly(self) -> None:
        """When the run fails for another reason: let the write end."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
