"""What ends a worker, though the search is not at its end: signals, and machines that cannot go on."""

import errno
import os
import signal
import sys
from functools import partial
from itertools import count

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import InMemoryStorage

import fullbatch.trials.trial
from fullbatch.cli.search import Search, _found, plan_values
from fullbatch.config.tree import write_values
from fullbatch.training.interruption import Interruption
from fullbatch.trials import storage
from fullbatch.trials.phases import Score
from fullbatch.trials.processes import OUTPUT, Pace, WorkersDie
from fullbatch.trials.search import InFolder, PhaseQueues, how_to_go_on, search, work, work_off
from fullbatch.trials.search_plan import search_from
from fullbatch.trials.storage import PLAN_FILE, StorageAway, keep_plan, open_storage, remember
from fullbatch.trials.trial import CannotWork
from tests.trials.search_making import small_search


@pytest.fixture
def plan(tmp_path):
    """Two trials, of two evaluations each."""
    file = small_search(tmp_path, choices={"trials": 2}, grid=None, fine=None, finals=None)
    return search_from(plan_values(Search(plan=file), []))


def phases(plan, **more):
    return PhaseQueues(InMemoryStorage(), plan, dict.fromkeys(plan.phases, 2), **more)


def attempts(phases):
    """By slot, whether it has ended or not."""
    trials = phases.queue("choices", {}).study.trials
    return [(trial.user_attrs["slot"], trial.user_attrs["attempt"], "released" in trial.user_attrs) for trial in trials]


@pytest.mark.parametrize(("at", "prune", "status"), [(2, False, "done"), (1, True, "pruned")])
def test_a_signal_at_the_end_of_a_trial(plan, tmp_path, at, prune, status):
    """The trial has ended, and counts; another is not begun."""
    made = phases(plan)
    inside = InFolder(plan, tmp_path)

    def train(phase, lease, params, report, given_up):
        def told(number, value):
            if number == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return prune

        return inside(phase, lease, params, told, given_up)

    with Interruption() as interruption:
        work_off(made, train, lambda: interruption.signal is not None)
    assert interruption.signal == signal.SIGTERM
    assert [(one.slot.number, one.status) for one in made.queue("choices", {}).ended()] == [(0, status)]
    assert attempts(made) == [(0, 1, False)]


@pytest.mark.slow
def test_a_machine_that_cannot_work_leaves_its_trial_to_others(plan, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    made = phases(plan)
    with monkeypatch.context() as patched:
        patched.setattr(fullbatch.trials.trial, "train", full)
        with pytest.raises(CannotWork, match="No space left"):
            work_off(made, InFolder(plan, tmp_path))
    assert made.queue("choices", {}).ended() == [] and attempts(made) == [(0, 1, True)]
    work_off(made, InFolder(plan, tmp_path))
    assert [one.status for one in made.queue("choices", {}).ended()] == ["done", "done"]


@pytest.mark.parametrize("error", [PermissionError("not here"), StorageAway("the server is down")])
def test_other_errors_of_the_machine(plan, error):
    """Where the storage is away, the lease cannot be given back, and nobody waits for that."""
    made = phases(plan)

    def train(*given):
        raise error

    with pytest.raises(type(error)):
        work_off(made, train)
    assert attempts(made) == [(0, 1, not isinstance(error, StorageAway))]


def test_what_is_said_with_it(tmp_path):
    folder, url = tmp_path / "my search", "postgresql://me:sec@ret@host/db"
    for error, words in [
        (StorageAway("It was away."), "postgresql://me:***@host/db: It was away. Once"),
        (CannotWork("No space left"), "No space left. Once"),
        (WorkersDie("They die."), "They die. Once"),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "a.txt: Permission denied. Once"),
    ]:
        with pytest.raises((ValueError, OSError)) as told, how_to_go_on(folder, url):
            raise error
        assert words in str(told.value) and "ret@" not in str(told.value)
        assert str(told.value).endswith(f"go on with: fullbatch search --resume '{folder}'")
    with pytest.raises(CannotWork, match=r"--jobs 4$"), how_to_go_on(folder, url, 4):
        raise CannotWork("No space left")
    with pytest.raises(KeyError), how_to_go_on(folder, url):
        raise KeyError


def test_a_storage_that_is_away_from_the_start_is_named(plan, tmp_path, monkeypatch):
    """A full disk: SQLite does not say which file it could not open."""

    def away(*args, **kwargs):
        raise StorageInternalError("unable to open database file")

    file, folder = tmp_path / "study.db", tmp_path / "begun"
    keep_plan(open_storage(str(file)), plan)
    folder.mkdir()
    (folder / PLAN_FILE).write_text(write_values(plan.as_dict()))
    remember(folder, str(file))
    monkeypatch.setattr(storage, "patiently", partial(storage.patiently, patience=0.0))
    monkeypatch.setattr(optuna, "create_study", away)
    monkeypatch.setattr(optuna, "get_all_study_summaries", away)
    for start in (
        lambda: search(plan, tmp_path / "new", str(file), Pace()),
        lambda: _found(Search(resume=folder), []),
        lambda: _found(Search(study=str(file)), []),
    ):
        with pytest.raises(StorageAway, match=rf"^{file}: The study's storage was away .*unable to open"):
            start()


class Context:
    stopping = False

    def __init__(self):
        self.said = []

    def say(self, message):
        self.said.append(message)


def test_a_crash_is_told_where_the_trial_failed(plan, tmp_path, monkeypatch):
    """A mistake of ours in every trial: the processes die, and the reason is among the results."""
    where = str(tmp_path / "study.db")
    keep_plan(open_storage(where), plan)
    terms = (where, plan.name, tmp_path, dict.fromkeys(plan.phases, 2), Pace(lost_after=60.0))

    def crash(*args):
        print("in the trial")
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("fullbatch.trials.search.Trial", crash)
    began = count()  # another process each time
    monkeypatch.setattr("fullbatch.trials.processes._began", lambda pid: str(next(began)))
    for number, name in enumerate(("stdout", "stderr"), 1):  # as in any process but pytest's
        monkeypatch.setattr(sys, name, os.fdopen(number, "w", closefd=False))
    kept = [os.dup(1), os.dup(2)]
    try:
        for _ in range(3):
            with pytest.raises(KeyError):
                work(Context(), *terms)
            print("between trials", flush=True)
        monkeypatch.setattr(
            "fullbatch.trials.search.InFolder", lambda *given: lambda *given: Score("done", (1.0,), seconds=1.0)
        )
        work(Context(), *terms)
    finally:
        sys.stdout.flush()
        for number, file in enumerate(kept, 1):
            os.dup2(file, number)
            os.close(file)
    made = PhaseQueues(open_storage(where), plan, dict.fromkeys(plan.phases, 2))
    first, second = made.queue("choices", {}).ended()
    assert (first.status, second.status) == ("failed", "done")
    assert "died 3 times" in first.error and "its output ends with: KeyError: 'a mistake of ours'" in first.error
    assert (tmp_path / "trials" / "choices-000" / OUTPUT).read_text().count("in the trial\n") == 3
    assert (tmp_path / OUTPUT).read_text() == "between trials\n" * 3
