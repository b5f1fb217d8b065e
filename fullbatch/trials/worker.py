"""One worker of a search: it takes trials as long as there are any, phase by phase, whoever else does the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.trials.claim import Claim
from fullbatch.trials.ledger import Ledger
from fullbatch.trials.phases import phases_of, slots_of
from fullbatch.trials.processes import OUTPUT, last_line
from fullbatch.trials.samplers import pruner_of, sampler_of
from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.search_summary import TRIALS, trial_name
from fullbatch.trials.slots import NOT_TRAINED, Ended, PhaseName, Slot
from fullbatch.trials.storage import StorageAway
from fullbatch.trials.study import phase_study
from fullbatch.trials.trial import CannotWork, Report, Score, run_trial

POLL = 1.0  # seconds between looks for work while others finish a phase

# Trains the trial of a claim with these params and tells of its evaluations; asked of the last: is it still ours?
Train = Callable[[PhaseName, Claim, Mapping[str, Any], Report, Callable[[], bool]], Score]


@dataclass(frozen=True)
class Phases:
    """The phases of a search in its storage.

    evaluations   of a whole run of each phase
    lost_after    seconds without a sign of life after which a worker counts as dead
    folder        of the search on this machine, for what its trials said before they died; None: not known
    """

    storage: BaseStorage
    plan: SearchPlan
    evaluations: Mapping[PhaseName, int]
    lost_after: float
    folder: Path | None = None

    def ledger(self, phase: PhaseName, before: Mapping[PhaseName, Sequence[Ended]]) -> Ledger:
        return Ledger(
            self.storage,
            phase_study(self.plan.name, phase),
            ["maximize" if more else "minimize" for more in self.plan.maximise],
            slots_of(phase, self.plan, before),
            lost_after=self.lost_after,
            pruner=pruner_of(self.plan, phase, self.evaluations[phase]),
            last_words=partial(self._last_words, phase),
        )

    def _last_words(self, phase: PhaseName, slot: Slot) -> str:
        if self.folder is None:
            return ""
        return last_line(self.folder / TRIALS / trial_name(phase, slot.number) / OUTPUT)


@dataclass(frozen=True)
class Worker:
    """stopping   whether it was told to stop
    until      the time, by this machine's monotonic clock, after which no trial is begun; None: there is none
    """

    phases: Phases
    train: Train
    stopping: Callable[[], bool] = lambda: False
    until: float | None = None

    def work(self) -> None:
        """To the end of the last phase, or until it is told to stop; the trial under way is then saved and let go."""
        ended: dict[PhaseName, Sequence[Ended]] = {}
        for phase in phases_of(self.phases.plan):
            ledger = self.phases.ledger(phase, ended)
            while not ledger.complete:
                if self.stopping() or (self.until is not None and time.monotonic() > self.until):
                    return
                claim = ledger.claim(partial(sampler_of, self.phases.plan, phase))
                if claim is None:
                    time.sleep(POLL)
                else:
                    self._try(phase, ledger, claim)
            ended[phase] = ledger.ended()

    def _try(self, phase: PhaseName, ledger: Ledger, claim: Claim) -> None:
        """What it raises beside these ends the process, and so the trial counts as one whose process died."""

        def given_up() -> bool:
            return claim.lost or self.stopping()

        try:
            params = claim.begin(lambda trial: self.phases.plan.suggest(phase, trial, claim.slot.params))
            if params is None:
                return
            score = _known(ledger, claim, params) or self.train(phase, claim, params, claim.report, given_up)
        except Abandoned:
            claim.release()
            return
        except StorageAway:  # nor can the claim be given back; the others will find it
            raise
        except (Interrupted, CannotWork, OSError):
            claim.release()
            raise
        claim.end(
            score.status, score.values, score.seconds, score.device_hours, score.error, evaluations=score.evaluations
        )


def _known(ledger: Ledger, claim: Claim, params: Mapping[str, Any]) -> Score | None:
    """The same settings and the same seed once more would give the same numbers: a sampler may draw so."""
    for one in ledger.ended():
        if one.params == params and one.slot.seed == claim.slot.seed and one.status != "failed":
            said = f"the same settings as slot {one.slot.number}, {NOT_TRAINED}"
            return Score(one.status, one.values, error=said, evaluations=one.evaluations)
    return None


@dataclass(frozen=True)
class InFolder:
    """Trains a trial as a run in a folder of the search's; ``around`` is called with it before, and what it returns
    entered."""

    plan: SearchPlan
    folder: Path
    around: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()

    def __call__(
        self,
        phase: PhaseName,
        claim: Claim,
        params: Mapping[str, Any],
        report: Report,
        given_up: Callable[[], bool],
    ) -> Score:
        plan, runs, name = self.plan, self.folder / TRIALS, trial_name(phase, claim.slot.number)
        with self.around(runs / name):
            try:
                config = plan.config(phase, params, claim.slot.seed, str(runs), name)
            except ValueError as error:  # two settings that do not go together
                return Score("failed", None, error=str(error))
            measures = plan.measures_in(phase)
            return run_trial(config, measures, report, plan.patience, plan.take, lambda: claim.lost, given_up)
