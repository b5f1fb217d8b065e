"""(seed, epoch, step) -> LoadedBatch: the same on any number of workers, and on any number of ranks put together.  A
worker makes a whole batch of its rank by itself; what it draws (crop, caption) depends on the place in the epoch alone.
A sample that cannot be read is replaced by another one, drawn by the same rule, so that too is the same on every
machine; it is reported in ``LoadedBatch.bad``."""

# B: rows on this rank

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fullbatch.config.data import Data
from fullbatch.data.ahead import ReadingAhead, ranks_here
from fullbatch.data.block_cache import block_cache
from fullbatch.data.images import EVALUATION, EvalTransform, TrainTransform, ViewMaker
from fullbatch.data.order import BatchPlans, Blocks, Ints, Order, key_of
from fullbatch.data.sample import BadSample, RawSample, Remote, Samples
from fullbatch.data.sources import open_source, share_of, shuffle_for
from fullbatch.data.workers import read_ahead
from fullbatch.distributed import World

_AHEAD = 4096  # samples whose remote files are fetched before their turn, where they come in no other's neighbourhood
REPLACEMENTS = 16  # tries; when that many in a row are bad, the data set is no data set

log = logging.getLogger("fullbatch")

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
    log_correction: Tensor | None = None  # (B, 2), of normalizers, where the batch was selected

    @property
    def inputs(self) -> tuple[Tensor | TextSize, ...]:
        """What a model is called with."""
        return (self.images, self.tokens, *known_size(self.tokens, self.lengths))

    def pin_memory(self) -> LoadedBatch:
        return self.moved(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> LoadedBatch:
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def moved(self, move: Callable[[Tensor], Tensor]) -> LoadedBatch:
        tensors = {name: move(tensor) for name, tensor in self.tensors.items()}
        return replace(self, **tensors)  # type: ignore[arg-type]

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {"ids": self.ids, "images": self.images, "tokens": self.tokens}
        return found if self.log_correction is None else {**found, "log_correction": self.log_correction}

    def split(self, rows: int | None) -> list[LoadedBatch]:
        """In pieces of at most ``rows`` rows; None: in one."""
        if rows is None or rows >= len(self.ids):
            return [self]
        pieces = [slice(start, start + rows) for start in range(0, len(self.ids), rows)]
        return [
            replace(self.moved(itemgetter(piece)), bad=(), captions=(), lengths=self.lengths[piece]) for piece in pieces
        ]

    @staticmethod
    def joined(parts: Sequence[LoadedBatch]) -> LoadedBatch:
        """Several batches as one; on several ranks its rows come in another order than on one."""
        if len(parts) == 1:
            return parts[0]
        tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        bad = tuple(sample for part in parts for sample in part.bad)
        lengths = tuple(length for part in parts for length in part.lengths)
        return replace(parts[0], **tensors, bad=bad, captions=(), lengths=lengths)


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
        self.remote_bytes = sum(source.remote_bytes for source in self.sources)

    def _read(self, index: int) -> RawSample:
        source = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[source].read(index - int(self._ends[source]) + self.lengths[source])

    def remote_pieces(self, indices_P: Ints) -> list[Remote]:
        found: list[Remote] = []
        sources_P = np.searchsorted(self._ends, indices_P, side="right")
        for number, source in enumerate(self.sources):
            if source.remote_bytes:
                here_P = indices_P[sources_P == number]
                found += source.remote_pieces(here_P - int(self._ends[number]) + self.lengths[number])
        return found


def open_pool(config: Data) -> tuple[SamplePool, Order]:
    """The training samples and, for seed 0, their order."""
    pool = SamplePool([share_of(open_source(source), config.data_share) for source in config.sources])
    blocks = Blocks(config.block_samples, config.window_blocks) if shuffle_for(config) == "blocks" else None
    order = Order(pool.lengths, tuple(source.weight for source in config.sources), seed=0, blocks=blocks)
    for source, length, slots in zip(config.sources, pool.lengths, order.slots, strict=True):
        if length == 0:
            raise ValueError(f"The source {str(source)!r} holds no sample.")
        if slots == 0:
            raise ValueError(f"The source {str(source)!r} has {length} samples, of which its weight shows none.")
    _warn_of_small_cache(pool, order)
    return pool, order


def _warn_of_small_cache(pool: SamplePool, order: Order) -> None:
    """What is mixed, and what comes next, must fit."""
    cache, blocks = block_cache() if pool.remote_bytes else None, order.blocks
    mixed = pool.remote_bytes if blocks is None else pool.remote_bytes * blocks.size * blocks.window // len(pool)
    needed = min(pool.remote_bytes, 2 * mixed)
    if cache is not None and needed > cache.bound:
        advice = "--shuffle blocks" if blocks is None else f"a smaller --window-blocks than {blocks.window}"
        log.warning(
            "The samples that are mixed need %.1f GB of cache, and it may have %.1f: files will be fetched again and "
            "again. Set FULLBATCH_CACHE_GB to more, or choose %s.",
            needed / 1e9,
            cache.bound / 1e9,
            advice,
        )


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
    stop: int | None = None  # the run's last batch comes before; None: not known, and more may be read ahead

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

    def log_correction(self, step: int, read: Tensor) -> Tensor | None:
        """Of the samples that were ``read``; one that stands in for another has none."""
        log_c = None if self.plans is None else self.plans.of(step).log_c(step)
        if log_c is None:
            return None
        here = self.world.rows(self.batch_size // self.world.size)
        return torch.from_numpy(log_c[here]) * (read == torch.tensor(self.ids(step)))[:, None]

    def stream(
        self, ranges: Iterable[range], workers: int, device: torch.device, stop: int | None = None
    ) -> Generator[LoadedBatch, None, None]:
        """These batches in this order; each range is asked for when its turn has come.  None of the run comes after
        ``stop``."""
        return read_ahead(replace(self, stop=stop), ranges, workers, device)

    def ids(self, step: int) -> list[int]:
        return [int(sample) for sample in self.order.ids(*self.places(step))]

    @cached_property
    def _ahead(self) -> ReadingAhead:
        blocks = self.order.blocks
        samples = _AHEAD if blocks is None else 2 * blocks.size * blocks.window
        batches = -(-samples // self.batch_size)
        most = min(batches, self.steps_per_epoch)  # another epoch needs the same
        return ReadingAhead(self._pieces, most, self.world)

    def _pieces(self, step: int) -> list[Remote] | None:
        """What the rows of this machine's ranks are read from, if the batch is the uniform one; a selected one is of
        its time."""
        if self.stop is not None and step >= self.stop:
            return None
        epoch, number = divmod(step, self.steps_per_epoch)
        rows, here = self.batch_size // self.world.size, ranks_here(self.world)
        places = number * self.batch_size + np.arange(here.start * rows, here.stop * rows)
        return self.pool.remote_pieces(self.order.ids(epoch, places))

    def __getitem__(self, step: int) -> LoadedBatch:
        if self.pool.remote_bytes:
            self._ahead.reached(step)
        epoch, places = self.places(step)
        bad: list[BadSample] = []
        samples = []
        for place, sample in zip(places.tolist(), self.ids(step), strict=True):
            rng = random.Random(key_of(self.order.seed, epoch, place, 2))
            samples.append(self._sample(epoch, place, sample, rng, bad))
        numbers, images, captions = zip(*samples, strict=True)
        ids = torch.tensor(numbers)
        log_c = self.log_correction(step, ids)
        if self.views is not None:
            views = self.views(torch.stack(images), epoch, places)
            return LoadedBatch(ids, *views, tuple(bad), log_correction=log_c)
        stacked: Tensor = default_collate(list(images))  # by a worker in memory that it shares: not copied later
        tokens, lengths = tokenized(self.tokenize, list(captions))
        return LoadedBatch(ids, stacked, tokens, tuple(bad), lengths=lengths, log_correction=log_c)

    def _sample(
        self, epoch: int, place: int, sample: int, rng: random.Random, bad: list[BadSample]
    ) -> tuple[int, Tensor, str]:
        """One pair; in place of a bad one, others that ``rng`` draws: from those that the place is mixed with, since
        these are read now; if half the tries do not find one there, from the epoch."""
        for tried in range(REPLACEMENTS):
            try:
                raw = self.pool.read(sample)
                return sample, self.transform(raw.image, raw.name, rng), rng.choice(raw.captions)
            except BadSample as error:
                bad.append(error)
                near = tried < REPLACEMENTS // 2
                drawn = rng.choice(self.order.neighbourhood(place) if near else range(self.order.epoch_size))
                sample = int(self.order.ids(epoch, np.array([drawn]))[0])
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

    @cached_property
    def _ahead(self) -> ReadingAhead:
        batches = -(-_AHEAD // (self.batch_size * self.world.size))
        return ReadingAhead(self._pieces, batches, self.world)

    def _pieces(self, index: int) -> list[Remote] | None:
        here, first = ranks_here(self.world), index * self.world.size
        start, stop = ((first + rank) * self.batch_size for rank in (here.start, here.stop))
        ids = np.arange(start, min(stop, len(self.pool)))
        return self.pool.remote_pieces(ids) if len(ids) else None

    def __getitem__(self, index: int) -> LoadedBatch:
        if self.pool.remote_bytes:
            self._ahead.reached(index)
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
