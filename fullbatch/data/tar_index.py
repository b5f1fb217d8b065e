"""Where the members of a tar shard lie: one walk over its headers, kept in the cache folder.

A row of the index is a sample: offset and size of its image, its .txt and its .json; (-1, -1) where one is absent.
Members with one key are one sample, in the order in which keys first appear.  The key is the path up to the first dot
of the base name, as in webdataset: ``a/0017.jpg`` and ``a/0017.txt`` share the key ``a/0017``.
"""

from __future__ import annotations

import atexit
import bz2
import functools
import gzip
import hashlib
import io
import logging
import lzma
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fullbatch.data.sample import IMAGE_EXTENSIONS

Index = NDArray[np.int64]
IMAGE, TXT, JSON = 0, 2, 4  # the column of a member's offset; its size is the next
COLUMNS = 6
INDEX_VERSION = 1  # part of the name of every cached file; raise it when the rows change
BLOCK = 512
_SUM_BYTES = 4  # of the checksum at the end of a cached index
_UNFINISHED, _ABANDONED = ".writing-", 3600.0  # seconds in which a process that is alive has written something
_MAX_LONG_NAME = 1 << 20
_FILES, _WITHOUT_DATA, _LONG_NAME, _PAX, _PAX_GLOBAL = b"0\07", b"123456", b"L", b"x", b"g"
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)

log = logging.getLogger("fullbatch")


class _Damage(Exception):
    """The walk cannot go on."""


def split_key(member: str) -> tuple[str, str] | None:
    """Key and lower-case extension; None for a member that belongs to no sample.

    >>> split_key("a.b/0017.seg.PNG")
    ('a.b/0017', 'seg.png')
    """
    match = _KEY.fullmatch(member)
    return (match[1], match[2].lower()) if match else None


def member_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """An octal number, or a big-endian one after 0x80 (GNU, for files over 8 GB)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if not re.fullmatch(rb"[0-7]*", digits):
        raise _Damage(f"a header holds the number {field!r}")
    return int(digits or b"0", 8)


def _check_sum(header: bytes) -> None:
    rest = header[:148] + b" " * 8 + header[156:]
    total, written = sum(rest), _number(header[148:156])
    if written != total and written != total - 256 * sum(byte > 127 for byte in rest):  # old writers: signed bytes
        raise _Damage("a header has a wrong checksum")


def _pax_records(raw: bytes) -> dict[bytes, bytes]:
    """Records of the form b"18 path=a/b.jpg\\n", where 18 is the record's own length."""
    records, at = {}, 0
    while at < len(raw) and raw[at] != 0:
        match = re.compile(rb"(\d{1,9}) ([^=]+)=").match(raw, at)
        if match is None or at + int(match[1]) > len(raw) or at + int(match[1]) <= match.end():
            raise _Damage("an extended header is not readable")
        records[match[2]] = raw[match.end() : at + int(match[1]) - 1]
        at += int(match[1])
    return records


def walk_members(file: int, end: int, path: str) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every regular member.  What lies behind a damaged header is lost, with a warning."""
    at, long_name, pax_size = 0, None, None
    try:
        while True:
            header = os.pread(file, BLOCK, at)
            if header == bytes(BLOCK):
                return
            if len(header) < BLOCK:
                raise _Damage("it ends without an end mark" if not header else "it ends inside a header")
            _check_sum(header)
            kind, size = header[156:157], _number(header[124:136])
            if kind in _WITHOUT_DATA:
                size = 0
            elif kind not in (_LONG_NAME, b"K", _PAX, _PAX_GLOBAL) and pax_size is not None:
                size = pax_size
            data = at + BLOCK
            if data + size > end:
                raise _Damage(f"{member_name(header)!r} claims {size:,} bytes, {end - data:,} are left")
            if kind in (_LONG_NAME, _PAX):
                if size > _MAX_LONG_NAME:
                    raise _Damage(f"an extended header has {size:,} bytes")
                raw = os.pread(file, size, data)
                if kind == _LONG_NAME:
                    long_name = raw.split(b"\0", 1)[0]
                else:
                    records = _pax_records(raw)
                    long_name = records.get(b"path", long_name)
                    if b"size" in records:
                        pax_size = _number_of_pax(records[b"size"])
            elif kind not in (b"K", _PAX_GLOBAL):
                name = member_name(header) if long_name is None else long_name.decode("utf-8", "surrogateescape")
                if kind in _FILES and not name.endswith("/"):
                    yield name, data, size
                long_name = pax_size = None
            at = data + (size + BLOCK - 1) // BLOCK * BLOCK
    except _Damage as damage:
        log.warning("%s is damaged at byte %d: %s; samples before it are used.", path, at, damage)


def _number_of_pax(raw: bytes) -> int:
    if not re.fullmatch(rb"\d{1,18}", raw):
        raise _Damage(f"an extended header holds the size {raw[:20]!r}")
    return int(raw)


def build_index(path: str, image: str) -> Index:
    """One row a sample; ``image`` is the extension of images, "" takes the usual ones."""
    columns = dict.fromkeys([image.lower().lstrip(".")] if image else IMAGE_EXTENSIONS, IMAGE)
    columns = {"txt": TXT, "json": JSON} | columns
    rows: list[list[int]] = []
    row_of_key: dict[str, list[int]] = {}
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for name, offset, size in walk_members(file, os.fstat(file).st_size, path):
            key, extension = split_key(name) or ("", "")
            column = columns.get(extension)
            if column is None:
                continue
            row = row_of_key.get(key)
            if row is None or row[column] >= 0:  # a member that is there already begins another sample
                row = row_of_key[key] = [-1] * COLUMNS
                rows.append(row)
            row[column], row[column + 1] = offset, size
    finally:
        os.close(file)
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


# The cache folder: FULLBATCH_CACHE, else ~/.cache/fullbatch.  Its files are named by what they were made from.


@functools.cache
def _writable(folder: Path) -> bool:
    """Once a process; what a killed one had not finished is swept away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - unfinished.stat().st_mtime > _ABANDONED:
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


