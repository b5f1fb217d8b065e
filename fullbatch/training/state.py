"""Everything a run must remember.  Its fields are saved and restored in a loop, so nothing can be forgotten.

Order, crops, captions, dropout and learning rates are functions of the seed and the step; they need no memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.distributed import towers
from fullbatch.distributed.shards import mapped
from fullbatch.objective.objective import Objective
from fullbatch.selection.selector import EmbeddingTable
from fullbatch.training.checkpoint import Captured
from fullbatch.training.optimizer import WeightAverage


@dataclass
class Position:
    """step         finished so far
    bad          samples that could not be read so far, on all ranks
    data         the fingerprint of the data set
    temperature  when it was last logged, for schedules that look at it; nan before
    first_loss   the first one logged; nan before
    """

    step: int = 0
    bad: int = 0
    data: str = ""
    temperature: float = float("nan")
    first_loss: float = float("nan")

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.data:
            raise ValueError(
                "The run was started on another data set than --data now names (files, sizes or samples differ), so "
                "its place in the order of samples means nothing here; start a new run."
            )
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])


@dataclass
class TrainingState:
    model: nn.Module
    average: WeightAverage | None
    optimizer: torch.optim.Optimizer
    temperature_optimizer: torch.optim.Optimizer | None
    objective: Objective
    scaler: torch.amp.GradScaler
    position: Position
    table: EmbeddingTable | None = None

    def capture(self, keep: bool = True) -> Captured:
        """A copy in host memory.  Every rank must ask: each copies the parts of sharded tensors that it holds, and one
        that is to ``keep`` them all the others."""
        shards: dict[str, Tensor] = {}

        def copied(place: str, tensor: Tensor) -> Tensor | None:
            if not towers.is_sharded(tensor):
                value = towers.whole(tensor)
                return value.detach().to("cpu", copy=True) if keep else None
            shards[place] = tensor.detach().to("cpu", copy=True)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        parts = mapped({name: part.state_dict() for name, part in self._parts()}, copied)
        return Captured(parts if keep else {}, shards)

    def restore(self, saved: dict[str, Any]) -> None:
        for name, part in self._parts():
            if name not in saved:
                raise ValueError(
                    f"The checkpoint has no {name}, but this run needs it: was it saved with other settings?"
                )
            try:
                self._write(part, saved[name])
            except (RuntimeError, KeyError, IndexError, TypeError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ValueError(f"The checkpoint's {name} does not fit this run's settings: {reason}") from None

    def _parts(self) -> list[tuple[str, Any]]:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, part) for name, part in fields if part is not None]

    def _write(self, part: Any, state: Any) -> None:
        if part is self.model:
            towers.load_weights(part, state)
        elif isinstance(part, torch.optim.Optimizer):
            kept = [{key: group[key] for key in group.keys() - {"params", "lr"}} for group in part.param_groups]
            towers.load_moments(part, state)
            for group, own in zip(part.param_groups, kept, strict=True):
                group.update(own)  # decay and betas are the config's, also where the checkpoint had others
                group["lr"] = float(group["lr"])
        else:
            part.load_state_dict(state)
