"""The number that a search is after or a training is judged by: one of an evaluation's, the mean of several, or the
seconds of training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullbatch.evaluation.named import is_share, metric_named, more_is_better, named_numbers

SECONDS = "seconds"
_FIELD = "metrics"
_MEAN = re.compile(r"mean\s*\((?P<names>.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Metric:
    """name    as the plan has it
    parts   the "TASK METRIC" names whose mean it is; (): the seconds of training
    """

    name: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, tasks: Sequence[str], where: str = _FIELD) -> Metric:
        """``METRIC``, ``TASK METRIC``, ``mean(A, B, ...)`` of such, or ``seconds``; ValueError where the tasks do not
        give it.  Where a name has a comma of its own, the commas between names need a space after them.  ``where`` is
        the field or flag that asks."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: a metric must be a name such as accuracy, got {text!r}.")
        text = text.strip()
        if text == SECONDS:
            return cls(text, ())
        mean = _MEAN.fullmatch(text)
        names = [text] if mean is None else _split(mean["names"])
        if not all(names):
            raise ValueError(f"{where}: {text!r} has an empty name in it; write mean(A, B).")
        if SECONDS in names:
            raise ValueError(f"{where}: {text!r} mixes seconds with what is measured; name it as a metric of its own.")
        parts = tuple(metric_named(name, tasks, where) for name in names)
        if len({more_is_better(part) for part in parts}) > 1:
            raise ValueError(f"{where}: {text!r} mixes ranks, where less is better, with shares, where more is.")
        return cls(text, parts)

    def of(self, results: Mapping[str, Any], seconds: float) -> float:
        """Its value by an evaluation, as results.json has it, after so many seconds of training."""
        if not self.parts:
            return seconds
        numbers = named_numbers(results)
        for part in self.parts:
            if not math.isfinite(numbers.get(part, math.nan)):
                gaps = {gap["task"]: gap["reason"] for gap in results.get("gaps", ())}
                why = gaps.get(part.rpartition(" ")[0], "it is not among the numbers")
                raise ValueError(f"The evaluation gave no {part}: {why.rstrip('.')}.")
        return sum(numbers[part] for part in self.parts) / len(self.parts)

    @property
    def maximise(self) -> bool:
        return bool(self.parts) and all(map(more_is_better, self.parts))

    @property
    def is_share(self) -> bool:
        """Shown as per cent."""
        return bool(self.parts) and all(map(is_share, self.parts))

    @property
    def worst(self) -> float | None:
        """What a run that ran away is worth; None where no number is the worst."""
        return 0.0 if self.is_share else None

    @property
    def short(self) -> str:
        """For tables: without the tasks.

        >>> Metric("retrieval:x mean_r1", ("retrieval:x mean_r1",)).short
        'mean_r1'
        >>> Metric("m", ("retrieval:x text_to_image_r1", "zero_shot:y accuracy")).short
        'mean(text_to_image_r1, accuracy)'
        """
        names = [part.rpartition(" ")[2] for part in self.parts]
        if not names:
            return SECONDS
        return names[0] if len(names) == 1 else f"mean({', '.join(names)})"


def parse_metrics(texts: Sequence[str], tasks: Sequence[str]) -> tuple[Metric, ...]:
    """At least one, none twice."""
    if isinstance(texts, str) or not texts:
        raise ValueError(f"{_FIELD} must be a list of at least one metric, got {texts!r}.")
    found = tuple(Metric.parse(text, tasks) for text in texts)
    for place, metric in enumerate(found):
        if any(sorted(metric.parts) == sorted(other.parts) for other in found[:place]):
            raise ValueError(f"{_FIELD}: {metric.name!r} is there twice.")
    return found


def worst_of(metrics: Sequence[Metric]) -> tuple[float, ...] | None:
    """The values of a run that ran away, if each metric has a worst one."""
    worst = [metric.worst for metric in metrics]
    return tuple(value for value in worst if value is not None) if None not in worst else None


def _split(names: str) -> list[str]:
    """At commas with a space after them where there are such, since a task may have others: ?captions=title,alt."""
    spaced = re.search(r",\s", names) is not None
    return [name.strip() for name in re.split(r",\s+" if spaced else ",", names)]
