"""The full-batch and the mini-batch loss along one angle: not the same function, the same minimiser.

Cho et al. 2023, Proposition 1 and Figure 1(a): N = 10 pairs in the plane at the optimum, of which u_1 alone is turned.
"""

# T: angles  N: pairs  K: batches

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fullbatch.theory.embeddings import all_batches, batch_losses, contrastive_loss


@dataclass(frozen=True)
class Turn:
    """angle       of u_1 from where it belongs, from -pi to pi
    full        the full-batch loss there
    mini        the mean loss of all mini-batches there
    """

    angle: tuple[float, ...]
    full: tuple[float, ...]
    mini: tuple[float, ...]

    @property
    def best_angles(self) -> tuple[float, float]:
        """Where each loss is least."""
        return self.angle[self.full.index(min(self.full))], self.angle[self.mini.index(min(self.mini))]

    @property
    def ratios(self) -> tuple[float, float]:
        """The least and the greatest ratio of the two: one constant would make them the same (Proposition 1)."""
        ratios = [full / mini for full, mini in zip(self.full, self.mini, strict=True)]
        return min(ratios), max(ratios)


def turn(count: int = 10, batch_size: int = 2, angles: int = 361) -> Turn:
    """The optimum in the plane is the regular polygon; u_1 = v_1 stands at angle 0."""
    at_T = torch.linspace(-math.pi, math.pi, angles, dtype=torch.float64)
    place_N = torch.arange(count, dtype=torch.float64) * (2.0 * math.pi / count)
    turned_TN = place_N.repeat(angles, 1)
    turned_TN[:, 0] = at_T
    gram_TNN = torch.cos(turned_TN.unsqueeze(-1) - place_N)
    mini_T = batch_losses(gram_TNN, all_batches(count, batch_size)).mean(-1)
    return Turn(tuple(at_T.tolist()), tuple(contrastive_loss(gram_TNN).tolist()), tuple(mini_T.tolist()))
