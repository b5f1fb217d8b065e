"""One mapping that all ranks of a node share: nameless in memory, or a file in a folder, both scratch space."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fullbatch import distributed


def map_shared(place: str, name: str, count: int, dtype: torch.dtype, owner: object) -> Tensor:
    """``count`` values, NaN at first.  ``place`` is "node", or a folder whose file is locked while ``owner`` lives."""
    path, lock = _choose_memory() if place == "node" else _choose_file(Path(place), name)
    shared_path = distributed.share_from_leader(path)
    if path != shared_path:
        os.unlink(path)  # only the leader's is used
    if distributed.is_node_leader():
        _reserve(path, count * dtype.itemsize)
    distributed.host_barrier()
    values = torch.from_file(shared_path, shared=True, size=count, dtype=dtype)
    if distributed.is_node_leader():
        values.fill_(math.nan)
    distributed.host_barrier()
    if place == "node" and distributed.is_node_leader():
        os.unlink(path)  # the mapping lives on; a killed run leaves nothing behind
    if lock is not None:
        weakref.finalize(owner, _release, lock)
    return values


def _release(lock: IO[bytes]) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # also for forked children, which hold the same open file
    lock.close()


def _choose_memory() -> tuple[str, None]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="fullbatch-", dir=memory)
    os.close(handle)
    return path, None


def _choose_file(folder: Path, name: str) -> tuple[str, IO[bytes] | None]:
    path = folder / f"{name}.table"
    if not distributed.is_node_leader():
        return str(path), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(f"{path}.lock", "wb")  # noqa: SIM115  (held while the table lives)
    except OSError as error:
        raise ValueError(f"table_storage={str(folder)!r} cannot be used as a folder: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"The table {path} is in use by another objective; give each its own folder as table_storage, or del the "
            "old objective first."
        ) from None
    path.unlink(missing_ok=True)  # a new file: what still maps the old one keeps it
    return str(path), lock


def _reserve(path: str, size: int) -> None:
    """Take the space now: a mapping that turns out too large later would kill the process."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            os.unlink(path)
            raise ValueError(
                f"A per-sample table needs {size / 2**20:.0f} MiB in {os.path.dirname(path)} and there is not enough "
                "room; give table_storage a folder on a larger disk, or enlarge the shared memory."
            ) from error
