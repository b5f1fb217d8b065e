"""What a search cost so far, and how long it will take yet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fullbatch.search.plan import SearchPlan
from fullbatch.search.slots import PHASES, Ended, PhaseName

Phases = Mapping[PhaseName, Sequence[Ended]]


def cost_of(
    plan: SearchPlan,
    ended: Phases,
    running: Mapping[PhaseName, int],
    owed: Mapping[PhaseName, int],
) -> dict[str, Any]:
    every = [one for ones in ended.values() for one in ones]
    workers = max(1, sum(running.values()))
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
        times = [one.seconds for one in ended.get(name, ()) if one.status != "failed"]
        if times:
            mean = statistics.fmean(times)
        elif owed[name] <= len(ended.get(name, ())):
            mean = 0.0
        elif before is None or length is None or before[0][0] != length[0]:
            return None
        else:
            mean = before[1] * length[1] / before[0][1]
        if length is not None and mean > 0.0:
            before = (length, mean)
        left += mean * max(0, owed[name] - len(ended.get(name, ()))) / workers
    return left


def _length(plan: SearchPlan, phase: PhaseName) -> tuple[str, float] | None:
    """How long a run of the phase is, in its own unit; phases in different units do not compare."""
    config = plan.config(phase, {"method": plan.methods[0], "optimizer": plan.optimizers[0]}, None, "", "")
    if config.training.samples is not None:
        return "samples", float(config.training.samples)
    return "epochs", float(config.training.epochs) * config.data.data_share
