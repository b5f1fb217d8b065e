"""Sample ids from the data of ``open_clip_train``: row numbers of a CSV, places in the shards of a webdataset.  Its own
loaders are used; only stages of the pipeline are replaced."""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from fullbatch.data.order import key_of
from fullbatch.data.tar_headers import walk_members
from fullbatch.integrations.ids import NumberedRows

PLACE = "__sample_id__"  # webdataset's decoder leaves alone what begins like this


class PairsOf:
    """open_clip's loader: its batches are pairs again, their ids went to the loss."""

    def __init__(self, batches: Any, expect_ids: Callable[[Tensor], None]) -> None:
        self.batches, self.expect_ids = batches, expect_ids
        self.num_batches, self.num_samples = batches.num_batches, batches.num_samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, texts, ids in self.batches:
            self.expect_ids(torch.as_tensor(ids))
            yield images, texts

    def __len__(self) -> int:
        return int(self.num_batches)


class NumberedShards:
    """A stage of open_clip's pipeline: samples of shards, each with its id.  A shard's n-th sample is ``first + n``."""

    def __init__(self, read: Callable[[Any], Iterator[dict[str, Any]]], sizes: dict[str, int]) -> None:
        self.read, self.sizes = read, sizes
        total, self.first = 0, {}
        for shard, size in sizes.items():
            self.first[shard], total = total, total + size

    def __call__(self, shards: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            for place, sample in enumerate(self.read(iter([shard]))):
                if place >= self.sizes[shard["url"]]:
                    raise ValueError(
                        f"{shard['url']} holds more samples than the {self.sizes[shard['url']]:,} that sizes.json "
                        "says; correct it, or remove it and have the shards counted."
                    )
                yield {**sample, PLACE: self.first[shard["url"]] + place}


@dataclass(frozen=True)
class WorkerSeed:
    """The same in every start of a run; torch's depends on when a worker was started."""

    seed: int
    rank: int

    def __call__(self) -> int:
        worker = get_worker_info()
        return key_of(self.seed, self.rank, 0 if worker is None else worker.id)


class SeededShuffle:
    """A stage of the pipeline in place of webdataset's shuffle, which takes its seed from the clock.  It also seeds the
    worker it runs in, for the transforms that follow."""

    def __init__(self, shuffle: Any, worker_seed: WorkerSeed, shared_epoch: Any) -> None:
        self.shuffle, self.worker_seed, self.shared_epoch = shuffle, worker_seed, shared_epoch

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        key = key_of(self.worker_seed(), self.shared_epoch.get_value())
        seed_everything(key)
        shuffled: Iterator[Any] = self.shuffle.f(samples, *self.shuffle.args, **self.shuffle.kw, rng=random.Random(key))
        return shuffled


def seed_everything(key: int) -> None:
    import numpy as np

    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def number_pipeline(info: Any, sizes: dict[str, int] | None, seed: int, rank: int) -> None:
    """Change the stages of open_clip's webdataset pipeline in place."""
    from open_clip_train import data as theirs
    from webdataset import filters

    stages: list[Any] = info.dataloader.pipeline[0].dataset.pipeline
    functions = [getattr(stage, "f", stage) for stage in stages]
    wanted = [theirs.tarfile_to_samples_nothrow, filters._shuffle, filters._to_tuple]
    if any(functions.count(function) != 1 for function in wanted):
        raise ValueError("This version of open_clip_train reads shards in another way; use open_clip_torch 3.x.")
    read, shuffle, to_tuple = (functions.index(function) for function in wanted)
    stages[shuffle] = SeededShuffle(stages[shuffle], WorkerSeed(seed, rank), info.shared_epoch)
    if isinstance(stages[0], theirs.ResampledShards2):
        stages[0].worker_seed = WorkerSeed(seed, rank)
    if sizes is not None:
        stages[read] = NumberedShards(stages[read], sizes)
        stages[to_tuple] = filters.to_tuple(*stages[to_tuple].args, PLACE)


def without_end_marks(expand: Callable[..., Any]) -> Callable[..., Any]:
    """webdataset marks the end of a shard by an empty sample since 0.2.90; open_clip_train 3 does not know that yet."""
    return partial(expand, eof_value=None) if "eof_value" in inspect.signature(expand).parameters else expand


def number_table(info: Any) -> Any:
    """The loader of a table of rows (CSV, synthetic) again, with row numbers."""
    old = info.dataloader
    loader = DataLoader(
        NumberedRows(old.dataset),
        batch_size=old.batch_size,
        sampler=old.sampler,
        num_workers=old.num_workers,
        pin_memory=old.pin_memory,
        drop_last=old.drop_last,
    )
    counted: Any = loader
    counted.num_samples, counted.num_batches = old.num_samples, old.num_batches
    return counted


def shard_sizes(shards: Sequence[str]) -> dict[str, int]:
    """Samples in each shard: as the sizes.json beside it says, or counted."""
    sizes: dict[str, int] = {}
    listings: dict[str, dict[str, int]] = {}
    for shard in shards:
        folder = os.path.dirname(shard)
        if folder not in listings:
            path = os.path.join(folder, "sizes.json")
            listings[folder] = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
        listed_size = listings[folder].get(os.path.basename(shard))
        if listed_size is None and not os.path.exists(shard):
            raise ValueError(
                f"This method remembers every sample, but the samples of {shard!r} cannot be counted, since it is no "
                "file here; put a sizes.json beside the shards, as open_clip reads it, or choose a method without a "
                "memory per sample, such as neuclip."
            )
        sizes[shard] = count_samples(shard) if listed_size is None else int(listed_size)
    return sizes


def count_samples(shard: str) -> int:
    """As open_clip groups members: a new key, or an extension that is there already, begins another sample."""
    from webdataset.tariterators import base_plus_ext

    count, current = 0, None
    extensions: set[str] = set()
    for name, _, _ in walk_members(shard):
        key, extension = base_plus_ext(name)
        if key is None:
            continue
        if key != current or extension.lower() in extensions:
            count, current, extensions = count + 1, key, set()
        extensions.add(extension.lower())
    return count
