"""Where each slot of a phase stands, read off the trials of its study.

Only what never changes decides, so that all who read agree, now and later: the state of a finished trial, and what was
written in the same act in which a trial was made.  (User attributes that come later can land, in a data base, a moment
after another process has ended the trial.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from fullbatch.trials.slots import Ended, Slot, Status

DEATHS = 3  # after so many a slot is given up

# written when a trial is made
SLOT, ATTEMPT, DIED, GIVEN, ENDED, OF = "slot", "attempt", "died", "given", "ended", "of"
# written by its holder while it runs
WORKER, BEAT, PARAMS, OUTCOME, RELEASED, SUPERSEDED = "worker", "beat", "params", "outcome", "released", "superseded"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, as its holder tells it."""

    status: Status
    values: tuple[float, ...] | None = None
    seconds: float = 0.0
    device_hours: float = 0.0
    error: str = ""
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Outcome:
        values = stored["values"]
        evaluations = tuple((int(step), tuple(found)) for step, found in stored["evaluations"])
        return cls(**{**stored, "values": None if values is None else tuple(values), "evaluations": evaluations})


@dataclass(frozen=True)
class Owed:
    """Nobody holds it: the next attempt has to be made.

    params   those it starts from; all of them, if an attempt before had chosen them
    died     processes that died of it so far
    """

    attempt: int
    params: Mapping[str, Any]
    died: int

    @property
    def given_up(self) -> bool:
        return self.died >= DEATHS


@dataclass(frozen=True)
class Waiting:
    trial: FrozenTrial


@dataclass(frozen=True)
class Held:
    trial: FrozenTrial
    attempt: int


Standing = Owed | Waiting | Held | Ended
Counted = Mapping[tuple[int, int], FrozenTrial]


def counted(trials: Iterable[FrozenTrial]) -> Counted:
    """By slot and attempt the trial that counts: the first that was made, whoever else made another."""
    found: dict[tuple[int, int], FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        attrs = trial.user_attrs
        if isinstance(attrs.get(SLOT), int) and isinstance(attrs.get(ATTEMPT), int):
            found.setdefault((attrs[SLOT], attrs[ATTEMPT]), trial)
    return found


def standing(slot: Slot, trials: Counted) -> Standing:
    now = Owed(1, slot.params, 0)
    while True:
        trial = trials.get((slot.number, now.attempt))
        if trial is None:
            return now
        after = trials.get((slot.number, now.attempt + 1))
        if after is not None and ENDED in after.user_attrs:
            return _ended(slot, now.attempt, trial, after.user_attrs[ENDED])
        match trial.state:
            case TrialState.WAITING:
                return Waiting(trial)
            case TrialState.RUNNING:
                return Held(trial, now.attempt)
            case TrialState.COMPLETE | TrialState.PRUNED:
                return _ended(slot, now.attempt, trial, trial.user_attrs.get(OUTCOME))
            case TrialState.FAIL:
                now = _after(slot, now.attempt, trial)


def _after(slot: Slot, attempt: int, trial: FrozenTrial) -> Owed:
    """It was let go, or its process died.  One that died before it wrote its name had not begun: nothing it did can be
    the reason."""
    attrs = trial.user_attrs
    died = attrs.get(DIED, 0) + (WORKER in attrs and RELEASED not in attrs)
    given = attrs.get(GIVEN, slot.params)
    return Owed(attempt + 1, {**given, **trial.params} if PARAMS in attrs else given, died)


def _ended(slot: Slot, attempt: int, trial: FrozenTrial, stored: Mapping[str, Any] | None) -> Ended:
    outcome = Outcome.read(stored) if stored else Outcome("done", None if trial.values is None else tuple(trial.values))
    return Ended(
        slot=slot,
        status=outcome.status,
        params=trial.user_attrs.get(PARAMS, {**slot.params, **trial.params}),
        values=outcome.values,
        seconds=outcome.seconds,
        device_hours=outcome.device_hours,
        error=outcome.error,
        attempts=attempt,
        number=trial.number,
        evaluations=outcome.evaluations,
        started=trial.datetime_start.isoformat(timespec="seconds") if trial.datetime_start else "",
        ended=trial.datetime_complete.isoformat(timespec="seconds") if trial.datetime_complete else "",
    )
