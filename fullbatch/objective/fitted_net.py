"""A small network that the objective fits by itself: its weights and optimizer moments are buffers, not parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build on the CPU from ``seed`` without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _parameters_to_buffers(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach().clone())
    return net


class FittedNet(nn.Module):
    """``net(x_ND) -> value_N``, with ``fit`` taking Adam or AdaGrad steps on a loss of those values."""

    counters = ("steps",)
    clock: Tensor

    def __init__(
        self, build: Callable[[], nn.Module], rule: Literal["adam", "adagrad"], lr: float, clip: float | None = None
    ) -> None:
        super().__init__()
        self.build, self.rule, self.lr, self.clip = build, rule, lr, clip
        self.net = _parameters_to_buffers(build_seeded(build, 0))
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
                weight.sub_(adagrad_direction(second, gradient).to(weight.dtype), alpha=self.lr)
            else:
                weight.sub_(adam_direction(first, second, gradient, self.clock).to(weight.dtype), alpha=self.lr)


def adagrad_direction(accumulator: Tensor, gradient: Tensor) -> Tensor:
    """AdaGrad's step at learning rate 1; the accumulator gains the squared gradient (epsilon as in torch)."""
    accumulator.add_(gradient.square())
    return gradient / (accumulator.sqrt() + 1e-10)


def adam_direction(
    first: Tensor, second: Tensor, gradient: Tensor, clock: Tensor, betas: tuple[float, float] = (0.9, 0.999)
) -> Tensor:
    """Adam's step at learning rate 1, with bias correction; both moments move."""
    first.lerp_(gradient.to(first.dtype), 1.0 - betas[0])
    second.lerp_(gradient.to(second.dtype).square(), 1.0 - betas[1])
    left_first, left_second = (torch.exp(clock.double() * math.log(beta)) for beta in betas)  # beta ** steps
    unbiased_first = first / (1.0 - left_first)
    unbiased_second = second / (1.0 - left_second)
    return unbiased_first / (unbiased_second.sqrt() + 1e-8)


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
