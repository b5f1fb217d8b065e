"""Free embeddings on the sphere, and the contrastive loss of the mini-batches that are drawn from them.

Cho et al. 2023, sections 3 and 4: there are no encoders, the vectors themselves are what descends.
Everything takes leading axes, so that seeds, settings and batches are descended side by side.
"""

# R: runs side by side (any leading axes)  N: pairs  D: width  K: batches  B: pairs of a batch

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Directions, of unit length, and how long the vectors are that descend; 1 where they are normalised each step."""

    unit_RND: Tensor
    length_RN1: Tensor


@dataclass(frozen=True)
class Pairs:
    """The paper's U and V; its columns are rows here."""

    u: Rows
    v: Rows

    @property
    def gram_RNN(self) -> Tensor:
        """The paper's heat map: entry (i, j) is u_i . v_j."""
        return self.u.unit_RND @ self.v.unit_RND.mT


def random_pairs(count: int, width: int, seeds: int, free: bool = False) -> Pairs:
    """Normal vectors, normalised (section 6.1) or left as long as they are; run r depends on seed r alone."""
    drawn = [
        torch.randn(2, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in range(seeds)
    ]
    u, v = (_rows(drawn_RND) for drawn_RND in torch.stack(drawn, dim=1))
    return Pairs(u, v) if free else Pairs(_normalised(u), _normalised(v))


def pairs_of(u_RND: Tensor, v_RND: Tensor) -> Pairs:
    """From any vectors: their directions."""
    return Pairs(_normalised(_rows(u_RND)), _normalised(_rows(v_RND)))


def all_batches(count: int, batch_size: int) -> Tensor:
    """Every batch there is, (K, B) with K = C(N, B); the full batch is the only one of its size."""
    return torch.tensor(list(combinations(range(count), batch_size)))


def contrastive_loss(gram_RNN: Tensor) -> Tensor:
    """Lcon of eq. (2): InfoNCE at temperature 1, both directions added."""
    positive_RN = gram_RNN.diagonal(dim1=-2, dim2=-1)
    return (gram_RNN.logsumexp(-1) + gram_RNN.logsumexp(-2) - 2.0 * positive_RN).mean(-1)


def batch_losses(gram_RNN: Tensor, batches_KB: Tensor) -> Tensor:
    """Lcon of each batch, (R, K); ``batches`` may have leading axes of its own, those of the runs."""
    return contrastive_loss(_blocks(gram_RNN, batches_KB))


def gram_gradient(gram_RNN: Tensor, batches_KB: Tensor) -> Tensor:
    """The derivative of the mean loss of the batches, eq. (4), by the heat map's entries.

    Of one batch it is (row softmax + column softmax - 2 I) / B; what a batch does not see stays zero.
    """
    blocks_RKBB = _blocks(gram_RNN, batches_KB)
    size, batches = batches_KB.shape[-1], batches_KB.shape[-2]
    eye_BB = torch.eye(size, dtype=gram_RNN.dtype)
    slope_RKBB = (blocks_RKBB.softmax(-1) + blocks_RKBB.softmax(-2) - 2.0 * eye_BB) / (size * batches)
    flat = _places(batches_KB, gram_RNN.shape[-1]).expand(slope_RKBB.shape).flatten(-3)
    gradient = torch.zeros_like(gram_RNN).flatten(-2).scatter_add(-1, flat, slope_RKBB.flatten(-3))
    return gradient.view(gram_RNN.shape)


def descended(pairs: Pairs, batches_KB: Tensor, rate: float) -> Pairs:
    """One step of gradient descent on the mean loss of the batches, then all rows are normalised again.

    As the paper has it: Algorithms 4 to 7, lines 4 to 6.
    """
    slope_RNN = gram_gradient(pairs.gram_RNN, batches_KB)
    u, v = pairs.u, pairs.v
    return Pairs(_stepped(u, slope_RNN @ v.unit_RND, rate), _stepped(v, slope_RNN.mT @ u.unit_RND, rate))


def descended_freely(pairs: Pairs, batches_KB: Tensor, rate: float) -> Pairs:
    """One step as the authors' code takes it: the gradient goes through the normalisation, the rows keep their length.

    They only get longer, so their directions move by ever smaller steps: a learning rate that falls by itself.
    """
    slope_RNN = gram_gradient(pairs.gram_RNN, batches_KB)
    u, v = pairs.u, pairs.v
    return Pairs(_stepped_freely(u, slope_RNN @ v.unit_RND, rate), _stepped_freely(v, slope_RNN.mT @ u.unit_RND, rate))


def tangent(rows: Rows, gradient_RND: Tensor) -> Tensor:
    """The part of a gradient along the sphere."""
    return gradient_RND - (gradient_RND * rows.unit_RND).sum(-1, keepdim=True) * rows.unit_RND


def _stepped(rows: Rows, gradient_RND: Tensor, rate: float) -> Rows:
    moved_RND = rows.unit_RND - rate * gradient_RND
    return Rows(moved_RND / moved_RND.norm(dim=-1, keepdim=True), rows.length_RN1)


def _stepped_freely(rows: Rows, gradient_RND: Tensor, rate: float) -> Rows:
    through_RND = tangent(rows, gradient_RND) / rows.length_RN1
    return _rows(rows.unit_RND * rows.length_RN1 - rate * through_RND)


def _rows(vectors_RND: Tensor) -> Rows:
    length_RN1 = vectors_RND.norm(dim=-1, keepdim=True)
    return Rows(vectors_RND / length_RN1, length_RN1)


def _normalised(rows: Rows) -> Rows:
    return Rows(rows.unit_RND, torch.ones_like(rows.length_RN1))


def _blocks(gram_RNN: Tensor, batches_KB: Tensor) -> Tensor:
    flat = _places(batches_KB, gram_RNN.shape[-1])
    wanted = gram_RNN.shape[:-2] + flat.shape[-3:]
    return gram_RNN.flatten(-2).gather(-1, flat.expand(wanted).flatten(-3)).view(wanted)


def _places(batches_KB: Tensor, count: int) -> Tensor:
    """Where the entries of each batch's block lie in the flattened heat map, (K, B, B)."""
    return batches_KB.unsqueeze(-1) * count + batches_KB.unsqueeze(-2)
