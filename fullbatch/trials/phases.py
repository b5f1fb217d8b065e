"""The slots of each phase, from what the phases before it found; how a slot ended, and which trial is better.

A slot is a trial that must end once, however often its process dies.  Every worker computes the slots of a phase by
itself: they follow from the plan and from how the slots of the phases before ended, which nobody changes any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from typing import Any, Literal

import numpy as np

from fullbatch.trials.search_plan import CHOSEN, PHASES, PhaseName, SearchPlan

# done      trained to its end
# stopped   it had not improved for a while; its value stands
# pruned    others were better at the same point; its value is the last one
# diverged  the loss ran away: a result, the worst there is
# failed    it could not be trained (memory, a setting that does not fit the data); no value
Status = Literal["done", "stopped", "pruned", "diverged", "failed"]


@dataclass(frozen=True)
class Slot:
    number: int  # its place in the phase
    params: Mapping[str, Any] = field(default_factory=dict)  # what is not left to the sampler, by names of the space
    seed: int | None = None  # of the run; None: the plan's
    label: str = ""  # of a finalist or a baseline, for tables; "": none


@dataclass(frozen=True)
class Score:
    """How a trial ended."""

    status: Status
    values: tuple[float, ...] | None = None  # by the metrics; None: it failed, or diverged and no value is the worst
    seconds: float = 0.0  # of training
    device_hours: float = 0.0  # of training and of measuring
    error: str = ""
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (number, values), oldest first
    same_as: int | None = None  # the slot with the same settings whose numbers these are; None: it was trained itself

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Score:
        values = None if stored["values"] is None else tuple(stored["values"])
        evaluations = tuple((int(step), tuple(values)) for step, values in stored["evaluations"])
        return cls(**{**stored, "values": values, "evaluations": evaluations})


@dataclass(frozen=True)
class Running:
    """A slot that somebody works on; ``since`` as the storage has it."""

    slot: Slot
    params: Mapping[str, Any]
    worker: str
    since: str


@dataclass(frozen=True)
class Ended:
    """How a slot ended, as the storage has it: a ``Score``, and what it is of."""

    slot: Slot
    status: Status
    params: Mapping[str, Any]  # all of them, sampled ones too
    values: tuple[float, ...] | None
    seconds: float = 0.0
    device_hours: float = 0.0
    error: str = ""
    attempts: int = 1
    number: int = -1  # Optuna's, of the trial that ended it
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()
    same_as: int | None = None
    started: str = ""
    ended: str = ""


Before = Mapping[PhaseName, Sequence[Ended]]


class NoWinner(ValueError):
    """A phase has nothing to start from."""


def slots_of(phase: PhaseName, plan: SearchPlan, before: Before) -> list[Slot]:
    if phase == "choices":
        return _choices(plan)
    make = {"grid": _grid, "fine": _fine, "finals": _finals}[phase]
    return make(plan, before)


def owed(plan: SearchPlan) -> dict[PhaseName, int]:
    """How many slots each phase will have, for an estimate of what is left."""
    counts: dict[PhaseName, int] = {"choices": _choice_count(plan)}
    if plan.grid is not None:
        methods, optimizers = min(plan.grid.methods, len(plan.methods)), min(plan.grid.optimizers, len(plan.optimizers))
        counts["grid"] = methods * optimizers
    if plan.fine is not None:
        counts["fine"] = plan.fine.trials
    if plan.finals is not None:
        counts["finals"] = (plan.finals.best + len(plan.finals.baselines)) * len(plan.finals.seeds)
    return counts


def _choices(plan: SearchPlan) -> list[Slot]:
    """The sampler's, but for the first ones where the plan says so: each method and each optimizer is tried once.

    Where there are no more pairs than trials, and nothing else to choose, each pair is tried once and none twice.  An
    even phase goes through all pairs over and over.
    """
    count, pairs = _choice_count(plan), _covering(plan.methods, plan.optimizers)
    covering = max(len(plan.methods), len(plan.optimizers)) if plan.choices.cover else 0
    if plan.choices.sampler == "even":
        pairs = list(islice(cycle(pairs), count))
    else:
        pairs = pairs[: count if tries_all_pairs(plan) else covering]
    given: list[dict[str, Any]] = [dict(zip(CHOSEN, pair, strict=True)) for pair in pairs]
    return [Slot(number, given[number] if number < len(given) else {}) for number in range(count)]


def tries_all_pairs(plan: SearchPlan) -> bool:
    """Whether phase 1 leaves nothing to the sampler."""
    return not _others(plan) and plan.choices.trials >= len(plan.methods) * len(plan.optimizers)


def _choice_count(plan: SearchPlan) -> int:
    pairs = len(plan.methods) * len(plan.optimizers)
    return plan.choices.trials if _others(plan) else min(plan.choices.trials, pairs)


def _others(plan: SearchPlan) -> bool:
    """Whether phase 1 chooses more than a method and an optimizer."""
    return any(plan.dimensions("choices", *pair) for pair in plan.candidates)


def _covering(methods: Sequence[str], optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair once, so that the first few have every method and every optimizer.

    >>> _covering(["a", "b"], ["x", "y", "z"])[:3]
    [('a', 'x'), ('b', 'y'), ('a', 'z')]
    """
    turns = [
        (methods[(number + turn) % len(methods)], optimizers[number % len(optimizers)])
        for turn in range(len(methods))
        for number in range(max(len(methods), len(optimizers)))
    ]
    return list(dict.fromkeys([*turns, *product(methods, optimizers)]))


