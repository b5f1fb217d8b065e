"""CIFAR-10-C, CIFAR-100-C and Tiny-ImageNet-C as they are published: a file or a folder for each corruption."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fullbatch.config.data import Source
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.data.sources import open_source
from fullbatch.evaluation.corruptions import CORRUPTION_NAMES

SEVERITIES = 5  # a file of CIFAR-C holds all of them, one after the other; what is measured here is the first


@dataclass
class ArrayImages:
    """The images of one array file at severity 1; their captions are their numbers."""

    name: str
    fingerprint: str
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> RawSample:
        where = f"{self.name}:{index}"
        try:
            pixels_HWC = np.load(self.name, mmap_mode="r", allow_pickle=False)[index]
        except (OSError, ValueError) as error:
            raise BadSample(where, str(error)) from None
        encoded = io.BytesIO()
        Image.fromarray(np.asarray(pixels_HWC)).save(encoded, "PNG")
        return RawSample(where, encoded.getvalue(), (str(index),))


def published_corruptions(root: str) -> dict[str, Samples]:
    """What the folder holds of each corruption, image for image the same; nothing: it is no such folder."""
    folder = Path(root).expanduser()
    found: dict[str, Samples] = {}
    for name in CORRUPTION_NAMES:
        if (file := folder / f"{name}.npy").is_file():
            found[name] = _array_images(file)
        elif (images := folder / name / "1").is_dir():
            found[name] = open_source(Source(str(images), kind="folder", captions=("folder",)))
    sizes = {name: len(samples) for name, samples in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{root!r} has different numbers of images for different corruptions: {sizes}.")
    if len(found) == 1:
        raise ValueError(f"{root!r} has one corruption ({next(iter(found))}): any model would be right.")
    return found


def _array_images(path: Path) -> ArrayImages:
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no array of images: {error}") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or len(images) % SEVERITIES:
        raise ValueError(
            f"{str(path)!r} must hold {SEVERITIES} severities of images, bytes of the shape (N, height, width, 3), as "
            f"CIFAR-10-C has them, got {images.dtype} {images.shape}."
        )
    told = path.stat()
    return ArrayImages(str(path), f"{path}:{told.st_size}:{told.st_mtime_ns}", len(images) // SEVERITIES)
