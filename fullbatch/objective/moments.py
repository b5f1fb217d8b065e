"""Losses of second moments: CyCLIP's consistency penalties and VICReg.  No B x B matrix is ever needed."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.config import CycleConsistency, VarianceCovariance
from fullbatch.objective.step import Batch, Rows


def _over_all(of_all: Tensor, of_local: Tensor) -> Tensor:
    """A sum over all ranks' rows whose gradient flows to this rank's, times the number of ranks (DDP's mean)."""
    return of_all + (of_local - of_local.detach()) * distributed.world().size


def _gram(first: Rows, second: Rows) -> Tensor:
    """sum_i first_i second_i^T over all ranks, D x D."""
    return _over_all(first.all_ND.T @ second.all_ND, first.local_BD.T @ second.local_BD)


def cycle_consistency(batch: Batch, config: CycleConsistency) -> Tensor:
    """CyCLIP: in_modal/N sum_ij (image_i.image_j - text_i.text_j)^2 + cross_modal/N sum_ij (s_ij - s_ji)^2.

    With the Gram matrices A = image^T image, B = text^T text, C = image^T text the sums are |A|^2 + |B|^2 - 2|C|^2 and
    2<A, B> - 2<C, C^T>.
    """
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
