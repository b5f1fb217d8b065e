"""Small images, shards and tables for tests."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullbatch.data.sample import BadSample, RawSample, Samples


def picture(size: tuple[int, int] = (32, 24), seed: int = 0) -> Image.Image:
    """A smooth random RGB image, (width, height), that JPEG hardly changes."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(size: tuple[int, int] = (32, 24), seed: int = 0, quality: int = 90) -> bytes:
    return encoded(picture(size, seed), "JPEG", quality=quality)


def png(size: tuple[int, int] = (32, 24), seed: int = 0) -> bytes:
    return encoded(picture(size, seed))


def captioned(count: int, size: tuple[int, int] = (32, 24), first: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """``count`` samples as img2dataset writes them, for ``write_shard``: the caption of number 7 is "picture 7"."""
    return [
        (
            f"{number:09d}",
            {
                "jpg": jpeg(size, number),
                "txt": f"picture {number}".encode(),
                "json": json.dumps({"caption": f"picture {number}", "key": f"{number:09d}"}).encode(),
            },
        )
        for number in range(first, first + count)
    ]


def write_members(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> Path:
    """A tar file of (name, bytes), packed if its name ends in .gz or .xz."""
    packing: Any = {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}.get(path.suffix, "w")
    with tarfile.open(path, packing, format=tar_format) as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def write_shard(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> Path:
    """A shard of (key, {extension: bytes}); see ``captioned``."""
    return write_members(
        path, [(f"{key}.{extension}", raw) for key, parts in samples for extension, raw in parts.items()]
    )


def write_images(folder: Path, count: int, size: tuple[int, int] = (32, 24)) -> list[str]:
    """``images/0.jpg`` ... below ``folder``; the relative paths."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    names = [f"images/{number}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(jpeg(size, number))
    return names


def write_csv(
    path: Path,
    rows: Iterable[Sequence[str]],
    columns: Sequence[str] = ("filepath", "title"),
    separator: str = ",",
) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_coco(path: Path, captions: Mapping[str, Sequence[str]]) -> Path:
    """A COCO captions file: image file name to captions."""
    images = [{"id": 100 + number, "file_name": name} for number, name in enumerate(captions)]
    annotations = [
        {"image_id": image["id"], "caption": caption}
        for image in images
        for caption in captions[str(image["file_name"])]
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def read_all(samples: Samples) -> tuple[dict[int, RawSample], dict[int, BadSample]]:
    """Every sample: the good ones and the bad ones, by position."""
    good: dict[int, RawSample] = {}
    bad: dict[int, BadSample] = {}
    for index in range(len(samples)):
        try:
            good[index] = samples.read(index)
        except BadSample as problem:
            bad[index] = problem
    return good, bad
