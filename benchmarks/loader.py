"""Images a second of the input pipeline beside open_clip's own, on the same JPEG shards, in one run.

    python benchmarks/loader.py                                  # 224 pixels, batch 128, 1 and 2 workers
    python benchmarks/loader.py --workers 8 --samples 8192
    python benchmarks/loader.py --photos coco --samples 1024
    python benchmarks/loader.py --pillow                         # as without the extra jpeg

The script packs photo-like JPEGs with short captions into tar shards (photo_shards.py).  Decoding, which both
pipelines do, takes longest with COCO's sizes.
Theirs is ``open_clip_train.data.get_wds_dataset`` with open_clip's training transform and tokenizer: float batches,
normalised.  Ours is measured twice: as it trains, uint8 batches that the towers normalise on the device; and with that
work done in the workers, so that the batches are of their kind.  Rounds are interleaved and the ratio is the median
over rounds of our images a second over theirs in the same round, so it does not depend on what else the machine is
doing.  A round is an epoch; the first batch of each worker is not counted, for it holds the start of the processes and
the filling of shuffle buffers.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import open_clip
import open_clip_train.data as their_data
import torch
from photo_shards import PHOTOS, cpu_name, write_shards
from torch.utils.data import Dataset

from fullbatch.config.data import Data
from fullbatch.data import images
from fullbatch.data.images import TrainTransform
from fullbatch.data.loader import LoadedBatch, TrainingBatches, load, open_pool
from fullbatch.models.tokenizers import clip_tokenizer

SHARDS = 8
Epoch = Callable[[], Iterable[object]]


# ---------------------------------------------------------------------------------------------------------------------
# the two pipelines; each gives a function that starts the next epoch


@dataclass(frozen=True)
class Normalised(Dataset[LoadedBatch]):
    """Our batches as open_clip's loader gives them: float, normalised in the worker."""

    batches: TrainingBatches

    def __getitem__(self, step: int) -> LoadedBatch:
        batch = self.batches[step]
        mean, std = (
            255.0 * torch.tensor(values).view(3, 1, 1)
            for values in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        )
        return replace(batch, images=(batch.images.float().sub_(mean)).div_(std))


def ours(pattern: str, size: int, batch: int, workers: int, as_floats: bool) -> Epoch:
    pool, order = open_pool(Data((pattern,)))
    batches = TrainingBatches(pool, order, batch, TrainTransform(size), clip_tokenizer(77))
    source = Normalised(batches) if as_floats else batches
    epochs = iter(range(10**6))

    def epoch() -> Iterable[object]:
        first = next(epochs) * batches.steps_per_epoch
        return load(source, range(first, first + batches.steps_per_epoch), workers, torch.device("cpu"))

    return epoch


def theirs(pattern: str, samples: int, size: int, batch: int, workers: int) -> Epoch:
    args = SimpleNamespace(
        train_data=pattern,
        train_num_samples=samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=batch,
        workers=workers,
        world_size=1,
    )
    transform = open_clip.image_transform(size, is_train=True)
    _bridge_webdataset()
    data = their_data.get_wds_dataset(args, transform, is_train=True, tokenizer=open_clip.get_tokenizer("ViT-B-32"))
    epochs = iter(range(10**6))

    def epoch() -> Iterable[object]:
        data.set_epoch(next(epochs))
        loader: Iterable[object] = data.dataloader
        return loader

    return epoch


def _bridge_webdataset() -> None:
    """webdataset since 0.2.90 marks the end of a shard by an empty sample, at which open_clip's grouping fails."""
    expand = their_data.tar_file_expander
    if "eof_value" in inspect.signature(expand).parameters:
        their_data.tar_file_expander = partial(expand, eof_value=None)


def images_per_second(epoch: Epoch, batch: int, workers: int) -> float:
    arrivals = []
    for _ in epoch():
        arrivals.append(time.perf_counter())
    counted = arrivals[workers - 1 :]
    return (len(counted) - 1) * batch / (counted[-1] - counted[0])


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", choices=PHOTOS, default="datacomp")
    parser.add_argument("--pillow", action="store_true", help="decode by Pillow, as without the extra jpeg")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=128, help="fewer where an epoch would have under 8 batches")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if min(args.workers) < 1 or max(args.workers) > SHARDS:
        parser.error(f"--workers: open_clip's loader wants 1 to {SHARDS}, a shard each at least")
    if args.pillow:
        patch.object(images, "simplejpeg", None).start()
    samples = max(args.samples // SHARDS, 2 * max(args.workers)) * SHARDS
    batch = min(args.batch, samples // 8)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FULLBATCH_CACHE"] = str(Path(folder) / "cache")
        kilobytes = write_shards(Path(folder), PHOTOS[args.photos], samples, SHARDS)
        pattern = f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "open_clip_torch", "webdataset", "pillow"))
        print(f"{datetime.date.today()}, {cpu_name()}, Python {platform.python_version()}, {versions}")
        decoder = "Pillow" if args.pillow or find_spec("simplejpeg") is None else "simplejpeg"
        photos = f"{samples} JPEGs of {kilobytes:.0f} kB ({args.photos}), decoded by {decoder}"
        print(f"{photos}, {args.size} pixels, batch {batch}, {args.rounds} rounds\n")
        print("| workers | batches | images/s | open_clip's images/s | ratio | over rounds |")
        print("|---|---|---|---|---|---|")
        for workers in args.workers:
            peer = theirs(pattern, samples, args.size, batch, workers)
            sides: dict[str, Any] = {
                "uint8, as it trains": ours(pattern, args.size, batch, workers, as_floats=False),
                "float, as open_clip's": ours(pattern, args.size, batch, workers, as_floats=True),
            }
            speeds: dict[str, list[float]] = {name: [] for name in ("peer", *sides)}
            for _ in range(args.rounds):
                for name, epoch in (("peer", peer), *sides.items()):
                    speeds[name].append(images_per_second(epoch, batch, workers))
            for name in sides:
                ratios = [a / b for a, b in zip(speeds[name], speeds["peer"], strict=True)]
                ratio = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
                own, other = (statistics.median(speeds[side]) for side in (name, "peer"))
                print(f"| {workers} | {name} | {own:.0f} | {other:.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
