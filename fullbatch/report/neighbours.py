"""Which samples are near which, a block of rows at a time: no matrix larger than chunk x N exists."""

# N: samples   C: rows at hand   D: width   P: numbers of a tiny picture   K: kept

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[int, int, float]  # two rows, the first before the second, and a score


def fits_the_other(image_ND: Tensor, text_ND: Tensor, groups_N: Tensor, most: int, chunk: int = 1024) -> list[Pair]:
    """Pairs by min(s_ij, s_ji) - max(s_ii, s_jj), greatest first.

    At 0 and above, each picture fits the other's caption no worse than either fits its own.  Rows of one group (equal
    captions) make no pair.
    """
    own_N = (image_ND * text_ND).sum(dim=1)

    def scores(rows: slice) -> Tensor:
        cross_CN = torch.minimum(image_ND[rows] @ text_ND.T, text_ND[rows] @ image_ND.T)
        cross_CN -= torch.maximum(own_N[rows, None], own_N[None, :])
        return cross_CN.masked_fill_(groups_N[rows, None].to(own_N.device) == groups_N.to(own_N.device), -torch.inf)

    return _best_pairs(len(own_N), scores, most, chunk)


def looks_alike(tiny_NP: Tensor, most: int, within: float, chunk: int = 1024) -> list[Pair]:
    """Pairs of pictures by the negative root mean squared difference of their tiny pixels, if at most ``within``."""
    square_N = tiny_NP.square().mean(dim=1)

    def scores(rows: slice) -> Tensor:
        product_CN = tiny_NP[rows] @ tiny_NP.T / tiny_NP.shape[1]
        squared_CN = (square_N[rows, None] + square_N[None, :] - 2.0 * product_CN).clamp_min_(0.0)
        return -squared_CN.sqrt_()

    return [pair for pair in _best_pairs(len(square_N), scores, most, chunk) if pair[2] >= -within]


def _best_pairs(count: int, scores: Callable[[slice], Tensor], most: int, chunk: int) -> list[Pair]:
    """The ``most`` pairs of rows with the greatest scores; each pair once."""
    best_K = torch.empty(0)
    pairs_K2 = torch.empty((0, 2), dtype=torch.int64)
    for start in range(0, count, chunk):
        score_CN = scores(slice(start, start + chunk))
        later_CN = torch.ones_like(score_CN, dtype=torch.bool).triu_(start + 1)
        flat = score_CN.masked_fill_(~later_CN, -torch.inf).flatten()
        found = flat.topk(min(most, len(flat)))
        rows_K2 = torch.stack((found.indices // count + start, found.indices % count), dim=1)
        best_K, pairs_K2 = torch.cat((best_K, found.values.cpu())), torch.cat((pairs_K2, rows_K2.cpu()))
        kept = best_K.topk(min(most, len(best_K))).indices
        best_K, pairs_K2 = best_K[kept], pairs_K2[kept]
    rows = zip(pairs_K2.tolist(), best_K.tolist(), strict=True)
    return [(first, second, score) for (first, second), score in rows if score > -torch.inf]


def nearest_other(image_ND: Tensor, text_ND: Tensor, groups_N: Tensor, rows: list[int]) -> list[tuple[int, float]]:
    """For each of these rows, the other sample whose caption is nearest to the picture; itself if there is none."""
    rows_K = torch.tensor(rows, device=image_ND.device, dtype=torch.int64)
    groups = groups_N.to(image_ND.device)
    sim_KN = image_ND[rows_K] @ text_ND.T
    sim_KN.masked_fill_(groups[rows_K, None] == groups[None, :], -torch.inf)
    best = sim_KN.max(dim=1)
    found = zip(rows, best.indices.tolist(), best.values.tolist(), strict=True)
    return [(other, score) if score > -torch.inf else (row, 1.0) for row, other, score in found]
