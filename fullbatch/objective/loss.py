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
    loss: Tensor
    alpha_B: Tensor
    log_ratio_B: Tensor


def direction_loss(direction: Direction, estimate: Estimate, times_temperature: bool) -> DirectionLoss:
    """tau mean_i((epsilon + g_i) / exp(alpha_i) - 1 + alpha_i): NeuCLIP eq. (6) at the method's alpha.

    Where alpha carries no gradient this is the surrogate with eq. (4)'s gradient, and its tau factors make the
    temperature's gradient eq. (13); where alpha does, it is eq. (12) itself.
    """
    tau_B = direction.factor_B if times_temperature else torch.ones_like(direction.tau_B)
    alpha_B = raise_stale(estimate.alpha_B, estimate.log_total_B, direction.guard)
    log_ratio_B = estimate.log_total_B - alpha_B
    ratio_tau_B = tau_B if estimate.tau_on_ratio else tau_B.detach()
    alpha_tau_B = tau_B if estimate.tau_on_alpha else tau_B.detach()
    loss = torch.mean(ratio_tau_B * (torch.exp(log_ratio_B) - 1.0) + alpha_tau_B * alpha_B)
    return DirectionLoss(loss, alpha_B.detach(), log_ratio_B.detach())


def raw_positive(direction: Direction, times_temperature: bool) -> Tensor:
    """-mean_i s_ii, over tau where the loss is not multiplied by it: what a gap would have had in its exponent."""
    if times_temperature:
        return -direction.positive_B.mean()
    return -(direction.positive_B / direction.tau_B).mean()


class Summary:
    """Means over this rank's anchors, direction by direction, then over ranks in one go."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}
        self.taus: list[Tensor] = []

    def add(self, direction: Direction, estimate: Estimate, part: DirectionLoss, penalty: Tensor) -> None:
        tau_B, name = direction.tau_B.detach(), direction.name
        full = torch.mean(tau_B * (torch.exp(part.log_ratio_B) - 1.0 + part.alpha_B)) + penalty.detach()
        guarded = (estimate.alpha_B.detach() < part.alpha_B).to(full.dtype).mean()
        self.means["global_loss"] = self.means.get("global_loss", 0.0) + full
        self.means["guarded"] = self.means.get("guarded", 0.0) + 0.5 * guarded
        self.means[f"log_normalizer_{name}"] = part.alpha_B.mean()
        self.means[f"log_batch_mean_{name}"] = estimate.log_total_B.detach().mean()
        self.means[f"log_ratio_{name}"] = part.log_ratio_B.mean()
        self.taus.append(direction.tau_N)

    def metrics(self, batch: Batch, positive_term: Tensor | None) -> Metrics:
        self.means["positive_similarity"] = batch.positive_B.detach().mean()
        if positive_term is not None:
            self.means["global_loss"] = self.means["global_loss"] + positive_term.detach()
        values = distributed.mean_over_ranks(torch.stack(list(self.means.values())))
        metrics: Metrics = dict(zip(self.means, values.unbind(), strict=True))
        tau = torch.stack(self.taus)
        metrics.update(tau=tau.mean(), tau_min=tau.min(), tau_max=tau.max())
        return metrics
