"""The cache folder: FULLBATCH_CACHE, else ~/.cache/fullbatch.  Its files are named by what they were made from."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

UNFINISHED, ABANDONED = ".writing-", 3600.0  # seconds in which a process that is alive has written something

log = logging.getLogger("fullbatch")


@functools.cache
def _writable(folder: Path) -> bool:
    """Once a process; what a killed one had not finished is swept away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - unfinished.stat().st_mtime > ABANDONED:
                    unfinished.unlink()
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        log.warning(
            "The cache folder %s is not writable (%s): indexes of tar shards are kept in memory and built again by "
            "the next run; set FULLBATCH_CACHE to a folder that is.",
            folder,
            error.strerror,
        )
        return False


def cache_folder() -> Path | None:
    folder = Path(os.environ.get("FULLBATCH_CACHE") or "~/.cache/fullbatch").expanduser().absolute()
    return folder if _writable(folder) else None


def unfinished_in(folder: Path) -> IO[bytes]:
    """A new file, to be renamed when it is whole; unlike tempfile's, others may read it if the umask lets them."""
    return open(folder / f"{UNFINISHED}{uuid.uuid4().hex}", "x+b")


def write_atomically(target: Path, write: Callable[[IO[bytes]], object]) -> None:
    """All or nothing, also when several ranks write at once."""
    temporary = unfinished_in(target.parent)
    try:
        with temporary:
            write(temporary)
            temporary.flush()
            os.fsync(temporary.fileno())
        os.replace(temporary.name, target)
    except BaseException:
        os.unlink(temporary.name)
        raise


def keep_in_cache(target: Path, write: Callable[[IO[bytes]], object], what: str) -> None:
    """Where it cannot be kept, it is made anew by the next run."""
    try:
        write_atomically(target, write)
    except OSError as error:
        log.warning("%s cannot be kept in %s (%s).", what, target.parent, error.strerror)
