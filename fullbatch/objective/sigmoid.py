"""SigLIP: a sigmoid over every pair, no normalizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fullbatch.kernels.log_mean_exp import Table, sum_softplus_of_batch
from fullbatch.objective.step import Batch


def sigmoid_loss(batch: Batch, tau_B: Tensor, tau_N: Tensor, bias: Tensor, chunk: int | None) -> Tensor:
    """mean_i of -log sigmoid(s_ii / tau + b) + sum_{j != i} softplus(s_ij / tau + b).

    In the kernel's terms the bias is a reference: (s - r) / tau with r = -b tau.
    """
    reference_B, reference_N = -bias * tau_B, -bias.detach() * tau_N
    image, text = (
        Table(side.local_BD, side.all_ND, reference_B, reference_N, tau_B, tau_N) for side in (batch.image, batch.text)
    )
    negatives_B = sum_softplus_of_batch(image, text, batch.rows, chunk)
    positives_B = -logsigmoid(batch.positive_B / tau_B + bias)
    return torch.mean(positives_B + negatives_B)
