"""A small network that the objective fits by itself: its weights and optimizer moments are buffers, not parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import get_total_norm
from torch.optim.adam import adam

from fullbatch.objective.chunked import tf32_products


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build on the CPU from ``seed`` without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class FittedNet(nn.Module):
    """``net(x_ND) -> value_N``, with ``fit`` taking Adam or AdaGrad steps on a loss of those values.  ``operands`` are
    those of the loss: where a GPU has float16 for its products, the net's are in TF32, which errs as much."""

    counters = ("steps",)
    clock_W: Tensor

    def __init__(
        self,
        build: Callable[[], nn.Module],
        rule: Literal["adam", "adagrad"],
        lr: float,
        operands: str,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.build, self.rule, self.lr, self.clip = build, rule, lr, clip
        self.products = tf32_products if operands == "float16" else nullcontext
        self.net = build_seeded(build, 0)
        for module in self.net.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach().clone())
        for index, weight in enumerate(self.weights.values()):
            self.register_buffer(f"first_{index}", torch.zeros_like(weight))
            self.register_buffer(f"second_{index}", torch.zeros_like(weight))
        self.steps = 0
        # the steps, on the device, one a weight, as torch's Adam counts them
        self.register_buffer("clock_W", torch.zeros(len(self.weights)), persistent=False)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = int(state)
        self.clock_W.fill_(self.steps)

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.net.named_buffers())

    def moments(self, which: Literal["first", "second"]) -> list[Tensor]:
        return [self.get_buffer(f"{which}_{index}") for index in range(len(self.weights))]

    def restart(self, seed: int) -> None:
        """New weights, no memory of the optimizer."""
        fresh = build_seeded(self.build, seed).state_dict()
        for name, weight in self.weights.items():
            weight.copy_(fresh[name], non_blocking=True)
        for moment in (*self.moments("first"), *self.moments("second"), self.clock_W):
            moment.zero_()
        self.steps = 0

    def follow(self, leader: FittedNet, keep: float) -> None:
        """weights <- keep * own + (1 - keep) * leader's."""
        for name, weight in self.weights.items():
            weight.lerp_(leader.weights[name], 1.0 - keep)

    def forward(self, x_ND: Tensor) -> Tensor:
        with self.products(x_ND):
            value_N: Tensor = functional_call(self.net, self._weights_as(x_ND.dtype), x_ND).squeeze(-1)
        return value_N

    def _weights_as(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: weight.detach().to(dtype) for name, weight in self.weights.items()}

    def fit(self, x_ND: Tensor, loss_of: Callable[[Tensor], Tensor], updates: int) -> None:
        for _ in range(updates):
            leaves = {name: weight.requires_grad_() for name, weight in self._weights_as(x_ND.dtype).items()}
            with torch.enable_grad(), self.products(x_ND):
                loss = loss_of(functional_call(self.net, leaves, x_ND).squeeze(-1))
                gradients = torch.autograd.grad(loss, list(leaves.values()))
            self._step(list(gradients))

    @torch.no_grad()
    def _step(self, gradients: list[Tensor]) -> None:
        if self.clip is not None:
            shrink = (self.clip / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
            gradients = list(torch._foreach_mul(gradients, shrink))
        self.steps += 1
        weights, seconds = list(self.weights.values()), self.moments("second")
        gradients = [gradient.to(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)]
        if self.rule == "adagrad":
            torch._foreach_addcmul_(seconds, gradients, gradients)
            scale = torch._foreach_sqrt(seconds)
            torch._foreach_add_(scale, 1e-10)  # epsilon as in torch
            torch._foreach_addcdiv_(weights, gradients, scale, value=-self.lr)
        else:
            adam(
                weights, gradients, self.moments("first"), seconds, [], list(self.clock_W.unbind()), fused=True,
                lr=self.lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False,
            )  # fmt: skip


class LambdaNet(nn.Module):
    """linear-ReLU-LayerNorm, twice, then the input added, ReLU and a linear layer to one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width),
            nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width),
        )  # fmt: skip
        self.head = nn.Linear(width, 1)

    def forward(self, x_ND: Tensor) -> Tensor:
        value_N1: Tensor = self.head(torch.relu(self.blocks(x_ND) + x_ND))
        return value_N1
