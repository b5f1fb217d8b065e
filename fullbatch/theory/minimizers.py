"""What gradient descent ends at: the full batch, all mini-batches, and strict subsets of them.

Cho et al. 2023, section 4 (Theorems 3 to 5), Figures 4(a) to (d), 6, 7; and where nothing is proved, Figure 8.
"""

# R: runs side by side  N: pairs  D: width  K: batches  B: pairs of a batch

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fullbatch.theory.embeddings import (
    Pairs,
    all_batches,
    batch_losses,
    contrastive_loss,
    descended,
    gram_gradient,
    pairs_of,
    random_pairs,
    tangent,
)
from fullbatch.theory.optimum import distance, relabelled_distance

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
    """Two minimisers where no optimum is known, each the best of several starts.

    full_NN, all_NN      their heat maps: of the full-batch loss, and of the mean loss of all mini-batches
    distance             between the two, under the best relabelling
    full_losses          the full-batch loss of the one and of the other
    all_losses           the mean mini-batch loss of the one and of the other
    full_minima          the full-batch loss that each start ended at
    all_minima           the mini-batch loss: first of the random starts, then of those next to the full batch's
    slopes               the length of a loss's gradient along the spheres, at the full batch's minimiser: of the
                         full-batch loss, which must vanish, and of the mini-batch loss
    """

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
    every = _descended(_beside(random, _moved(full, 1e-3)), every_KB, rates[1], steps[1])
    of_full, of_every = (_losses(pairs, every_KB) for pairs in (full, every))
    best_full, best_every = int(of_full[0].argmin()), int(of_every[1].argmin())
    one_NN, other_NN = full.gram_RNN[best_full], every.gram_RNN[best_every]
    return Unproven(
        full_NN=one_NN,
        all_NN=other_NN,
        distance=relabelled_distance(one_NN, other_NN),
        full_losses=(float(of_full[0][best_full]), float(of_every[0][best_every])),
        all_losses=(float(of_full[1][best_full]), float(of_every[1][best_every])),
        full_minima=tuple(of_full[0].tolist()),
        all_minima=tuple(of_every[1].tolist()),
        slopes=(float(_slope(full, whole_1N)[best_full]), float(_slope(full, every_KB)[best_full])),
    )


def _descended(pairs: Pairs, batches_KB: Tensor, rate: float, steps: int) -> Pairs:
    for _ in range(steps):
        pairs = descended(pairs, batches_KB, rate)
    return pairs


def _moved(pairs: Pairs, by: float) -> Pairs:
    noise = torch.Generator().manual_seed(0)
    moved = (
        rows.unit_RND + by * torch.randn(rows.unit_RND.shape, dtype=torch.float64, generator=noise)
        for rows in (pairs.u, pairs.v)
    )
    return pairs_of(*moved)


def _beside(one: Pairs, other: Pairs) -> Pairs:
    """The runs of both."""
    return pairs_of(*(torch.cat([a.unit_RND, b.unit_RND]) for a, b in ((one.u, other.u), (one.v, other.v))))


def _losses(pairs: Pairs, every_KB: Tensor) -> tuple[Tensor, Tensor]:
    gram_RNN = pairs.gram_RNN
    return contrastive_loss(gram_RNN), batch_losses(gram_RNN, every_KB).mean(-1)


def _slope(pairs: Pairs, batches_KB: Tensor) -> Tensor:
    slope_RNN = gram_gradient(pairs.gram_RNN, batches_KB)
    along_u = tangent(pairs.u, slope_RNN @ pairs.v.unit_RND)
    along_v = tangent(pairs.v, slope_RNN.mT @ pairs.u.unit_RND)
    length_R: Tensor = torch.linalg.matrix_norm(torch.cat([along_u, along_v], dim=-2))
    return length_R
