"""One reader of reading.py, in a process of its own and, for a peer, with a Python of its own: opens a data set, reads
epochs of it, and prints as JSON how long that took.  Each is read as its documentation shows it.  Pictures are decoded
and batches stacked by the same functions for all, so that it is readers that are compared.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fullbatch.data.images import TrainTransform

TOKENS = 77


def tokenize(captions: list[str]) -> Tensor:
    """A stand-in that costs nothing: captions' bytes."""
    rows = [list(caption.encode()[:TOKENS].ljust(TOKENS, b"\0")) for caption in captions]
    return torch.tensor(rows)


class Pair:
    """A sample of a batch, of the bytes that a peer gives."""

    def __init__(self, size: int) -> None:
        self.transform = TrainTransform(size)

    def __call__(self, image: bytes, caption: bytes) -> tuple[Tensor, Tensor]:
        return self.transform(image, "", random.Random()), tokenize([caption.decode()])[0]


# ---------------------------------------------------------------------------------------------------------------------
# each opens a data set and gives its epochs; an epoch gives the number of images in each batch


Epochs = Iterator[Iterable[int]]


def ours(task: dict[str, Any]) -> Epochs:
    from fullbatch.config.data import Data
    from fullbatch.data.loader import TrainingBatches, open_pool

    blocks = {"block_samples": task["block"], "window_blocks": task["window"] // task["block"]}
    pool, order = open_pool(Data((task["source"],), shuffle=task["shuffle"], **blocks))
    batches = TrainingBatches(pool, order, task["batch"], TrainTransform(task["size"]), tokenize)
    steps = batches.steps_per_epoch
    ranges = [range(epoch * steps, (epoch + 1) * steps) for epoch in range(task["epochs"])]
    stream = batches.stream(ranges, task["workers"], torch.device("cpu"), ranges[-1].stop)
    for _ in ranges:
        yield (len(next(stream).images) for _ in range(steps))
    stream.close()


def webdataset(task: dict[str, Any]) -> Epochs:
    import webdataset as wds

    cache = {"cache_dir": task["cache"]} if task["cached"] else {}
    pair = Pair(task["size"])
    dataset = (
        wds.WebDataset(task["shards"], shardshuffle=len(task["shards"]), **cache)
        .shuffle(task["window"])
        .to_tuple("jpg", "txt")
        .map(lambda sample: pair(*sample))
        .batched(task["batch"], collation_fn=default_collate)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=task["workers"], persistent_workers=True)
    for _ in range(task["epochs"]):
        yield (len(batch[0]) for batch in loader)


def streaming(task: dict[str, Any]) -> Epochs:
    from streaming import StreamingDataset

    pair = Pair(task["size"])

    class Photos(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            sample = super().__getitem__(index)
            return pair(sample["jpg"], sample["txt"])

    place = {"remote": task["source"], "local": task["cache"]} if task["remote"] else {"local": task["source"]}
    dataset = Photos(**place, shuffle=True, shuffle_block_size=task["window"], batch_size=task["batch"])
    options = {"batch_size": task["batch"], "num_workers": task["workers"], "persistent_workers": True}
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    for _ in range(task["epochs"]):
        yield (len(batch[0]) for batch in loader)


READERS = {"ours": ours, "webdataset": webdataset, "streaming": streaming}


def write_mds(tars: list[str], folder: str, bytes_of_a_shard: int) -> None:
    """streaming's own format, by its own writer, of the same samples in the same order."""
    import tarfile

    from streaming import MDSWriter

    with MDSWriter(out=folder, columns={"jpg": "bytes", "txt": "bytes"}, size_limit=bytes_of_a_shard) as writer:
        for path in tars:
            with tarfile.open(path) as tar:
                members = [(member.name, tar.extractfile(member)) for member in tar.getmembers()]
                raw = {name: file.read() for name, file in members if file is not None}
            for name in raw:
                if name.endswith(".jpg"):
                    writer.write({"jpg": raw[name], "txt": raw[f"{Path(name).stem}.txt"]})


# ---------------------------------------------------------------------------------------------------------------------


def forget_pages(folder: str) -> None:
    """Takes files out of the kernel's memory, so that they are read from the disk."""
    for path in filter(Path.is_file, Path(folder).glob("*")):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def counts(server: str | None) -> dict[str, int]:
    """What the server sent since it was asked last."""
    if server is None:
        return {"requests": 0, "bytes": 0}
    with urllib.request.urlopen(server) as answer:
        found: dict[str, int] = json.load(answer)
    return found


def measured(task: dict[str, Any]) -> dict[str, Any]:
    import_module({"ours": "fullbatch.data.loader"}.get(task["reader"], task["reader"]))
    counts(task["counts"])
    start = time.perf_counter()
    epochs = READERS[task["reader"]](task)
    epoch = next(epochs)
    opening = {"seconds": time.perf_counter() - start, **counts(task["counts"])}
    if task["forget"]:
        forget_pages(task["forget"])
    shutil.rmtree(Path(task["cache"]) / "blocks", ignore_errors=True)  # ours, of shards; their indexes stay
    rows, before = [], _cpu_seconds()
    while epoch is not None:
        start, images, first = time.perf_counter(), 0, 0.0
        for size in epoch:
            first = first or time.perf_counter() - start
            images += size
        seconds = time.perf_counter() - start
        rows.append({"seconds": seconds, "first": first, "images": images, **counts(task["counts"])})
        epoch = next(epochs, None)  # type: ignore[arg-type]
    del epoch, epochs
    total = sum(row["images"] for row in rows)
    return {"opening": opening, "epochs": rows, "cpu": (_cpu_seconds() - before) / total}


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given["reader"] == "write_mds":
        write_mds(given["tars"], given["folder"], given["bytes"])
    else:
        print(json.dumps(measured(given)))
