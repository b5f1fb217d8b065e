"""Where a search is kept: what is refused, and what a file survives."""

import threading
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from fullbatch.trials import storage
from fullbatch.trials.storage import StorageAway, open_storage, patiently, without_heartbeat


def test_clear_errors(tmp_path):
    (tmp_path / "notes.txt").write_text("not a data base\n" * 100)
    (tmp_path / "old.journal").write_text('{"op_code":0,"worker_id":"x","study_name":"small","directions":[2]}\n')
    (tmp_path / "notes.db").write_bytes(b"not a data base at all, but long enough" * 100)
    for where, said in [
        ("", "empty"),
        (str(tmp_path / "notes.txt"), "not an SQLite file; name a new file"),
        (
            str(tmp_path / "old.journal"),
            "earlier versions kept a search; begin it anew, with its search.yaml",
        ),
        (str(tmp_path), "directory"),
        (str(tmp_path / "notes.txt" / "study.db"), "cannot be kept"),
        ("/proc/study.db", "cannot be kept"),  # where nobody may write
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


@pytest.fixture
def pauses(monkeypatch):
    """Those between two tries; they take no time, and nothing else does by the clock that patience goes by."""
    made = []
    clock = SimpleNamespace(monotonic=lambda: sum(made), sleep=made.append)
    monkeypatch.setattr(storage, "time", clock)
    return made


def test_a_storage_that_stays_away(tmp_path, pauses):
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
    assert len(tries) > 2 and pauses
    with pytest.raises(StorageAway, match="file is not a database"):
        patiently(lambda: without_heartbeat(study._storage._backend, 0), patience=0.3)
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


@pytest.mark.parametrize("name", ["{x}", "a{}b", "50%20", "a?b", "a#b", "ü b"])
def test_a_file_may_have_any_name(tmp_path, name):
    folder = tmp_path / name
    storage = open_storage(str(folder / "study.db"))
    optuna.create_study(storage=storage, study_name="one")
    assert (folder / "study.db").stat().st_size > 0 and not (tmp_path / "a").exists()
    assert optuna.get_all_study_names(open_storage(str(folder / "study.db"))) == ["one"]


def test_a_damaged_file_is_not_waited_for(tmp_path):
    path = tmp_path / "study.db"
    storage = open_storage(str(path))
    optuna.create_study(storage=storage, study_name="small")
    storage.engine.dispose()
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + bytes(len(raw) - 4096))
    with pytest.raises(ValueError, match="The study's data base is damaged: database disk image is malformed"):
        patiently(storage.get_all_studies)
