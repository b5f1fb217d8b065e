"""Tar shards as img2dataset and webdataset write them (000000017.jpg, .txt, .json), with random access.  One walk over
a shard's headers makes its index, which is kept in the cache folder.  A row of it is a sample: offset and size of its
image, its .txt and its .json; (-1, -1) where one is absent.  Members with one key are one sample, in the order in which
keys first appear.  The key is the path up to the first dot of the base name, as in webdataset: ``a/0017.jpg`` and
``a/0017.txt`` share the key ``a/0017``.  (webdataset 1.0 no longer ships its indexed reader.)"""

from __future__ import annotations

import atexit
import bz2
import functools
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fullbatch.data.sample import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    BadSample,
    RawSample,
    Samples,
    caption_texts,
    check_image_size,
    checked_captions,
    fingerprint_of,
    utf8,
)

Index = NDArray[np.int64]
IMAGE, TXT, JSON = 0, 2, 4  # the column of a member's offset; its size is the next
COLUMNS = 6
INDEX_VERSION = 2  # part of the name of every cached file; raise it when the rows change
BLOCK = 512
_SUM_BYTES = 4  # of the checksum at the end of a cached index
_UNFINISHED, _ABANDONED = ".writing-", 3600.0  # seconds in which a process that is alive has written something
_ENDS = {"EmptyHeaderError": "it ends without an end mark", "TruncatedHeaderError": "it ends inside a header"}
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_OPEN_FILES = 64
_JSON_FIELDS = ("captions", "caption")

log = logging.getLogger("fullbatch")


def split_key(member: str) -> tuple[str, str] | None:
    """Key and lower-case extension; None for a member that belongs to no sample.

    >>> split_key("a.b/0017.seg.PNG")
    ('a.b/0017', 'seg.png')
    """
    match = _KEY.fullmatch(member)
    return (match[1], match[2].lower()) if match else None


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """GNU tar keeps times where ustar keeps the first part of a name; tarfile takes them for one."""
        member = super().frombuf(buf, encoding, errors)
        if buf[257:265] == tarfile.GNU_MAGIC and member.type not in tarfile.GNU_TYPES:
            member.name = bytes(buf[:100]).split(b"\0", 1)[0].decode(encoding, errors)
        return member


class _Headers(tarfile.TarFile):
    """tarfile's own ``next`` takes a damaged header for the end of the file."""

    tarinfo = _Member

    def next(self) -> tarfile.TarInfo:
        assert self.fileobj is not None
        self.fileobj.seek(self.offset)
        return self.tarinfo.fromtarfile(self)


