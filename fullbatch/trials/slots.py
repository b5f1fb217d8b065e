"""What a phase of a search owes: slots, each a trial that must end once, however often its process dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PhaseName = Literal["choices", "grid", "fine", "finals"]
PHASES: tuple[PhaseName, ...] = ("choices", "grid", "fine", "finals")

# done      trained to its end
# stopped   it had not improved for a while; its value stands
# pruned    others were better at the same point; its value is the last one
# diverged  the loss ran away: a result, the worst there is
# failed    it could not be trained (memory, a setting that does not fit the data); no value
Status = Literal["done", "stopped", "pruned", "diverged", "failed"]

NOT_TRAINED = "not trained again"  # ends the remark on a slot that has the settings of another


@dataclass(frozen=True)
class Slot:
    """number   its place in the phase
    params   what is not left to the sampler: method, optimizer, and settings by their names in the space
    seed     of the run; None: the plan's
    label    of a finalist or a baseline, for tables; "": none
    """

    number: int
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    label: str = ""


@dataclass(frozen=True)
class Ended:
    """How a slot ended, as the storage has it.

    params   all of them, sampled ones too
    values   by the plan's metrics; None where there is none
    """

    slot: Slot
    status: Status
    params: Mapping[str, Any]
    values: tuple[float, ...] | None
    seconds: float = 0.0
    device_hours: float = 0.0
    error: str = ""
    attempts: int = 1
    number: int = -1  # Optuna's, of the attempt that ended it
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()
    started: str = ""
    ended: str = ""

    @property
    def repeated(self) -> bool:
        """Its numbers are another slot's."""
        return self.error.endswith(NOT_TRAINED)
