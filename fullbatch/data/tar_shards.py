"""Tar shards as img2dataset and webdataset write them (000000017.jpg, .txt, .json), with random access.  One walk over
a shard's headers makes its index, which is kept in the cache folder.  A row of it is a sample: offset and size of its
image, its .txt and its .json; (-1, -1) where one is absent.  Members with one key are one sample, in the order in which
keys first appear.  The key is the path up to the first dot of the base name, as in webdataset: ``a/0017.jpg`` and
``a/0017.txt`` share the key ``a/0017``.  (webdataset 1.0 no longer ships its indexed reader.)  A shard may lie in a
store: its index is made of ranges of it, and kept for the version that the store names."""

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
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fullbatch.config.data import is_url
from fullbatch.data.block_cache import block_cache
from fullbatch.data.cache_folder import cache_folder, keep_in_cache, write_atomically
from fullbatch.data.files import AnyFile, name_on_disk, size_of
from fullbatch.data.remote import RemoteBlock, RemoteFile, blocks_of, look_up
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
from fullbatch.data.store_requests import StoreError
from fullbatch.data.tar_headers import BLOCK, TarHeader, walk_members

Index = NDArray[np.int64]
IMAGE, TXT, JSON = 0, 2, 4  # the column of a member's offset; its size is the next
COLUMNS = 6
_ABSENT = array("q", [-1] * COLUMNS)
INDEX_VERSION = 2  # part of the name of every cached file; raise it when the rows change
_SUM_BYTES = 4  # of the checksum at the end of a cached index
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_OPEN_FILES = 64
_NEAR = 16 << 10  # bytes behind an image, within which its caption ends, as it mostly does
_JSON_FIELDS = ("captions", "caption")

_parsing = threading.Lock()  # numpy parses the header as Python, which in several threads at once can fail in 3.11

log = logging.getLogger("fullbatch")


def split_key(member: str) -> tuple[str, str] | None:
    """Key and lower-case extension; None for a member that belongs to no sample.

    >>> split_key("a.b/0017.seg.PNG")
    ('a.b/0017', 'seg.png')
    """
    match = _KEY.fullmatch(member)
    return (match[1], match[2].lower()) if match else None


def build_index(shard: AnyFile, image: str) -> Index:
    """One row a sample; ``image`` is the extension of images, "" takes the usual ones."""
    columns = dict.fromkeys([image.lower().lstrip(".")] if image else IMAGE_EXTENSIONS, IMAGE)
    columns = {"txt": TXT, "json": JSON} | columns
    rows = array("q")
    row_of_key: dict[str, int] = {}  # where its row begins
    for name, offset, size in walk_members(shard):
        key, extension = split_key(name) or ("", "")
        column = columns.get(extension)
        if column is None:
            continue
        row = row_of_key.get(key)
        if row is None or rows[row + column] >= 0:  # a member that is there already begins another sample
            row = row_of_key[key] = len(rows)
            rows.extend(_ABSENT)
        rows[row + column], rows[row + column + 1] = offset, size
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


