"""The equations that never leave the log domain, one function each."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_or_minus_inf(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def log_add(log_x: Tensor, value: float) -> Tensor:
    """log(value + x); log(epsilon + g_i) when value is epsilon.  NeuCLIP eq. (1)."""
    return torch.logaddexp(log_x, torch.full_like(log_x, log_or_minus_inf(value)))


def log_moving_average(log_u: Tensor, log_new: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) u + gamma new), NeuCLIP eq. (3).  A row never seen (NaN) starts at ``new``."""
    moved = torch.logaddexp(log_u + log_or_minus_inf(1.0 - gamma), log_new + math.log(gamma))
    return torch.where(torch.isnan(log_u), log_new, moved)


def cosine_gamma(gamma: float, gamma_epochs: float | None, epoch: float) -> float:
    """FastCLIP's schedule: 1 in epoch 0, then a cosine down to ``gamma``."""
    if gamma_epochs is None:
        return gamma
    share = min(epoch / gamma_epochs, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * share)) * (1.0 - gamma) + gamma


def temperature_gradient(alpha: Tensor, log_g: Tensor, mean_exponent: Tensor, rho: float) -> Tensor:
    """d/d tau_i of tau_i (log(epsilon + g_i) + rho) at the estimate alpha_i of the log.  iSogCLR; NeuCLIP eq. (13)."""
    return alpha + rho - bounded_exp(log_g - alpha) * mean_exponent


# exp(log g - alpha) weighs an anchor. With the exact alpha it is at most (n - 1) / (B - 1), below exp(16) for a billion
# samples at B = 128: beyond that the normalizer is stale, not the anchor important.
LOG_WEIGHT_BOUND = 16.0


def bounded_exp(log_weight: Tensor) -> Tensor:
    return torch.exp(log_weight.clamp(max=LOG_WEIGHT_BOUND))


def raise_stale(alpha: Tensor, log_total: Tensor) -> Tensor:
    """alpha, raised where exp(log_total - alpha) would pass the bound; there its own gradient is cut."""
    return torch.maximum(alpha, (log_total - LOG_WEIGHT_BOUND).detach())
