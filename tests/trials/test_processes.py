"""Workers as processes with a parent: replaced when they die, told to stop, never left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from fullbatch.training.interruption import Interrupted
from fullbatch.trials.processes import WorkerPool, WorkersDie, _run_worker
from tests.trials.test_killed import is_alive
from tests.waiting import HANG, wait_for


def make(folder, name):
    """Whether this call made the file: the system lets one do so."""
    try:
        (folder / name).open("x").close()
    except FileExistsError:
        return False
    return True


def die_once(worker, folder):
    """The first to come dies of a signal, the second of an error."""
    worker.say(("place", worker.place))
    for way in ("signal", "error"):
        if make(folder, way):
            if way == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a mistake of ours")
    make(folder, f"peace-{os.getpid()}")


def until_stopped(worker, folder):
    (folder / f"pid-{os.getpid()}").touch()
    print("under way", flush=True)
    while not worker.stopping:
        time.sleep(0.01)
    (folder / f"saved-{os.getpid()}").touch()


def complain(worker, folder):
    until_stopped(worker, folder) if worker.place else _complain(folder)


def _complain(folder):
    while not list(folder.glob("pid-*")):  # the other is under way, and must end too
        time.sleep(0.01)
    raise ValueError("the field must be another")


def die(worker, folder):
    raise RuntimeError("no use")


def told_to_end(worker, folder):
    """The first is told to stop by somebody who is not its parent, and the second while it is between two things."""
    worker.say("here")
    for way in ("within", "between"):
        if make(folder, way):
            os.kill(os.getpid(), signal.SIGTERM)
            if way == "within":
                raise Interrupted(signal.SIGTERM, "Saved.")
            assert worker.stopping
            return
    make(folder, "peace")


def no_room(worker, folder):
    raise OSError(errno.ENOSPC, "No space left on device")


class Gone:
    """The end of a line at whose other end nobody is."""

    def __init__(self):
        self.tried = False

    def recv(self):
        time.sleep(3600)

    def send(self, message):
        self.tried = True
        raise BrokenPipeError


@pytest.mark.slow
def test_who_dies_is_replaced(tmp_path):
    heard, died, ticks = [], [], []
    pool = WorkerPool(2, None, heard.append, died.append, lambda: ticks.append(1), output=tmp_path / "output.txt")
    pool.run(partial(die_once, folder=tmp_path))
    assert len(list(tmp_path.glob("peace-*"))) == 2
    assert len(heard) == 4 and {place for _, place in heard} == {0, 1} and ticks
    assert sorted(member.ending for member in died) == ["by SIGKILL", "with status 1"]
    assert "a mistake of ours" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow
def test_a_users_mistake_is_raised_and_the_others_end(tmp_path):
    with pytest.raises(ValueError, match="the field must be another"):
        WorkerPool(2, output=tmp_path / "output.txt").run(partial(complain, folder=tmp_path))
    (other,) = tmp_path.glob("pid-*")
    assert (tmp_path / other.name.replace("pid", "saved")).exists()


@pytest.mark.slow
def test_workers_that_only_die_are_given_up(tmp_path):
    with pytest.raises(WorkersDie, match=r"one after another.*no use.*What they said is in .*output.txt"):
        WorkerPool(1, output=tmp_path / "output.txt").run(partial(die, folder=tmp_path))


@pytest.mark.slow
def test_who_is_told_to_stop_alone_is_replaced(tmp_path):
    WorkerPool(1, output=tmp_path / "output.txt").run(partial(told_to_end, folder=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} >= {"within", "between", "peace"}


@pytest.mark.slow
def test_what_is_not_there_for_a_worker_stops_the_search(tmp_path):
    with pytest.raises(ValueError, match="No space left"):
        WorkerPool(1, output=tmp_path / "output.txt").run(partial(no_room, folder=tmp_path))


def test_a_parent_that_is_gone_is_not_told(capsys):
    gone = Gone()
    with pytest.raises(SystemExit):
        _run_worker(gone, 0, None, partial(no_room, folder=None))
    assert gone.tried and "No space left" in capsys.readouterr().err


PARENT = """
import sys
from functools import partial
from pathlib import Path
from fullbatch.trials.processes import WorkerPool
from fullbatch.training.interruption import Interrupted
from tests.trials.test_processes import until_stopped

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        WorkerPool(2, output=folder / "output.txt").run(partial(until_stopped, folder=folder))
    except Interrupted as stopped:
        sys.exit(stopped.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_with_their_parent(tmp_path, number):
    """Told to stop it passes that on; killed, its workers notice by themselves."""
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, tmp_path / "parent.py", tmp_path], env=environment)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    workers = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    process.send_signal(number)
    assert process.wait(timeout=HANG) == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not any(map(is_alive, workers)))
    assert len(list(tmp_path.glob("saved-*"))) == 2
