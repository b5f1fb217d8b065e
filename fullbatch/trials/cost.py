"""What a search cost so far, and how long it will take yet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.slots import PHASES, Ended, PhaseName

Phases = Mapping[PhaseName, Sequence[Ended]]


def cost_of(
    plan: SearchPlan, ended: Phases, running: int, owed: Mapping[PhaseName, int], jobs: int = 1
) -> dict[str, Any]:
    """``running``: trials under way, anywhere.  ``jobs``: so many at a time on this machine."""
    every = [one for ones in ended.values() for one in ones]
    workers = max(1, jobs, running)
    return {
        "seconds": sum(one.seconds for one in every),
        "device_hours": sum(one.device_hours for one in every),
        "left_seconds": _left(plan, ended, owed, workers),
        "workers": workers,
        "trials_done": len(every),
        "trials_owed": sum(max(count, len(ended.get(name, ()))) for name, count in owed.items()),
    }


def _left(plan: SearchPlan, ended: Phases, owed: Mapping[PhaseName, int], workers: int) -> float | None:
    """Each phase by the mean time of its trials; one that has none yet by the one before and how much longer its runs
    are.  Trials under way count as not begun, so it is a little too much."""
    left, before = 0.0, None
    for name in (name for name in PHASES if name in owed):
        length = _length(plan, name)
        times = [_took(one) for one in ended.get(name, ()) if one.status != "failed" and not one.repeated]
        rest = max(0, owed[name] - len(ended.get(name, ())))
        if times:
            mean = statistics.fmean(times)
        elif not rest:
            mean = 0.0
        elif before is None or length is None or before[0][0] != length[0]:
            return None
        else:
            mean = before[1] * length[1] / before[0][1]
        if length is not None and mean > 0.0:
            before = (length, mean)
        if rest:
            left += mean * max(1.0, rest / workers)  # a single one is not done sooner by many
    return left


def _took(one: Ended) -> float:
    """By the clock: the model is built and measured, too.  One that was taken up again has trained before."""
    if not one.started or not one.ended:
        return one.seconds
    clock = datetime.fromisoformat(one.ended) - datetime.fromisoformat(one.started)
    return max(one.seconds, clock.total_seconds())


def _length(plan: SearchPlan, phase: PhaseName) -> tuple[str, float] | None:
    """How long a run of the phase is, in its own unit; phases in different units do not compare."""
    config = plan.config(phase, {"method": plan.methods[0], "optimizer": plan.optimizers[0]}, None, "", "")
    if config.training.samples is not None:
        return "samples", float(config.training.samples)
    return "epochs", float(config.training.epochs) * config.data.data_share
