"""Optuna's samplers and pruners as a plan asks for them."""

from __future__ import annotations

import warnings
import zlib

from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from typing_extensions import assert_never

from fullbatch.trials.search_plan import PRUNED, SearchPlan
from fullbatch.trials.slots import PhaseName, Slot

MOST_RANDOM = 10  # trials before TPE has something to go by; in short searches a quarter of them


def sampler_of(plan: SearchPlan, phase: PhaseName, slot: Slot) -> BaseSampler:
    """Seeded by the slot: what it draws depends on what has ended and not on who draws it.

    Parameters are drawn together, those that go together in groups (a method's own settings with the method); trials
    under way count as bad ones, so that workers do not all try the same.
    """
    seed = zlib.crc32(f"{plan.seed} {phase} {slot.number}".encode())
    match phase:
        case "choices" | "fine":
            trials = plan.choices.trials if phase == "choices" or plan.fine is None else plan.fine.trials
            random = min(MOST_RANDOM, max(2, trials // 4))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(n_startup_trials=random, multivariate=True, group=True, constant_liar=True, seed=seed)
        case "grid" | "finals":
            return RandomSampler(seed)  # nothing is left to it
        case _:
            assert_never(phase)


def pruner_of(plan: SearchPlan, phase: PhaseName, evaluations: int) -> BasePruner:
    """``evaluations``: of a whole run of the phase."""
    if phase not in PRUNED:
        return NopPruner()
    first, factor = plan.pruner_start, plan.pruner_factor
    match plan.pruner:
        case "none":
            return NopPruner()
        case "asha":
            return SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor)
        case "hyperband":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return HyperbandPruner(
                    min_resource=first, max_resource=max(evaluations, first), reduction_factor=factor
                )
        case "median":
            return MedianPruner(n_startup_trials=4, n_warmup_steps=first - 1)
        case _:
            assert_never(plan.pruner)
