"""The trials of a phase, shared by all its workers: each slot ends once, whoever dies, and whenever.

A phase is an Optuna study.  Its slots are numbered, and a slot is tried in attempts 1, 2, 3, …: every attempt is a
trial that says in its user attributes which slot and which attempt it is.  They are made one by one, the lowest first.

1.  **Making.**  Who wants work and finds a slot that nobody holds makes a waiting trial for its next attempt
    (``enqueue_trial``).  Several may do so at once.  A storage makes trials one after another and numbers them, so all
    agree which was first: it counts, the others never do.
2.  **Taking.**  ``ask`` turns a waiting trial into a running one, for one process only.  That process writes its name
    (``worker``) and looks whether the trial counts; if not, it ends it (FAIL, ``superseded``) and begins again.  Where
    no trial waits any more, ``ask`` makes one without a slot, which goes the same way.
3.  **Living.**  While it runs, a thread of its holder raises ``beat``.
4.  **Dying.**  Everyone who looks for work looks for dead first.  A holder is dead if it is a process of this machine
    that is gone, or if its beat has not changed in ``lost_after`` seconds of watching, by the watcher's own clock.  A
    trial whose taker has not even written its name is given a shorter time.  Who finds it ends it (FAIL).  Two who find
    it end it once, since a finished trial cannot be ended again.
5.  **Ending.**  The holder writes the outcome, then ends the trial (COMPLETE, PRUNED).  A slot has ended when a trial
    that counts has one of these states.  Did somebody take the holder for dead before, the storage refuses both,
    and the result is dropped.
6.  **Ending without a result** (failed; too many deaths).  FAIL cannot say it: it is also the state of the dead.  So
    the ending is a trial of its own, made finished, in the place of the next attempt.  Whether that place is a retry or
    the end, is again decided by which was made first.
7.  **Trying again.**  The next attempt of a slot whose last trial is FAIL has the parameters of that one if they were
    all chosen (``begin``), else those that it was given.  So a search in one process, killed and resumed, tries the
    same.

What if a process dies, or sleeps, between two of these?  Before it makes a trial: nothing happened.  Made, not taken:
anyone takes it.  Taken, not named: found by the shorter time, and not counted as a death.  Named, not looked: found
dead.  FAIL, next attempt not made: who looks next makes it.  Outcome written, trial not ended: found dead, tried again;
its folder holds what was trained.  Ending made (6), trial not ended: the slot has ended, and the trial is found dead.
Asleep and taken for dead: its next beat, report or end is refused, ``Claim.lost`` says so; and what it makes late in 6
comes after the retry, or before and then there is none.  Asleep while it watched: a pause counts as a third of
``lost_after`` at most, and the clock is read before the trials for judging and after them for remembering.

One thing has no cure here: a process that is stopped (SIGSTOP) within the milliseconds in which it holds the lock of a
file lets all others wait until it goes on or is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from fullbatch.trials.claim import Claim
from fullbatch.trials.identity import Identity, is_gone, this_process
from fullbatch.trials.sampling import BySlot, without_the_dead
from fullbatch.trials.slots import Ended, Slot
from fullbatch.trials.standing import (
    ATTEMPT,
    BEAT,
    DEATHS,
    DIED,
    ENDED,
    GIVEN,
    OF,
    PARAMS,
    SLOT,
    SUPERSEDED,
    WORKER,
    Held,
    Outcome,
    Owed,
    Standing,
    Waiting,
    counted,
    standing,
)
from fullbatch.trials.storage import patiently

LOST_AFTER = 180.0  # seconds without a beat
BEAT_EVERY = 10.0
NAMELESS_AFTER = 30.0  # seconds a trial may be held by nobody knows whom

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Running:
    slot: Slot
    attempt: int
    number: int
    params: dict[str, Any]
    worker: str
    since: str


@dataclass
class Ledger:
    """storage      open_storage's
    name         of the study
    directions   one a metric: "maximize" or "minimize"
    slots        what the phase owes; every worker must give the same
    pruner       Optuna's; None: none
    worker       this process
    lost_after   seconds without a sign of life after which a worker counts as dead
    beat_every   seconds between signs of life, a small part of ``lost_after``; None: a sixth, at most BEAT_EVERY
    last_words   what those who tried a slot said at the end, if it can be seen from here; else ""
    gone, clock  how processes and time are seen; tests have their own
    """

    storage: BaseStorage
    name: str
    directions: Sequence[Direction]
    slots: Sequence[Slot]
    worker: Identity = field(default_factory=this_process)
    lost_after: float = LOST_AFTER
    pruner: BasePruner | None = None
    beat_every: float | None = None
    last_words: Callable[[Slot], str] = lambda slot: ""
    gone: Callable[[Identity], bool] = is_gone
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._sampler = BySlot()
        self.study = patiently(self._study)
        told = [direction.name.lower() for direction in self.study.directions]
        if told != list(self.directions):
            raise ValueError(
                f"The study {self.name!r} in this storage has the directions {told}, this search has "
                f"{list(self.directions)}; give the search another name."
            )
        self._by_number = {slot.number: slot for slot in self.slots}
        self.holds: set[int] = set()  # trials in the hands of this very process
        self._seen: dict[int, tuple[object, float]] = {}  # beat, and seconds that it was watched without a change
        self._looked: float | None = None

    def _study(self) -> optuna.Study:
        return optuna.create_study(
            storage=self.storage,
            study_name=self.name,
            directions=list(self.directions),
            sampler=self._sampler,
            pruner=without_the_dead(self.pruner or NopPruner()),
            load_if_exists=True,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # looking

    def ended(self) -> list[Ended]:
        return [found for found in self._standings(self._trials()).values() if isinstance(found, Ended)]

    def running(self) -> list[Running]:
        return list(self._running(self._standings(self._trials())))

    @property
    def complete(self) -> bool:
        return all(isinstance(found, Ended) for found in self._standings(self._trials()).values())

    def ended_by(self, slot: Slot, number: int) -> bool:
        found = self._standings(self._trials())[slot.number]
        return isinstance(found, Ended) and found.number == number

    def is_finished(self, number: int) -> bool:
        return any(trial.number == number and trial.state.is_finished() for trial in self._trials())

    def _trials(self) -> list[FrozenTrial]:
        return patiently(lambda: self.study.get_trials(deepcopy=False))

    def _standings(self, trials: Sequence[FrozenTrial]) -> dict[int, Standing]:
        first = counted(trials)
        return {slot.number: standing(slot, first) for slot in self.slots}

    def _running(self, standings: dict[int, Standing]) -> Iterator[Running]:
        for number, found in standings.items():
            if isinstance(found, Held):
                slot, trial = self._by_number[number], found.trial
                params = trial.user_attrs.get(PARAMS, {**slot.params, **trial.params})
                holder = Identity.read(trial.user_attrs.get(WORKER))
                since = trial.datetime_start.isoformat(timespec="seconds") if trial.datetime_start else ""
                yield Running(slot, found.attempt, trial.number, params, holder.name if holder else "", since)

    # -----------------------------------------------------------------------------------------------------------------
    # taking

    def claim(self, sampler_for: Callable[[Slot], BaseSampler]) -> Claim | None:
        """The next trial, in this process's hands; None: none is free now; unless all have ended, one may be later."""
        self._sampler.sampler_for = lambda number: sampler_for(self._by_number[number])
        while True:
            self.bury_the_dead()
            standings = self._standings(self._trials())
            owed = {number: found for number, found in standings.items() if isinstance(found, Owed)}
            hopeless = {number: found for number, found in owed.items() if found.given_up}
            for number, found in hopeless.items():
                self._give_up(self._by_number[number], found)
            if hopeless:
                continue
            if not any(isinstance(found, Waiting) for found in standings.values()):
                if not owed:
                    return None
                number = min(owed)
                self._enqueue(number, owed[number])
            if (claim := self._take()) is not None:
                return claim

    def _enqueue(self, number: int, owed: Owed) -> None:
        params = dict(owed.params)
        attrs = {SLOT: number, ATTEMPT: owed.attempt, DIED: owed.died, GIVEN: params}
        patiently(lambda: self.study.enqueue_trial(params, user_attrs=attrs))

    def _take(self) -> Claim | None:
        try:
            trial = patiently(self.study.ask)
            patiently(lambda: trial.set_user_attr(WORKER, self.worker.as_dict()))
        except RuntimeError:  # it was finished meanwhile
            return None
        slot = self._by_number.get(trial.user_attrs.get(SLOT, -1))
        found = self._standings(self._trials())[slot.number] if slot is not None else None
        if slot is not None and isinstance(found, Held) and found.trial.number == trial.number:
            every = min(BEAT_EVERY, self.lost_after / 6) if self.beat_every is None else self.beat_every
            return Claim(self, trial, slot, found.attempt, every)
        with suppress(RuntimeError, ValueError):
            patiently(lambda: trial.set_user_attr(SUPERSEDED, True))
            patiently(lambda: self.study.tell(trial, state=TrialState.FAIL))
        return None

    def _give_up(self, slot: Slot, owed: Owed) -> None:
        last = counted(self._trials())[slot.number, owed.attempt - 1]
        said = self.last_words(slot)
        where = f"its output ends with: {said}" if said else "see the end of its output"
        why = f"its process died {DEATHS} times (out of memory? {where})"
        self.record(slot, owed.attempt - 1, last.number, Outcome("failed", error=why))

    def record(self, slot: Slot, attempt: int, number: int, outcome: Outcome) -> None:
        """An ending in the place of the attempt after it."""
        attrs = {SLOT: slot.number, ATTEMPT: attempt + 1, ENDED: outcome.as_dict(), OF: number}
        made = create_trial(state=TrialState.FAIL, user_attrs=attrs)
        patiently(lambda: self.study.add_trial(made))

    # -----------------------------------------------------------------------------------------------------------------
    # the dead

    def bury_the_dead(self) -> int:
        """End the trials of workers that are gone; how many.  To be asked now and then by who only watches, too."""
        before = self.clock()
        trials = self._trials()
        after = self.clock()
        paused = 0.0 if self._looked is None else max(0.0, before - self._looked)
        watched = min(paused, self.lost_after / 3)
        self._looked = after
        running = [trial for trial in trials if trial.state is TrialState.RUNNING and trial.number not in self.holds]
        self._seen = {trial.number: self._unchanged(trial, watched) for trial in running}
        dead = [trial for trial in running if self._is_dead(trial)]
        for trial in dead:
            with suppress(RuntimeError, ValueError):  # somebody else did, or it ended
                patiently(lambda number=trial.number: self.study.tell(number, state=TrialState.FAIL))  # type: ignore[misc]
        return len(dead)

    def _unchanged(self, trial: FrozenTrial, watched: float) -> tuple[object, float]:
        beat = (trial.user_attrs.get(WORKER), trial.user_attrs.get(BEAT))
        earlier, seconds = self._seen.get(trial.number, (None, 0.0))
        return beat, seconds + watched if beat == earlier else 0.0

    def _is_dead(self, trial: FrozenTrial) -> bool:
        holder = Identity.read(trial.user_attrs.get(WORKER))
        seconds = self._seen[trial.number][1]
        if holder is None:
            return seconds >= min(self.lost_after, NAMELESS_AFTER)
        return self.gone(holder) or seconds >= self.lost_after