@functools.cache
def _folder_of_this_run() -> Path:
    folder, owner = Path(tempfile.mkdtemp(prefix="fullbatch-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def file_key(shard: AnyFile, *more: object) -> str:
    """Changes when the file is moved or rewritten."""
    if isinstance(shard, str):
        status = os.stat(shard)
        parts: tuple[object, ...] = (os.path.abspath(shard), status.st_size, status.st_mtime_ns, INDEX_VERSION, *more)
    else:
        parts = (shard.key, INDEX_VERSION, *more)
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def load_array(path: Path) -> Index | None:
    """A cached index, mapped so that all processes of a machine share it; None where it is absent or damaged."""
    try:
        if not _has_its_sum(path):
            return None
        with _parsing:
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


def cached_index(shard: AnyFile, image: str) -> Index:
    return _cached(file_key(shard, image), lambda: [build_index(shard, image)])


def joined_index(shards: list[AnyFile], image: str, parts: list[Index]) -> Index:
    """The indexes of all shards as one array."""
    names = "".join(file_key(shard, image) for shard in shards)
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


def _looked_up(path: str) -> AnyFile:
    if not is_url(path):
        return unpacked(path)
    if Path(path).suffix.lower() in _PACKED:
        raise ValueError(f"{path!r} is packed, and samples are read from the middle; put it there as a plain .tar.")
    return look_up(path)


class _File:
    """A descriptor that closes when the last user lets go, so that a thread may read what another has evicted."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class TarShards(Samples):
    """Samples of shards, in the order of the shards and of the samples in each.  A caption is the .txt member,
    else "captions" or "caption" in the .json; ``captions`` names other .json fields.  A sample without image or text
    keeps its position and is a bad sample when it is read."""

    def __init__(self, paths: list[str], image: str = "", captions: tuple[str, ...] = ()) -> None:
        self.name = paths[0]
        self._fields, self._image = captions, image
        names = [name_on_disk(path) for path in paths]
        self._labels = ["/".join(Path(name).absolute().parts[-2:]) for name in names]
        cache_folder()  # says here, once, if it is not writable
        if any(map(is_url, paths)):
            block_cache()  # says here if its bound is no number
        with ThreadPoolExecutor(max_workers=8) as pool:
            self._shards = list(pool.map(_looked_up, paths))
            parts = list(pool.map(cached_index, self._shards, [image] * len(paths)))
        self._starts = np.cumsum([0, *map(len, parts)])
        self.count = int(self._starts[-1])
        self._index: Index | None = joined_index(self._shards, image, parts)
        described: list[object] = []
        for path, name, shard, rows in zip(paths, names, self._shards, parts, strict=True):
            described += [os.path.basename(name), size_of(path if isinstance(shard, str) else shard), len(rows)]
        self.fingerprint = fingerprint_of("tar", image, *captions, *described)
        self.remote_bytes = sum(shard.size for shard in self._shards if isinstance(shard, RemoteFile))
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
            parts = [cached_index(shard, self._image) for shard in self._shards]
            index = joined_index(self._shards, self._image, parts)
            if len(index) != len(self):
                raise RuntimeError(f"The shards of {self.name} changed during the run; start it again.")
            self._index = index
        return self._index

    def _bytes(self, label: str, number: int, offset: int, size: int) -> bytes:
        shard = self._shards[number]
        try:
            file = self._file(shard) if isinstance(shard, str) else shard
            raw = file.read(offset, size)
            while len(raw) < size:  # network file systems may give less than asked for
                more = file.read(offset + len(raw), size - len(raw))
                if not more:
                    raise BadSample(label, "the shard is shorter than when it was indexed")
                raw += more
            return raw
        except StoreError:  # not this sample's fault, and another one would not fare better
            raise
        except OSError as error:
            raise BadSample(label, f"cannot read the shard: {error.strerror}") from None

    def _read(self, index: int) -> RawSample:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        label = f"{self._labels[shard]}:{index - int(self._starts[shard])}"
        row: list[int] = self._rows()[index].tolist()
        first = next(column for column in (IMAGE, TXT, JSON) if row[column] >= 0)
        offset, size = row[first : first + 2]

        # one read for the image, the header before it, where the key stands, and a caption close behind it
        wanted = size if first == IMAGE and size <= MAX_IMAGE_BYTES else 0
        caption = self._caption_column(row)
        start, end = row[caption], row[caption] + row[caption + 1]
        is_near = wanted > 0 and offset + size <= start <= end <= offset + size + _NEAR
        raw = self._bytes(label, shard, offset - BLOCK, BLOCK + (end - offset if is_near else wanted))
        with suppress(tarfile.TarError):  # the shard was written over
            key = split_key(TarHeader.frombuf(raw[:BLOCK], "utf-8", "surrogateescape").name)
            label = f"{self._labels[shard]}:{key[0]}" if key else label
        if first != IMAGE:
            raise BadSample(label, f"no image member (.{self._image or 'jpg, .png, .webp, ...'})")
        check_image_size(label, size)
        text = raw[BLOCK + start - offset :] if is_near else None
        return RawSample(label, raw[BLOCK : BLOCK + size], self._captions(label, shard, row, text))

    def remote_pieces(self, indices_P: NDArray[np.int64]) -> list[RemoteBlock]:
        rows_P6 = self._rows()[indices_P]
        shards_P = np.searchsorted(self._starts, indices_P, side="right") - 1
        found: list[RemoteBlock] = []
        for column in (IMAGE, TXT, JSON):
            there_P = rows_P6[:, column] >= 0
            offsets_P, sizes_P = rows_P6[there_P, column], rows_P6[there_P, column + 1]
            found += blocks_of(self._shards, shards_P[there_P], offsets_P - BLOCK, offsets_P + sizes_P)
        return list(dict.fromkeys(found))

    def _caption_column(self, row: list[int]) -> int:
        return TXT if row[TXT] >= 0 and not self._fields else JSON

    def _captions(self, label: str, shard: int, row: list[int], raw: bytes | None) -> tuple[str, ...]:
        """``raw``: the member's bytes, if they are read."""
        column = self._caption_column(row)
        if row[column] < 0:
            wanted = f".json with {', '.join(self._fields)}" if self._fields else ".txt or .json"
            raise BadSample(label, f"no caption member ({wanted})")
        offset, size = row[column], row[column + 1]
        if size > MAX_TEXT_BYTES:
            raise BadSample(label, f"the caption member has {size:,} bytes, more than the limit of {MAX_TEXT_BYTES:,}")
        text = utf8(label, self._bytes(label, shard, offset, size) if raw is None else raw)
        if column == TXT:
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
