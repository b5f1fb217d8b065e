"""A sample on its way from a source to a batch, what every source checks of one, and sources that are image files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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


class Remote(Protocol):
    """A piece of a file on another machine."""

    @property
    def name(self) -> str:
        """By which this machine's cache knows it."""

    @property
    def size(self) -> int:
        """The bytes it takes there; where that is not known before it is read, a usual number."""

    def keep(self) -> None:
        """See that it is in the cache when it is read, if there is room for it."""


class Samples:
    """An ordered, finite list of samples with random access; it pickles and survives a fork, since workers hold copies.
    ``fingerprint`` changes when the samples or their order do.  ``_read`` gives a sample or raises BadSample."""

    name: str
    fingerprint: str
    count: int
    remote_bytes: int = 0  # of all samples, as far as they lie on other machines

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> RawSample:
        if not 0 <= index < self.count:
            raise IndexError(f"{self.name} has samples 0 to {self.count - 1}, asked for {index}.")
        return self._read(index)

    def _read(self, index: int) -> RawSample:
        raise NotImplementedError

    def remote_pieces(self, indices_P: NDArray[np.int64]) -> Sequence[Remote]:
        """What these samples are read from, as far as it lies on other machines."""
        return ()


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


# -- images in a folder, and images that a JSON file of captions names -------------------------------------------------


_TRIED = 16  # images that are looked for, to find the folder that all start from


class ImageFolder(Samples):
    """All images below a folder, sorted by path.  The captions of ``cats/7.jpg`` are the lines of ``cats/7.txt``;
    without one, "a photo of a cats", from the folder.  ``bare``: always the folder's name alone, "cats".
    ``uncaptioned``: "image" for all, where captions do not matter."""

    def __init__(self, path: str, bare: bool = False, uncaptioned: bool = False) -> None:
        self.name, self._bare, self._uncaptioned = path, bare, uncaptioned
        self._root = os.path.abspath(path)
        self._images = PackedStrings(sorted(os.fsencode(image) for image in images_below(self._root)))
        self.count = len(self._images)
        if not self.count:
            endings = ", ".join(f".{extension}" for extension in IMAGE_EXTENSIONS)
            raise ValueError(f"The folder {path!r} holds no images ({endings}); name one that does.")
        self.fingerprint = fingerprint_of("folder", *self._images)

    @property
    def kinds(self) -> set[str]:
        """What the names of the folders say that the images lie in."""
        return {_kind(os.fsdecode(image)) for image in self._images}

    def _read(self, index: int) -> RawSample:
        relative = os.fsdecode(self._images[index])
        label = f"{os.path.basename(self._root)}/{relative}"
        path = os.path.join(self._root, relative)
        # no check that the path stays below the root: it was found there, and folders of links are common
        image = checked_image(label, read_file(label, path, MAX_IMAGE_BYTES))
        if self._uncaptioned:
            return RawSample(label, image, ("image",))
        sidecar = os.path.splitext(path)[0] + ".txt"
        if os.path.exists(sidecar) and not self._bare:
            captions = utf8(label, read_file(label, sidecar, MAX_TEXT_BYTES)).split("\n")
        elif os.path.dirname(relative):
            kind = _kind(relative)
            captions = [kind if self._bare else f"a photo of a {kind}"]
        else:
            raise BadSample(
                label, f"no caption: neither {os.path.basename(sidecar)!r} nor a folder named by what it shows"
            )
        return RawSample(label, image, checked_captions(label, captions))


def _kind(relative: str) -> str:
    return os.path.basename(os.path.dirname(relative)).replace("_", " ").replace("-", " ")


def images_below(root: str, unread: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Relative paths, with links followed; a folder that links lead to twice is visited once.  ``unread`` is told of
    folders that cannot be read."""
    endings = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
    visited = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, onerror=unread, followlinks=True):
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in sorted(subfolders)}
        fresh = [name for name, place in real.items() if place not in visited and not name.startswith(".")]
        visited.update(real[name] for name in fresh)
        subfolders[:] = fresh
        for file in files:
            if file.lower().endswith(endings) and not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), root)


class CocoCaptions(Samples):
    """The captioned images of a JSON file: of COCO's, or of a list of {"image": path, "caption": text or texts}."""

    def __init__(self, path: str, root: str = "") -> None:
        self.name, self._label = path, os.path.basename(path)
        captions_of = _load_captions(path)
        self._root = root or _root_of(path, captions_of)
        rows = [json.dumps([image, captions]).encode() for image, captions in captions_of]
        if not rows:
            raise ValueError(
                f"{path!r} has no image with a caption: no annotation's image_id is the id of an image, or no entry of "
                'its list has "image" and "caption".'
            )
        self._rows, self.count = PackedStrings(rows), len(rows)
        self.fingerprint = fingerprint_of("coco", *rows)

    def _read(self, index: int) -> RawSample:
        file_name, captions = json.loads(self._rows[index])
        label = f"{self._label}:{file_name}"
        if not isinstance(file_name, str):
            raise BadSample(label, "the image has no file_name")
        checked = checked_captions(label, captions)
        return RawSample(label, read_image(label, self._root, file_name), checked)


PathAndCaptions = tuple[object, list[object]]  # an image's path, and what is said of it


def _load_captions(path: str) -> list[PathAndCaptions]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path!r} is not a readable JSON file: {error}.") from error
    captions_of: dict[Any, list[object]] = {}
    if isinstance(record, list):  # entries of the same image are one
        for entry in record:
            if isinstance(entry, dict) and isinstance(entry.get("image"), str) and "caption" in entry:
                captions_of.setdefault(entry["image"], []).extend(caption_texts(entry["caption"]))
        return list(captions_of.items())
    lists = [record.get(key) if isinstance(record, dict) else None for key in ("images", "annotations")]
    ids = ("id", "image_id")
    images, annotations = (
        [e for e in entries if isinstance(e, dict) and all(isinstance(e.get(k), str | int | None) for k in ids)]
        if isinstance(entries, list)
        else None
        for entries in lists
    )
    if images is None or annotations is None:
        raise ValueError(
            f"{path!r} is not a COCO captions file: it needs the lists 'images' (id, file_name) and 'annotations' "
            '(image_id, caption); or it is one list of {"image": path, "caption": text}.'
        )
    for annotation in annotations:
        captions_of.setdefault(annotation.get("image_id"), []).append(annotation.get("caption"))
    return [
        (image.get("file_name"), captions_of[image.get("id")]) for image in images if image.get("id") in captions_of
    ]


def _root_of(path: str, rows: list[PathAndCaptions]) -> str:
    """The folder that image paths start from: the first of a few places that holds one of the first images.  It tries
    the file's folder, the one above, and folders there that the file's name mentions, as COCO has val2017/ beside
    annotations/."""
    own = os.path.dirname(os.path.abspath(path))
    words = [word for word in os.path.splitext(os.path.basename(path))[0].split("_") if word.strip(".")]
    above = (own, os.path.dirname(own))
    places = [*above, *(os.path.join(folder, word) for folder in above for word in words)]
    relative = (image for image, _ in rows if isinstance(image, str) and not os.path.isabs(image) and "\0" not in image)
    few = list(islice(relative, _TRIED))
    there = (place for place in places for image in few if os.path.isfile(os.path.join(place, image)))
    return next(there, own)
