"""The heat maps that are known to be optimal, and how far a heat map is from them.

Cho et al. 2023, Lemma 1 and Theorems 3 and 4: a simplex equiangular tight frame where N <= d + 1, a cross-polytope
where N = 2d.
"""

# S: heat maps  N: pairs

from __future__ import annotations

from functools import cache
from itertools import permutations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
_CHUNK = 512  # heat maps at a time: the search's table of N = 16 holds 16,384 costs a heat map at its widest
_MOST_RELABELLED = 9


def simplex(count: int) -> Tensor:
    """u_i . u_j = -1 / (N - 1): definition 1.  It is the same under every relabelling."""
    off = -1.0 / (count - 1)
    return torch.full((count, count), off, dtype=torch.float64).fill_diagonal_(1.0)


def cross_polytope(partner_N: Tensor) -> Tensor:
    """u_i = -u_partner(i), all else orthogonal: definition 3."""
    count = len(partner_N)
    gram = torch.eye(count, dtype=torch.float64)
    gram[torch.arange(count), partner_N] = -1.0
    return gram


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

    |G - I + M|^2 depends on the matching M only by the sum of G over its pairs.  The least sum is found over all
    matchings at once: always the first free vertex is matched next, so a state is the set that is matched already.
    """
    return torch.cat([_antipodes(chunk) for chunk in torch.split(gram_SNN, _CHUNK)])


def _antipodes(gram_SNN: Tensor) -> Tensor:
    cost_SNN = (gram_SNN + gram_SNN.mT).numpy()
    samples, count = cost_SNN.shape[:2]
    best: Floats = np.zeros((samples, 1))
    chosen: list[Places] = []
    for layer in _layers(count):
        tried = best[:, layer.source] + cost_SNN[:, layer.first, layer.second]
        least = np.minimum.reduceat(tried, layer.start, axis=1)
        # the transition that attains the least, per state: the first one that equals it
        where = np.where(tried == least[:, layer.target], np.arange(tried.shape[1]), tried.shape[1])
        chosen.append(np.minimum.reduceat(where, layer.start, axis=1))
        best = least
    partner: Places = np.zeros((samples, count), dtype=np.int64)
    rows, state = np.arange(samples), np.zeros(samples, dtype=np.int64)
    for layer, move in zip(reversed(_layers(count)), reversed(chosen), strict=True):
        taken = move[rows, state]
        first, second = layer.first[taken], layer.second[taken]
        partner[rows, first], partner[rows, second] = second, first
        state = layer.source[taken]
    return torch.from_numpy(partner)


class _Layer:
    """The moves from sets of 2m matched vertices to sets of 2m + 2, sorted by the set they lead to.

    source   the place of the set they start from, in the layer before
    target   the place of the set they lead to; ``start`` is where a set's moves begin
    """

    def __init__(self, moves: list[tuple[int, int, int, int]]) -> None:
        moves.sort()
        reached, source, first, second = (np.array(column) for column in zip(*moves, strict=True))
        self.sets, self.start, self.target = np.unique(reached, return_index=True, return_inverse=True)
        self.source, self.first, self.second = source, first, second


@cache
def _layers(count: int) -> tuple[_Layer, ...]:
    if count % 2:
        raise ValueError(f"An antipodal matching needs an even number of vectors, got {count}.")
    layers: list[_Layer] = []
    sets = [0]
    for _ in range(count // 2):
        moves = []
        for place, done in enumerate(sets):
            free = [vertex for vertex in range(count) if not done >> vertex & 1]
            moves += [(done | 1 << free[0] | 1 << other, place, free[0], other) for other in free[1:]]
        layers.append(_Layer(moves))
        sets = [int(reached) for reached in layers[-1].sets]
    return tuple(layers)


def relabelled_distance(one_NN: Tensor, other_NN: Tensor) -> float:
    """The least Frobenius norm of one - P other P^T over all relabellings P: where no optimum is known, two solutions
    are compared with each other.  All N! are tried.
    """
    count = len(one_NN)
    if count > _MOST_RELABELLED:
        raise ValueError(f"All relabellings are tried, which is for at most {_MOST_RELABELLED} vectors, got {count}.")
    order = torch.tensor(list(permutations(range(count))))
    moved = other_NN[order.unsqueeze(-1), order.unsqueeze(-2)]
    return float(torch.linalg.matrix_norm(moved - one_NN).min())
