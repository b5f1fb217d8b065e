"""(seed, epoch, step) -> LoadedBatch: the same on any number of workers, and on any number of ranks put together.  A
worker makes a whole batch of its rank by itself; what it draws (crop, caption) depends on the place in the epoch alone.
A sample that cannot be read is replaced by another one, drawn by the same rule, so that too is the same on every
machine; it is reported in ``LoadedBatch.bad``."""

# B: rows on this rank

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fullbatch.config.data import Data
from fullbatch.data.images import EVALUATION, EvalTransform, TrainTransform, ViewMaker
from fullbatch.data.order import BatchPlans, Ints, Order, key_of
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.data.sources import open_source, share_of
from fullbatch.data.workers import read_ahead
from fullbatch.distributed import World

REPLACEMENTS = 16  # tries; when that many in a row are bad, the data set is no data set

Tokenize = Callable[[list[str]], Tensor]


class TextSize(NamedTuple):
    """How much of a batch's captions there is to read, their padding apart; the host knows it."""

    total: int  # tokens of all captions, each up to its end; or some more, but no more than as many longest ones have
    longest: int  # tokens of the longest, or some more


def known_size(tokens_BL: Tensor, lengths: Sequence[int]) -> tuple[TextSize] | tuple[()]:
    """The size of captions of these lengths, if they are known.  For a GPU it is rounded up to one of a few, so that a
    step need be compiled or recorded for few."""
    if not lengths:
        return ()
    total, longest, rows = sum(lengths), max(lengths), len(lengths)
    if tokens_BL.is_cuda:
        longest = min(-(-longest // 16) * 16, tokens_BL.shape[1])
        total = min(-(-total // rows), longest) * rows
    return (TextSize(total, longest),)


@dataclass(frozen=True)
class LoadedBatch:
    ids: Tensor  # which samples these are, of all sources together
    images: Tensor  # uint8, channels first
    tokens: Tensor  # of one caption each; for a model of two views the second view, as images are
    bad: tuple[BadSample, ...] = ()  # what could not be read in making this batch
    captions: tuple[tuple[str, ...], ...] = ()  # all that each of the samples has, where evaluation wants them
    lengths: tuple[int, ...] = ()  # how many of each caption's tokens are no padding, where that is known

    @property
    def inputs(self) -> tuple[Tensor | TextSize, ...]:
        """What a model is called with."""
        return (self.images, self.tokens, *known_size(self.tokens, self.lengths))

    def pin_memory(self) -> LoadedBatch:
        return self._with(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> LoadedBatch:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def _with(self, moved: Callable[[Tensor], Tensor]) -> LoadedBatch:
        return replace(self, ids=moved(self.ids), images=moved(self.images), tokens=moved(self.tokens))

    def split(self, rows: int | None) -> list[LoadedBatch]:
        """In pieces of at most ``rows`` rows; None: in one."""
        if rows is None or rows >= len(self.ids):
            return [self]
        pieces = [slice(start, start + rows) for start in range(0, len(self.ids), rows)]
        return [
            LoadedBatch(self.ids[piece], self.images[piece], self.tokens[piece], lengths=self.lengths[piece])
            for piece in pieces
        ]


def tokenized(tokenize: Tokenize, captions: list[str]) -> tuple[Tensor, tuple[int, ...]]:
    """Token ids, and how many of each caption's are no padding, if the tokenizer can tell."""
    tokens_BL = tokenize(captions)
    count = getattr(tokenize, "lengths", None)
    return tokens_BL, () if count is None else tuple(count(tokens_BL).tolist())


class SamplePool(Samples):
    """The samples of several sources under one numbering: a sample's id is its place in the concatenation."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        self.name, self.sources = "pool", list(sources)
        self.lengths = tuple(len(source) for source in self.sources)
        self._ends, self.count = np.cumsum(self.lengths), sum(self.lengths)
        self.fingerprint = " ".join(source.fingerprint for source in self.sources)

    def _read(self, index: int) -> RawSample:
        source = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[source].read(index - int(self._ends[source]) + self.lengths[source])


def open_pool(config: Data) -> tuple[SamplePool, Order]:
    """The training samples and, for seed 0, their order."""
    pool = SamplePool([share_of(open_source(source), config.data_share) for source in config.sources])
    order = Order(pool.lengths, tuple(source.weight for source in config.sources), seed=0)
    for source, length, slots in zip(config.sources, pool.lengths, order.slots, strict=True):
        if length == 0:
            raise ValueError(f"The source {str(source)!r} holds no sample.")
        if slots == 0:
            raise ValueError(f"The source {str(source)!r} has {length} samples, of which its weight shows none.")
    return pool, order


@dataclass(frozen=True)
class TrainingBatches(Dataset[LoadedBatch]):
    """Batch number ``step`` of a run, or rather this rank's share of it."""

    pool: SamplePool
    order: Order
    batch_size: int
    transform: TrainTransform | EvalTransform
    tokenize: Tokenize
    world: World = World()
    plans: BatchPlans | None = None
    views: ViewMaker | None = None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Whole batches only: the samples left over come in another epoch's order."""
        return self.order.epoch_size // self.batch_size

    def places(self, step: int) -> tuple[int, Ints]:
        """The epoch, and this rank's places in its order: one after the other, unless there are plans."""
        here = self.world.rows(self.batch_size // self.world.size)
        if self.plans is not None:
            plan = self.plans.of(step)
            return plan.epoch, plan.places(step)[here]
        first = step % self.steps_per_epoch * self.batch_size
        return step // self.steps_per_epoch, np.arange(first + here.start, first + here.stop)

    def stream(self, ranges: Iterable[range], workers: int, device: torch.device) -> Generator[LoadedBatch, None, None]:
        """These batches in this order; each range is asked for when its turn has come."""
        return read_ahead(self, ranges, workers, device)

    def ids(self, step: int) -> list[int]:
        return [int(sample) for sample in self.order.ids(*self.places(step))]

    def __getitem__(self, step: int) -> LoadedBatch:
        epoch, places = self.places(step)
        bad: list[BadSample] = []
        samples = []
        for place, sample in zip(places.tolist(), self.ids(step), strict=True):
            rng = random.Random(key_of(self.order.seed, epoch, place, 2))
            samples.append(self._sample(epoch, sample, rng, bad))
        ids, images, captions = zip(*samples, strict=True)
        if self.views is not None:
            return LoadedBatch(torch.tensor(ids), *self.views(torch.stack(images), epoch, places), tuple(bad))
        stacked: Tensor = default_collate(list(images))  # by a worker in memory that it shares: not copied later
        tokens, lengths = tokenized(self.tokenize, list(captions))
        return LoadedBatch(torch.tensor(ids), stacked, tokens, tuple(bad), lengths=lengths)

    def _sample(self, epoch: int, sample: int, rng: random.Random, bad: list[BadSample]) -> tuple[int, Tensor, str]:
        """One pair; in place of a bad one, others that ``rng`` draws from the epoch."""
        for _ in range(REPLACEMENTS):
            try:
                raw = self.pool.read(sample)
                return sample, self.transform(raw.image, raw.name, rng), rng.choice(raw.captions)
            except BadSample as error:
                bad.append(error)
                sample = int(self.order.ids(epoch, np.array([rng.randrange(self.order.epoch_size)]))[0])
        raise ValueError(
            f"{REPLACEMENTS} samples in a row could not be read, the last one was {bad[-1]}. "
            "Check --data: are these files the images and captions you mean?"
        )


@dataclass(frozen=True)
class EvaluationBatches(Dataset[LoadedBatch]):
    """Batch number ``index`` of a pass over a source in its own order: every sample once, with its first caption.
    Ranks take turns, batch by batch, and have equally many; a rank's last may be empty.  What cannot be read is left
    out.  ``views``: two views of each image, the same in every pass, in place of image and caption."""

    pool: SamplePool
    batch_size: int
    transform: EvalTransform
    tokenize: Tokenize
    world: World = World()
    views: ViewMaker | None = None

    def __len__(self) -> int:
        return -(-len(self.pool) // (self.batch_size * self.world.size))

    def __getitem__(self, index: int) -> LoadedBatch:
        first = (self.world.rank + index * self.world.size) * self.batch_size
        ids, images, captions, bad = [], [], [], []
        for sample in range(first, min(first + self.batch_size, len(self.pool))):
            try:
                raw = self.pool.read(sample)
                images.append(self.transform(raw.image, raw.name))
                captions.append(raw.captions)
                ids.append(sample)
            except BadSample as error:
                bad.append(error)
        size = self.transform.size
        stacked = torch.stack(images) if images else torch.empty((0, 3, size, size), dtype=torch.uint8)
        lengths: tuple[int, ...] = ()
        if self.views is not None:
            first_view, second = self.views(stacked, EVALUATION, np.array(ids, np.int64))
        else:
            tokens, lengths = tokenized(self.tokenize, [of[0] for of in captions] or [""])
            first_view, second, lengths = stacked, tokens[: len(captions)], lengths[: len(captions)]
        all_ids = torch.tensor(ids, dtype=torch.int64)
        return LoadedBatch(all_ids, first_view, second, tuple(bad), tuple(captions), lengths)


def load(
    batches: Dataset[LoadedBatch], steps: range, workers: int, device: torch.device
) -> Generator[LoadedBatch, None, None]:
    """These batches in this order, read ahead by ``workers`` processes and moved to the device."""
    return read_ahead(batches, [steps], min(workers, len(steps)), device)
