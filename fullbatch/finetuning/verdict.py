"""Is the tuned model better than the base, and is it worse anywhere?  Pure functions of measured values.

Values go by "TASK METRIC", as in metrics.jsonl; all are shares, and higher is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fullbatch.config.messages import listed, nearest
from fullbatch.config.tasks import DataCompSuite, parse_task
from fullbatch.evaluation.result import Measured

MEAN = "mean"  # of the main metric of every task
Outcome = Literal["tuned", "kept_base"]


@dataclass(frozen=True)
class Change:
    """What tuning did to one metric of one task; ``chance`` is None where nobody knows it."""

    task: str
    metric: str
    base: float
    tuned: float
    change: float
    chance: float | None
    regressed: bool


@dataclass(frozen=True)
class Verdict:
    """outcome   whether the tuned model takes the base's place
    reasons   why it does not; none where it does
    """

    outcome: Outcome
    reasons: tuple[str, ...]


def check_metric(metric: str, tasks: Sequence[str]) -> None:
    """Before anything is measured only the task can be looked at; ``values_of`` looks at the metric."""
    if metric == MEAN:
        return
    task = metric.rsplit(" ", 1)[0]
    of_a_suite = task.startswith("datacomp:") and any(isinstance(parse_task(text), DataCompSuite) for text in tasks)
    if " " not in metric or (task not in tasks and not of_a_suite):
        raise ValueError(
            f"--metric {metric!r} is none that will be measured{nearest(task, tasks)} "
            f"It is {MEAN!r}, or a task and its metric, such as '{tasks[0]} METRIC'; the tasks are {listed(tasks)}."
        )


def check_tolerance(tolerance: float) -> None:
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"--tolerance must lie in [0, 1], got {tolerance}; 0.01 lets a task fall by one point.")


def values_of(measured: Measured, metric: str) -> dict[str, float]:
    """The main value of each task, and the chosen one where it is another."""
    values = dict(measured.main_values)
    if metric == MEAN or metric in values:
        return values
    shares = {
        f"{result.task} {name}": value
        for result in measured.results
        for name, value in result.metrics.items()
        if not name.endswith("median_rank")  # the lower the better
    }
    if metric not in shares:
        raise ValueError(
            f"--metric {metric!r} was not measured{nearest(metric, shares)} It is {MEAN!r}, or one of {listed(shares)}."
        )
    return {**values, metric: shares[metric]}


def score_of(values: Mapping[str, float | None], metric: str, base: Mapping[str, float | None]) -> float | None:
    """The number that decides.  None where a task that the base was measured on gave none: a mean over fewer tasks
    compares with nothing, and nobody knows whether the others fell."""
    found = {name: value for name in base if (value := values.get(name)) is not None and math.isfinite(value)}
    if not found or len(found) < len(base):
        return None
    return sum(found.values()) / len(found) if metric == MEAN else found.get(metric)


def changes_between(
    base: Mapping[str, float | None],
    tuned: Mapping[str, float | None],
    chances: Mapping[str, float],
    tolerance: float,
) -> tuple[Change, ...]:
    """Of the values that both have.  A fall of exactly the tolerance is within it."""
    found = []
    for name, before in base.items():
        after = tuned.get(name)
        if before is not None and after is not None:
            task, metric = name.rsplit(" ", 1)
            fell = before - after > tolerance + 1e-9  # shares are sums of roundings
            found.append(Change(task, metric, before, after, after - before, chances.get(name), fell))
    return tuple(found)


def verdict(base_score: float | None, best_score: float | None, changes: Sequence[Change], tolerance: float) -> Verdict:
    """The base stays unless the best epoch beats it and no task pays for that."""
    reasons = []
    if best_score is None or base_score is None:
        reasons.append("no epoch could be scored, for a task gave no number")
    elif best_score <= base_score:
        reasons.append(f"no epoch beats the base: the best one scores {best_score:.2%}, the base {base_score:.2%}")
    for change in changes:
        if change.regressed:
            reasons.append(
                f"{change.task} fell from {change.base:.2%} to {change.tuned:.2%} ({change.metric}), "
                f"by more than the tolerance, {tolerance:g}"
            )
    return Verdict("kept_base" if reasons else "tuned", tuple(reasons))
