"""A trial in the hands of this process: what is reported of it, how it ends, and the beat that says that it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState
from typing_extensions import assert_never

from fullbatch.trials.slots import Slot, Status
from fullbatch.trials.standing import BEAT, OUTCOME, PARAMS, RELEASED, Outcome
from fullbatch.trials.storage import patiently

if TYPE_CHECKING:
    from fullbatch.trials.ledger import Ledger


class Claim:
    """Held by ``with``: a block that is left before ``end`` lets the trial go.

    trial     Optuna's: what is not in ``slot.params`` is suggested by it
    lost      others have taken this process for dead, and someone else has the trial, or will; nothing counts any more
    """

    def __init__(self, ledger: Ledger, trial: optuna.Trial, slot: Slot, attempt: int, every: float) -> None:
        self.trial, self.slot, self.attempt = trial, slot, attempt
        self._ledger = ledger
        self._every, self._beats = every, 0
        self._lost, self._over = threading.Event(), threading.Event()
        self._heart = threading.Thread(target=self._live, name=f"beat of trial {trial.number}", daemon=True)
        ledger.holds.add(trial.number)
        self._heart.start()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._over.is_set():
            with suppress(Exception):  # the beats end all the same, and others will find it so
                self.release()
            self._close()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def begin(self, choose: Callable[[optuna.Trial], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Choose what is open, and keep it: from here on another attempt has the same.  None: lost.

        choose   suggests by the trial, and returns the parameters as they are to be shown
        """
        try:
            params = patiently(lambda: dict(choose(self.trial)))
        except RuntimeError:
            if not self._is_finished():
                raise
            self._lost.set()
            return None
        if not self._write(PARAMS, params):
            return None
        if self._is_finished():  # it was written too late, and another attempt may have chosen otherwise
            self._lost.set()
            return None
        return params

    def report(self, step: int, value: float) -> bool:
        """An evaluation; whether the run should end here, because others did better.  If it is lost, nobody says so."""
        if self.lost or len(self._ledger.directions) > 1:  # Optuna prunes by one value
            return False

        def act() -> bool:
            self.trial.report(value, step)
            return self.trial.should_prune()

        try:
            return patiently(act)
        except RuntimeError:
            if not self._is_finished():
                raise
            self._lost.set()
            return False

    def end(
        self,
        status: Status,
        values: Sequence[float] | None = None,
        seconds: float = 0.0,
        device_hours: float = 0.0,
        error: str = "",
        evaluations: Sequence[tuple[int, tuple[float, ...]]] = (),
    ) -> bool:
        """Once.  False: it was lost before, and does not count."""
        assert not self._over.is_set(), "a trial ends once"
        assert values is not None or status not in ("done", "stopped"), f"{status} without values"
        found = None if values is None or not all(map(isfinite, values)) else tuple(map(float, values))
        found = None if status == "failed" else found
        if found is None and status in ("done", "stopped"):
            status = "diverged"
        outcome = Outcome(status, found, seconds, device_hours, error, tuple(evaluations))
        state = self._state(outcome)
        counts = False
        if not self.lost:
            if state is TrialState.FAIL:
                self._ledger.record(self.slot, self.attempt, self.trial.number, outcome)
                self._tell(state)
            elif self._write(OUTCOME, outcome.as_dict()):
                self._tell(state, found)
            counts = self._ledger.ended_by(self.slot, self.trial.number)
        self._close()
        if not counts:
            self._lost.set()
        return counts

    def release(self) -> None:
        """Let it go: somebody goes on with it, and it does not count as a death."""
        if self._write(RELEASED, True):
            self._tell(TrialState.FAIL)
        self._close()

    # -----------------------------------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        return self._ledger.is_finished(self.trial.number)

    def _close(self) -> None:
        self._over.set()
        self._ledger.holds.discard(self.trial.number)

    def _state(self, outcome: Outcome) -> TrialState:
        """What Optuna is told.  FAIL: what its samplers should not learn from; of several metrics, also what has no
        values, since they cannot do without."""
        alone = len(self._ledger.directions) == 1
        match outcome.status:
            case "done" | "stopped":
                return TrialState.COMPLETE
            case "diverged" if outcome.values is not None:
                return TrialState.COMPLETE
            case "diverged" | "pruned":
                return TrialState.PRUNED if alone else TrialState.FAIL
            case "failed":
                return TrialState.FAIL
            case _:
                assert_never(outcome.status)

    def _write(self, key: str, value: Any) -> bool:
        if self.lost:
            return False
        try:
            patiently(lambda: self.trial.set_user_attr(key, value))
        except RuntimeError:
            if not self._is_finished():
                raise
            self._lost.set()
            return False
        return True

    def _tell(self, state: TrialState, values: Sequence[float] | None = None) -> None:
        """Whether it was this call that ended the trial, the ledger says afterwards."""
        told: Callable[[], object] = lambda: self._ledger.study.tell(  # noqa: E731
            self.trial, values if state is TrialState.COMPLETE else None, state
        )
        with suppress(RuntimeError, ValueError):  # it is finished
            patiently(told)

    def beat(self) -> None:
        """A sign of life; the heart gives it."""
        self._beats += 1
        try:
            self.trial.set_user_attr(BEAT, self._beats)
        except (RuntimeError, KeyError):  # it is finished
            if not self._over.is_set():
                self._lost.set()

    def _live(self) -> None:
        while not self._over.wait(self._every) and not self.lost:
            with suppress(Exception):  # the storage is away; how long is too long, the others decide
                self.beat()
        self._ledger.storage.remove_session()
