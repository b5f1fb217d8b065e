"""Which sample comes when: a pure function of (seed, epoch, position), with no memory, for any number of ranks.  An
epoch is a list of *slots*: every source fills ``round(weight * length)`` of them.  A keyed bijection (a Feistel network
with cycle walking) shuffles the slots, so a billion samples need no permutation in memory, and any worker of any rank
can ask for any position."""

# P: positions asked for   L: batches of a period   B: rows of a batch, on all ranks

from __future__ import annotations

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


def uniforms(positions_P: Ints, key: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each position, drawn by ``key``."""
    words: _Words = _mix(_mix(positions_P.astype(np.uint64) ^ np.uint64(key & _MASK)))
    return np.asarray(words >> np.uint64(11), np.float64) * 2.0**-53


@dataclass(frozen=True)
class PeriodPlan:
    """Batches of a run that were chosen together: a period."""

    number: int  # of the period
    first: int  # the number that its first batch has in the run
    epoch: int  # in whose order the places lie
    places_LB: Ints  # that make up each of its batches

    def places(self, batch: int) -> Ints:
        """Of batch number ``batch`` of the run."""
        return np.array(self.places_LB[batch - self.first])


class BatchPlans(Protocol):
    """Which places meet in a batch; ``fullbatch.selection`` makes such plans."""

    def of(self, batch: int) -> PeriodPlan:
        """The plan of the period that batch number ``batch`` of the run belongs to."""


@dataclass(frozen=True)
class Order:
    """The order of a run over sources of these lengths, each shown ``weights`` times an epoch.  ids number the samples
    of all sources, one source after the other; they do not depend on the weights."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

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
        slots_P = shuffled(positions_P, self.epoch_size, key_of(self.seed, epoch))
        ends = np.cumsum(self.slots)
        sources_P = np.searchsorted(ends, slots_P, side="right")
        ids_P = np.empty_like(slots_P)
        for source, length in enumerate(self.lengths):
            here = sources_P == source
            within = slots_P[here] - (ends[source] - self.slots[source])
            index = within % max(length, 1)
            partial = within >= self.slots[source] // max(length, 1) * length  # the last, incomplete showing
            key = key_of(self.seed, epoch, source, 1)
            index[partial] = shuffled(index[partial], length, key)
            ids_P[here] = index + sum(self.lengths[:source])
        return ids_P
