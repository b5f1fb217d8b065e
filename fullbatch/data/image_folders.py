"""Images in a folder, and images that a JSON file of captions names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from fullbatch.data.sample import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    BadSample,
    PackedStrings,
    RawSample,
    Samples,
    caption_texts,
    checked_captions,
    checked_image,
    fingerprint_of,
    read_file,
    read_image,
    utf8,
)

_TRIED = 16  # images that are looked for, to find the folder that all start from


class ImageFolder(Samples):
    """All images below a folder, sorted by path.  The captions of ``cats/7.jpg`` are the lines of ``cats/7.txt``;
    without one, "a photo of a cats", from the folder.  ``bare``: always the folder's name alone, "cats".
    ``uncaptioned``: "image" for all, where captions do not matter."""

    def __init__(self, path: str, name: str = "", bare: bool = False, uncaptioned: bool = False) -> None:
        self.name, self._bare, self._uncaptioned = name or path, bare, uncaptioned
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


def images_below(root: str) -> Iterator[str]:
    """Relative paths, with links followed; a folder that links lead to twice is visited once."""
    endings = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
    visited = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in sorted(subfolders)}
        fresh = [name for name, place in real.items() if place not in visited and not name.startswith(".")]
        visited.update(real[name] for name in fresh)
        subfolders[:] = fresh
        for file in files:
            if file.lower().endswith(endings) and not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), root)


class CocoCaptions(Samples):
    """The captioned images of a JSON file: of COCO's, or of a list of {"image": path, "caption": text or texts}."""

    def __init__(self, path: str, root: str = "", name: str = "") -> None:
        self.name = name or path
        self._label = os.path.basename(path)
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
