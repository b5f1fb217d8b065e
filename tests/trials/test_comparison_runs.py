"""Which run a worker of a comparison takes, and how long it waits for one that others hold."""

import errno
import fcntl
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fullbatch.config.run import RunConfig
from fullbatch.training import run_folder
from fullbatch.trials import comparison, trial
from fullbatch.trials.comparison import _work
from fullbatch.trials.trial import Outcome, outcome_of
from tests.waiting import HANG, wait_for


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Four runs that end when they are begun; ``configs.trained`` says in whose hands."""
    base = RunConfig()
    runs = [replace(base, run=replace(base.run, runs=str(tmp_path / "runs"), name=name)) for name in "abcd"]
    monkeypatch.setattr(trial, "train", lambda config, resume: trained.append(config.run.name))
    monkeypatch.setattr(comparison, "print_to", lambda path: None)
    monkeypatch.setattr(comparison, "LOOK_EVERY", 0.01)
    trained = []
    return SimpleNamespace(runs=runs, trained=trained)


def worker(place=0):
    return SimpleNamespace(place=place, stopping=False, say=lambda message: None)


def test_a_run_that_another_process_still_saves_is_waited_for(configs, tmp_path, monkeypatch):
    held, lock = {"a"}, run_folder._lock
    monkeypatch.setattr(run_folder, "_lock", lambda run: None if run.name in held else lock(run))
    waiting = threading.Thread(target=_work, args=(worker(), configs.runs, 1, math.inf))
    waiting.start()
    wait_for(lambda: len(configs.trained) == 3)
    assert configs.trained == ["b", "c", "d"] and waiting.is_alive()
    held.clear()
    waiting.join(HANG)
    assert configs.trained == ["b", "c", "d", "a"] and not waiting.is_alive()
    assert outcome_of(tmp_path / "runs" / "a").status == "done"


def test_a_run_that_another_process_ends_is_not_trained_again(configs, tmp_path):
    Outcome("done").write(tmp_path / "runs" / "b")
    _work(worker(), configs.runs, 1, math.inf)
    assert configs.trained == ["a", "c", "d"]


@pytest.mark.slow
def test_without_locks_each_worker_has_runs_of_its_own(configs, monkeypatch):
    def no_locks(*given):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    _work(worker(place=1), configs.runs, 2, math.inf)
    assert configs.trained == ["b", "d"]
    _work(worker(place=0), configs.runs, 2, math.inf)
    assert configs.trained == ["b", "d", "a", "c"]
