"""What the benchmarks of input pipelines share: photo-like JPEGs with short captions in tar shards, and the machine's
name.  The photos' sizes are those of data sets whose sizes are published: of DataComp, at most 512 pixels a side and
35 kB a sample (12.8 million in 450 GB), or of COCO, mostly 640 x 480 pixels and 152 kB (118,287 in 18 GB)."""

# C: channels   H, W: pixels

from __future__ import annotations

import io
import os
import platform
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = (
    *("a", "photo", "of", "the", "small", "red", "old", "street", "market", "boat", "dog", "tree"),
    *("on", "with", "two", "people", "near", "river", "at", "night", "in", "winter"),
)


@dataclass(frozen=True)
class Photos:
    """The least and the most of each."""

    width: tuple[int, int]
    height: tuple[int, int]
    quality: tuple[int, int]


PHOTOS = {
    "datacomp": Photos(width=(256, 512), height=(256, 512), quality=(85, 95)),
    "coco": Photos(width=(640, 640), height=(480, 480), quality=(96, 99)),
}


def photo_like(photos: Photos, rng: np.random.Generator) -> bytes:
    """A JPEG whose power falls with frequency about as a photo's does."""
    width, height = (int(rng.integers(least, most + 1)) for least, most in (photos.width, photos.height))
    fall = rng.uniform(0.3, 0.7)
    total_HWC = np.zeros((height, width, 3), np.float32)
    cells = 2
    while cells < max(width, height):
        shape = (max(2, cells * height // max(width, height)), max(2, cells * width // max(width, height)))
        grey, colour = rng.normal(size=(*shape, 1)), rng.normal(size=(*shape, 3))
        grid = (cells**-fall * (grey + 0.3 * colour)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(grid[:, :, channel]).resize((width, height), Image.Resampling.BICUBIC)
            total_HWC[:, :, channel] += np.asarray(layer)
        cells *= 2
    pixels_HWC = (128.0 + 55.0 * total_HWC / total_HWC.std()).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "JPEG", quality=int(rng.integers(photos.quality[0], photos.quality[1] + 1)))
    return file.getvalue()


def write_shards(folder: Path, photos: Photos, samples: int, shards: int, distinct: int | None = None) -> float:
    """Tar files of equally many samples; returns the mean size of an image in kB.  ``distinct``: how many photos are
    drawn; further samples are the same ones again."""
    rng, words = np.random.default_rng(0), random.Random(0)
    drawn: list[bytes] = []
    size = 0
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(samples // shards):
                caption = " ".join(words.choices(WORDS, k=words.randint(4, 16)))
                if distinct is None or len(drawn) < distinct:
                    drawn.append(photo_like(photos, rng))
                image = drawn[(shard * (samples // shards) + number) % len(drawn)]
                size += len(image)
                for ending, raw in (("jpg", image), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{shard:05d}{number:04d}.{ending}")
                    member.size = len(raw)
                    tar.addfile(member, io.BytesIO(raw))
    return size / samples / 1e3


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
