"""Blocks of remote files on this machine's disk, shared by all processes, up to a bound.

A block is a file: its bytes, then a checksum of each 64 KiB of them, so that a sample is read and checked without the
rest of its block.  It is written aside and renamed, and a reader keeps no file open: whoever is reading a block while
another process removes it reads on, and its disk space is free a moment later.  What a power failure or a bad disk left
fails its checksum and is fetched again.

The bound holds at every moment, not only in the end.  Under one lock a writer makes room, notes the new total and
creates its unfinished file at full length, so whoever counts next counts that too; renaming takes the lock again.  A
process that dies in between leaves a total that is too high at worst, and its unfinished file, known by the lock that
it no longer holds.  Files are counted, which puts that right, where the total reaches the bound, and where it was not
noted since this machine started, for then a power failure may have set it back.  Locks are flock's: the kernel lets go
of a dead process's; a living one that does not move is waited for a minute, and then the block is not kept.

Others write to the disk too, checkpoints above all: some of it stays free, and where others take that the cache gives
way when its next block comes.  So it does where a disk or a quota is full all the same."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from fullbatch.data.cache_folder import UNFINISHED, cache_folder, unfinished_in
from fullbatch.data.durable import is_full

BLOCK_BYTES = 4 << 20
_PIECE = 64 << 10
_SUM = 4  # bytes
_DEFAULT_GB = 32.0
_KEPT = 0.9  # of the bound, after making room: counting is not for every block
_FREE, _MOST_FREE = 0.02, 10 * 10**9  # of the disk that stay free: this share, up to so many bytes
_FRESH = 60.0  # seconds in which another use of a block is not noted
_PATIENCE = 60.0
_RESTS = 60.0  # seconds after a block that could not be kept, in which none is
_LOCKS = 256  # for blocks that are being fetched, shared by all of them

log = logging.getLogger("fullbatch")


def block_cache() -> BlockCache | None:
    """In the cache folder, up to FULLBATCH_CACHE_GB; None: there is none, or its bound is 0."""
    return _of_environment(*map(os.environ.get, ("FULLBATCH_CACHE_GB", "FULLBATCH_CACHE", "HOME")))


@functools.cache  # every sample asks
def _of_environment(gigabytes: str | None, *folders: str | None) -> BlockCache | None:
    text = gigabytes or str(_DEFAULT_GB)
    try:
        bound = float(text) * 1e9
    except ValueError:
        bound = -1.0
    if not 0.0 <= bound < float("inf"):
        raise ValueError(f"FULLBATCH_CACHE_GB must be a number of gigabytes, 0 or more, got {text!r}.")
    folder = cache_folder() if bound else None
    return None if folder is None else _opened(folder / "blocks", int(bound))


@functools.cache
def _opened(folder: Path, bound: int) -> BlockCache:
    return BlockCache(folder, bound)


class BlockCache:
    def __init__(self, folder: Path, bound: int) -> None:
        self.folder, self.bound = folder, bound
        self._counted = self._warned = False
        self._rests_until = -math.inf
        self._start = _start_of_machine()

    def get(self, name: str, length: int | None = None, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes ``start`` to ``stop`` of a block, of this length if it is known; None: it is absent or damaged."""
        path = self.folder / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(file)
            length = _length(status.st_size) if length is None else length
            stop = length if stop is None else stop
            first, last = start // _PIECE, -(-stop // _PIECE)
            raw = os.pread(file, min(last * _PIECE, length) - first * _PIECE, first * _PIECE)
            sums = os.pread(file, (last - first) * _SUM, length + first * _SUM)
            if time.time() - status.st_mtime > _FRESH:
                with suppress(OSError):  # another user's
                    os.utime(file)
        except OSError:
            return None
        finally:
            os.close(file)
        if status.st_size != _file_size(length) or _sums(raw) != sums:
            log.warning("A block in %s is damaged and fetched again.", self.folder)
            with suppress(OSError):
                path.unlink()
            return None
        return raw[start - first * _PIECE : stop - first * _PIECE]

    def holds(self, name: str, length: int) -> bool:
        """As far as its size tells; whoever asks will use it, so that it is not the next to go."""
        try:
            there = os.stat(self.folder / name).st_size == _file_size(length)
        except OSError:
            return False
        if there:
            with suppress(OSError):  # another user's
                os.utime(self.folder / name)
        return there

    @property
    def keeps(self) -> bool:
        """Whether it is worth a try; a whole block is a hundred times what a sample needs of it."""
        return time.monotonic() >= self._rests_until

    def put(self, name: str, block: bytes) -> None:
        """Kept, if there is or can be made room for it."""
        kept = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                kept = self._write(name, block)
            except OSError as error:
                if not is_full(error):
                    raise
                kept = self._write(name, block, full=True)
        except OSError as error:
            if not self._warned:
                log.warning("Blocks of remote files cannot be kept in %s (%s).", self.folder, error.strerror)
                self._warned = True
        if not kept:
            self._rests_until = time.monotonic() + _RESTS

    def _write(self, name: str, block: bytes, full: bool = False) -> bool:
        temporary = self._reserve(_file_size(len(block)), full)
        if temporary is None:
            return False
        with temporary:
            try:
                temporary.write(block)
                temporary.write(_sums(block))
                temporary.flush()
                with _held(self.folder / ".lock"):
                    os.replace(temporary.name, self.folder / name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary.name)
                raise
        return True

    @contextmanager
    def fetching(self, name: str) -> Iterator[None]:
        """Held by the one process that fetches a block, while others that want it wait."""
        with ExitStack() as stack:
            with suppress(OSError):  # then several may fetch it
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_held(self.folder / f".lock-{zlib.crc32(name.encode()) % _LOCKS}"))
            yield

    def _reserve(self, size: int, full: bool = False) -> IO[bytes] | None:
        """An unfinished file of this size, locked, within the bound; None: there is no room.  ``full``: the disk is."""
        if size > self.bound:
            return None
        with _held(self.folder / ".lock") as lock:
            if lock is None:
                return None
            noted, start = os.pread(lock, 8, 0), os.pread(lock, len(self._start), 8)
            total, limit, fits = int.from_bytes(noted, "little"), self.bound, False
            if len(noted) == 8 and (self._counted or start == self._start != b"") and not full:
                fits = total + size <= self._limit(total)
            if not fits:
                total, limit = self._make_room(size, full)
                self._counted, fits = True, total + size <= limit
            os.pwrite(lock, (total + size * fits).to_bytes(8, "little") + self._start, 0)
            if not fits:
                if limit < self.bound:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return None
            file = unfinished_in(self.folder)
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)
            return file

    def _limit(self, total: int) -> int:
        """The bound, or less where the disk is nearly full: what may be there, where ``total`` is."""
        disk = os.statvfs(self.folder)
        spare = min(int(_FREE * disk.f_blocks * disk.f_frsize), _MOST_FREE)
        return min(self.bound, total + disk.f_bavail * disk.f_frsize - spare)

    def _make_room(self, size: int, full: bool) -> tuple[int, int]:
        """The bytes that are there, after those least recently used were removed, if there was no room; and how many
        may be."""
        blocks, total = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(".lock"):
                    continue
                with suppress(FileNotFoundError):  # it was damaged
                    status = entry.stat()
                    if not entry.name.startswith(UNFINISHED):
                        blocks.append((status.st_mtime, status.st_size, entry.path))
                    elif _is_abandoned(entry.path) and _is_removed(entry.path):
                        continue
                    total += status.st_size
        limit = min(total, self._limit(total)) if full else self._limit(total)
        if total + size > limit:
            for _, bytes_there, path in sorted(blocks):
                if total + size <= _KEPT * limit:
                    break
                total -= bytes_there * _is_removed(path)
        return total, limit


@functools.cache
def _start_of_machine() -> bytes:
    """Names it; nothing where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _is_removed(path: str) -> bool:
    """By us or by others; one of another user's may have to stay."""
    with suppress(PermissionError):
        Path(path).unlink(missing_ok=True)
        return True
    return False


def _is_abandoned(path: str) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:  # another user's
        return False
    try:
        return _try_lock(file)
    finally:
        os.close(file)


def _file_size(length: int) -> int:
    return length + -(-length // _PIECE) * _SUM


def _length(file_size: int) -> int:
    return max(0, file_size - -(-file_size // (_PIECE + _SUM)) * _SUM)


def _sums(raw: bytes) -> bytes:
    view = memoryview(raw)
    pieces = (view[start : start + _PIECE] for start in range(0, len(raw), _PIECE))
    return b"".join(zlib.crc32(piece).to_bytes(_SUM, "little") for piece in pieces)


@contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """The locked file; None where another process does not let go of it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locked, until = _try_lock(file), time.monotonic() + _PATIENCE
        while not locked and time.monotonic() < until:
            time.sleep(0.005)
            locked = _try_lock(file)
        try:
            yield file if locked else None
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for forked children, which hold the same open file
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