def _grid(plan: SearchPlan, before: Before) -> list[Slot]:
    """The best few methods and optimizers, each by its best trial."""
    assert plan.grid is not None
    _, order = _won(plan, before, "grid")
    methods = list(dict.fromkeys(trial.params["method"] for trial in order))[: plan.grid.methods]
    optimizers = list(dict.fromkeys(trial.params["optimizer"] for trial in order))[: plan.grid.optimizers]
    pairs = enumerate(product(methods, optimizers))
    return [Slot(number, plan.carried("grid", _inherited(plan, order, *pair))) for number, pair in pairs]


def _inherited(plan: SearchPlan, order: Sequence[Ended], method: str, optimizer: str) -> dict[str, Any]:
    """What else was searched comes along: from the pair's best trial, else the optimizer's, else the method's."""
    wanted = plan.dimensions("choices", method, optimizer)

    def near(trial: Ended) -> int:
        return -2 * int(trial.params["optimizer"] == optimizer) - int(trial.params["method"] == method)

    known: dict[str, Any] = {"method": method, "optimizer": optimizer}
    for trial in sorted(order, key=near):  # stable: of equally near ones the better first
        known |= {name: value for name, value in trial.params.items() if name in wanted and name not in known}
    return known


def _fine(plan: SearchPlan, before: Before) -> list[Slot]:
    """Around the winner so far, which is the first to be tried; what is not searched here all have from it."""
    assert plan.fine is not None
    winner = _won(plan, before, "fine")[1][0]
    params = plan.carried("fine", winner.params)
    searched = plan.dimensions("fine", params["method"], params["optimizer"])
    kept = {key: value for key, value in params.items() if key not in searched}
    start = {**plan.values_at("fine", params), **params}
    return [Slot(number, start if number == 0 else kept) for number in range(plan.fine.trials)]


def _finals(plan: SearchPlan, before: Before) -> list[Slot]:
    """Seed by seed, so that every finalist has one before any has two.  Each has params of its own: a winner twice
    among the finalists would be compared with itself."""
    assert plan.finals is not None
    last, order = _won(plan, before, "finals")
    rows: list[tuple[str, dict[str, Any]]] = []
    for trial in order:
        params = plan.carried("finals", trial.params)
        if params not in [other for _, other in rows]:
            rows.append((f"{last} {trial.slot.number}", params))
    rows = rows[: plan.finals.best] + [(name, {"method": name}) for name in plan.finals.baselines]
    pairs = product(plan.finals.seeds, rows)
    return [Slot(number, params, seed, label) for number, (seed, (label, params)) in enumerate(pairs)]


def _won(plan: SearchPlan, before: Before, phase: PhaseName) -> tuple[PhaseName, list[Ended]]:
    """What the phase starts from."""
    won = last_won(before, plan.maximise, phase)
    if won is None:
        ended = [trial for trials in before.values() for trial in trials]
        reason = next((f": {trial.error}" for trial in ended if trial.error), ".")
        raise NoWinner(
            f"All {len(ended)} trials of the phase {', '.join(map(repr, before))} failed or diverged, so there is no "
            f"winner to go on with{reason}"
        )
    return won


# ---------------------------------------------------------------------------------------------------------------------
# ranking: finished trials by value, then those that were cut short, then those that ran away.  With several metrics
# by fronts: nobody on the first front is beaten in all metrics by another; within a front the first metric decides.

# A pruned trial's value is that of a shorter training, and says less.
_CLASSES: Mapping[Status, int] = {"done": 0, "stopped": 0, "pruned": 1, "diverged": 2}


def ranked(ended: Sequence[Ended], maximise: Sequence[bool]) -> list[Ended]:
    """Best first, those without a value left out; of equal ones the earlier slot first."""
    known = [trial for trial in ended if trial.values is not None and trial.status in _CLASSES]
    known.sort(key=lambda trial: trial.slot.number)
    order: list[Ended] = []
    for kind in sorted(set(_CLASSES.values())):
        alike = [trial for trial in known if _CLASSES[trial.status] == kind]
        costs = [costs_of(trial.values or (), maximise) for trial in alike]
        by_front = sorted(zip(fronts(costs), costs, alike, strict=True), key=lambda row: (row[0], row[1]))
        order += [trial for _, _, trial in by_front]
    return order


def last_won(
    ended: Mapping[PhaseName, Sequence[Ended]], maximise: Sequence[bool], until: PhaseName = "finals"
) -> tuple[PhaseName, list[Ended]] | None:
    """The last phase before ``until`` in which somebody won, and who, best first.  What ran away is a result, and
    nothing to go on with; a phase in which all failed or ran away says nothing against earlier winners."""
    for name in reversed(PHASES[: PHASES.index(until)]):
        if order := [trial for trial in ranked(ended.get(name, ()), maximise) if trial.status != "diverged"]:
            return name, order
    return None


def costs_of(values: Sequence[float], maximise: Sequence[bool]) -> tuple[float, ...]:
    """Signed so that less is better."""
    return tuple(-value if more else value for value, more in zip(values, maximise, strict=True))


def fronts(costs: Sequence[Sequence[float]]) -> list[int]:
    """The number of each one's front, from 0.

    >>> fronts([(1.0, 5.0), (2.0, 2.0), (2.0, 6.0), (3.0, 7.0)])
    [0, 0, 1, 2]
    """
    table, front = np.array(costs), np.zeros(len(costs), int)
    order = sorted(range(len(costs)), key=lambda place: tuple(costs[place]))  # nobody is beaten by a later one
    for count, place in enumerate(order):
        before, ours = order[:count], table[place]
        beaten = (table[before] <= ours).all(1) & (table[before] < ours).any(1)
        front[place] = (front[before][beaten] + 1).max(initial=0)
    return [int(number) for number in front]
