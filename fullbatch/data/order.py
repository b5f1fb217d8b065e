"""Which sample comes when: a pure function of (seed, epoch, position), with no memory, for any number of ranks.  An
epoch is a list of *slots*: every source fills ``round(weight * length)`` of them.  A keyed bijection (a Feistel network
with cycle walking) shuffles the slots, so a billion samples need no permutation in memory, and any worker of any rank
can ask for any position.  Where storage reads best in one go, blocks of neighbours are shuffled instead, and samples
only within a window of some blocks."""

# P: positions asked for   L: batches of a plan   B: rows of a batch, on all ranks

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_MASK = (1 << 64) - 1


def key_of(*numbers: int) -> int:
    """64 mixed bits of a tuple of whole numbers: the seed of whatever happens there and then."""
    key = 0
    for number in numbers:
        key = int(_mix(key ^ (number & _MASK)))
    return key


def _mix(word: Any) -> Any:
    """The finaliser of splitmix64 (Steele et al. 2014), of a whole number or of an array of uint64."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def shuffled(positions_P: Ints, size: int, key: int) -> Ints:
    """Where each position lies after a shuffle of range(size) that ``key`` names; a bijection."""
    assert positions_P.size == 0 or (positions_P.min() >= 0 and positions_P.max() < size), "a position out of range"
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(key_of(key, turn)) for turn in range(_ROUNDS)]

    def once(words_P: Any) -> Any:
        left_P, right_P = words_P >> half, words_P & low
        for turn_key in keys:
            left_P, right_P = right_P, left_P ^ (_mix(right_P ^ turn_key) & low)
        return (left_P << half) | right_P

    words: _Words = once(positions_P.astype(np.uint64))
    while (outside := words >= np.uint64(size)).any():  # walk the cycle until it is back inside
        words[outside] = once(words[outside])
    return words.astype(np.int64)


@dataclass(frozen=True)
class Blocks:
    """A shuffle that reads like a stream."""

    size: int  # neighbours that stay together until they are in their window
    window: int  # blocks whose samples are mixed


def shuffled_by_blocks(positions_P: Ints, size: int, key: int, blocks: Blocks) -> Ints:
    """``shuffled``, but blocks of neighbours are put in a random order, and samples mixed within each window."""
    span, mixed_P = blocks.size * blocks.window, np.empty_like(positions_P)
    for window in np.unique(positions_P // span).tolist():
        here, first = positions_P // span == window, window * span
        within = shuffled(positions_P[here] - first, min(span, size - first), key_of(key, 1, window))
        mixed_P[here] = first + within
    return _blocks_shuffled(mixed_P, size, key, blocks.size)


def _blocks_shuffled(positions_P: Ints, size: int, key: int, block: int) -> Ints:
    """Blocks of neighbours in a random order.  The last block, which may be shorter, has a random place among the
    others."""
    whole, rest = divmod(size, block)
    start = key_of(key, 2) % (whole + 1) * block  # of the short block
    short_P = (positions_P >= start) & (positions_P < start + rest)
    others_P = np.where(positions_P < start, positions_P, positions_P - rest)
    others_P[short_P] = 0
    block_P = shuffled(others_P // block, max(whole, 1), key_of(key, 3))
    return np.where(short_P, whole * block + positions_P - start, block_P * block + others_P % block)


def _some_by_blocks(positions_P: Ints, count: int, size: int, key: int, block: int) -> Ints:
    """The first ``count`` positions of ``_blocks_shuffled``, turned: they begin anywhere in it, so that each sample is
    as likely as any other, also where a block is cut or is all there is.  Where whole blocks add up they stay whole."""
    step = math.gcd(count, size, block)
    start = key_of(key, 4) % (size // step) * step
    return _blocks_shuffled((positions_P + start) % size, size, key, block)


def uniforms(positions_P: Ints, key: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each position, drawn by ``key``."""
    words: _Words = _mix(_mix(positions_P.astype(np.uint64) ^ np.uint64(key & _MASK)))
    return np.asarray(words >> np.uint64(11), np.float64) * 2.0**-53


@dataclass(frozen=True)
class BatchPlan:
    """Which places meet in some batches of a run."""

    batches: range  # the numbers they have in the run
    epoch: int  # in whose order the places lie
    places_LB: Ints
    # of the samples there, with images and with texts as anchors: log of a uniform batch's normalizer less that of the
    # batch they are in; None: they are taken as they come
    log_c_LB2: npt.NDArray[np.float32] | None = None

    def places(self, batch: int) -> Ints:
        """Of batch number ``batch`` of the run."""
        return np.array(self.places_LB[batch - self.batches.start])

    def log_c(self, batch: int) -> npt.NDArray[np.float32] | None:
        return None if self.log_c_LB2 is None else np.array(self.log_c_LB2[batch - self.batches.start])


class BatchPlans(Protocol):
    """Which places meet in a batch; ``fullbatch.selection`` makes such plans."""

    def of(self, batch: int, stop: int | None = None) -> BatchPlan:
        """Of batch number ``batch`` of the run, and of those up to ``stop`` that are of its period."""


@dataclass(frozen=True)
class Order:
    """The order of a run over sources of these lengths, each shown ``weights`` times an epoch.  ids number the samples
    of all sources, one source after the other; they do not depend on the weights."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    blocks: Blocks | None = None  # None: every sample may come anywhere, as where all blocks fit into one window

    @property
    def by_blocks(self) -> bool:
        return self.blocks is not None and self.epoch_size > self.blocks.size * self.blocks.window

    @cached_property
    def slots(self) -> tuple[int, ...]:
        return tuple(round(length * weight) for length, weight in zip(self.lengths, self.weights, strict=True))

    @property
    def epoch_size(self) -> int:
        return sum(self.slots)

    @property
    def num_samples(self) -> int:
        return sum(self.lengths)

    def ids(self, epoch: int, positions_P: Ints) -> Ints:
        """The samples at these positions of an epoch."""
        slots_P = self._slots(epoch, positions_P)
        ends = np.cumsum(self.slots)
        sources_P = np.searchsorted(ends, slots_P, side="right")
        ids_P = np.empty_like(slots_P)
        for source, length in enumerate(self.lengths):
            here = sources_P == source
            within = slots_P[here] - (ends[source] - self.slots[source])
            index = within % max(length, 1)
            partial = within >= self.slots[source] // max(length, 1) * length  # the last, incomplete showing
            key = key_of(self.seed, epoch, source, 1)
            if self.blocks is None or not self.by_blocks:
                index[partial] = shuffled(index[partial], length, key)
            elif partial.any():  # neighbours, too
                count = self.slots[source] % length
                index[partial] = _some_by_blocks(index[partial], count, length, key, self.blocks.size)
            ids_P[here] = index + sum(self.lengths[:source])
        return ids_P

    def neighbourhood(self, position: int) -> range:
        """The positions with which this one is mixed."""
        if self.blocks is None or not self.by_blocks:
            return range(self.epoch_size)
        span = self.blocks.size * self.blocks.window
        first = min(position // span * span, self.epoch_size - span)  # the last window may be short
        return range(first, first + span)

    def _slots(self, epoch: int, positions_P: Ints) -> Ints:
        key = key_of(self.seed, epoch)
        if self.blocks is None or not self.by_blocks:
            return shuffled(positions_P, self.epoch_size, key)
        return shuffled_by_blocks(positions_P, self.epoch_size, key, self.blocks)
