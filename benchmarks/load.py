"""Large data sets: how long a run takes to open them, and what memory that costs.

    python benchmarks/load.py FOLDER                    # makes sets of a million pairs there (4 GB), opens them
    python benchmarks/load.py FOLDER --pairs 100_000

Each set is opened in a process of its own, first with an empty cache, so that its index is built, then again.  Memory
is the process's peak beyond what importing takes.  Read: 2,000 samples at random places, pictures not decoded.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from PIL import Image

READ = 2_000


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(file, "PNG")
    return file.getvalue()


def make_csv(folder: Path, pairs: int) -> str:
    """Rows that name a thousand pictures in turn."""
    folder.mkdir(parents=True)
    for number in range(1000):
        (folder / f"{number:03d}.png").write_bytes(picture())
    with (folder / "pairs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        rows.writerows([f"{row % 1000:03d}.png", f"a teal square, number {row}"] for row in range(pairs))
    return str(folder / "pairs.csv")


def make_folder(folder: Path, pairs: int) -> str:
    """Pictures with a text file beside each, a thousand pairs a subfolder."""
    bytes_of = picture()
    for first in range(0, pairs, 1000):
        part = folder / f"{first // 1000:04d}"
        part.mkdir(parents=True)
        for number in range(first, min(first + 1000, pairs)):
            (part / f"{number:07d}.png").write_bytes(bytes_of)
            (part / f"{number:07d}.txt").write_text(f"a teal square, number {number}")
    return str(folder)


def make_shards(folder: Path, pairs: int) -> str:
    """Two tar files with half of the pairs each."""
    folder.mkdir(parents=True)
    bytes_of = picture()
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard * pairs // 2, (shard + 1) * pairs // 2):
                text = f"a teal square, number {number}".encode()
                for ending, data in (("png", bytes_of), ("txt", text)):
                    member = tarfile.TarInfo(f"{number:07d}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return f"{folder}/{{00000..00001}}.tar"


KINDS = {"CSV": make_csv, "folder": make_folder, "tar shards": make_shards}


def opened(source: str) -> None:
    """In a process of its own: what opening and reading take, as JSON."""
    import random

    from fullbatch.config.data import Data
    from fullbatch.data.loader import open_pool

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    pool = open_pool(Data(data=(source,)))[0]
    opening = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    rng, start = random.Random(0), time.perf_counter()
    for _ in range(READ):
        pool.read(rng.randrange(len(pool)))
    found = {"pairs": len(pool), "opening": opening, "memory": peak * 1024, "reading": time.perf_counter() - start}
    print(json.dumps({**found, "after": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--opened", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opened is not None:
        opened(options.opened)
        return
    print("| set | pairs | cache | opened in, s | memory, MB | samples read a second | memory then, MB |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        place = options.folder / kind.replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        source = KINDS[kind](place, options.pairs)
        cache = options.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        for state in ("empty", "filled"):
            command = [sys.executable, __file__, str(options.folder), "--opened", source]
            environment = {**os.environ, "FULLBATCH_CACHE": str(cache)}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
            numbers = (found["opening"], found["memory"] / 1e6, READ / found["reading"], found["after"] / 1e6)
            said = " | ".join(f"{number:,.1f}" for number in numbers)
            print(f"| {kind} | {found['pairs']:,} | {state} | {said} |", flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
