"""Normalizers that need no network: the batch's own mean, and a moving average per sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fullbatch.config import BatchMean, MovingAverage, Scent
from fullbatch.objective.log_domain import cosine_gamma, log_add, log_moving_average, log_scent
from fullbatch.objective.per_sample import PerSampleTable, TableOptions, log_mean_within, same_id_groups
from fullbatch.objective.step import Direction, Estimate, Progress


class BatchMeanNormalizer(nn.Module):
    """alpha_i = log(epsilon + g_i(batch)); with epsilon = 1/(number of negatives) this is CLIP's InfoNCE."""

    def __init__(self, config: BatchMean) -> None:
        super().__init__()
        self.config = config

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        epsilon = 1.0 / direction.negatives if self.config.epsilon is None else self.config.epsilon
        log_total_B = log_add(direction.log_g_B, epsilon)
        return Estimate(log_total_B.detach(), log_total_B, tau_on_ratio=False, tau_on_alpha=True)


class MovingAverageNormalizer(nn.Module):
    """alpha_i = log u_i, the new u of NeuCLIP eq. (3), so that the gradient is eq. (4) and tau's eq. (13).

    In eval mode u is what is remembered; a row never seen has only its batch to go by.  SCENT differs in gamma alone,
    which is a sample's own.

    ``shared``: u_i <- (1 - gamma) u_i + gamma (g1_i + g2_i) / 2 is kept, the same in the tables of both directions, and
    each divides by (1 - gamma) u_i + gamma g_i of its own.  Where images and texts have ids of their own, a pair's g
    counts for both ids.
    """

    def __init__(self, config: MovingAverage | Scent, table: TableOptions, name: str) -> None:
        super().__init__()
        self.config = config
        self.log_u = PerSampleTable(table, f"{name}.log_u")

    def gamma(self, progress: Progress) -> float | None:
        """The weight of a new value; None: every sample has its own."""
        if isinstance(self.config, Scent):
            return None
        return cosine_gamma(self.config.gamma, self.config.gamma_epochs, progress.epoch)

    def moved(self, log_u_N: Tensor, log_new_N: Tensor, progress: Progress) -> Tensor:
        if isinstance(self.config, Scent):
            return log_scent(log_u_N, log_new_N, self.config.log_step)
        return log_moving_average(
            log_u_N, log_new_N, cosine_gamma(self.config.gamma, self.config.gamma_epochs, progress.epoch)
        )

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        ids_N = direction.anchor.ids_N
        assert ids_N is not None
        group_N = same_id_groups(ids_N)
        log_new_N = log_mean_within(log_add(direction.log_g_N, self.config.epsilon), group_N)
        log_old_N = self.log_u.get(ids_N, log_new_N.dtype)
        if progress.training:
            log_u_N = log_kept_N = self.moved(log_old_N, log_new_N, progress)
            if isinstance(self.config, MovingAverage) and self.config.shared:
                log_other_N = log_mean_within(log_add(direction.other_log_g_N, self.config.epsilon), group_N)
                log_mean_N = torch.logaddexp(log_new_N, log_other_N) - math.log(2.0)
                log_kept_N = self.moved(log_old_N, log_mean_N, progress)
            self.log_u.put(ids_N, log_kept_N, group_N, progress)
        else:
            log_u_N = torch.where(torch.isnan(log_old_N), log_new_N, log_old_N)
        log_total_B = log_add(direction.log_g_B, self.config.epsilon)
        return Estimate(log_u_N[direction.rows], log_total_B, tau_on_ratio=False, tau_on_alpha=True)