@functools.cache
def _folder_of_this_run() -> Path:
    folder, owner = Path(tempfile.mkdtemp(prefix="fullbatch-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def file_key(path: str, *more: object) -> str:
    """Changes when the file is moved or rewritten."""
    status = os.stat(path)
    parts = (os.path.abspath(path), status.st_size, status.st_mtime_ns, INDEX_VERSION, *more)
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def write_atomically(target: Path, write: Callable[[IO[bytes]], object]) -> None:
    """All or nothing, also when several ranks write at once."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_array(path: Path) -> Index | None:
    """A cached index, mapped so that all processes of a machine share it; None where it is absent or damaged."""
    try:
        if not _has_its_sum(path):
            return None
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    good = isinstance(array, np.ndarray) and array.dtype == np.int64 and array.ndim == 2 and array.shape[1] == COLUMNS
    return array if good else None


def _write_index(file: IO[bytes], parts: list[Index]) -> None:
    """As np.save has it, and the checksum of that."""
    header = io.BytesIO()
    shape = (sum(map(len, parts)), COLUMNS)
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    total = 0
    for block in chain([header.getvalue()], (np.ascontiguousarray(part, "<i8").tobytes() for part in parts)):
        file.write(block)
        total = zlib.crc32(block, total)
    file.write(total.to_bytes(_SUM_BYTES, "little"))


def _has_its_sum(path: Path) -> bool:
    with path.open("rb") as file:
        left, total = os.fstat(file.fileno()).st_size - _SUM_BYTES, 0
        while left > 0 and (block := file.read(min(left, 1 << 22))):
            total, left = zlib.crc32(block, total), left - len(block)
        return file.read() == total.to_bytes(_SUM_BYTES, "little")


def cached_index(path: str, image: str) -> Index:
    folder = cache_folder()
    target = folder / f"{file_key(path, image)}.npy" if folder else None
    kept = load_array(target) if target else None
    if kept is not None:
        return kept
    index = build_index(path, image)
    if target:
        _save(target, [index])
    return index


def joined_index(paths: list[str], image: str, parts: list[Index]) -> Index:
    """The indexes of all shards as one array: mapped from the cache, in memory where there is none."""
    if len(parts) == 1:
        return parts[0]
    length = sum(map(len, parts))
    folder = cache_folder()
    if folder is None:
        return np.concatenate(parts)
    names = "".join(file_key(path, image) for path in paths)
    target = folder / f"{hashlib.blake2b(names.encode(), digest_size=16).hexdigest()}-joined.npy"
    kept = load_array(target)
    if kept is not None and len(kept) == length:
        return kept
    _save(target, parts)
    kept = load_array(target)
    return np.concatenate(parts) if kept is None else kept


def _save(target: Path, parts: list[Index]) -> None:
    try:
        write_atomically(target, lambda file: _write_index(file, parts))
    except OSError as error:
        log.warning("Cannot keep the index %s (%s); it stays in memory.", target, error.strerror)


_PACKED = {".gz": gzip, ".tgz": gzip, ".xz": lzma, ".txz": lzma, ".bz2": bz2}
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")


def unpacked(path: str) -> str:
    """The plain tar file of a compressed one, unpacked once; random access needs it."""
    packing = _PACKED.get(Path(path).suffix.lower())
    if packing is None:
        return path
    target = (cache_folder() or _folder_of_this_run()) / f"{file_key(path)}.tar"
    if not target.exists():

        def write(file: IO[bytes]) -> None:
            with packing.open(path) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)

        try:
            write_atomically(target, write)
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            raise ValueError(
                f"Cannot unpack {path!r} into {str(target.parent)!r}: {error}; "
                "get the file again, make room, or unpack it yourself and name the .tar."
            ) from error
    return str(target)
