"""What each phase tries, from what the phases before it found; and which trial is better.

Every worker computes the slots of a phase by itself: they follow from the plan and from how the slots of the phases
before ended, which nobody changes any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from typing_extensions import assert_never

from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.slots import CHOSEN, PHASES, Ended, PhaseName, Slot, Status

Before = Mapping[PhaseName, Sequence[Ended]]


class NoWinner(ValueError):
    """A phase has nothing to start from."""


def phases_of(plan: SearchPlan) -> tuple[PhaseName, ...]:
    return tuple(name for name, _ in plan.phases())


def slots_of(phase: PhaseName, plan: SearchPlan, before: Before) -> list[Slot]:
    match phase:
        case "choices":
            return _choices(plan)
        case "grid":
            return _grid(plan, before)
        case "fine":
            return _fine(plan, before)
        case "finals":
            return _finals(plan, before)
        case _:
            assert_never(phase)


def owed(plan: SearchPlan) -> dict[PhaseName, int]:
    """How many slots each phase will have, for an estimate of what is left."""
    found: dict[PhaseName, int] = {"choices": _choice_count(plan)}
    if plan.grid is not None:
        found["grid"] = _at_most(plan.grid.methods, plan.methods) * _at_most(plan.grid.optimizers, plan.optimizers)
    if plan.fine is not None:
        found["fine"] = plan.fine.trials
    if plan.finals is not None:
        found["finals"] = (plan.finals.best + len(plan.finals.baselines)) * len(plan.finals.seeds)
    return found


def _at_most(asked: int, there: Sequence[str]) -> int:
    return min(asked, len(there))


# ---------------------------------------------------------------------------------------------------------------------
# the phases


def _choices(plan: SearchPlan) -> list[Slot]:
    """The sampler's, but for the first ones where the plan says so: each method and each optimizer is tried once.

    Where there are no more pairs than trials, and nothing else to choose, each pair is tried once and none twice.
    """
    slots = _choice_count(plan)
    covering = max(len(plan.methods), len(plan.optimizers)) if plan.choices.cover else 0
    if tries_all_pairs(plan):
        covering = slots
    pairs = _covering(plan.methods, plan.optimizers)[:covering]
    given = [dict(zip(CHOSEN, pair, strict=True)) for pair in pairs]
    return [Slot(number, given[number] if number < len(given) else {}) for number in range(slots)]


def tries_all_pairs(plan: SearchPlan) -> bool:
    """Whether phase 1 leaves nothing to the sampler."""
    return not _others(plan) and plan.choices.trials >= len(plan.methods) * len(plan.optimizers)


def _choice_count(plan: SearchPlan) -> int:
    if _others(plan):
        return plan.choices.trials
    return min(plan.choices.trials, len(plan.methods) * len(plan.optimizers))


def _others(plan: SearchPlan) -> bool:
    """Whether phase 1 chooses more than a method and an optimizer."""
    return any(plan.dimensions("choices", *pair) for pair in plan.candidates)


def _covering(methods: Sequence[str], optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair once, so that the first few have every method and every optimizer.

    >>> _covering(["a", "b"], ["x", "y", "z"])[:3]
    [('a', 'x'), ('b', 'y'), ('a', 'z')]
    """
    longer = max(len(methods), len(optimizers))
    turns = [
        (methods[(number + turn) % len(methods)], optimizers[number % len(optimizers)])
        for turn in range(len(methods))
        for number in range(longer)
    ]
    return list(dict.fromkeys([*turns, *product(methods, optimizers)]))


def _grid(plan: SearchPlan, before: Before) -> list[Slot]:
    assert plan.grid is not None
    _, order = _won(plan, before, "grid")
    methods = _first(order, "method", plan.grid.methods)
    optimizers = _first(order, "optimizer", plan.grid.optimizers)
    found = [plan.carried("grid", _inherited(plan, order, *pair)) for pair in product(methods, optimizers)]
    return [Slot(number, params) for number, params in enumerate(found)]


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
    """Seed by seed, so that every finalist has one before any has two."""
    assert plan.finals is not None
    last, order = _won(plan, before, "finals")
    carried = [(f"{last} {one.slot.number}", plan.carried("finals", one.params)) for one in order]
    rows = _different(carried, plan.finals.best) + [(name, {"method": name}) for name in plan.finals.baselines]
    pairs = product(plan.finals.seeds, rows)
    return [Slot(number, params, seed, label) for number, (seed, (label, params)) in enumerate(pairs)]


