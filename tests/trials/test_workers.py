"""Real processes on one study: in SQLite, on a PostgreSQL server; one of them killed, or asleep."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import TrialState

from fullbatch.trials.queue import SLOT
from fullbatch.trials.storage import open_storage
from tests.trials.working import queue_of
from tests.waiting import HANG, wait_for

SLOTS = 8


@pytest.fixture
def start(storage_url, tmp_path):
    folder, study, processes = tmp_path / "files", f"{tmp_path.name}/choices", []
    folder.mkdir()

    def start(halt=-1, lost_after=180.0, beat=0.05):
        command = [
            sys.executable,
            "-m",
            "tests.trials.working",
            storage_url,
            study,
            folder,
            SLOTS,
            lost_after,
            halt,
            beat,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"said-{len(processes)}").open("w") as said:
            process = subprocess.Popen(list(map(str, command)), env=environment, stderr=said)
        process.said = tmp_path / f"said-{len(processes)}"
        processes.append(process)
        return process

    start.folder = folder
    start.queue = lambda: queue_of(open_storage(storage_url), study, SLOTS)
    yield start
    for process in processes:
        process.kill()
        process.wait()


def done(process):
    assert process.wait(timeout=HANG) == 0, process.said.read_text()


def check(start):
    """No slot is lost, none ended twice, no attempt run twice; a retry has the parameters of the attempt before."""
    queue = start.queue()
    ended = {found.slot.number: found for found in queue.ended()}
    assert sorted(ended) == list(range(SLOTS))
    assert queue.complete and not queue.progress()[1]
    trials = queue.study.trials
    good = Counter(trial.user_attrs[SLOT] for trial in trials if trial.state is TrialState.COMPLETE)
    assert good == dict.fromkeys(range(SLOTS), 1)
    assert not [trial for trial in trials if not trial.state.is_finished()]
    names = {path.name for path in start.folder.iterdir()}
    for number, found in ended.items():
        assert found.status == "done" and found.values == (found.params["x"],)
        assert f"begun-{number}-{found.attempts}" in names
        tried = [trial for trial in trials if trial.user_attrs.get(SLOT) == number and "params" in trial.user_attrs]
        assert all(trial.user_attrs["params"] == found.params for trial in tried)
    return ended


@pytest.mark.slow
def test_one_of_two_is_killed_in_its_trial(start):
    victim = start(halt=2)
    wait_for((start.folder / "halts-2-1").exists, victim)
    other = start(halt=5)
    wait_for((start.folder / "halts-5-1").exists, victim, other)
    victim.kill()
    victim.wait()
    (start.folder / "go").touch()
    done(other)
    ended = check(start)
    assert [found.attempts for found in ended.values()] == [1, 1, 2, 1, 1, 1, 1, 1]
    assert not list(start.folder.glob("dropped-*")) and not (start.folder / "ended-2-1").exists()


@pytest.mark.slow
def test_one_that_was_asleep_finds_its_trial_taken(start):
    """The other gives it a second; it is stopped, so that no machine is too slow for that.  It is stopped between two
    beats: in the middle of one it would hold the lock of a file, and all would have to wait for it."""
    sleeper = start(halt=0, beat=3600.0)
    wait_for((start.folder / "halts-0-1").exists, sleeper)
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    other = start(lost_after=1.0)
    done(other)
    before = check(start)
    assert before[0].attempts == 2
    (start.folder / "go").touch()
    os.kill(sleeper.pid, signal.SIGCONT)
    done(sleeper)
    assert (start.folder / "dropped-0-1").exists()
    assert check(start) == before


@pytest.mark.slow
def test_many_begin_at_once(start):
    """Tables, study and slots are all made by whoever is first; nobody halts."""
    workers = [start() for _ in range(4)]
    for worker in workers:
        done(worker)
    assert all(found.attempts == 1 for found in check(start).values())


@pytest.mark.slow
def test_all_are_killed_and_one_goes_on(start):
    first = start(halt=1)
    wait_for((start.folder / "halts-1-1").exists, first)
    second = start(halt=2)
    wait_for((start.folder / "halts-2-1").exists, first, second)
    for victim in (first, second):
        victim.kill()
        victim.wait()
    done(start())
    ended = check(start)
    assert ended[1].attempts == ended[2].attempts == 2
