"""Optuna's samplers and pruners as a plan asks for them: a sampler for each slot, and pruners that do not count failed
attempts."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import assert_never

from fullbatch.trials.search_plan import PRUNED, SearchPlan
from fullbatch.trials.slots import PhaseName, Slot

SLOT = "slot"  # the user attribute that names a trial's
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
            most = max(evaluations, first)
            return HyperbandPruner(min_resource=first, max_resource=most, reduction_factor=factor)
        case "median":
            return MedianPruner(n_startup_trials=4, n_warmup_steps=first - 1)
        case _:
            assert_never(plan.pruner)


class SamplerBySlot(BaseSampler):
    """What a slot draws depends on its seed and on what has ended, not on which process draws it or what that process
    drew before.  (Before and after a trial the samplers of ``sampler_of`` do nothing.)"""

    def __init__(self) -> None:
        self.sampler_for: Callable[[int], BaseSampler] = lambda number: RandomSampler()
        self._of: dict[int, BaseSampler] = {}  # by trial

    def _sampler(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number not in self._of:
            slot = trial.user_attrs.get(SLOT)
            self._of[trial.number] = RandomSampler() if slot is None else self.sampler_for(slot)
        return self._of[trial.number]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler(trial).sample_independent(study, trial, param_name, param_distribution)


def without_failed(pruner: BasePruner) -> BasePruner:
    """Successive halving ranks a trial among all that came as far, also attempts whose process died later: the slot
    would count twice.  (Hyperband does too, in studies of its own that cannot be reached; the median counts only
    trials that are complete.)"""
    return _WithoutFailed(pruner) if isinstance(pruner, SuccessiveHalvingPruner) else pruner


class _WithoutFailed(BasePruner):
    def __init__(self, pruner: BasePruner) -> None:
        self._pruner = pruner

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        others = copy.copy(study)
        others.get_trials = lambda deepcopy=True: [  # type: ignore[method-assign, misc, assignment]
            other for other in study.get_trials(deepcopy) if other.state is not TrialState.FAIL
        ]
        return self._pruner.prune(others, trial)
