"""What gradient descent ends at, on the full batch, all mini-batches and strict subsets; and which batches are fastest.

Cho et al. 2023, section 4 (Theorems 3 to 5), Figures 4(a) to (d), 6, 7; and where nothing is proved, Figure 8.
"""

# R: runs side by side  N: pairs  D: width  K: batches  B: pairs of a batch  T: looks

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch.selection.spectral import even_clusters
from fullbatch.theory import embeddings
from fullbatch.theory.embeddings import FreePairs, all_batches, batch_losses, contrastive_loss, descended, distance

NEAR = 1e-3  # Frobenius norm: "reached"


@dataclass(frozen=True)
class Descent:
    """A descent of several starts side by side; distances and heat maps are those at the end."""

    count: int
    width: int
    number: int  # of batches
    rate: float
    steps: int
    reached_R: Tensor  # the first look at which a run was within NEAR of the optimum; -1: never
    distance_R: Tensor
    gram_RNN: Tensor
    batches: str = ""  # what they are called
    optimal: bool = True  # by the theorems

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
    pairs, reached_R = embeddings.random_pairs(count, width, seeds), torch.full((seeds,), -1)
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
    """Two minimisers of N pairs where no optimum is known, each the best of several starts: "full" of the full-batch
    loss, "all" of the mean loss of all mini-batches."""

    count: int
    width: int
    distance: float  # between the two, under the best relabelling
    full_batch_loss: dict[str, float]  # of either: of_full, of_all
    mini_batch_loss: dict[str, float]
    full_minima: list[float]  # the loss that each start ended at; of all mini-batches first the random starts
    all_minima: list[float]
    slope_at_full: dict[str, float]  # length of the gradient along the spheres; of the "full" loss it must vanish
    heat_maps: dict[str, Tensor]


def unproven(
    count: int, width: int, batch_size: int, rates: tuple[float, float], steps: tuple[int, int], seeds: int
) -> Unproven:
    """Are the minimisers of the full batch and of all mini-batches the same where the theorems do not say so?

    rates, steps   of the full batch, and of all mini-batches; the latter start at random and, moved by a thousandth,
                   at what the full batch came to: if that were their minimiser too, they would come back to it
    """
    whole_1N, every_KB = all_batches(count, count), all_batches(count, batch_size)
    random = embeddings.random_pairs(count, width, seeds)
    full = _descended(random, whole_1N, rates[0], steps[0])
    generator = torch.Generator().manual_seed(0)
    noise_2RND = torch.randn(full.unit_2RND.shape, dtype=torch.float64, generator=generator)
    moved = FreePairs.of(full.unit_2RND + 1e-3 * noise_2RND)
    starts = FreePairs.of(torch.cat([random.unit_2RND, moved.unit_2RND], dim=1))
    every = _descended(starts, every_KB, rates[1], steps[1])
    whole_losses = [contrastive_loss(pairs.gram_RNN) for pairs in (full, every)]
    mini_losses = [batch_losses(pairs.gram_RNN, every_KB).mean(-1) for pairs in (full, every)]
    best = int(whole_losses[0].argmin()), int(mini_losses[1].argmin())
    full_NN, all_NN = full.gram_RNN[best[0]], every.gram_RNN[best[1]]

    def of_best(losses: list[Tensor]) -> dict[str, float]:
        return {"of_full": float(losses[0][best[0]]), "of_all": float(losses[1][best[1]])}

    def slope(batches_KB: Tensor) -> float:
        return float(full.along_sphere(full.gradient(batches_KB))[:, best[0]].norm())

    return Unproven(
        count,
        width,
        embeddings.relabelled_distance(full_NN, all_NN),
        full_batch_loss=of_best(whole_losses),
        mini_batch_loss=of_best(mini_losses),
        full_minima=whole_losses[0].tolist(),
        all_minima=mini_losses[1].tolist(),
        slope_at_full={"full": slope(whole_1N), "mini": slope(every_KB)},
        heat_maps={"full": full_NN, "all": all_NN},
    )


