"""The best evaluation of a run so far, as the lines of metrics.jsonl say it: what a resumed run needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SCORE = "score"  # in a line of an evaluation: the number that the run is judged by
BEST = "best"  # likewise: it is the best so far, and its checkpoint is kept


@dataclass(frozen=True)
class Best:
    """step     of the best evaluation; None: there was none
    score    its number; None where somebody else judges
    waited   evaluations since then
    """

    step: int | None = None
    score: float | None = None
    waited: int = 0

    def after(self, line: Mapping[str, Any]) -> Best:
        """Once this evaluation was written down."""
        if line.get(BEST):
            return Best(line["step"], line.get(SCORE))
        return replace(self, waited=self.waited + 1)

    def beaten_by(self, score: float, more_is_better: bool) -> bool:
        """Of equal ones the first is the best."""
        return self.score is None or (score > self.score if more_is_better else score < self.score)
