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
from fullbatch.objective.objective import Objective
from fullbatch.selection.selector import EmbeddingTable
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

    def capture(self, keep: bool = True) -> dict[str, Any]:
        """A copy of it all in host memory, whole.  Every rank must ask, since a rank may hold a part only; a rank that
        does not ``keep`` it copies nothing."""
        found = {name: self._read(part) for name, part in self._parts()}
        return {name: _on_host(part) for name, part in found.items()} if keep else {}

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

    def _read(self, part: Any) -> Any:
        if part is self.model:
            return towers.weights_of(self.model)
        if part is self.optimizer:
            return towers.moments_of(self.model, self.optimizer)
        return part.state_dict()

    def _write(self, part: Any, state: Any) -> None:
        if part is self.model:
            towers.set_weights(self.model, state)
        elif isinstance(part, torch.optim.Optimizer):
            kept = [{key: group[key] for key in group.keys() - {"params", "lr"}} for group in part.param_groups]
            if part is self.optimizer:
                towers.set_moments(self.model, part, state)
            else:
                part.load_state_dict(state)
            for group, own in zip(part.param_groups, kept, strict=True):
                group.update(own)  # decay and betas are the config's, also where the checkpoint had others
                group["lr"] = float(group["lr"])
        else:
            part.load_state_dict(state)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value
