"""Images a second read from a disk, from S3 and from a web server, beside webdataset's and streaming's own readers.

    python benchmarks/reading.py FOLDER --webdataset-python wds/bin/python --streaming-python mds/bin/python
    python benchmarks/reading.py FOLDER --places s3 --workers 2 --latency 0.2

The peers have environments of their own, for their pins conflict with ours; a peer that is not named is left out:

    python -m venv wds && wds/bin/pip install webdataset awscli torch pillow simplejpeg
    python -m venv mds && mds/bin/pip install mosaicml-streaming torch pillow simplejpeg

The script draws photo-like JPEGs into tar shards in FOLDER, once, writes the same samples with streaming's own writer
into shards of the same size, and starts a web server and moto's S3 server, each in a process of its own, that wait
before they answer (slow_server.py).  Every reader runs in a process of its own (reading_sides.py) with an empty cache
and reads two epochs: the first fills the cache, the second finds what it kept.  Rounds are interleaved: every reader
has its turn in each, and a ratio is the median over rounds of our images a second over the reader's in the same round,
so it does not depend on what else the machine is doing.  An epoch is timed from asking for it to its last batch, the
start of the workers included.  Opening comes before it.  There we walk over the shards, once for a data set, and keep
an index of them; what the cache has of the shards themselves is then removed, so that the first epoch reads from the
store in every case.  ``read``: how often each byte of the data set was sent, by the server's own count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photo_shards import PHOTOS, cpu_name, write_shards
from slow_server import COUNTS

HERE = Path(__file__).parent
DISTINCT = 2048  # photos that are drawn; further samples are the same ones again
PARALLEL = 8  # downloads, when a server is measured alone
RANGE = 4 << 20
EPOCHS = 2
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}

Result = dict[str, Any]  # as reading_sides.py prints it


@dataclass(frozen=True)
class Reader:
    name: str
    kind: str  # which of reading_sides.py
    python: str
    places: tuple[str, ...] = ("disk", "s3", "http")
    shuffle: str = "blocks"  # ours alone
    cached: bool = False  # webdataset alone: whole shards are kept on the disk


def readers(args: argparse.Namespace) -> list[Reader]:
    """The first is the one that others are compared with."""
    found = [
        Reader("fullbatch, `--shuffle blocks`", "ours", sys.executable),
        Reader("fullbatch, `--shuffle full`", "ours", sys.executable, ("disk",), shuffle="full"),
    ]
    if args.webdataset_python:
        peer = args.webdataset_python
        found.append(Reader("webdataset", "webdataset", peer))
        found.append(Reader("webdataset, `cache_dir`", "webdataset", peer, ("s3", "http"), cached=True))
    if args.streaming_python:  # it has no downloader for web servers
        found.append(Reader("streaming", "streaming", args.streaming_python, ("disk", "s3")))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the data and where it lies


def make_data(folder: Path, args: argparse.Namespace) -> None:
    """The shards in both formats, unless they are there."""
    tars, made = folder / "tar", folder / f"made-{args.photos}-{args.samples}-{args.shards}"
    if not made.exists():
        for old in ("tar", "mds"):
            shutil.rmtree(folder / old, ignore_errors=True)
        for old_mark in folder.glob("made-*"):
            old_mark.unlink()
        tars.mkdir(parents=True)
        write_shards(tars, PHOTOS[args.photos], args.samples, args.shards, DISTINCT)
        made.touch()
    paths = sorted(map(str, tars.iterdir()))
    if args.streaming_python and not (folder / "mds" / "index.json").exists():
        shutil.rmtree(folder / "mds", ignore_errors=True)
        task = {"reader": "write_mds", "tars": paths, "folder": str(folder / "mds"), "bytes": os.path.getsize(paths[0])}
        child(args.streaming_python, task, {})


@contextmanager
def serving(kind: str, folder: Path, latency: float) -> Iterator[str]:
    command = [sys.executable, str(HERE / "slow_server.py"), kind, str(folder), "--latency", str(latency)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def upload(folder: Path, address: str) -> None:
    import boto3

    options = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=address, **options)
    client.create_bucket(Bucket="bucket")
    for path in sorted(path for kind in ("tar", "mds") for path in (folder / kind).glob("*")):
        key = f"{path.parent.name}/{path.name}"
        client.put_object(Bucket="bucket", Key=key, Body=path.read_bytes(), ACL="public-read")


def speed_alone(address: str, folder: Path) -> str:
    """Of a server, while nothing else is done: shards whole, and by ranges of 4 MiB."""

    def fetched(url: str, span: str = "") -> int:
        request = urllib.request.Request(url, headers={"Range": span} if span else {})
        with urllib.request.urlopen(request) as answer:
            return len(answer.read())

    shards = [(f"{address}/tar/{path.name}", path.stat().st_size) for path in sorted((folder / "tar").iterdir())]
    firsts = [(url, first) for url, size in shards for first in range(0, size, RANGE)]
    spans = [(url, f"bytes={first}-{first + RANGE - 1}") for url, first in firsts]
    speeds = []
    with ThreadPoolExecutor(PARALLEL) as pool:
        for asked in ([(url, "") for url, _ in shards], spans):
            start = time.perf_counter()
            total = sum(pool.map(lambda one: fetched(*one), asked))
            speeds.append(total / (time.perf_counter() - start) / 1e6)
    return f"{speeds[0]:.0f} MB/s by shards, {speeds[1]:.0f} by ranges of 4 MiB, {PARALLEL} at a time"


# ---------------------------------------------------------------------------------------------------------------------
# one reader, two epochs


def child(python: str, task: dict[str, Any], environment: dict[str, str]) -> str:
    path = f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}"  # webdataset calls that one's aws
    everyone = {"PYTHONPATH": str(HERE.parent), "OMP_WAIT_POLICY": "PASSIVE", "PATH": path}
    command = [python, str(HERE / "reading_sides.py"), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **everyone, **environment})
    if done.returncode:
        raise SystemExit(f"{task['reader']} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def read(reader: Reader, place: str, address: str, workers: int, args: argparse.Namespace) -> Result:
    folder: Path = args.folder.resolve()
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    base = {"disk": str(folder), "s3": "s3://bucket", "http": address}[place]
    names = [f"{number:05d}.tar" for number in range(args.shards)]
    pipe = ("pipe:aws s3 cp {} -" if place == "s3" else "{}").format
    task = {
        "reader": reader.kind,
        "source": f"{base}/mds" if reader.kind == "streaming" else f"{base}/tar/{{00000..{args.shards - 1:05d}}}.tar",
        "shards": [pipe(f"{base}/tar/{name}") for name in names],
        "remote": place != "disk",
        "cache": str(cache),
        "cached": reader.cached,
        "counts": address + COUNTS if address else None,
        "forget": str(folder / ("mds" if reader.kind == "streaming" else "tar")) if place == "disk" else None,
        "shuffle": reader.shuffle,
        **{name: getattr(args, name) for name in ("block", "window", "batch", "size")},
        "workers": workers,
        "epochs": EPOCHS,
    }
    environment = {"FULLBATCH_CACHE": str(cache)}
    if place == "s3":  # the last is streaming's own
        environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": address, "S3_ENDPOINT_URL": address}
    result: Result = json.loads(child(reader.python, task, environment).splitlines()[-1])
    shutil.rmtree(cache)
    return result


# ---------------------------------------------------------------------------------------------------------------------


HEAD = """\
| reader | opening, s | first epoch, images/s | ours over it | second epoch | ours over it | first batch, s \
| read: opening, first, second epoch | CPU ms an image |
|---|---|---|---|---|---|---|---|---|"""


def speed(result: Result, epoch: int) -> float:
    return float(result["epochs"][epoch]["images"] / result["epochs"][epoch]["seconds"])


def table_row(reader: Reader, results: list[Result], compared: list[Result], data_bytes: int) -> str:
    def median(of: Callable[[Result], float]) -> float:
        return statistics.median(map(of, results))

    cells = [f"{median(lambda result: result['opening']['seconds']):.1f}"]
    for epoch in range(EPOCHS):
        ratios = [speed(own, epoch) / speed(other, epoch) for own, other in zip(compared, results, strict=True)]
        over_rounds = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells.append(f"{statistics.median(speed(result, epoch) for result in results):.0f}")
        cells.append("" if results is compared else over_rounds)
    cells.append(f"{median(lambda result: result['epochs'][0]['first']):.1f}")
    phases = [[phase["bytes"] / data_bytes for phase in (result["opening"], *result["epochs"])] for result in results]
    read_times = [statistics.median(times) for times in zip(*phases, strict=True)]
    cells.append(", ".join(f"{times:.2f}" for times in read_times) if any(read_times) else "")
    cells.append(f"{median(lambda result: 1e3 * result['cpu']):.2f}")
    return f"| {reader.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the shards and the caches; three times the data set")
    parser.add_argument("--webdataset-python", default=None, help="of an environment with webdataset and awscli")
    parser.add_argument("--streaming-python", default=None, help="of an environment with mosaicml-streaming")
    parser.add_argument("--places", nargs="+", choices=["disk", "s3", "http"], default=["disk", "s3", "http"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that a server waits with each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", choices=PHOTOS, default="datacomp")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--block", type=int, default=512, help="samples of one of our blocks")
    parser.add_argument("--window", type=int, default=2048, help="samples that are mixed, by every reader")
    args = parser.parse_args()

    args.folder.mkdir(parents=True, exist_ok=True)
    make_data(args.folder, args)
    data_bytes = sum(path.stat().st_size for path in (args.folder / "tar").iterdir())
    with serving("http", args.folder, args.latency) as web, serving("s3", args.folder, args.latency) as s3:
        addresses = {"disk": "", "s3": s3, "http": web}
        if "s3" in args.places:
            upload(args.folder, s3)
        print(f"{datetime.date.today()}, {cpu_name()}, Python {platform.python_version()}")
        print(f"{args.samples} JPEGs ({args.photos}) in {args.shards} shards, {data_bytes / 1e6:.0f} MB")
        print(f"batch {args.batch}, {args.size} pixels, {1e3 * args.latency:.0f} ms a request, {args.rounds} rounds")
        for place, address in addresses.items():
            if address and place in args.places:
                bucket = f"{address}/bucket" if place == "s3" else address
                print(f"the {place} server alone: {speed_alone(bucket, args.folder)}")
        for workers in args.workers:
            results: dict[tuple[str, Reader], list[Result]] = defaultdict(list)
            turns = [(place, reader) for place in args.places for reader in readers(args) if place in reader.places]
            for _ in range(args.rounds):
                for place, reader in turns:
                    result = read(reader, place, addresses[place], workers, args)
                    results[place, reader].append(result)
                    with (args.folder / "results.jsonl").open("a") as file:
                        row = {"place": place, "reader": reader.name, "workers": workers, **result}
                        file.write(json.dumps(row) + "\n")
            for place in args.places:
                print(f"\n{place}, {workers} worker{'s' * (workers > 1)}\n\n{HEAD}", flush=True)
                rows = {reader: results[at, reader] for at, reader in turns if at == place}
                compared = next(iter(rows.values()))
                for reader, of_rounds in rows.items():
                    print(table_row(reader, of_rounds, compared, data_bytes), flush=True)


if __name__ == "__main__":
    main()
