"""Which trial is better: finished ones by value, then those that were cut short, then those that ran away.

With several metrics by fronts: nobody on the first front is beaten in all metrics by another; within a front the first
metric decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fullbatch.trials.slots import PHASES, Ended, PhaseName, Status

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
