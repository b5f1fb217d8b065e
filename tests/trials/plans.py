"""A plan of some phases and dimensions, for tests of plans: nothing is trained."""

from __future__ import annotations

import math
import random
from typing import Any

from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict
from fullbatch.trials.search_plan import PhaseName, SearchPlan, search_from
from fullbatch.trials.space import Choice, Dimension, Real, Whole

BASE, _ = train_config([])


def plan_of(**values: Any) -> SearchPlan:
    usual: dict[str, Any] = {
        "name": "small",
        "base": to_dict(BASE),
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
        "choices": {"trials": 24, "changes": {"epochs": 2, "data_share": 0.2}},
        "grid": {"methods": 2, "optimizers": 2, "changes": {"epochs": 3}},
        "fine": {"trials": 20, "changes": {"epochs": 4}},
        "finals": {"best": 3, "seeds": [0, 1, 2], "baselines": ["openclip", "sogclr"], "changes": {"epochs": 4}},
    }
    return search_from({**usual, **values})


def sampled(plan: SearchPlan, phase: PhaseName, given: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """What a sampler might choose, by Optuna's names."""
    pair = {"method": chance.choice(plan.methods), "optimizer": chance.choice(plan.optimizers), **given}
    dimensions = plan.dimensions(phase, pair["method"], pair["optimizer"])
    return {**pair, **{name: drawn(dimension, chance) for name, dimension in dimensions.items()}}


def drawn(dimension: Dimension, chance: random.Random) -> Any:
    match dimension:
        case Choice(values):
            return chance.choice(values)
        case Whole(low, high, _, step):
            return chance.randrange(low, high + 1, step)
        case Real(low, high, True, _):
            return min(max(math.exp(chance.uniform(math.log(low), math.log(high))), low), high)
        case Real(low, high, _, _):
            return chance.uniform(low, high)
