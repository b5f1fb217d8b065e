"""SigLIP: a sigmoid over every pair, no normalizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fullbatch.kernels.log_mean_exp import Remote, sum_softplus
from fullbatch.objective.step import Batch


def sigmoid_loss(batch: Batch, tau_B: Tensor, tau_N: Tensor, bias: Tensor, chunk: int | None) -> Tensor:
    """mean_i of -log sigmoid(s_ii / tau + b) + sum_{j != i} softplus(s_ij / tau + b).

    In the kernel's terms the bias is a reference: (s - r) / tau with r = -b tau.
    """
    reference_B = -bias * tau_B
    reference_N = -bias.detach() * tau_N
    remote = Remote(batch.image.all_ND, batch.text.all_ND, reference_N, tau_N, batch.rows)
    negatives_B = sum_softplus(
        batch.image.local_BD, batch.text.local_BD, reference_B, tau_B, remote=remote, chunk=chunk
    )
    positives_B = -logsigmoid(batch.positive_B / tau_B + bias)
    return torch.mean(positives_B + negatives_B)
