"""The slots of a phase as trials of an Optuna study, shared by all workers: each slot counts once, whoever dies.

A trial names its slot, the attempt at it that it is, and the process that makes it.  A storage of Optuna's does two
things in one act each: it makes a trial with all that and numbers it, and it finishes a running trial, once.  So two
rules decide, and all who read agree, now and later:

    By their numbers, the first trial of a slot that is attempt 1 is that attempt, the first one after it that is
    attempt 2 is the next, and so on.  Any other was made by a process that came late, which fails it.
    A slot's trial is the lowest-numbered of its attempts that has not failed, or that records how the slot ended.

A worker that wants work fails the trials of the dead, and makes the next attempt at the first slot that has no trial.

Optuna knows the dead by their heartbeats, and refuses what comes late from a worker that was taken for dead: the first
result counts.  Three things it does not do by itself.  A process of this machine that is gone is noticed at once.  A
trial whose process died before its first heartbeat gets one from who meets it, and grows stale.  FAIL is the
state of the dead, too: a slot that cannot be trained ends with a further trial, made finished, that says why.

The next attempt has the parameters of the one before, if that had chosen them all.  A sampler is seeded by the slot.
So a search in one process, killed and resumed, tries the same.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from fullbatch.trials.phases import Ended, Running, Score, Slot
from fullbatch.trials.processes import ProcessIdentity, is_gone, this_process
from fullbatch.trials.storage import BEAT_EVERY, heartbeat_every, patiently, without_heartbeat

MOST_DEATHS = 3  # after so many a slot is given up

# user attributes: those that a trial is made with; those of one that records an ending; those that its process writes
SLOT, ATTEMPT, WORKER = "slot", "attempt", "worker"
ENDED, OF = "ended", "of"
PARAMS, OUTCOME, RELEASED = "params", "outcome", "released"

Direction = Literal["maximize", "minimize"]


@dataclass
class SlotQueue:
    storage: BaseStorage  # open_storage's
    name: str  # of the study
    directions: Sequence[Direction]  # one a metric
    slots: Sequence[Slot]  # what the phase owes; every worker must give the same
    pruner: BasePruner | None = None
    worker: ProcessIdentity = field(default_factory=this_process)
    last_line: Callable[[Slot], str] = lambda slot: ""  # that an attempt printed, if it can be seen from here
    is_gone: Callable[[ProcessIdentity], bool] = is_gone  # tests have their own

    def __post_init__(self) -> None:
        self._sampler = _SamplerBySlot()
        self.study = patiently(
            lambda: optuna.create_study(
                storage=self.storage,
                study_name=self.name,
                directions=list(self.directions),
                sampler=self._sampler,
                pruner=_without_failed(self.pruner or NopPruner()),
                load_if_exists=True,
            )
        )
        stored = [direction.name.lower() for direction in self.study.directions]
        if stored != list(self.directions):
            raise ValueError(
                f"The study {self.name!r} in this storage has the directions {stored}, this search has "
                f"{list(self.directions)}; give the search another name."
            )
        self.held: set[int] = set()  # trials of this very process
        self._alive: set[int] = set()  # trials of others that have had a heartbeat
        self._looked = time.time(), time.monotonic()
        self._trusted_from = -math.inf  # by the monotonic clock: from when heartbeats that are missing tell something

    def trials(self) -> list[FrozenTrial]:
        return patiently(lambda: self.study.get_trials(deepcopy=False))

    def ended(self) -> list[Ended]:
        return self.progress()[0]

    def progress(self) -> tuple[list[Ended], list[Running]]:
        """The slots that have ended, and those under way."""
        trials, ended, running = self.trials(), list[Ended](), list[Running]()
        for slot in self.slots:
            trial = _deciding(slot, trials)
            if trial is not None and trial.state.is_finished():
                ended.append(_ended(slot, trial, trials))
            elif trial is not None and trial.state is TrialState.RUNNING:
                holder = ProcessIdentity.read(trial.user_attrs.get(WORKER))
                params = trial.user_attrs.get(PARAMS, {**slot.params, **trial.params})
                running.append(Running(slot, params, holder.name if holder else "", _iso(trial.datetime_start)))
        return ended, running

    @property
    def complete(self) -> bool:
        return len(self.ended()) == len(self.slots)

    def is_finished(self, number: int) -> bool:
        return any(trial.number == number and trial.state.is_finished() for trial in self.trials())

    def take(self, sampler_for: Callable[[Slot], BaseSampler]) -> Lease | None:
        """The next trial; None: none is free now.  Unless all slots have ended, one may be later."""
        slots = {slot.number: slot for slot in self.slots}
        self._sampler.sampler_for = lambda number: sampler_for(slots[number])
        while True:
            self.fail_dead()
            trials = self.trials()
            slot = next((slot for slot in self.slots if _deciding(slot, trials) is None), None)
            if slot is None:
                return None
            attempts = _attempts(slot, trials)
            died = [trial for trial in attempts if RELEASED not in trial.user_attrs]
            if len(died) >= MOST_DEATHS:
                text = self.last_line(slot)
                where = f"its output ends with: {text}" if text else "see the end of its output"
                error = f"its process died {MOST_DEATHS} times (out of memory? {where})"
                self.record(slot, died[-1].number, Score("failed", error=error))
            elif (lease := self._attempt(slot, attempts)) is not None:
                return lease

    def _attempt(self, slot: Slot, before: Sequence[FrozenTrial]) -> Lease | None:
        """The next one, after these; None: another process was faster."""
        chosen = [{**slot.params, **trial.params} for trial in before if PARAMS in trial.user_attrs]
        attrs = {SLOT: slot.number, ATTEMPT: len(before) + 1, WORKER: asdict(self.worker)}
        given = {"fixed_params": chosen[-1] if chosen else dict(slot.params)}  # as Optuna's own queue names it
        made = create_trial(state=TrialState.RUNNING, user_attrs=attrs, system_attrs=given)
        trial_id = patiently(lambda: self.storage.create_new_trial(self.study._study_id, template_trial=made))
        patiently(lambda: self.record_heartbeat(trial_id))
        trials = self.trials()
        number = next(trial.number for trial in trials if trial._trial_id == trial_id)
        deciding = _deciding(slot, trials)
        if deciding is None or deciding.number != number:
            self.tell(number, TrialState.FAIL)
            return None
        self.study._thread_local.cached_all_trials = None  # as Optuna does for every trial, so that samplers see all
        return Lease(self, patiently(lambda: optuna.Trial(self.study, trial_id)), slot, len(before) + 1)

    def record_heartbeat(self, trial_id: int) -> None:
        if heartbeat_every(self.storage) is not None:
            self.storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """Finish a trial, unless somebody has."""
        with suppress(RuntimeError, ValueError):
            patiently(lambda: self.study.tell(number, values if state is TrialState.COMPLETE else None, state))

    def record(self, slot: Slot, number: int, score: Score) -> None:
        """An ending without a result, as a trial that is made finished."""
        attrs = {SLOT: slot.number, ENDED: asdict(score), OF: number}
        made = create_trial(state=TrialState.FAIL, user_attrs=attrs)
        patiently(lambda: self.study.add_trial(made))

    def fail_dead(self) -> None:
        """Fail the trials of workers that are gone."""
        heartbeats_tell = not self._just_woke()
        if heartbeats_tell:
            patiently(lambda: optuna.storages.fail_stale_trials(self.study))
        for trial in self.trials():
            if trial.state is TrialState.RUNNING and trial.number not in self.held:
                holder = ProcessIdentity.read(trial.user_attrs.get(WORKER))
                if holder == self.worker:  # made, but the answer of the storage was lost
                    with suppress(RuntimeError):  # it was finished meanwhile
                        patiently(partial(self.storage.set_trial_user_attr, trial._trial_id, RELEASED, True))
                    self.tell(trial.number, TrialState.FAIL)
                elif holder is not None and self.is_gone(holder):
                    self.tell(trial.number, TrialState.FAIL)
                elif heartbeats_tell and trial.number not in self._alive:
                    if patiently(partial(without_heartbeat, self.storage, trial._trial_id)):
                        patiently(partial(self.record_heartbeat, trial._trial_id))
                    self._alive.add(trial.number)

    def _just_woke(self) -> bool:
        """Whether this machine slept or its clock was set: its other workers have had no time for a heartbeat yet."""
        (wall, monotonic), self._looked = self._looked, (time.time(), time.monotonic())
        every = heartbeat_every(self.storage) or BEAT_EVERY
        if abs((self._looked[0] - wall) - (self._looked[1] - monotonic)) > every:
            self._trusted_from = self._looked[1] + 2 * every
        return self._looked[1] < self._trusted_from


def _attempts(slot: Slot, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """In their order, by the rule above."""
    attempts: list[FrozenTrial] = []
    for trial in sorted(trials, key=lambda trial: trial.number):
        attrs = trial.user_attrs
        if WORKER in attrs and attrs[SLOT] == slot.number and attrs.get(ATTEMPT, 1) == len(attempts) + 1:
            attempts.append(trial)
    return attempts


def _deciding(slot: Slot, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The slot's trial, by the rule above; None: it has to be made.  A result counts however its attempts are numbered:
    earlier versions counted those that nobody had begun too, or named them late."""
    going = [trial for trial in _attempts(slot, trials) if trial.state is not TrialState.FAIL]
    own = [trial for trial in trials if trial.user_attrs.get(SLOT) == slot.number]
    ended = [
        trial for trial in own if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or ENDED in trial.user_attrs
    ]
    return min([*going, *ended], key=lambda trial: trial.number, default=None)


