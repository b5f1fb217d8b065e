"""Checkpoints on disk: a folder a step, a file a part, and a manifest with the length and SHA-256 of each.  Of sharded
tensors each rank writes its own file; the part has a tensor without values in their place.

The manifest also has the seconds trained so far: they are no part of the state, which two runs have equal to the bit.

A checkpoint appears whole or not at all: it is written under another name, synced, and renamed.  Writing happens in a
thread, from a copy in host memory, while training goes on.  Reading checks every file against the manifest, so a
damaged checkpoint is passed over and the one before it taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.data.durable import full_disk, is_full, sync
from fullbatch.distributed.shards import empty_whole, mapped, read_shards, write_shards

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


@dataclass(frozen=True)
class Captured:
    """What a rank has to write of a state.

    parts   by name, on the first rank; meta tensors, which have no values, stand for the sharded ones
    shards  this rank's parts of these, by their places in ``parts``
    """

    parts: dict[str, Any]
    shards: dict[str, Tensor] = field(default_factory=dict)


def write(
    root: Path,
    step: int,
    captured: Captured,
    keep: int,
    seconds: float = 0.0,
    best: int | None = None,
    line: Any = None,
) -> Path:
    """Save the checkpoint of ``step``, then drop all but the ``keep`` newest and the ``best``.  The first rank does it,
    and where tensors are sharded all of them together, by a ``line`` of their own."""
    final, unfinished = folder_of(root, step), root / f"{_UNFINISHED}{step:09d}"
    first = distributed.world().rank == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
    there = distributed.gather_objects(final.exists(), line) if captured.shards else [final.exists()]
    if any(there):  # machines may see it one after the other
        return final
    try:
        files = _write_shards(unfinished, captured.shards, line) if captured.shards else {}
        if not first:
            return final
        unfinished.mkdir(parents=True, exist_ok=True)
        own = {f"{name}.pt": part for name, part in captured.parts.items()}
        for name, part in own.items():
            torch.save(part, unfinished / name)
            files[name] = _describe(unfinished / name)
        manifest = {"step": step, "seconds": seconds, "files": files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*(unfinished / name for name in own), unfinished / MANIFEST, unfinished):
            sync(path)  # the shards are on the disk since their ranks described them
        unfinished.rename(final)
        sync(root)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # ValueError: on another rank; torch.save answers a full disk with a RuntimeError
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(_advice(error, final, free)) from error
    drop_old(root, keep, best)
    return final


def _write_shards(folder: Path, shards: dict[str, Tensor], line: Any) -> dict[str, Any]:
    """The files of all ranks, each described by the rank that wrote it."""
    own = write_shards(folder, shards, line)

    def described_on_disk() -> dict[str, Any]:
        for path in own:
            sync(path)
        return {path.name: _describe(path) for path in own}

    described = distributed.together(described_on_disk, line)
    return {name: said for files in distributed.gather_objects(described, line) for name, said in files.items()}


def drop_old(root: Path, keep: int, best: int | None = None) -> None:
    """All but the ``keep`` newest and the one of the step ``best``."""
    for old in checkpoints(root)[:-keep]:
        if step_of(old) != best:
            drop(old)


def drop(folder: Path) -> None:
    """Never leave half a checkpoint under a good name."""
    doomed = folder.with_name(f"{_UNFINISHED}{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _advice(error: Exception, path: Path, free: int) -> str:
    kept = checkpoints(path.parent)
    intact = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
    if is_full(error) or free < 1 << 20:
        return f"{full_disk(path, free)}; {intact}. Free some space, then go on with --resume."
    return f"{path} could not be written ({error}); {intact}. Put that right, then go on with --resume."


def read(
    folder: Path,
    only: tuple[str, ...] | None = None,
    checked: bool = False,
    empty: Callable[[Tensor], Tensor] = empty_whole,
) -> dict[str, Any]:
    """The parts of a checkpoint, checked against its manifest unless they were; ValueError if it is damaged.  ``empty``
    makes room for a tensor that was sharded: for the whole of it, or for what this rank holds."""
    files = _manifest(folder)["files"]
    wanted = files if only is None else [f"{name}.pt" for name in only if f"{name}.pt" in files]
    parts: dict[str, Any] = {}
    for path in (folder / name for name in wanted if name.endswith(".pt")):
        _check(path, files, checked)
        with understood(path):
            parts[path.stem] = dict(torch.load(path, map_location="cpu", weights_only=True))
    sharded: dict[str, Tensor] = {}

    def with_room(place: str, tensor: Tensor) -> Tensor:
        return sharded.setdefault(place, empty(tensor)) if tensor.is_meta else tensor

    parts = {name: mapped(part, with_room, name) for name, part in parts.items()}
    if sharded:
        for path in (folder / name for name in files if not name.endswith(".pt")):
            _check(path, files, checked)
        with understood(folder):
            read_shards(folder, sharded)
    return parts


def _check(path: Path, files: dict[str, Any], checked: bool) -> None:
    if not checked and not _matches(path, files[path.name]):
        raise ValueError(f"{path} is missing or differs from what was saved.")


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


class Writer:
    """Writes checkpoints one at a time in a thread; what went wrong is raised at the next call.

    ``best`` is the step of a checkpoint that stays beside the ``keep`` newest.  ``settle`` brings to the disk what a
    run that goes on from a checkpoint will look for.
    """

    def __init__(
        self, root: Path, keep: int, best: int | None = None, settle: Callable[[], None] = lambda: None
    ) -> None:
        self.root, self.keep, self.best, self.settle = root, keep, best, settle
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, captured: Captured, seconds: float) -> None:
        """Returns at once, unless the write before is still going on.  Every rank must call."""
        self.finish_quietly()
        line = distributed.thread_line() if captured.shards else None
        if captured.parts or captured.shards:
            self._thread = threading.Thread(target=self._write, args=(step, captured, seconds, line), name="checkpoint")
            self._thread.start()

    def _write(self, step: int, captured: Captured, seconds: float, line: Any) -> None:
        try:
            if line is None:
                self.settle()
            else:
                distributed.together(self.settle, line)
            write(self.root, step, captured, self.keep, seconds, self.best, line)
        except BaseException as error:
            self._error = error

    def keep_best(self, step: int) -> None:
        """From now on this one stays, and the one before it goes, unless this one could not be written."""
        self.finish_quietly()
        if self._error is None:
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
