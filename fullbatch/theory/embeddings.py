"""Free embeddings on the sphere, the contrastive loss of their mini-batches, and the heat maps known to be optimal.

Cho et al. 2023, sections 3 and 4: there are no encoders, the vectors themselves are what descends.
Everything takes leading axes, so that seeds, settings and batches are descended side by side.
"""

# 2: the paper's U and V  R: runs side by side (any leading axes)  N: pairs  D: width  K: batches  B: pairs of a batch
# S: heat maps

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

import torch
from torch import Tensor

_MOST_RELABELLED = 9


@dataclass(frozen=True)
class FreePairs:
    """The paper's U and V, whose columns are rows here."""

    unit_2RND: Tensor  # directions
    length_2RN1: Tensor  # of the vectors that descend: 1 where they are normalised each step

    @classmethod
    def of(cls, vectors_2RND: Tensor, free: bool = False) -> FreePairs:
        """From any vectors: their directions, and their lengths if they are ``free``."""
        length_2RN1 = vectors_2RND.norm(dim=-1, keepdim=True)
        return cls(vectors_2RND / length_2RN1, length_2RN1 if free else torch.ones_like(length_2RN1))

    @property
    def gram_RNN(self) -> Tensor:
        """The paper's heat map: entry (i, j) is u_i . v_j."""
        return self.unit_2RND[0] @ self.unit_2RND[1].mT

    def gradient(self, batches_KB: Tensor) -> Tensor:
        """The derivative of the mean loss of the batches by the unit vectors, (2, R, N, D)."""
        slope_RNN = gram_gradient(self.gram_RNN, batches_KB)
        return torch.stack([slope_RNN @ self.unit_2RND[1], slope_RNN.mT @ self.unit_2RND[0]])

    def along_sphere(self, gradient_2RND: Tensor) -> Tensor:
        """The part of a gradient that turns the vectors."""
        return gradient_2RND - (gradient_2RND * self.unit_2RND).sum(-1, keepdim=True) * self.unit_2RND


