"""A sample on its way from a source to a batch, and what every source checks of one."""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fullbatch.config.messages import plain


class BadSample(Exception):
    """A sample that cannot be used; the loader skips it, counts it, logs it and takes another in its place."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = plain(name), plain(reason)
        super().__init__(f"{self.name}: {self.reason}")

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (self.name, self.reason)


@dataclass(frozen=True)
class RawSample:
    name: str  # where it lies, for logs: "cc3m/00003.tar:000030017"
    image: bytes  # the encoded image
    captions: tuple[str, ...]  # one or more, stripped, none empty


class Samples:
    """An ordered, finite list of samples with random access; it pickles and survives a fork, since workers hold copies.
    ``fingerprint`` changes when the samples or their order do.  ``_read`` gives a sample or raises BadSample."""

    name: str
    fingerprint: str
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> RawSample:
        if not 0 <= index < self.count:
            raise IndexError(f"{self.name} has samples 0 to {self.count - 1}, asked for {index}.")
        return self._read(index)

    def _read(self, index: int) -> RawSample:
        raise NotImplementedError


MAX_IMAGE_BYTES = 256 << 20
MAX_TEXT_BYTES = 16 << 20
MAX_CAPTION = 10_000  # characters; the rest is cut off, for no tokenizer reads that far
IMAGE_EXTENSIONS = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")


def checked_captions(name: str, texts: Iterable[object]) -> tuple[str, ...]:
    """The captions stripped and cut; None and empty ones left out, for tables have holes."""
    captions = []
    for text in texts:
        if text is None:
            continue
        if not isinstance(text, str):
            raise BadSample(name, f"the caption is not text but {type(text).__name__} ({str(text)[:40]!r})")
        if "\0" in text:
            raise BadSample(name, "the caption holds a NUL byte")
        caption = text.strip()[:MAX_CAPTION].rstrip()
        if not caption.isascii() and any("\ud800" <= letter <= "\udfff" for letter in caption):
            raise BadSample(name, "the caption is not valid UTF-8 (a lone surrogate)")
        if caption:
            captions.append(caption)
    if not captions:
        raise BadSample(name, "the caption is empty")
    return tuple(captions)


def caption_texts(value: object) -> Iterator[object]:
    """A caption field holds one caption or a list of them."""
    if isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def utf8(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(name, f"the caption is not valid UTF-8 ({error.reason} at byte {error.start})") from None


def check_image_size(name: str, size: int) -> None:
    if size == 0:
        raise BadSample(name, "the image has zero bytes")
    if size > MAX_IMAGE_BYTES:
        raise BadSample(name, f"the image has {size:,} bytes, more than the limit of {MAX_IMAGE_BYTES:,}")


def checked_image(name: str, raw: object) -> bytes:
    if not isinstance(raw, bytes):
        raise BadSample(name, f"the image is not bytes but {type(raw).__name__}")
    check_image_size(name, len(raw))
    return raw


def file_below(name: str, root: str, path: str) -> str:
    """The file of an image that a table names.  An absolute path is taken as it is; a relative one starts at ``root``
    and may not leave it, neither by ``..`` nor through a symbolic link."""
    if not path or "\0" in path:
        raise BadSample(name, f"{path!r} is not an image path")
    if os.path.isabs(path):
        return path
    real_root = os.path.realpath(root)
    real_path = os.path.realpath(os.path.join(real_root, path))
    if os.path.commonpath([real_root, real_path]) != real_root:
        raise BadSample(name, f"{path!r} leads out of the folder {root!r}; say where images start with ?root=FOLDER")
    return real_path


def read_file(name: str, path: str, limit: int) -> bytes:
    """A regular file of at most ``limit`` bytes; anything else (a pipe would hang) is a bad sample."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadSample(name, f"{path!r} is not a regular file")
            if status.st_size > limit:
                raise BadSample(name, f"{path!r} has {status.st_size:,} bytes, more than the limit of {limit:,}")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path that no file system can encode
        reason = getattr(error, "strerror", None) or str(error)
        raise BadSample(name, f"cannot read {path!r}: {reason}") from None


def read_image(name: str, root: str, path: str) -> bytes:
    return checked_image(name, read_file(name, file_below(name, root, path), MAX_IMAGE_BYTES))


def fingerprint_of(*parts: object) -> str:
    """Sixteen hex digits.  Never give it an absolute path: data sets get moved."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


class PackedStrings:
    """Millions of short strings in two buffers: no Python object each, so forked workers keep sharing the memory."""

    def __init__(self, strings: Iterable[bytes]) -> None:
        blob, ends = bytearray(), array("q", [0])
        for string in strings:
            blob += string
            ends.append(len(blob))
        self.blob, self.ends = bytes(blob), np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.blob[int(self.ends[index]) : int(self.ends[index + 1])]

    def __iter__(self) -> Iterator[bytes]:
        return (self.blob[start:end] for start, end in pairwise(self.ends.tolist()))
