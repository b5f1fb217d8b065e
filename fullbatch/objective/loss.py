"""From a direction and its normalizer's estimate to the loss and to the numbers that are reported."""

# B: rows on this rank   N: rows on all ranks

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.objective.log_domain import raise_stale
from fullbatch.objective.step import Batch, Direction, Estimate

Metrics = dict[str, Tensor | float]


@dataclass(frozen=True)
class DirectionLoss:
    """The loss, and what is reported of its anchors, detached."""

    loss: Tensor
    alpha_B: Tensor
    log_ratio_B: Tensor
    full_B: Tensor  # tau (ratio - 1 + alpha), whatever the loss leaves out of it


def direction_loss(direction: Direction, estimate: Estimate, times_temperature: bool) -> DirectionLoss:
    """tau mean_i((epsilon + g_i) / exp(alpha_i) - 1 + alpha_i): NeuCLIP eq. (6) at the method's alpha.

    Where alpha carries no gradient this is the surrogate with eq. (4)'s gradient, and its tau factors make the
    temperature's gradient eq. (13); where alpha does, it is eq. (12) itself.
    """
    alpha_B = estimate.alpha_B
    if not estimate.fresh:
        alpha_B = raise_stale(alpha_B, estimate.log_total_B, direction.guard)
    log_ratio_B = estimate.log_total_B - alpha_B
    excess_B = log_ratio_B if estimate.fresh else torch.expm1(log_ratio_B)  # at 0 equal, and so are their slopes
    if times_temperature:
        tau_B = direction.factor_B
        ratio_tau_B = tau_B if estimate.tau_on_ratio else tau_B.detach()
        alpha_tau_B = tau_B if estimate.tau_on_alpha else tau_B.detach()
        loss_B = ratio_tau_B * excess_B + alpha_tau_B * alpha_B
        full_B = loss_B.detach()
    else:
        loss_B = excess_B + alpha_B
        full_B = direction.tau_B.detach() * loss_B.detach()
    return DirectionLoss(loss_B.mean(), alpha_B.detach(), log_ratio_B.detach(), full_B)


def raw_positive(direction: Direction, times_temperature: bool) -> Tensor:
    """-mean_i s_ii, over tau where the loss is not multiplied by it: what a gap would have had in its exponent."""
    if times_temperature:
        return -direction.positive_B.mean()
    return -(direction.positive_B / direction.tau_B).mean()


_REPORTED = ("full", "guarded", "log_normalizer", "log_batch_mean", "log_ratio")  # of each direction


class Summary:
    """What is reported: means over this rank's anchors, then over ranks, in few operations."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.means: list[Tensor] = []
        self.terms: dict[str, Tensor] = {}
        self.taus: list[Tensor] = []

    def add(self, direction: Direction, estimate: Estimate, part: DirectionLoss) -> None:
        guarded_B = (estimate.alpha_B.detach() < part.alpha_B).to(part.full_B.dtype)
        rows = (part.full_B, guarded_B, part.alpha_B, estimate.log_total_B.detach(), part.log_ratio_B)
        self.names += [f"{kind}_{direction.name}" for kind in _REPORTED]
        self.means.append(torch.stack(rows).mean(dim=1))
        self.taus.append(direction.tau_N)

    def add_term(self, name: str, term: Tensor) -> None:
        """Of the loss, besides its directions."""
        self.terms[f"full_{name}"] = term.detach()

    def metrics(self, batch: Batch) -> Metrics:
        alone = {**self.terms, "positive_similarity": batch.positive_B.detach().mean()}
        values = distributed.mean_over_ranks(torch.cat([*self.means, torch.stack(list(alone.values()))]))
        named = dict(zip([*self.names, *alone], values.unbind(), strict=True))
        full, guarded = ([named.pop(key) for key in list(named) if key.startswith(kind)] for kind in _REPORTED[:2])
        least, most = torch.aminmax(tau := torch.stack(self.taus))
        spread = {"tau": tau.mean(), "tau_min": least, "tau_max": most}
        return {"global_loss": sum(full), "guarded": 0.5 * sum(guarded), **named, **spread}