def _descended(pairs: FreePairs, batches_KB: Tensor, rate: float, steps: int) -> FreePairs:
    for _ in range(steps):
        pairs = descended(pairs, batches_KB, rate)
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# which mini-batches get there first: sections 5 and 6.1, Algorithms 3 to 7, Figure 4(e)

# SGD: random batches; without replacement an epoch is a partition (Algorithm 5), with it each is new (4).
# OSGD: the batch of largest loss: of all C(N, B) (Algorithm 6), or of a random partition (7, q = 1).
# spectral: even clusters of the graph of pair losses (Algorithm 3), made anew each epoch of N / B steps.
RacingMethod = Literal["SGD", "OSGD", "spectral", "SGD with replacement", "OSGD of a partition"]


@dataclass(frozen=True)
class Reading:
    """What a step is."""

    steps: int
    epochs: bool  # ``steps`` are epochs of N / B steps
    free: bool  # vectors are never normalised, and the gradient goes through the normalisation

    def __str__(self) -> str:
        unit = "epochs of N / B steps" if self.epochs else "steps"
        return f"{self.steps} {unit}, {'vectors of free length' if self.free else 'normalised each step'}"


AS_WRITTEN = Reading(steps=500, epochs=False, free=False)
AS_PUBLISHED = Reading(steps=500, epochs=True, free=True)  # the authors' code


@dataclass(frozen=True)
class Race:
    method: RacingMethod
    count: int
    width: int
    reading: Reading
    at: tuple[int, ...]  # the updates after which it was looked
    distance_TR: Tensor  # to the optimum, by look and seed

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
    pairs = embeddings.random_pairs(count, width, seeds, reading.free)
    seen, plans, next_batches = [pairs.gram_RNN], 0, list[Tensor]()
    for update in range(1, updates + 1):
        if not next_batches:
            next_batches = list(torch.split(planned(method, pairs, batch_size, plans), 1, dim=1))
            plans += 1
        pairs = descended(pairs, next_batches.pop(0), rate, reading.free)
        if update in at:
            seen.append(pairs.gram_RNN)
    return Race(method, count, width, reading, at, distance(count, width, torch.stack(seen)))


def planned(method: RacingMethod, pairs: FreePairs, batch_size: int, number: int) -> Tensor:
    """The batches to take next, (R, K, B): an epoch's of SGD and spectral batches, one of the others.

    Noise depends on the seed of the run and the number of the plan, so a run is the same whatever stands beside it.
    """
    _, seeds, count, _ = pairs.unit_2RND.shape
    match method:
        case "SGD with replacement":
            return _partition(seeds, count, batch_size, number)[:, :1]
        case "SGD":
            return _partition(seeds, count, batch_size, number)
        case "OSGD of a partition":
            return _hardest(pairs, _partition(seeds, count, batch_size, number))
        case "OSGD":
            return _hardest(pairs, all_batches(count, batch_size).expand(seeds, -1, -1))
        case "spectral":
            clusters = [
                even_clusters(u_ND, v_ND, batch_size, tau=1.0, seed=number)
                for u_ND, v_ND in zip(*pairs.unit_2RND, strict=True)
            ]
            return torch.from_numpy(np.stack(clusters))
        case _:
            assert_never(method)


def _partition(seeds: int, count: int, batch_size: int, number: int) -> Tensor:
    rows = [np.random.default_rng([seed, number]).permutation(count) for seed in range(seeds)]
    return torch.from_numpy(np.stack(rows))[:, : count // batch_size * batch_size].reshape(seeds, -1, batch_size)


def _hardest(pairs: FreePairs, batches_RKB: Tensor) -> Tensor:
    """The batch of largest loss; of equal ones the first."""
    hardest_R = batch_losses(pairs.gram_RNN, batches_RKB).argmax(-1)
    return batches_RKB[torch.arange(len(hardest_R)), hardest_R].unsqueeze(-2)
