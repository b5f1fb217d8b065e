"""Tar shards as img2dataset and webdataset write them (000000017.jpg, .txt, .json), with random access.

Not through webdataset's indexed reader ``wids``: webdataset 1.0 no longer ships it.
"""

from __future__ import annotations

import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fullbatch.data import tar_index
from fullbatch.data.sample import (
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
from fullbatch.data.tar_index import BLOCK, IMAGE, JSON, TXT

_OPEN_FILES = 64
_JSON_FIELDS = ("captions", "caption")


class _File:
    """A descriptor that closes when the last user lets go, so that a thread may read what another has evicted."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class TarShards(Samples):
    """Samples of local shards, in the order of the shards and of the samples in each.

    A caption is the .txt member, else "captions" or "caption" in the .json; ``captions`` names other .json fields.  A
    sample without image or text keeps its position and is a bad sample when it is read.
    """

    def __init__(self, paths: list[str], image: str = "", captions: tuple[str, ...] = (), name: str = "") -> None:
        self.name = name or paths[0]
        self._fields, self._image = captions, image
        self._labels = ["/".join(Path(path).absolute().parts[-2:]) for path in paths]
        tar_index.cache_folder()  # says here, once, if it is not writable
        with ThreadPoolExecutor(max_workers=8) as pool:
            self._paths = list(pool.map(tar_index.unpacked, paths))
            parts = list(pool.map(tar_index.cached_index, self._paths, [image] * len(paths)))
        self._starts = np.cumsum([0, *map(len, parts)])
        self.count = int(self._starts[-1])
        self._index: tar_index.Index | None = tar_index.joined_index(self._paths, image, parts)
        shards = zip(paths, parts, strict=True)
        described = [
            part for path, rows in shards for part in (os.path.basename(path), os.path.getsize(path), len(rows))
        ]
        self.fingerprint = fingerprint_of("tar", image, *captions, *described)
        self._file = lru_cache(_OPEN_FILES)(_File)

    def __getstate__(self) -> dict[str, Any]:
        """Without descriptors, and without an index that the reader's process finds in the cache."""
        mapped = isinstance(self._index, np.memmap)
        return self.__dict__ | {"_file": None} | ({"_index": None} if mapped else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = lru_cache(_OPEN_FILES)(_File)

    def _rows(self) -> tar_index.Index:
        if self._index is None:
            parts = [tar_index.cached_index(path, self._image) for path in self._paths]
            index = tar_index.joined_index(self._paths, self._image, parts)
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
            key = tar_index.split_key(tarfile.TarInfo.frombuf(raw[:BLOCK], "utf-8", "surrogateescape").name)
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
