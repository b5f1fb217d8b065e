"""What gradient descent ends at, on the full batch, all mini-batches and strict subsets; and which batches are fastest.

Cho et al. 2023, section 4 (Theorems 3 to 5), Figures 4(a) to (d), 6, 7; and where nothing is proved, Figure 8.
"""

# R: runs side by side  N: pairs  D: width  K: batches  B: pairs of a batch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch.selection.spectral import even_clusters
from fullbatch.theory.embeddings import (
    FreePairs,
    all_batches,
    batch_losses,
    contrastive_loss,
    descended,
    descended_freely,
    distance,
    random_pairs,
    relabelled_distance,
)

NEAR = 1e-3  # Frobenius norm: "reached"


@dataclass(frozen=True)
class Descent:
    """A descent of several starts side by side.

    reached_R    the first look at which a run was within NEAR of the optimum; -1: never
    distance_R   at the end
    gram_RNN     at the end
    """

    steps: int
    reached_R: Tensor
    distance_R: Tensor
    gram_RNN: Tensor


def partition_batches(count: int, batch_size: int) -> Tensor:
    """One epoch's batches, over and over: the authors' strict subset."""
    return torch.arange(count // batch_size * batch_size).view(-1, batch_size)


def all_but_one(count: int, batch_size: int) -> Tensor:
    """The largest strict subset: all batches but {1, ..., B}."""
    return all_batches(count, batch_size)[1:]


def descend(
    count: int, width: int, batches_KB: Tensor, rate: float, most_steps: int, seeds: int, look_every: int = 100
) -> Descent:
    """Descend until all runs have reached the optimum, or so many steps."""
    pairs, reached_R = random_pairs(count, width, seeds), torch.full((seeds,), -1)
    looks = [*range(0, most_steps, look_every), most_steps]
    distance_R = distance(count, width, pairs.gram_RNN)
    for before, now in pairwise(looks):
        pairs = _descended(pairs, batches_KB, rate, now - before)
        distance_R = distance(count, width, pairs.gram_RNN)
        reached_R = torch.where((reached_R < 0) & (distance_R < NEAR), now, reached_R)
        if bool((reached_R >= 0).all()):
            break
    return Descent(now, reached_R, distance_R, pairs.gram_RNN)


@dataclass(frozen=True)
class Unproven:
    """Two minimisers of N pairs where no optimum is known, each the best of several starts.

    full_NN, all_NN      their heat maps: of the full-batch loss, and of the mean loss of all mini-batches
    distance             between the two, under the best relabelling
    full_losses          the full-batch loss of the one and of the other
    all_losses           the mean mini-batch loss of the one and of the other
    full_minima          the full-batch loss that each start ended at
    all_minima           the mini-batch loss: first of the random starts, then of those next to the full batch's
    slopes               the length of a loss's gradient along the spheres, at the full batch's minimiser: of the
                         full-batch loss, which must vanish, and of the mini-batch loss
    """

    count: int
    width: int
    full_NN: Tensor
    all_NN: Tensor
    distance: float
    full_losses: tuple[float, float]
    all_losses: tuple[float, float]
    full_minima: tuple[float, ...]
    all_minima: tuple[float, ...]
    slopes: tuple[float, float]


def unproven(
    count: int, width: int, batch_size: int, rates: tuple[float, float], steps: tuple[int, int], seeds: int
) -> Unproven:
    """Are the minimisers of the full batch and of all mini-batches the same where the theorems do not say so?

    rates, steps   of the full batch, and of all mini-batches; the latter start at random and, moved by a thousandth,
                   at what the full batch came to: if that were their minimiser too, they would come back to it
    """
    whole_1N, every_KB = all_batches(count, count), all_batches(count, batch_size)
    random = random_pairs(count, width, seeds)
    full = _descended(random, whole_1N, rates[0], steps[0])
    noise = torch.Generator().manual_seed(0)
    moved_2RND = [
        unit_RND + 1e-3 * torch.randn(unit_RND.shape, dtype=torch.float64, generator=noise)
        for unit_RND in full.unit_2RND
    ]
    beside = FreePairs.of(torch.cat([random.unit_2RND, FreePairs.of(torch.stack(moved_2RND)).unit_2RND], dim=1))
    every = _descended(beside, every_KB, rates[1], steps[1])
    full_losses = [contrastive_loss(pairs.gram_RNN) for pairs in (full, every)]
    all_losses = [batch_losses(pairs.gram_RNN, every_KB).mean(-1) for pairs in (full, every)]
    best = int(full_losses[0].argmin()), int(all_losses[1].argmin())  # of the full batch, and of all mini-batches
    full_NN, all_NN = full.gram_RNN[best[0]], every.gram_RNN[best[1]]
    return Unproven(
        count=count,
        width=width,
        full_NN=full_NN,
        all_NN=all_NN,
        distance=relabelled_distance(full_NN, all_NN),
        full_losses=(float(full_losses[0][best[0]]), float(full_losses[1][best[1]])),
        all_losses=(float(all_losses[0][best[0]]), float(all_losses[1][best[1]])),
        full_minima=tuple(full_losses[0].tolist()),
        all_minima=tuple(all_losses[1].tolist()),
        slopes=(_slope(full, whole_1N, best[0]), _slope(full, every_KB, best[0])),
    )


def _descended(pairs: FreePairs, batches_KB: Tensor, rate: float, steps: int) -> FreePairs:
    for _ in range(steps):
        pairs = descended(pairs, batches_KB, rate)
    return pairs


def _slope(pairs: FreePairs, batches_KB: Tensor, run: int) -> float:
    return float(pairs.along_sphere(pairs.gradient(batches_KB))[:, run].norm())


# ---------------------------------------------------------------------------------------------------------------------
# which mini-batches get there first: sections 5 and 6.1, Algorithms 3 to 7, Figure 4(e)


Chooser = Callable[[FreePairs, int], Tensor]  # the pairs and the number of the step -> one batch a run, (R, 1, B)


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


def _by_epoch(plan: Callable[[FreePairs, int], Tensor], steps_of_epoch: int) -> Chooser:
    """A plan, (R, N / B, B), at the start of each epoch, then its batches one after the other."""
    current = torch.empty(0)

    def choose(pairs: FreePairs, step: int) -> Tensor:
        nonlocal current
        epoch, place = divmod(step, steps_of_epoch)
        if place == 0:
            current = plan(pairs, epoch)
        return current[:, place : place + 1]

    return choose


def _hardest(pairs: FreePairs, batches_RKB: Tensor) -> Tensor:
    """The batch of largest loss; of equal ones the first."""
    hardest_R = batch_losses(pairs.gram_RNN, batches_RKB).argmax(-1)
    return batches_RKB[torch.arange(len(hardest_R)), hardest_R].unsqueeze(-2)


def _clusters(pairs: FreePairs, batch_size: int, epoch: int) -> Tensor:
    plans = [
        even_clusters(u_ND, v_ND, batch_size, tau=1.0, seed=epoch) for u_ND, v_ND in zip(*pairs.unit_2RND, strict=True)
    ]
    return torch.from_numpy(np.stack(plans))
