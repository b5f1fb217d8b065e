"""Where a search is kept: what is refused, and what a file survives."""

import json
import multiprocessing
import signal
import subprocess
import sys
import threading

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from fullbatch.trials.journal import JournalFile
from fullbatch.trials.storage import StorageAway, open_storage, patiently


def test_clear_errors(tmp_path):
    (tmp_path / "notes.txt").write_text("not a journal\n")
    (tmp_path / "notes.db").write_bytes(b"not a data base at all, but long enough" * 100)
    for where, said in [
        ("", "empty"),
        (str(tmp_path / "notes.txt"), "not the journal of a study"),
        (str(tmp_path), "directory"),
        (str(tmp_path / "notes.txt" / "study.journal"), "cannot be kept"),
        ("/proc/study.journal", "cannot be kept"),  # where nobody may write
        (f"sqlite:///{tmp_path}/nowhere/study.db", "unable to open"),
        (f"sqlite:///{tmp_path}/notes.db", "not a database"),
        ("postgres://me@host/db", "postgresql://"),
        ("nosuch://me@host/db", "no driver"),
        ("://x", "not a URL"),
        ("postgresql://me:secret@127.0.0.1:1/db", "cannot be used"),
        ("postgresql://me:a@secret@127.0.0.1:1/db", "write %40 for an @"),
        ("postgresql://me:a@b/secret@127.0.0.1:1/db", "write %40 for an @"),
        ("no scheme://me:a@secret@host/db", "not a URL"),
    ]:
        with pytest.raises(ValueError, match=said) as error:
            open_storage(where)
        assert "secret" not in str(error.value)


def test_a_storage_that_stays_away(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=open_storage(url), study_name="study")
    tries = []

    def act():
        tries.append(True)
        if len(tries) == 2:
            (tmp_path / "study.db").write_bytes(b"not a data base at all, but long enough" * 100)
        return study.get_trials()

    assert patiently(act) == []
    with pytest.raises(StorageAway, match=r"was away for 0 seconds: file is not a database\.$"):
        patiently(act, patience=0.3)
    assert len(tries) > 2
    with pytest.raises(StorageAway, match="No space left"):
        patiently(lambda: (_ for _ in ()).throw(OSError("No space left")), patience=0.0)


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr("fullbatch.trials.storage._DRIVERS", {"no_such_driver": "postgresql+nothing"})
    with pytest.raises(ValueError, match=r"pip install 'fullbatch\[postgresql\]'"):
        open_storage("postgresql://me@host/db")


def test_a_study_is_kept(storage_url, tmp_path):
    name = tmp_path.name
    study = optuna.create_study(storage=open_storage(storage_url), study_name=name)
    study.enqueue_trial({"x": 0.5}, user_attrs={"slot": 0})
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    study.tell(trial, 1.5)
    again = optuna.load_study(storage=open_storage(storage_url), study_name=name)
    assert [(t.value, t.params, t.user_attrs) for t in again.trials] == [(1.5, {"x": 0.5}, {"slot": 0})]
    with pytest.raises((ValueError, RuntimeError)):
        again.tell(0, state=TrialState.FAIL)


def test_a_waiting_trial_is_taken_once(storage_url, tmp_path):
    """Threads with a connection each, all at the same trials.  Optuna's own SQLite gives some to two."""
    name, trials = tmp_path.name, 30
    study = optuna.create_study(storage=open_storage(storage_url), study_name=name)
    for number in range(trials):
        study.enqueue_trial({}, user_attrs={"slot": number})
    taken, together = [], threading.Barrier(4)

    def take():
        mine = optuna.load_study(storage=open_storage(storage_url), study_name=name)
        together.wait()
        while len(taken) < trials:
            slot = mine.ask().user_attrs.get("slot")
            if slot is None:
                return
            taken.append(slot)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(trials))


# ---------------------------------------------------------------------------------------------------------------------
# the journal


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    path = tmp_path / "study.journal"
    study = optuna.create_study(storage=open_storage(str(path)), study_name="study")
    watching = optuna.load_study(storage=open_storage(str(path)), study_name="study")
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study_')  # killed here
    assert watching.trials == []
    study.enqueue_trial({})
    assert len(watching.trials) == len(study.trials) == 1
    assert len(optuna.load_study(storage=open_storage(str(path)), study_name="study").trials) == 1
    watching.enqueue_trial({})
    assert len(study.trials) == 2


def append(path, number, times):
    journal = JournalFile(path)
    for time in range(times):
        journal.append_logs([{"op_code": -1, "who": number, "time": time, "long": "x" * 5000}])


def test_lines_of_many_processes_do_not_mix(tmp_path):
    path, context = tmp_path / "study.journal", multiprocessing.get_context("fork")
    processes = [context.Process(target=append, args=(path, number, 40)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = [(line["who"], line["time"]) for line in map(json.loads, path.read_text().splitlines())]
    assert sorted(found) == [(who, time) for who in range(4) for time in range(40)]
    assert len(list(JournalFile(path).read_logs(0))) == 160
    assert len(list(JournalFile(path).read_logs(100))) == 60


def test_the_lock_dies_with_its_holder(tmp_path):
    path = tmp_path / "study.journal"
    code = f"""
import os, signal
from pathlib import Path
from fullbatch.trials.journal import JournalFile
with JournalFile(Path({str(path)!r}))._alone():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == -signal.SIGKILL
    assert JournalStorage(JournalFile(path)).get_all_studies() == []
    append(path, 0, 1)


@pytest.mark.parametrize("code", [99, -1, None, "x", [0]])
def test_an_operation_of_an_unknown_kind(tmp_path, code):
    path = tmp_path / "study.journal"
    optuna.create_study(storage=open_storage(str(path)), study_name="study")
    with path.open("a") as file:
        file.write(json.dumps({"op_code": code, "worker_id": "w"}) + "\n")
    with pytest.raises(ValueError, match=r"study\.journal is damaged, or of another version of Optuna"):
        optuna.load_study(storage=open_storage(str(path)), study_name="study")