def walk_members(path: str) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every regular member.  What lies behind a damaged header is lost, with a warning."""
    at, end = 0, os.path.getsize(path)
    try:
        with _Headers(path, encoding="utf-8", errors="surrogateescape") as tar:
            tar.offset = 0  # opening reads the first header
            while True:
                at = tar.offset
                member = tar.next()
                left, is_plain = end - member.offset_data, member.isreg() and not member.issparse()
                if member.size < 0 or (is_plain and member.size > left) or tar.offset <= at:
                    raise tarfile.HeaderError(f"{member.name!r} claims {member.size:,} bytes, {left:,} are left")
                if is_plain:
                    yield member.name, member.offset_data, member.size
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as damage:
        kind = type(damage).__name__
        if kind != "EOFHeaderError":
            words = _ENDS.get(kind, damage)
            log.warning("%s is damaged at byte %d: %s; samples before it are used.", path, at, words)


def build_index(path: str, image: str) -> Index:
    """One row a sample; ``image`` is the extension of images, "" takes the usual ones."""
    columns = dict.fromkeys([image.lower().lstrip(".")] if image else IMAGE_EXTENSIONS, IMAGE)
    columns = {"txt": TXT, "json": JSON} | columns
    rows: list[list[int]] = []
    row_of_key: dict[str, list[int]] = {}
    for name, offset, size in walk_members(path):
        key, extension = split_key(name) or ("", "")
        column = columns.get(extension)
        if column is None:
            continue
        row = row_of_key.get(key)
        if row is None or row[column] >= 0:  # a member that is there already begins another sample
            row = row_of_key[key] = [-1] * COLUMNS
            rows.append(row)
        row[column], row[column + 1] = offset, size
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


def keep_in_cache(target: Path, write: Callable[[IO[bytes]], object], what: str) -> None:
    """Where it cannot be kept, it is made anew by the next run."""
    try:
        write_atomically(target, write)
    except OSError as error:
        log.warning("%s cannot be kept in %s (%s).", what, target.parent, error.strerror)


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
    return _cached(file_key(path, image), lambda: [build_index(path, image)])


def joined_index(paths: list[str], image: str, parts: list[Index]) -> Index:
    """The indexes of all shards as one array."""
    names = "".join(file_key(path, image) for path in paths)
    name = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
    return parts[0] if len(parts) == 1 else _cached(f"{name}-joined", lambda: parts)


def _cached(name: str, build: Callable[[], list[Index]]) -> Index:
    """Mapped from the cache folder; in memory where there is none, or no room in it."""
    folder = cache_folder()
    target = folder / f"{name}.npy" if folder else None
    kept = load_array(target) if target else None
    if kept is not None:
        return kept
    parts = build()
    if target:
        keep_in_cache(target, lambda file: _write_index(file, parts), "The index of a shard")
        kept = load_array(target)
    return np.concatenate(parts) if kept is None else kept


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


class _File:
    """A descriptor that closes when the last user lets go, so that a thread may read what another has evicted."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class TarShards(Samples):
    """Samples of local shards, in the order of the shards and of the samples in each.  A caption is the .txt member,
    else "captions" or "caption" in the .json; ``captions`` names other .json fields.  A sample without image or text
    keeps its position and is a bad sample when it is read."""

    def __init__(self, paths: list[str], image: str = "", captions: tuple[str, ...] = ()) -> None:
        self.name = paths[0]
        self._fields, self._image = captions, image
        self._labels = ["/".join(Path(path).absolute().parts[-2:]) for path in paths]
        cache_folder()  # says here, once, if it is not writable
        with ThreadPoolExecutor(max_workers=8) as pool:
            self._paths = list(pool.map(unpacked, paths))
            parts = list(pool.map(cached_index, self._paths, [image] * len(paths)))
        self._starts = np.cumsum([0, *map(len, parts)])
        self.count = int(self._starts[-1])
        self._index: Index | None = joined_index(self._paths, image, parts)
        shards = zip(paths, parts, strict=True)
        described = [
            part for path, rows in shards for part in (os.path.basename(path), os.path.getsize(path), len(rows))
        ]
        self.fingerprint = fingerprint_of("tar", image, *captions, *described)
        self._file = functools.lru_cache(_OPEN_FILES)(_File)

    def __getstate__(self) -> dict[str, Any]:
        """Without descriptors, and without an index that the reader's process finds in the cache."""
        mapped = isinstance(self._index, np.memmap)
        return self.__dict__ | {"_file": None} | ({"_index": None} if mapped else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = functools.lru_cache(_OPEN_FILES)(_File)

    def _rows(self) -> Index:
        if self._index is None:
            parts = [cached_index(path, self._image) for path in self._paths]
            index = joined_index(self._paths, self._image, parts)
            if len(index) != len(self):
                raise RuntimeError(f"The shards of {self.name} changed during the run; start it again.")
            self._index = index
        return self._index

    def _bytes(self, label: str, shard: int, offset: int, size: int) -> bytes:
        try:
            file = self._file(self._paths[shard])
            raw = os.pread(file.descriptor, size, offset)
            while len(raw) < size:  # network file systems may give less than asked for
                more = os.pread(file.descriptor, size - len(raw), offset + len(raw))
                if not more:
                    raise BadSample(label, "the shard is shorter than when it was indexed")
                raw += more
            return raw
        except OSError as error:
            raise BadSample(label, f"cannot read the shard: {error.strerror}") from None

    def _read(self, index: int) -> RawSample:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        label = f"{self._labels[shard]}:{index - int(self._starts[shard])}"
        row: list[int] = self._rows()[index].tolist()
        first = next(column for column in (IMAGE, TXT, JSON) if row[column] >= 0)
        offset, size = row[first : first + 2]

        # one read for the image and the header before it, where the key stands
        wanted = size if first == IMAGE and size <= MAX_IMAGE_BYTES else 0
        raw = self._bytes(label, shard, offset - BLOCK, BLOCK + wanted)
        with suppress(tarfile.TarError):  # the shard was written over
            key = split_key(_Member.frombuf(raw[:BLOCK], "utf-8", "surrogateescape").name)
            label = f"{self._labels[shard]}:{key[0]}" if key else label
        if first != IMAGE:
            raise BadSample(label, f"no image member (.{self._image or 'jpg, .png, .webp, ...'})")
        check_image_size(label, size)
        return RawSample(label, raw[BLOCK:], self._captions(label, shard, row))

    def _captions(self, label: str, shard: int, row: list[int]) -> tuple[str, ...]:
        use_txt = row[TXT] >= 0 and not self._fields
        column = TXT if use_txt else JSON
        if row[column] < 0:
            wanted = f".json with {', '.join(self._fields)}" if self._fields else ".txt or .json"
            raise BadSample(label, f"no caption member ({wanted})")
        offset, size = row[column], row[column + 1]
        if size > MAX_TEXT_BYTES:
            raise BadSample(label, f"the caption member has {size:,} bytes, more than the limit of {MAX_TEXT_BYTES:,}")
        text = utf8(label, self._bytes(label, shard, offset, size))
        if use_txt:
            return checked_captions(label, [text])
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSample(label, f"the .json is not readable: {error}") from None
        fields = self._fields or _JSON_FIELDS
        if not isinstance(record, dict) or not any(field in record for field in fields):
            raise BadSample(label, f"the .json has no field {' or '.join(map(repr, fields))}")
        if not self._fields:
            fields = next(((field,) for field in fields if record.get(field)), fields)
        return checked_captions(label, [text for field in fields for text in caption_texts(record.get(field))])
