"""Positives that are not part of the gap: re-weighted towards the hard ones (iSogCLR_New_v2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fullbatch.config import RobustPositives
from fullbatch.objective.log_domain import log_moving_average
from fullbatch.objective.step import Batch, Progress


class PositiveWeights(nn.Module):
    """-2 mean_i p_i s_ii with p_i = exp(-2 s_ii / lambda) / r, r one running mean that starts after epoch 0; p carries
    no gradient."""

    log_r: Tensor

    def __init__(self, config: RobustPositives) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("log_r", torch.tensor(math.nan))

    def forward(self, batch: Batch, progress: Progress) -> Tensor:
        log_weight_N = -2.0 * batch.positive_N / self.config.strength
        log_mean = torch.logsumexp(log_weight_N, dim=0) - math.log(batch.size)
        gamma = self.config.gamma if progress.epoch > 0 else 1.0
        log_r = log_moving_average(self.log_r.to(log_mean.dtype), log_mean, gamma)
        if progress.training:
            self.log_r.copy_(log_r)
        weight_B = torch.exp(log_weight_N[batch.rows] - log_r)
        return -2.0 * (weight_B * batch.positive_B).mean()
