"""NovoGrad as the paper has it: Ginsburg et al. 2019, Algorithm 1 (https://arxiv.org/abs/1905.11286)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss
