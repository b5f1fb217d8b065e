"""Which run a worker of a comparison takes, and how long it waits for one that others hold."""

import errno
import fcntl
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.training import run_folder
from fullbatch.trials import comparison_runs
from fullbatch.trials.comparison_runs import Outcome, _Terms, _work, outcome_of


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Four runs that end when they are begun; ``configs.trained`` says in whose hands."""
    base = RunConfig()
    named = {
        name: replace(base, run=replace(base.run, runs=str(tmp_path / "runs"), name=name))
        for name in ("a", "b", "c", "d")
    }
    monkeypatch.setattr(comparison_runs, "train", lambda config, resume: trained.append(config.run.name))
    monkeypatch.setattr(comparison_runs, "print_to", lambda path: None)
    monkeypatch.setattr(comparison_runs, "LOOK_EVERY", 0.01)
    trained = []
    return SimpleNamespace(values={name: to_dict(config) for name, config in named.items()}, trained=trained)


def worker(place=0):
    return SimpleNamespace(place=place, stopping=False, say=lambda message: None)


def test_a_run_that_another_process_still_saves_is_waited_for(configs, tmp_path, monkeypatch):
    held, lock = {"a"}, run_folder._lock
    monkeypatch.setattr(run_folder, "_lock", lambda run: None if run.name in held else lock(run))
    waiting = threading.Thread(target=_work, args=(worker(), _Terms(configs.values, 1, None)))
    waiting.start()
    until = time.monotonic() + 20
    while len(configs.trained) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert configs.trained == ["b", "c", "d"] and waiting.is_alive()
    held.clear()
    waiting.join(20)
    assert configs.trained == ["b", "c", "d", "a"] and not waiting.is_alive()
    assert outcome_of(tmp_path / "runs" / "a").status == "done"


def test_a_run_that_another_process_ends_is_not_trained_again(configs, tmp_path):
    Outcome("done").write(tmp_path / "runs" / "b")
    _work(worker(), _Terms(configs.values, 1, None))
    assert configs.trained == ["a", "c", "d"]


def test_without_locks_each_worker_has_runs_of_its_own(configs, monkeypatch):
    def no_locks(*given):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    _work(worker(place=1), _Terms(configs.values, 2, None))
    assert configs.trained == ["b", "d"]
    _work(worker(place=0), _Terms(configs.values, 2, None))
    assert configs.trained == ["b", "d", "a", "c"]
