"""Optimizers that scale each tensor's step by a norm of its own.

LARS: You et al. 2017 (https://arxiv.org/abs/1708.03888), as SimCLR and SogCLR train with it.  timm's numbers to
rounding, in a form that a CUDA graph can hold: whole lists of tensors at a time, nothing decided by a number that the
host would have to wait for, and a learning rate that may lie on the device.

NovoGrad as the paper has it: Ginsburg et al. 2019, Algorithm 1 (https://arxiv.org/abs/1905.11286).
"""

# n: tensors of a group

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullbatch.distributed import towers


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
    """Momentum SGD whose step of each tensor is scaled to the tensor's own norm.

    A group is scaled where it decays or ``always_adapt`` says so; others (gains, biases) take the plain step.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        always_adapt: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

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
            ratio_n = trust_ratios(weights, updates, group["trust_coefficient"], decay, group["eps"])
            decayed = torch._foreach_add(updates, weights, alpha=decay)
            updates = list(torch._foreach_mul(decayed, list(ratio_n.unbind())))
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(weights, torch._foreach_mul(buffers, group["lr"]))


def novograd_moments(
    gradient: Tensor,
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Both moments after this gradient; the weight then moves by -lr times the first.

    A layer's first gradient sets v = |g|^2 and m = g / |g| + d w; a second moment of 0 says that none has come yet.
    """
    beta1, beta2 = betas
    square = gradient.square().sum()
    fresh = second == 0
    new_second = torch.where(fresh, square, beta2 * second + (1.0 - beta2) * square)
    root = new_second.sqrt()
    tiny = torch.finfo(gradient.dtype).tiny  # so that a gradient of zeros moves nothing
    divisor = torch.where(fresh, root, root + eps).clamp_min(tiny)
    return beta1 * first + (gradient / divisor + decay * weight), new_second


class NovoGrad(torch.optim.Optimizer):
    """One second moment a tensor, from the norm of its gradient; weight decay is added after the normalisation.

    The first moment is a sum, not a mean, so a step is up to 1 / (1 - beta1) times lr long.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradient is there before the step"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["first_moment"] = torch.zeros_like(weight)
                    state["second_moment"] = weight.new_zeros(())
                state["first_moment"], state["second_moment"] = novograd_moments(
                    weight.grad,
                    weight,
                    state["first_moment"],
                    state["second_moment"],
                    group["betas"],
                    group["eps"],
                    group["weight_decay"],
                )
                weight.sub_(group["lr"] * state["first_moment"])
