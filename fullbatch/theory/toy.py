"""Four points in the plane: how much sooner ordered SGD leaves a bad start than SGD does; and the loss along one angle.

Cho et al. 2023, section 5.1, Theorem 6 and Figure 2.  u_i = v_i stand at angles +-theta_i from the two ends of the x
axis, all theta_i = epsilon at first; the optimum, a square, is theta_i = pi / 4.
"""

# R: runs side by side  K: batches  B: pairs of a batch, 2

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch.theory.embeddings import all_batches, batch_losses, contrastive_loss, gram_gradient

POINTS = 4
BATCHES = all_batches(POINTS, 2)
GOAL = math.pi / 4
DRIFT_RATIO = 3.0 * (math.e**2 + 1.0) / (math.e**2 - 1.0)  # Corollary 1: how much faster OSGD moves at first
BEST_LOSS = 2.0 * math.log(math.e + 2.0 + 1.0 / math.e) - 2.0  # of the square: 1.253
_ACROSS = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
_UP = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)

Method = Literal["ordered", "uniform", "all_batches", "full"]
METHODS: dict[Method, str] = {"ordered": "OSGD", "uniform": "SGD", "all_batches": "all batches", "full": "full batch"}


@dataclass(frozen=True)
class Start:
    rate: float  # eta
    epsilon: float  # the angle at which all points start


def points(theta_R4: Tensor) -> Tensor:
    """u_1 = (cos, sin), u_2 = (cos, -sin), u_3 = (-cos, -sin), u_4 = (-cos, sin), (R, 4, 2)."""
    return torch.stack([_ACROSS * theta_R4.cos(), _UP * theta_R4.sin()], dim=-1)


def heat_map(theta_R4: Tensor) -> Tensor:
    u_R42 = points(theta_R4)
    return u_R42 @ u_R42.mT


def angle_gradient(theta_R4: Tensor, batches_RKB: Tensor) -> Tensor:
    """The derivative of the mean loss of the batches by the angles; both u_i and v_i turn with theta_i."""
    u_R42 = points(theta_R4)
    turning_R42 = torch.stack([-_ACROSS * theta_R4.sin(), _UP * theta_R4.cos()], dim=-1)
    slope_R44 = gram_gradient(u_R42 @ u_R42.mT, batches_RKB)
    return (turning_R42 * ((slope_R44 + slope_R44.mT) @ u_R42)).sum(-1)


def initial_drifts(epsilon: float) -> tuple[float, float]:
    """How fast an angle grows at first, by unit of rate and expected over the draws: OSGD's, whose two hardest batches,
    {1, 2} and {3, 4}, are alike and come in turn, and SGD's, which draws one of the six."""
    start_4 = torch.full((POINTS,), epsilon, dtype=torch.float64)
    losses_K = batch_losses(heat_map(start_4), BATCHES)
    hardest_KB = BATCHES[losses_K >= losses_K.max() - 1e-14]
    ordered, uniform = (-float(angle_gradient(start_4, batches)[0]) for batches in (hardest_KB, BATCHES))
    return ordered, uniform


def drift_ratio(epsilon: float) -> float:
    """OSGD's drift over SGD's; DRIFT_RATIO in the limit of small epsilon."""
    ordered, uniform = initial_drifts(epsilon)
    return ordered / uniform


@dataclass(frozen=True)
class Path:
    least_T: list[float]  # of each step: the least expected angle of the four points
    loss_T: list[float]  # and the expected full-batch loss

    def hitting_time(self, rho: float) -> int | None:
        """The first step at which every point's expected angle is beyond pi / 4 - rho; None: not within these steps.
        The paper also asks for less than pi / 4, which a step of finite rate may jump over."""
        return next((step for step, least in enumerate(self.least_T) if least > GOAL - rho), None)


def walk(method: Method, start: Start, steps: int, runs: int = 4000, enough: float = GOAL) -> Path:
    """Descend by the method until the least expected angle is beyond ``enough``, or so many steps.  Only SGD is random:
    its expectation is over so many runs and, by symmetry, over the four points."""
    random = method == "uniform"
    theta_R4 = torch.full((runs if random else 1, POINTS), start.epsilon, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    leasts, losses = list[float](), list[float]()
    for _ in range(steps + 1):
        expected_4 = theta_R4.mean(0)
        leasts.append(float(expected_4.mean() if random else expected_4.min()))
        losses.append(float(contrastive_loss(heat_map(theta_R4)).mean()))
        if leasts[-1] > enough:
            break
        theta_R4 = theta_R4 - start.rate * angle_gradient(theta_R4, _chosen(method, theta_R4, generator))
    return Path(leasts, losses)


def _chosen(method: Method, theta_R4: Tensor, generator: torch.Generator) -> Tensor:
    match method:
        case "full":
            return all_batches(POINTS, POINTS)
        case "all_batches":
            return BATCHES
        case "ordered":
            return BATCHES[batch_losses(heat_map(theta_R4), BATCHES).argmax(-1)].unsqueeze(-2)
        case "uniform":
            return BATCHES[torch.randint(len(BATCHES), (len(theta_R4),), generator=generator)].unsqueeze(-2)
        case _:
            assert_never(method)


# ---------------------------------------------------------------------------------------------------------------------
# the loss along one angle: Proposition 1 and Figure 1(a)


@dataclass(frozen=True)
class Turn:
    """N = 10 pairs in the plane at the optimum, of which u_1 alone is turned."""

    angle: list[float]  # of u_1 from where it belongs, from -pi to pi
    full: list[float]  # the full-batch loss there
    mini: list[float]  # the mean loss of all mini-batches there

    @property
    def best_angle(self) -> dict[str, float]:
        """Where each loss is least."""
        losses = {"full": self.full, "mini": self.mini}
        return {name: self.angle[loss.index(min(loss))] for name, loss in losses.items()}

    @property
    def ratio(self) -> dict[str, float]:
        """Of the full-batch loss to the other: one constant would make the two the same (Proposition 1)."""
        ratios = [full / mini for full, mini in zip(self.full, self.mini, strict=True)]
        return {"least": min(ratios), "greatest": max(ratios)}


def turn(count: int = 10, batch_size: int = 2, angles: int = 361) -> Turn:
    """The optimum in the plane is the regular polygon; u_1 = v_1 stands at angle 0."""
    at_T = torch.linspace(-math.pi, math.pi, angles, dtype=torch.float64)
    place_N = torch.arange(count, dtype=torch.float64) * (2.0 * math.pi / count)
    turned_TN = place_N.repeat(angles, 1)
    turned_TN[:, 0] = at_T
    gram_TNN = torch.cos(turned_TN.unsqueeze(-1) - place_N)
    mini_T = batch_losses(gram_TNN, all_batches(count, batch_size)).mean(-1)
    return Turn(at_T.tolist(), contrastive_loss(gram_TNN).tolist(), mini_T.tolist())
