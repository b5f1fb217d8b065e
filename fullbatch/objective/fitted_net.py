"""A small network that the objective fits by itself: its weights and optimizer moments are buffers, not parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

_BETAS = (0.9, 0.999)  # Adam's


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build on the CPU from ``seed`` without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class FittedNet(nn.Module):
    """``net(x_ND) -> value_N``, with ``fit`` taking Adam or AdaGrad steps on a loss of those values."""

    counters = ("steps",)
    clock: Tensor

    def __init__(
        self, build: Callable[[], nn.Module], rule: Literal["adam", "adagrad"], lr: float, clip: float | None = None
    ) -> None:
        super().__init__()
        self.build, self.rule, self.lr, self.clip = build, rule, lr, clip
        self.net = build_seeded(build, 0)
        for module in self.net.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach().clone())
        for index, weight in enumerate(self.weights.values()):
            self.register_buffer(f"first_{index}", torch.zeros_like(weight))
            self.register_buffer(f"second_{index}", torch.zeros_like(weight))
        self.steps = 0
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64), persistent=False)  # the steps, on the device

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = int(state)
        self.clock.fill_(self.steps)

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.net.named_buffers())

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"first_{index}"), self.get_buffer(f"second_{index}")

    def restart(self, seed: int) -> None:
        """New weights, no memory of the optimizer."""
        fresh = build_seeded(self.build, seed).state_dict()
        for index, (name, weight) in enumerate(self.weights.items()):
            weight.copy_(fresh[name], non_blocking=True)
            for moment in self.moments(index):
                moment.zero_()
        self.steps = 0
        self.clock.zero_()

    def follow(self, leader: FittedNet, keep: float) -> None:
        """weights <- keep * own + (1 - keep) * leader's."""
        for name, weight in self.weights.items():
            weight.lerp_(leader.weights[name], 1.0 - keep)

    def forward(self, x_ND: Tensor) -> Tensor:
        weights = {name: weight.to(x_ND.dtype) for name, weight in self.weights.items()}
        value_N: Tensor = functional_call(self.net, weights, x_ND).squeeze(-1)
        return value_N

    def fit(self, x_ND: Tensor, loss_of: Callable[[Tensor], Tensor], updates: int) -> None:
        for _ in range(updates):
            leaves = {name: weight.detach().to(x_ND.dtype).requires_grad_() for name, weight in self.weights.items()}
            with torch.enable_grad():
                loss = loss_of(functional_call(self.net, leaves, x_ND).squeeze(-1))
                gradients = list(torch.autograd.grad(loss, list(leaves.values())))
            self._step(gradients)

    @torch.no_grad()
    def _step(self, gradients: list[Tensor]) -> None:
        if self.clip is not None:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
            shrink = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            gradients = [gradient * shrink for gradient in gradients]
        self.steps += 1
        self.clock.add_(1)
        for index, (weight, gradient) in enumerate(zip(self.weights.values(), gradients, strict=True)):
            first, second = self.moments(index)
            if self.rule == "adagrad":
                second.add_(gradient.square())
                direction = gradient / (second.sqrt() + 1e-10)  # epsilon as in torch
            else:
                first.lerp_(gradient.to(first.dtype), 1.0 - _BETAS[0])
                second.lerp_(gradient.to(second.dtype).square(), 1.0 - _BETAS[1])
                # what is left of the start, beta ** steps
                left_first, left_second = (torch.exp(self.clock.double() * math.log(beta)) for beta in _BETAS)
                direction = first / (1.0 - left_first) / ((second / (1.0 - left_second)).sqrt() + 1e-8)
            weight.sub_(direction.to(weight.dtype), alpha=self.lr)


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
