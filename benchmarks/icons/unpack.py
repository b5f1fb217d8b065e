"""Turns the pack of the icon corpus into tar shards that ``fullbatch train --data`` reads.

    python benchmarks/icons/unpack.py OUT/icons.tar DATA
    fullbatch train --data 'DATA/train-{00000..00019}.tar' ...

Needs numpy and Pillow.  DATA/train-00000.tar ... train-00019.tar hold the training pairs in an order drawn by hash, so
that the first two shards are a fair tenth of them; with --by-set they lie set by set, as files do that were gathered
from many places, and it takes an order that mixes them to be fair.  DATA/test-00000.tar holds the test pairs.  A sample
is KEY.png and KEY.json with "caption" (the name alone), "captions" (training: also with its category or keywords),
"set", "name", "license", "style" and "category".
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from icon_pack import Entry, read_pack, untiled
from PIL import Image

TRAIN_SHARDS = 20


def pngs(content: bytes, is_grey: bool, count: int) -> list[bytes]:
    """The icons of a sheet, packed lightly: decoding them is what counts."""
    sheet = Image.open(io.BytesIO(content)).convert("L" if is_grey else "RGB")
    encoded = []
    for icon in untiled(sheet, count):
        buffer = io.BytesIO()
        Image.fromarray(icon).save(buffer, "png", compress_level=1)
        encoded.append(buffer.getvalue())
    return encoded


def as_json(entry: Entry, license: str, every_caption: bool) -> bytes:
    captions = list(entry.captions) if every_caption and entry.split == "train" else [entry.captions[0]]
    about = {
        "caption": entry.captions[0],
        "captions": captions,
        **{"set": entry.set, "name": entry.name, "license": license},
        **{"style": entry.style, "category": entry.category},
    }
    return json.dumps(about, separators=(",", ":")).encode()


def write_shard(path: Path, samples: list[tuple[str, bytes, bytes]]) -> None:
    unfinished = path.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, png, record in samples:
            for ending, content in (("png", png), ("json", record)):
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    os.replace(unfinished, path)


def draw_order(entry: Entry) -> str:
    return hashlib.sha256(f"order|{entry.set}|{entry.name}".encode()).hexdigest()


def unpack(pack_path: Path, out: Path, captions: str = "all", workers: int = 0, by_set: bool = False) -> dict[str, int]:
    """Writes the shards and says how many samples each split has."""
    pack = read_pack(pack_path)
    workers = workers or os.cpu_count() or 1
    out.mkdir(parents=True, exist_ok=True)
    contents, greys, entries = zip(*pack.parts(), strict=True)
    with ProcessPoolExecutor(workers) as pool:
        images = [png for sheet in pool.map(pngs, contents, greys, map(len, entries)) for png in sheet]
        samples = sorted(zip(pack.entries, images, strict=True), key=lambda sample: draw_order(sample[0]))
        if by_set:
            samples.sort(key=lambda sample: (sample[0].set, sample[0].name))
        shards: dict[Path, list[tuple[str, bytes, bytes]]] = {}
        counts = {split: sum(entry.split == split for entry in pack.entries) for split in ("train", "test")}
        seen = dict.fromkeys(counts, 0)
        for entry, png in samples:
            number = seen[entry.split]
            seen[entry.split] += 1
            shard = number * TRAIN_SHARDS // counts["train"] if entry.split == "train" else 0
            record = as_json(entry, pack.sets[entry.set]["license"], captions == "all")
            shards.setdefault(out / f"{entry.split}-{shard:05d}.tar", []).append((f"{number:06d}", png, record))
        list(pool.map(write_shard, shards.keys(), shards.values()))
    (out / "ATTRIBUTION.md").write_text(pack.attribution, encoding="utf-8")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tar shards of the icon corpus.")
    parser.add_argument("pack", type=Path, help="icons.tar of build.py")
    parser.add_argument("out", type=Path, help="folder for the shards")
    parser.add_argument(
        "--captions", choices=("all", "name"), default="all", help="for training: all, or the name alone"
    )
    parser.add_argument("--by-set", action="store_true", help="icons of a set lie together")
    parser.add_argument("--workers", type=int, default=0, help="0: one a core")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        counts = unpack(arguments.pack, arguments.out, arguments.captions, arguments.workers, arguments.by_set)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(
        f"{arguments.out}: {counts['train']:,} training and {counts['test']:,} test pairs, "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
