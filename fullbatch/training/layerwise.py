"""Optimizers that scale each tensor's step by a norm of its own.

LARS: You et al. 2017 (https://arxiv.org/abs/1708.03888), timm's numbers to rounding, in a form that a CUDA graph can
hold: whole lists of tensors at a time, and nothing that the host would have to wait for.
NovoGrad: Ginsburg et al. 2019, Algorithm 1 (https://arxiv.org/abs/1905.11286).
"""

# n: tensors of a group

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullbatch.distributed import towers

_TRUST, _EPS = 0.001, 1e-8  # of LARS


def trust_ratios(
    weights: list[Tensor], gradients: list[Tensor], coefficient: float, decay: float, eps: float
) -> Tensor:
    """coefficient |w| / (|g| + decay |w| + eps) of each tensor, (n,); 1 where a norm is 0.  You et al., eq. (6)."""
    weight_n, gradient_n = (
        torch.stack([towers.whole(norm) for norm in torch._foreach_norm(tensors)]) for tensors in (weights, gradients)
    )
    ratio_n = coefficient * weight_n / (gradient_n + decay * weight_n + eps)
    return torch.where((weight_n > 0.0) & (gradient_n > 0.0), ratio_n, 1.0)


class Lars(torch.optim.Optimizer):
    """Momentum SGD whose step of each tensor is scaled to the tensor's own norm.  A group is scaled where it decays or
    ``always_adapt`` says so; others (gains, biases) take the plain step."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "always_adapt": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradient is there before the step"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._move(weights, [weight.grad for weight in weights], group)

    def _move(self, weights: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        if decay or group["always_adapt"]:
            ratio_n = trust_ratios(weights, updates, _TRUST, decay, _EPS)
            decayed = torch._foreach_add(updates, weights, alpha=decay)
            updates = list(torch._foreach_mul(decayed, list(ratio_n.unbind())))
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(weights, torch._foreach_mul(buffers, group["lr"]))


class NovoGrad(torch.optim.Optimizer):
    """One second moment a tensor, from the norm of its gradient; weight decay is added after the normalisation.  The
    first moment is a sum, not a mean, so a step is up to 1 / (1 - beta1) times lr long."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradient is there before the step"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, gradient = self.state[weight], weight.grad
                if not state:
                    state["first_moment"] = torch.zeros_like(weight)
                    state["second_moment"] = weight.new_zeros(())
                # a layer's first gradient sets v = |g|^2 and m = g / |g| + d w; v = 0 says that none has come yet
                square, fresh = gradient.square().sum(), state["second_moment"] == 0
                moved = beta2 * state["second_moment"] + (1.0 - beta2) * square
                state["second_moment"] = torch.where(fresh, square, moved)
                root = state["second_moment"].sqrt()
                tiny = torch.finfo(gradient.dtype).tiny  # so that a gradient of zeros moves nothing
                divisor = torch.where(fresh, root, root + group["eps"]).clamp_min(tiny)
                update = gradient / divisor + group["weight_decay"] * weight
                state["first_moment"] = beta1 * state["first_moment"] + update
                weight.sub_(group["lr"] * state["first_moment"])