def _won(plan: SearchPlan, before: Before, phase: PhaseName) -> tuple[PhaseName, list[Ended]]:
    """What the phase starts from."""
    found = last_won(before, plan.maximise, phase)
    if found is None:
        ended = [one for ones in before.values() for one in ones]
        said = next((f": {one.error}" for one in ended if one.error), ".")
        named = ", ".join(map(repr, before))
        raise NoWinner(
            f"All {len(ended)} trials of the phase {named} failed or diverged, so there is no winner to go on "
            f"with{said}"
        )
    return found


def _first(order: Sequence[Ended], name: str, count: int) -> list[str]:
    """The best few values of a choice, each by its best trial."""
    return list(dict.fromkeys(str(one.params[name]) for one in order))[:count]


def _different(rows: Sequence[tuple[str, dict[str, Any]]], count: int) -> list[tuple[str, dict[str, Any]]]:
    """The best few, each with params of its own: a winner twice among the finalists would be compared with itself."""
    found: list[tuple[str, dict[str, Any]]] = []
    for label, params in rows:
        if all(params != other for _, other in found):
            found.append((label, params))
    return found[:count]


def _inherited(plan: SearchPlan, order: Sequence[Ended], method: str, optimizer: str) -> dict[str, Any]:
    """What else was searched comes along: from the pair's best trial, else the optimizer's, else the method's."""
    wanted = plan.dimensions("choices", method, optimizer)
    chosen = {"method": method, "optimizer": optimizer}

    def near(one: Ended) -> int:
        return -2 * int(one.params["optimizer"] == optimizer) - int(one.params["method"] == method)

    known: dict[str, Any] = {}
    for one in sorted(order, key=near):  # stable: of equally near ones the better first
        for name, value in one.params.items():
            if name in wanted:
                known.setdefault(name, value)
    return {**chosen, **known}


# ---------------------------------------------------------------------------------------------------------------------
# ranking: finished trials by value, then those that were cut short, then those that ran away.  With several metrics
# by fronts: nobody on the first front is beaten in all metrics by another; within a front the first metric decides.

# A pruned trial's value is that of a shorter training, and says less.
_CLASSES: Mapping[Status, int] = {"done": 0, "stopped": 0, "pruned": 1, "diverged": 2}


def ranked(ended: Sequence[Ended], maximise: Sequence[bool]) -> list[Ended]:
    """Best first, those without a value left out; of equal ones the earlier slot first."""
    known = [one for one in ended if one.values is not None and one.status in _CLASSES]
    found: list[Ended] = []
    for kind in sorted(set(_CLASSES.values())):
        alike = sorted((one for one in known if _CLASSES[one.status] == kind), key=lambda one: one.slot.number)
        costs = [costs_of(one, maximise) for one in alike]
        by_front = sorted(zip(fronts(costs), costs, alike, strict=True), key=lambda row: (row[0], row[1]))
        found += [one for _, _, one in by_front]
    return found


def winners(ended: Sequence[Ended], maximise: Sequence[bool]) -> list[Ended]:
    """Best first, those that may win: what ran away is a result, and nothing to go on with."""
    return [one for one in ranked(ended, maximise) if one.status != "diverged"]


def last_won(
    ended: Mapping[PhaseName, Sequence[Ended]], maximise: Sequence[bool], until: PhaseName = "finals"
) -> tuple[PhaseName, list[Ended]] | None:
    """The last phase before ``until`` in which somebody won, and who, best first: one in which all failed or ran away
    says nothing against the winners of the phase before it."""
    for name in reversed(PHASES[: PHASES.index(until)]):
        if order := winners(ended.get(name, ()), maximise):
            return name, order
    return None


def costs_of(one: Ended, maximise: Sequence[bool]) -> tuple[float, ...]:
    """Its values, signed so that less is better."""
    assert one.values is not None
    return tuple(-value if more else value for value, more in zip(one.values, maximise, strict=True))


def fronts(costs: Sequence[Sequence[float]]) -> list[int]:
    """The number of each one's front, from 0.

    >>> fronts([(1.0, 5.0), (2.0, 2.0), (2.0, 6.0), (3.0, 7.0)])
    [0, 0, 1, 2]
    """
    found, members = [0] * len(costs), list[list[Sequence[float]]]()
    for one in sorted(range(len(costs)), key=lambda one: tuple(costs[one])):  # nobody is beaten by a later one
        low, high = 0, len(members)
        while low < high:  # who is beaten on a front is beaten on all before it
            middle = (low + high) // 2
            beaten = any(_beats(other, costs[one]) for other in reversed(members[middle]))
            low, high = (middle + 1, high) if beaten else (low, middle)
        if low == len(members):
            members.append([])
        members[low].append(costs[one])
        found[one] = low
    return found


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    at_least = all(a <= b for a, b in zip(one, other, strict=True))
    return at_least and any(a < b for a, b in zip(one, other, strict=True))