def random_pairs(count: int, width: int, seeds: int, free: bool = False) -> FreePairs:
    """Normal vectors, normalised (section 6.1) or left as long as they are; run r depends on seed r alone."""
    drawn = [
        torch.randn(2, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in range(seeds)
    ]
    return FreePairs.of(torch.stack(drawn, dim=1), free)


@cache
def all_batches(count: int, batch_size: int) -> Tensor:
    """Every batch there is, (K, B) with K = C(N, B); the full batch is the only one of its size."""
    return torch.tensor(list(combinations(range(count), batch_size)))


def contrastive_loss(gram_RNN: Tensor) -> Tensor:
    """Lcon of eq. (2): InfoNCE at temperature 1, both directions added."""
    positive_RN = gram_RNN.diagonal(dim1=-2, dim2=-1)
    return (gram_RNN.logsumexp(-1) + gram_RNN.logsumexp(-2) - 2.0 * positive_RN).mean(-1)


def batch_losses(gram_RNN: Tensor, batches_KB: Tensor) -> Tensor:
    """Lcon of each batch, (R, K); ``batches`` may have leading axes of its own, those of the runs."""
    return contrastive_loss(_blocks(gram_RNN, batches_KB)[0])


def gram_gradient(gram_RNN: Tensor, batches_KB: Tensor) -> Tensor:
    """The derivative of the mean loss of the batches, eq. (4), by the heat map's entries.

    Of one batch it is (row softmax + column softmax - 2 I) / B; what a batch does not see stays zero.
    """
    blocks_RKBB, places = _blocks(gram_RNN, batches_KB)
    size, batches = batches_KB.shape[-1], batches_KB.shape[-2]
    eye_BB = torch.eye(size, dtype=gram_RNN.dtype)
    slope_RKBB = (blocks_RKBB.softmax(-1) + blocks_RKBB.softmax(-2) - 2.0 * eye_BB) / (size * batches)
    gradient = torch.zeros_like(gram_RNN).flatten(-2).scatter_add(-1, places, slope_RKBB.flatten(-3))
    return gradient.view(gram_RNN.shape)


def _blocks(gram_RNN: Tensor, batches_KB: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the heat map that each batch sees, (R, K, B, B), and where its entries lie in the flattened map."""
    places_KBB = batches_KB.unsqueeze(-1) * gram_RNN.shape[-1] + batches_KB.unsqueeze(-2)
    shape = gram_RNN.shape[:-2] + places_KBB.shape[-3:]
    places = places_KBB.expand(shape).flatten(-3)
    return gram_RNN.flatten(-2).gather(-1, places).view(shape), places


def descended(pairs: FreePairs, batches_KB: Tensor, rate: float, free: bool = False) -> FreePairs:
    """One step of gradient descent on the mean loss of the batches, then all rows are normalised again: the paper's
    Algorithms 4 to 7, lines 4 to 6.

    ``free`` is the authors' code: the gradient goes through the normalisation, the rows keep their length.  They only
    get longer, so their directions move by ever smaller steps: a learning rate that falls by itself.
    """
    gradient_2RND = pairs.gradient(batches_KB)
    if free:
        gradient_2RND = pairs.along_sphere(gradient_2RND) / pairs.length_2RN1
    return FreePairs.of(pairs.unit_2RND * pairs.length_2RN1 - rate * gradient_2RND, free)


# ---------------------------------------------------------------------------------------------------------------------
# optima: a simplex equiangular tight frame where N <= d + 1, a cross-polytope where N = 2d (Theorems 3 and 4)


def simplex(count: int) -> Tensor:
    """u_i . u_j = -1 / (N - 1): definition 1.  It is the same under every relabelling."""
    return torch.full((count, count), -1.0 / (count - 1), dtype=torch.float64).fill_diagonal_(1.0)


def cross_polytope(partner_N: Tensor) -> Tensor:
    """u_i = -u_partner(i), all else orthogonal: definition 3."""
    eye_NN = torch.eye(len(partner_N), dtype=torch.float64)
    return eye_NN - eye_NN[partner_N]


def optimum_of(count: int, width: int, gram_SNN: Tensor) -> Tensor | None:
    """The optimal heat map nearest to each of these; None where nobody has proved which it is."""
    if count <= width + 1:
        return simplex(count).expand(gram_SNN.shape)
    if count == 2 * width:
        maps = gram_SNN.reshape(-1, count, count)
        return torch.stack([cross_polytope(partner) for partner in antipodes(maps)]).view(gram_SNN.shape)
    return None


def distance(count: int, width: int, gram_SNN: Tensor) -> Tensor:
    """Frobenius norm of the difference to the nearest optimal heat map (section 6.1, Figure 4e)."""
    target = optimum_of(count, width, gram_SNN)
    if target is None:
        raise ValueError(f"The optimum is known for N <= d + 1 and for N = 2d only, not for N = {count}, d = {width}.")
    away_S: Tensor = torch.linalg.matrix_norm(gram_SNN - target)
    return away_S


def antipodes(gram_SNN: Tensor) -> Tensor:
    """Each heat map's partners in the nearest cross-polytope, (S, N): exactly, the perfect matching of least weight.

    |G - I + M|^2 depends on the matching M only by the sum of G over its pairs.
    """
    if gram_SNN.shape[-1] % 2:
        raise ValueError(f"An antipodal matching needs an even number of vectors, got {gram_SNN.shape[-1]}.")
    return torch.tensor([_matching(cost_NN) for cost_NN in (gram_SNN + gram_SNN.mT).tolist()])


def _matching(cost_NN: list[list[float]]) -> list[int]:
    """Branch and bound: the first free vertex is matched next, with the cheapest partner first.

    No matching of the free vertices costs less than half the sum of their cheapest edges.
    """
    count = len(cost_NN)
    half_N = [min(cost for other, cost in enumerate(row) if other != vertex) / 2 for vertex, row in enumerate(cost_NN)]
    least, best = math.inf, list[tuple[int, int]]()

    def extend(free: list[int], cost: float, pairs: list[tuple[int, int]]) -> None:
        nonlocal least, best
        if not free:
            least, best = cost, pairs
            return
        first, *others = free
        bound = cost + sum(half_N[vertex] for vertex in others)
        for other in sorted(others, key=cost_NN[first].__getitem__):
            if bound - half_N[other] + cost_NN[first][other] < least:
                left = [vertex for vertex in others if vertex != other]
                extend(left, cost + cost_NN[first][other], [*pairs, (first, other)])

    extend(list(range(count)), 0.0, [])
    partner = [0] * count
    for first, other in best:
        partner[first], partner[other] = other, first
    return partner


def relabelled_distance(one_NN: Tensor, other_NN: Tensor) -> float:
    """The least Frobenius norm of one - P other P^T over all N! relabellings P: where no optimum is known."""
    count = len(one_NN)
    if count > _MOST_RELABELLED:
        raise ValueError(f"All relabellings are tried, which is for at most {_MOST_RELABELLED} vectors, got {count}.")
    order = torch.tensor(list(permutations(range(count))))
    moved = other_NN[order.unsqueeze(-1), order.unsqueeze(-2)]
    return float(torch.linalg.matrix_norm(moved - one_NN).min())