def _ended(slot: Slot, trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> Ended:
    stored = trial.user_attrs.get(ENDED) or trial.user_attrs.get(OUTCOME)
    if ENDED in trial.user_attrs:
        trial = next(other for other in trials if other.number == trial.user_attrs[OF])
    values = None if trial.values is None else tuple(trial.values)
    score = Score("done", values) if stored is None else Score.read(stored)
    return Ended(
        slot=slot,
        params=trial.user_attrs.get(PARAMS, {**slot.params, **trial.params}),
        attempts=trial.user_attrs.get(ATTEMPT, 1),
        number=trial.number,
        started=_iso(trial.datetime_start),
        ended=_iso(trial.datetime_complete),
        **vars(score),
    )


def _iso(moment: datetime | None) -> str:
    return moment.isoformat(timespec="seconds") if moment else ""


# ---------------------------------------------------------------------------------------------------------------------
# a trial of this process


class Lease:
    """A trial that this process works on, until ``end`` or ``release``."""

    def __init__(self, queue: SlotQueue, trial: optuna.Trial, slot: Slot, attempt: int) -> None:
        self.trial, self.slot, self.attempt = trial, slot, attempt
        self._queue = queue
        self._lost, self._over = threading.Event(), threading.Event()
        queue.held.add(trial.number)
        threading.Thread(target=self._live, name=f"heartbeat of trial {trial.number}", daemon=True).start()

    @property
    def lost(self) -> bool:
        """This process was taken for dead, and another has the slot, or will; nothing counts any more."""
        return self._lost.is_set()

    def begin(self, choose: Callable[[optuna.Trial], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Choose what is open, and keep it: from here on another attempt has the same.  None: lost.

        choose   suggests by the trial, and returns the parameters as they are to be shown
        """
        params = self._unless_lost(lambda: dict(choose(self.trial)))
        self._unless_lost(lambda: self.trial.set_user_attr(PARAMS, params))
        if not self.lost and self._queue.is_finished(self.trial.number):  # written too late
            self._lost.set()
        return None if self.lost else params

    def report(self, step: int, value: float) -> bool:
        """An evaluation; whether the run should end here, because others did better."""
        if len(self._queue.directions) > 1:  # Optuna prunes by one value
            return False
        self._unless_lost(lambda: self.trial.report(value, step))
        return bool(self._unless_lost(self.trial.should_prune))

    def end(self, score: Score) -> bool:
        """Once.  False: it was lost before, and does not count."""
        assert not self._over.is_set(), "a trial ends once"
        assert score.values is not None or score.status not in ("done", "stopped"), f"{score.status} without values"
        score = _finite(score)
        state = _state(score, len(self._queue.directions))
        number, counts = self.trial.number, False
        if not self.lost:
            if state is TrialState.FAIL:
                self._queue.record(self.slot, number, score)
            else:
                self._unless_lost(lambda: self.trial.set_user_attr(OUTCOME, asdict(score)))
            self._queue.tell(number, state, score.values)
            counts = any(found.slot == self.slot and found.number == number for found in self._queue.ended())
        self._close()
        if not counts:
            self._lost.set()
        return counts

    def release(self) -> None:
        """Give it back: another process goes on with it, and it does not count as a death."""
        self._unless_lost(lambda: self.trial.set_user_attr(RELEASED, True))
        if not self.lost:
            self._queue.tell(self.trial.number, TrialState.FAIL)
        self._close()

    def beat(self) -> None:
        """A sign of life; a thread gives it."""
        self._queue.record_heartbeat(self.trial._trial_id)
        if self._queue.is_finished(self.trial.number) and not self._over.is_set():
            self._lost.set()

    def _unless_lost(self, act: Callable[[], Any]) -> Any:
        """None: it is lost, or was just now."""
        if self.lost:
            return None
        try:
            return patiently(act)
        except RuntimeError:
            if not self._queue.is_finished(self.trial.number):
                raise
            self._lost.set()
            return None

    def _close(self) -> None:
        self._over.set()
        self._queue.held.discard(self.trial.number)

    def _live(self) -> None:
        every = heartbeat_every(self._queue.storage) or BEAT_EVERY
        while not self._over.wait(every) and not self.lost:
            with suppress(Exception):  # the storage is away; how long is too long, the others decide
                self.beat()
        self._queue.storage.remove_session()


def _finite(score: Score) -> Score:
    """A value that is no number is a divergence."""
    finite = score.values is not None and all(map(math.isfinite, score.values))
    values = tuple(map(float, score.values or ())) if finite and score.status != "failed" else None
    status = "diverged" if values is None and score.status in ("done", "stopped") else score.status
    return Score(**{**vars(score), "status": status, "values": values})


def _state(score: Score, metrics: int) -> TrialState:
    """What Optuna is told.  FAIL: what its samplers should not learn from; of several metrics, also what has no values,
    since they cannot do without."""
    if score.status in ("done", "stopped") or (score.status == "diverged" and score.values is not None):
        return TrialState.COMPLETE
    return TrialState.FAIL if score.status == "failed" or metrics > 1 else TrialState.PRUNED


# ---------------------------------------------------------------------------------------------------------------------
# Optuna's samplers and pruners, slot by slot


class _SamplerBySlot(BaseSampler):
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


def _without_failed(pruner: BasePruner) -> BasePruner:
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
