"""What gradient descent ends at, on the full batch, all mini-batches and strict subsets; and which batches are fastest.

Cho et al. 2023, section 4 (Theorems 3 to 5), Figures 4(a) to (d), 6, 7; and where nothing is proved, Figure 8.
"""

# R: runs side by side  N: pairs  D: width  K: batches  B: pairs of a batch  T: looks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

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
    """A descent of several starts side by side; ``distance_R`` and ``gram_RNN`` are those at the end.

    reached_R    the first look at which a run was within NEAR of the optimum; -1: never
    number       of batches; ``batches`` is what they are called
    optimal      whether the theorems promise the optimum
    """

    count: int
    width: int
    number: int
    rate: float
    steps: int
    reached_R: Tensor
    distance_R: Tensor
    gram_RNN: Tensor
    batches: str = ""
    optimal: bool = True

    @property
    def case(self) -> str:
        kind = "simplex" if self.count <= self.width + 1 else "cross-polytope"
        return f"N = {self.count}, d = {self.width}: {kind}"


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
    for before, now in pairwise(looks):
        pairs = _descended(pairs, batches_KB, rate, now - before)
        distance_R = distance(count, width, pairs.gram_RNN)
        reached_R = torch.where((reached_R < 0) & (distance_R < NEAR), now, reached_R)
        if bool((reached_R >= 0).all()):
            break
    return Descent(count, width, len(batches_KB), rate, now, reached_R, distance_R, pairs.gram_RNN)


@dataclass(frozen=True)
class Unproven:
    """Two minimisers of N pairs where no optimum is known, each the best of several starts.

    full_NN, all_NN            their heat maps: of the full-batch loss, and of the mean loss of all mini-batches
    distance                   between the two, under the best relabelling
    full_losses, all_losses    the full-batch loss, and the mean mini-batch loss, of the one and of the other
    full_minima, all_minima    the loss that each start ended at; of all mini-batches first the random starts
    slopes                     the length of a loss's gradient along the spheres, at the full batch's minimiser: of the
                               full-batch loss, which must vanish, and of the mini-batch loss
    """

    count: int
    width: int
    full_NN: Tensor
    all_NN: Tensor
    distance: float
    full_losses: tuple[float, float]
    all_losses: tuple[float, float]
    full_minima: list[float]
    all_minima: list[float]
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
    generator = torch.Generator().manual_seed(0)
    noise_2RND = torch.randn(full.unit_2RND.shape, dtype=torch.float64, generator=generator)
    moved = FreePairs.of(full.unit_2RND + 1e-3 * noise_2RND)
    starts = FreePairs.of(torch.cat([random.unit_2RND, moved.unit_2RND], dim=1))
    every = _descended(starts, every_KB, rates[1], steps[1])
    full_losses = [contrastive_loss(pairs.gram_RNN) for pairs in (full, every)]
    all_losses = [batch_losses(pairs.gram_RNN, every_KB).mean(-1) for pairs in (full, every)]
    best_full, best_all = int(full_losses[0].argmin()), int(all_losses[1].argmin())
    full_NN, all_NN = full.gram_RNN[best_full], every.gram_RNN[best_all]

    def slope(batches_KB: Tensor) -> float:
        return float(full.along_sphere(full.gradient(batches_KB))[:, best_full].norm())

    return Unproven(
        count=count,
        width=width,
        full_NN=full_NN,
        all_NN=all_NN,
        distance=relabelled_distance(full_NN, all_NN),
        full_losses=(float(full_losses[0][best_full]), float(full_losses[1][best_all])),
        all_losses=(float(all_losses[0][best_full]), float(all_losses[1][best_all])),
        full_minima=full_losses[0].tolist(),
        all_minima=all_losses[1].tolist(),
        slopes=(slope(whole_1N), slope(every_KB)),
    )


def _descended(pairs: FreePairs, batches_KB: Tensor, rate: float, steps: int) -> FreePairs:
    for _ in range(steps):
        pairs = descended(pairs, batches_KB, rate)
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# which mini-batches get there first: sections 5 and 6.1, Algorithms 3 to 7, Figure 4(e)

Chooser = Callable[[FreePairs, int], Tensor]  # the pairs and the number of the step -> one batch a run, (R, 1, B)
# SGD: random batches; without replacement an epoch is a partition (Algorithm 5), with it each is new (4).
# OSGD: the batch of largest loss: of all C(N, B) (Algorithm 6), or of a random partition (7, q = 1).
# spectral: even clusters of the graph of pair losses (Algorithm 3), made anew each epoch of N / B steps.
RacingMethod = Literal["SGD", "OSGD", "spectral", "SGD with replacement", "OSGD of a partition"]


@dataclass(frozen=True)
class Reading:
    """What a step is.

    steps     steps, or epochs of N / B steps
    free      vectors are never normalised, and the gradient goes through the normalisation
    """

    steps: int
    epochs: bool
    free: bool

    def __str__(self) -> str:
        unit = "epochs of N / B steps" if self.epochs else "steps"
        return f"{self.steps} {unit}, {'vectors of free length' if self.free else 'normalised each step'}"


AS_WRITTEN = Reading(steps=500, epochs=False, free=False)
AS_PUBLISHED = Reading(steps=500, epochs=True, free=True)  # the authors' code


@dataclass(frozen=True)
class Race:
    """at            the updates after which it was looked
    distance_TR   to the optimum, by look and seed
    """

    method: RacingMethod
    count: int
    width: int
    reading: Reading
    at: tuple[int, ...]
    distance_TR: Tensor

    @property
    def final_R(self) -> Tensor:
        return self.distance_TR[-1]


def race(
    method: RacingMethod,
    count: int,
    width: int,
    batch_size: int,
    reading: Reading,
    rate: float,
    seeds: int,
    looks: int = 100,
) -> Race:
    """Descend from the starts of so many seeds, batch by batch, and look so often (and at start and end)."""
    updates = reading.steps * (count // batch_size if reading.epochs else 1)
    at = tuple(sorted({round(updates * look / looks) for look in range(looks + 1)}))
    choose = chooser(method, count, batch_size, seeds)
    step = descended_freely if reading.free else descended
    pairs, seen = random_pairs(count, width, seeds, reading.free), []
    for update in range(updates + 1):
        if update in at:
            seen.append(pairs.gram_RNN)
        if update < updates:
            pairs = step(pairs, choose(pairs, update), rate)
    return Race(method, count, width, reading, at, distance(count, width, torch.stack(seen)))


def chooser(method: RacingMethod, count: int, batch_size: int, seeds: int) -> Chooser:
    """Noise depends on the seed of the run and on the step, so a run is the same whatever stands beside it."""
    steps_of_epoch = count // batch_size

    def partition(epoch: int) -> Tensor:
        rows = [np.random.default_rng([seed, epoch]).permutation(count) for seed in range(seeds)]
        return torch.from_numpy(np.stack(rows))[:, : steps_of_epoch * batch_size].reshape(seeds, -1, batch_size)

    match method:
        case "SGD with replacement":
            return lambda _, step: partition(step)[:, :1]
        case "SGD":
            return _by_epoch(lambda _, epoch: partition(epoch), steps_of_epoch)
        case "OSGD of a partition":
            return lambda pairs, step: _hardest(pairs, partition(step))
        case "OSGD":
            every_KB = all_batches(count, batch_size).expand(seeds, -1, -1)
            return lambda pairs, _: _hardest(pairs, every_KB)
        case "spectral":
            return _by_epoch(lambda pairs, epoch: _clusters(pairs, batch_size, epoch), steps_of_epoch)
        case _:
            assert_never(method)


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
