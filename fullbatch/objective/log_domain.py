"""The equations that never leave the log domain, one function each."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_or_minus_inf(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def log_add(log_x: Tensor, value: float) -> Tensor:
    """log(value + x); log(epsilon + g_i) when value is epsilon.  NeuCLIP eq. (1)."""
    return torch.logaddexp(log_x, torch.full_like(log_x, log_or_minus_inf(value)))


def log_moving_average(log_u: Tensor, log_new: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) u + gamma new), NeuCLIP eq. (3).  A row never seen (NaN) starts at ``new``."""
    moved = torch.logaddexp(log_u + log_or_minus_inf(1.0 - gamma), log_new + math.log(gamma))
    return torch.where(torch.isnan(log_u), log_new, moved)


def log_scent(log_u: Tensor, log_new: Tensor, log_step: float) -> Tensor:
    """log((1 - gamma) u + gamma new) with gamma = sigmoid(log_step + log u).  A row never seen starts at ``new``."""
    moved = torch.logaddexp(log_u + logsigmoid(-log_step - log_u), log_new + logsigmoid(log_step + log_u))
    return torch.where(torch.isnan(log_u), log_new, moved)


def cosine_gamma(gamma: float, gamma_epochs: float | None, epoch: float) -> float:
    """FastCLIP's schedule: 1 in epoch 0, then a cosine down to ``gamma``."""
    if gamma_epochs is None:
        return gamma
    share = min(epoch / gamma_epochs, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * share)) * (1.0 - gamma) + gamma


def bounded_exp(log_weight: Tensor, guard: float) -> Tensor:
    return torch.exp(log_weight.clamp(max=guard))


def raise_stale(alpha: Tensor, log_total: Tensor, guard: float) -> Tensor:
    """alpha, raised where exp(log_total - alpha), the anchor's weight, would pass exp(guard).  With the exact alpha a
    weight is at most (n - 1) / (B - 1); far beyond, the normalizer is stale.  The shift carries no gradient, so alpha's
    own stays what it was."""
    return alpha + (log_total - guard - alpha).detach().clamp(min=0.0)
