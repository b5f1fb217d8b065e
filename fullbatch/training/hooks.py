"""What happens around the steps of a run, at the trainer's word: evaluate, audit, select, abandon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fullbatch.objective.objective import Objective
from fullbatch.selection.selector import Selector


@dataclass(frozen=True)
class EvaluationLine:
    """values   for the log, in which the model may be marked as the best so far
    ends     whether the run is to end here
    """

    values: Mapping[str, Any]
    ends: bool = False


class Auditor(Protocol):
    def due(self, step: int) -> bool:
        """Whether to measure the normalizers after so many steps."""

    def audit(self) -> Mapping[str, Any]:
        """Measure them, for a line of the log."""


@dataclass(frozen=True)
class Hooks:
    """Every rank calls each of them at the same step.  None: there is nothing to do.

    evaluate          measures the model after so many seconds of training
    auditor           measures the normalizers now and then
    selector          plans which samples meet in a batch; None: the order's neighbours do
    abandoned         asked now and then: whether to leave the run where it stands, at once
    fresh_objective   makes one without memory, for a recovery that does not carry it over
    """

    evaluate: Callable[[float], EvaluationLine] | None = None
    auditor: Auditor | None = None
    selector: Selector | None = None
    abandoned: Callable[[], bool] = lambda: False
    fresh_objective: Callable[[], Objective] | None = None
