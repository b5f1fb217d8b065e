"""Searches that nobody ran: a plan, and trials whose values follow from their settings and a seeded noise."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict
from fullbatch.trials.phases import Ended, Slot, Status, owed, slots_of
from fullbatch.trials.search_plan import PhaseName, SearchPlan, search_from
from fullbatch.trials.space import Choice, Whole

_OPTIMIZERS = {"adamw": 0.20, "radam": 0.24, "lamb": 0.15, "sgd": 0.03, "adam": 0.19, "lion": 0.17}
_METHODS = {"openclip": 0.0, "sogclr": 0.03, "isogclr_new": 0.05, "neuclip": 0.06}


@dataclass(frozen=True)
class Running:
    slot: Slot
    params: dict[str, Any]
    worker: str = "host:17"
    since: str = "2026-01-01T00:00:00"


def plan_of(**values: Any) -> SearchPlan:
    usual: dict[str, Any] = {
        "name": "small",
        "base": to_dict(train_config([])[0]),
        "metrics": ["mean_r1"],
        "methods": ["openclip", "sogclr", "neuclip"],
        "optimizers": ["adamw", "radam", "lamb", "sgd"],
        "space": {
            "lr": {"low": 1e-4, "high": 1e-2, "log": True},
            "sgd.lr": {"low": 1e-2, "high": 1.0, "log": True},
            "weight_decay": {"low": 1e-3, "high": 0.3, "log": True},
            "beta2": {"choices": [0.95, 0.98, 0.999]},
            "schedule": {"choices": ["cosine", "tanh"]},
            "gamma": {"low": 0.5, "high": 1.0},
            "warmup_epochs": {"low": 0, "high": 5},
        },
        "choices": {
            "trials": 24,
            "over": ["method", "optimizer", "lr"],
            "changes": {"epochs": 2, "data_share": 0.2},
        },
        "grid": {"methods": 2, "optimizers": 2, "changes": {"epochs": 3}},
        "fine": {"trials": 20, "changes": {"epochs": 4}},
        "finals": {"best": 3, "seeds": [0, 1, 2], "baselines": ["openclip", "sogclr"], "changes": {"epochs": 4}},
    }
    return search_from({**usual, **values})


def played(
    plan: SearchPlan, phases: tuple[PhaseName, ...] = ("choices", "grid", "fine", "finals"), seed: int = 0
) -> dict[PhaseName, list[Ended]]:
    """The whole search; a few trials of its Bayesian phases are pruned, one diverges, one fails."""
    chance = random.Random(seed)
    found: dict[PhaseName, list[Ended]] = {}
    for phase in (name for name in phases if getattr(plan, name) is not None):
        found[phase] = [_trial(plan, phase, slot, chance) for slot in slots_of(phase, plan, found)]
    return found


def all_owed(plan: SearchPlan) -> dict[PhaseName, int]:
    return owed(plan)


def _trial(plan: SearchPlan, phase: PhaseName, slot: Slot, chance: random.Random) -> Ended:
    params = dict(slot.params) if phase == "finals" else _sampled(plan, phase, dict(slot.params), chance)
    value = _value(params, chance)
    status: Status = "done"
    if phase in ("choices", "fine"):
        odd: dict[int, Status] = {5: "diverged", 6: "failed"}
        status = odd.get(slot.number, "pruned" if slot.number % 7 == 3 else "done")
    curve = [(10 * (n + 1), value * (1 - math.exp(-(n + 1) / 2))) for n in range(2 if status == "pruned" else 5)]
    last = {"pruned": curve[-1][1], "diverged": 0.0, "failed": None}.get(status, value)
    return Ended(
        slot=slot,
        status=status,
        params=params,
        values=None if last is None else _with_others(plan, last, chance),
        seconds=30.0 + chance.random() * 5,
        device_hours=0.01,
        error="CUDA out of memory" if status == "failed" else "",
        number=slot.number,
        evaluations=()
        if status in ("failed", "diverged")
        else tuple((step, _with_others(plan, one, chance)) for step, one in curve),
        started="2026-01-01T00:00:00",
        ended="2026-01-01T00:00:35",
    )


def _sampled(plan: SearchPlan, phase: PhaseName, given: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """What a sampler would choose, by Optuna's names."""
    params = dict(given)
    if phase == "choices":
        params = {"method": chance.choice(plan.methods), "optimizer": chance.choice(plan.optimizers), **given}
    for name, dimension in plan.dimensions(phase, params["method"], params["optimizer"]).items():
        if name in params:
            continue
        if isinstance(dimension, Choice):
            params[name] = chance.choice(dimension.values)
        elif isinstance(dimension, Whole):
            params[name] = chance.randint(dimension.low, dimension.high)
        elif dimension.log:
            params[name] = math.exp(chance.uniform(math.log(dimension.low), math.log(dimension.high)))
        else:
            params[name] = chance.uniform(dimension.low, dimension.high)
    return params


def _value(params: dict[str, Any], chance: random.Random) -> float:
    found = _OPTIMIZERS.get(params.get("optimizer", "adamw"), 0.1) + _METHODS.get(params["method"], 0.02)
    found -= 0.03 * abs(math.log10(params.get("lr", 1e-3)) + 2.7)
    found -= 0.1 * abs(params.get("gamma", 0.8) - 0.85)
    return max(0.001, found + chance.gauss(0.0, 0.006))


def _with_others(plan: SearchPlan, value: float, chance: random.Random) -> tuple[float, ...]:
    """Further metrics pull the other way, as seconds do."""
    return (value, *(40.0 + 200 * value + 30 * chance.random() for _ in plan.metrics[1:]))
