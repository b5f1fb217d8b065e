"""What each phase tries, from what the phases before it found.

Every worker computes the slots of a phase by itself: they follow from the plan and from how the slots of the phases
before ended, which nobody changes any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from typing_extensions import assert_never

from fullbatch.trials.plan_parts import CHOSEN
from fullbatch.trials.ranking import last_won
from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.slots import Ended, PhaseName, Slot

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
