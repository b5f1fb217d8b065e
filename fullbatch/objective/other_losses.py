"""Losses and parts of losses that need no normalizer: CyCLIP's consistency penalties and VICReg, which are second
moments and never need a B x B matrix; SigLIP's sigmoid over every pair; iSogCLR_New_v2's re-weighted positives."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fullbatch import distributed
from fullbatch.config.axes import CycleConsistency, RobustPositives, Sigmoid, VarianceCovariance
from fullbatch.objective.kernel import reduce_batch
from fullbatch.objective.log_domain import log_moving_average
from fullbatch.objective.pairs import Table
from fullbatch.objective.step import Batch, Progress, Rows


def _over_all(of_all: Tensor, of_local: Tensor) -> Tensor:
    """A sum over all ranks' rows whose gradient flows to this rank's, times the number of ranks (DDP's mean)."""
    return of_all + (of_local - of_local.detach()) * distributed.world().size


def _gram(first: Rows, second: Rows) -> Tensor:
    """sum_i first_i second_i^T over all ranks, D x D."""
    local_DD = first.local_BD.T @ second.local_BD
    return local_DD if distributed.world().size == 1 else _over_all(first.all_ND.T @ second.all_ND, local_DD)


def cycle_consistency(batch: Batch, config: CycleConsistency) -> Tensor:
    """CyCLIP: in_modal/N sum_ij (image_i.image_j - text_i.text_j)^2 + cross_modal/N sum_ij (s_ij - s_ji)^2.  With the
    Gram matrices A = image^T image, B = text^T text, C = image^T text the sums are |A|^2 + |B|^2 - 2|C|^2 and 2<A, B> -
    2<C, C^T>."""
    a_DD, b_DD, c_DD = (
        _gram(*pair) for pair in ((batch.image, batch.image), (batch.text, batch.text), (batch.image, batch.text))
    )
    in_modal = a_DD.square().sum() + b_DD.square().sum() - 2.0 * c_DD.square().sum()
    cross_modal = 2.0 * (a_DD * b_DD).sum() - 2.0 * (c_DD * c_DD.T).sum()
    return (config.in_modal * in_modal + config.cross_modal * cross_modal) / batch.size


def variance_covariance(batch: Batch, config: VarianceCovariance) -> Tensor:
    """VICReg (Bardes et al. 2022) on the rows as they are: mean squared distance, hinge on each coordinate's standard
    deviation, squared off-diagonal covariances over the width."""
    count, width = batch.size, batch.image.all_ND.shape[1]
    distance = (batch.image.local_BD - batch.text.local_BD).square().mean()
    total = config.invariance * distance
    for rows in (batch.image, batch.text):
        mean_D = _over_all(rows.all_ND.sum(0), rows.local_BD.sum(0)) / count
        covariance_DD = (_gram(rows, rows) - count * torch.outer(mean_D, mean_D)) / (count - 1)
        deviation_D = (covariance_DD.diagonal() + 1e-4).sqrt()
        off_diagonal = covariance_DD.square().sum() - covariance_DD.diagonal().square().sum()
        total = total + config.variance * torch.relu(1.0 - deviation_D).mean() / 2
        total = total + config.covariance * off_diagonal / width
    return total


def sigmoid_loss(batch: Batch, tau_B: Tensor, tau_N: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """mean_i of -log sigmoid(s_ii / tau + b) + sum_{j != i} softplus(s_ij / tau + b).  In the kernel's terms the bias
    is a reference: (s - r) / tau with r = -b tau.  ``options`` are the kernel's, chunk and operands."""
    reference_B, reference_N = -bias * tau_B, -bias.detach() * tau_N
    image, text = (
        Table(side.local_BD, side.all_ND, reference_B, reference_N, tau_B, tau_N) for side in (batch.image, batch.text)
    )
    negatives = reduce_batch(image, text, batch.rows, columns_are_anchors=False, pairwise=Sigmoid(), **options)
    positives_B = -logsigmoid(batch.positive_B / tau_B + bias)
    return torch.mean(positives_B + negatives.row_value_B)


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
