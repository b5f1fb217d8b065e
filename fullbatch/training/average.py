"""An exponential average of the weights, kept beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullbatch.distributed import towers


class WeightAverage:
    """w_bar <- decay w_bar + (1 - decay) w, of the weights that learn; decay is smaller in the first steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step number ``step`` (the first is 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        for name, weight in self.weights.items():
            kept = weight.detach().clone()
            weight.copy_(self.averages[name])
            self.averages[name].copy_(kept)
        towers.forget_gathered(self.model)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model holds the averages meanwhile."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: towers.whole(average) for name, average in self.averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, average in self.averages.items():
            towers.fill(average, state[name])
