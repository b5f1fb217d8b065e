"""One study, and for each slot a sampler of its own: what a slot draws depends on its seed and on what has ended, not
on which process draws it or what that process drew before.  And a pruner that does not count the dead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from fullbatch.trials.standing import SLOT


class BySlot(BaseSampler):
    def __init__(self) -> None:
        self.sampler_for: Callable[[int], BaseSampler] = lambda number: RandomSampler()
        self._of: dict[int, BaseSampler] = {}  # by trial

    def _sampler(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number not in self._of:
            slot = trial.user_attrs.get(SLOT)
            self._of[trial.number] = RandomSampler() if slot is None else self.sampler_for(slot)
        return self._of[trial.number]

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._sampler(trial).before_trial(study, trial)

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

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        if (sampler := self._of.pop(trial.number, None)) is not None:  # else another process's, found dead
            sampler.after_trial(study, trial, state, values)


def without_the_dead(pruner: BasePruner) -> BasePruner:
    """Successive halving ranks a trial among all that came as far, also attempts whose process died later: the slot
    would count twice.  (Hyperband does too, in studies of its own that cannot be reached; the median counts only
    trials that are complete.)"""
    return _Halving(pruner) if isinstance(pruner, SuccessiveHalvingPruner) else pruner


class _Halving(BasePruner):
    def __init__(self, pruner: SuccessiveHalvingPruner) -> None:
        self._pruner = pruner

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        return self._pruner.prune(cast(Study, _Living(study)), trial)


class _Living:
    """A study in which nobody died."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, deepcopy: bool = True) -> list[FrozenTrial]:
        return [trial for trial in self._study.get_trials(deepcopy) if trial.state is not TrialState.FAIL]
