"""What happens before the weights of a pretrained model move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullbatch.config.checks import is_number, require, require_choice, require_count

Carry = Literal["all", "moments", "memory", "none"]
_CARRIES: tuple[Carry, ...] = ("all", "moments", "memory", "none")


@dataclass(frozen=True)
class Recovery:
    """Optimizer statistics recovery (TuneCLIP, Algorithm 1): steps with frozen weights, before those that move them.

    recovery_epochs   passes over the data in which the optimizer's moments and the objective's memory settle on the
                      weights as they are; 0: none, the run starts cold
    recovery_steps    the same in steps
    recovery_batch    pairs of such a step, a multiple of batch_size; None: batch_size
    carry             what of it training starts with: "all", "moments" (the optimizer's), "memory" (the objective's:
                      u of each sample, prototypes, nets), or "none"
    """

    recovery_epochs: float | None = None
    recovery_steps: int | None = None
    recovery_batch: int | None = None
    carry: Carry = "all"

    def __post_init__(self) -> None:
        epochs = self.recovery_epochs
        if epochs is not None:
            good = is_number(epochs) and epochs >= 0.0
            require(good, self, "recovery_epochs", "be a number of at least 0", "0 means no recovery")
            require(self.recovery_steps is None, self, "recovery_steps", "be left out with recovery_epochs")
        if self.recovery_steps is not None:
            require_count(self, "recovery_steps", 0)
        if self.recovery_batch is not None:
            require_count(self, "recovery_batch", 2)
        require_choice(self, "carry", _CARRIES)
