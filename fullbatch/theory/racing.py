"""Which mini-batches get there first: SGD, ordered SGD and spectral clustering on free embeddings.

Cho et al. 2023, sections 5 and 6.1, Algorithms 3 to 7, Figure 4(e).
"""

# R: runs side by side  N: pairs  D: width  B: pairs of a batch  K: batches

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch.selection.spectral import even_clusters
from fullbatch.theory.embeddings import (
    Pairs,
    all_batches,
    batch_losses,
    descended,
    descended_freely,
    random_pairs,
)
from fullbatch.theory.optimum import distance

Chooser = Callable[[Pairs, int], Tensor]  # the pairs and the number of the step -> one batch a run, (R, 1, B)


@dataclass(frozen=True)
class Uniform:
    """SGD: random batches; without replacement an epoch is a partition (Algorithm 5), with it each is new (4)."""

    replacement: bool = False


@dataclass(frozen=True)
class Ordered:
    """Ordered SGD on the batch of largest loss: of all C(N, B) (Algorithm 6), or of a random partition (7, q = 1)."""

    of_partition: bool = False


@dataclass(frozen=True)
class Spectral:
    """Even clusters of the graph of pair losses (Algorithm 3), made anew at the start of each epoch of N / B steps."""


Choice = Uniform | Ordered | Spectral


@dataclass(frozen=True)
class Reading:
    """What a step is.

    steps     steps, or epochs of N / B steps
    free      vectors are never normalised, and the gradient goes through the normalisation
    """

    steps: int
    epochs: bool
    free: bool

    def updates(self, count: int, batch_size: int) -> int:
        return self.steps * (count // batch_size) if self.epochs else self.steps


AS_WRITTEN = Reading(steps=500, epochs=False, free=False)
AS_PUBLISHED = Reading(steps=500, epochs=True, free=True)  # the authors' code


@dataclass(frozen=True)
class Race:
    """at            the updates after which it was looked
    distance_TR   to the optimum, by look and seed
    """

    at: tuple[int, ...]
    distance_TR: Tensor

    @property
    def final_R(self) -> Tensor:
        return self.distance_TR[-1]


def race(
    choice: Choice, count: int, width: int, batch_size: int, reading: Reading, rate: float, seeds: int, looks: int = 100
) -> Race:
    """Descend from the starts of so many seeds, batch by batch, and look so often (and at start and end)."""
    updates = reading.updates(count, batch_size)
    at = tuple(sorted({round(updates * look / looks) for look in range(looks + 1)}))
    choose = chooser(choice, count, batch_size, seeds)
    step = descended_freely if reading.free else descended
    pairs, seen = random_pairs(count, width, seeds, reading.free), []
    for update in range(updates + 1):
        if update in at:
            seen.append(pairs.gram_RNN)
        if update < updates:
            pairs = step(pairs, choose(pairs, update), rate)
    return Race(at, distance(count, width, torch.stack(seen)))


def chooser(choice: Choice, count: int, batch_size: int, seeds: int) -> Chooser:
    """Noise depends on the seed of the run and on the step, so a run is the same whatever stands beside it."""
    steps_of_epoch = count // batch_size

    def partition(epoch: int) -> Tensor:
        rows = [np.random.default_rng([seed, epoch]).permutation(count) for seed in range(seeds)]
        return torch.from_numpy(np.stack(rows))[:, : steps_of_epoch * batch_size].reshape(seeds, -1, batch_size)

    match choice:
        case Uniform(replacement=True):
            return lambda _, step: partition(step)[:, :1]
        case Uniform():
            return _by_epoch(lambda _, epoch: partition(epoch), steps_of_epoch)
        case Ordered(of_partition=True):
            return lambda pairs, step: _hardest(pairs, partition(step))
        case Ordered():
            every_KB = all_batches(count, batch_size).expand(seeds, -1, -1)
            return lambda pairs, _: _hardest(pairs, every_KB)
        case Spectral():
            return _by_epoch(lambda pairs, epoch: _clusters(pairs, batch_size, epoch), steps_of_epoch)
        case _:
            assert_never(choice)


def _by_epoch(plan: Callable[[Pairs, int], Tensor], steps_of_epoch: int) -> Chooser:
    """A plan, (R, N / B, B), at the start of each epoch, then its batches one after the other."""
    current = torch.empty(0)

    def choose(pairs: Pairs, step: int) -> Tensor:
        nonlocal current
        epoch, place = divmod(step, steps_of_epoch)
        if place == 0:
            current = plan(pairs, epoch)
        return current[:, place : place + 1]

    return choose


def _hardest(pairs: Pairs, batches_RKB: Tensor) -> Tensor:
    """The batch of largest loss; of equal ones the first."""
    hardest_R = batch_losses(pairs.gram_RNN, batches_RKB).argmax(-1)
    return batches_RKB[torch.arange(len(hardest_R)), hardest_R].unsqueeze(-2)


def _clusters(pairs: Pairs, batch_size: int, epoch: int) -> Tensor:
    plans = [
        even_clusters(u_ND, v_ND, batch_size, tau=1.0, seed=epoch)
        for u_ND, v_ND in zip(pairs.u.unit_RND, pairs.v.unit_RND, strict=True)
    ]
    return torch.from_numpy(np.stack(plans))
