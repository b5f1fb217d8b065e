"""What an evaluation says: numbers, and the tasks that gave none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Result:
    task: str  # as it was asked for; of a suite "datacomp:KEY"
    metrics: dict[str, float]  # name -> share (or rank)
    main: str  # the metric to look at
    chance: float  # what guessing gives for it
    size: int  # captions in the gallery, classes, or candidates
    examples: tuple[dict[str, Any], ...] = ()  # of retrieval: an image's caption, its rank, and the nearest captions
    counts: Mapping[str, int] = field(default_factory=dict)  # images, captions, classes, those not readable (left_out)
    notes: tuple[str, ...] = ()  # what a reader of the number must know

    @property
    def value(self) -> float:
        return self.metrics[self.main]

    def as_dict(self) -> dict[str, Any]:
        named = {"task": self.task, "main": self.main, "chance": self.chance, "size": self.size, **self.metrics}
        return {**named, "examples": self.examples, "counts": dict(self.counts), "notes": list(self.notes)}


@dataclass(frozen=True)
class Gap:
    """A task without a number: its data are missing, or it failed, and why."""

    task: str
    kind: Literal["missing", "failed"]
    reason: str


@dataclass(frozen=True)
class Average:
    """The mean of the main metrics of the ``found`` tasks among the ``of`` that belong to it; None where none was."""

    name: str
    value: float | None
    found: int
    of: int

    def __str__(self) -> str:
        """
        >>> str(Average("VTAB", 0.213, 3, 7))
        '21.3 (3 of 7 tasks)'
        """
        if self.value is None:
            return f"none of {self.of} tasks"
        whole = f"{self.of} task{'s' if self.of > 1 else ''}"
        return f"{100.0 * self.value:.1f} ({whole if self.found == self.of else f'{self.found} of {whole}'})"


@dataclass(frozen=True)
class Measured:
    results: tuple[Result, ...]
    gaps: tuple[Gap, ...] = ()
    averages: tuple[Average, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As in results.json and evaluation.json, beside the step."""
        return {
            "results": [result.as_dict() for result in self.results],
            "gaps": [asdict(gap) for gap in self.gaps],
            "averages": [{**asdict(average), "text": str(average)} for average in self.averages],
        }

    @property
    def main_values(self) -> dict[str, float]:
        return {f"{result.task} {result.main}": result.value for result in self.results}

    @property
    def curves(self) -> dict[str, float]:
        """What has a curve over the steps: the main values, and R@1 of both directions of retrieval."""
        return {
            f"{result.task} {name}": value
            for result in self.results
            for name, value in {result.main: result.value, **result.metrics}.items()
            if name == result.main or ("_to_" in name and name.endswith("_r1"))
        }
