"""Workers as processes with a parent: replaced when they die, told to stop, never left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullbatch.training.interruption import Interrupted
from fullbatch.trials.crew import Crew, WorkersDie, _work
from tests.trials.test_killed import is_alive, wait_for


def make(folder, name):
    """Whether this call made the file: the system lets one do so."""
    try:
        (folder / name).open("x").close()
    except FileExistsError:
        return False
    return True


def die_once(desk, folder):
    """The first to come dies of a signal, the second of an error."""
    desk.say(("place", desk.place))
    for way in ("signal", "error"):
        if make(folder, way):
            if way == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a mistake of ours")
    make(folder, f"peace-{os.getpid()}")


def until_stopped(desk, folder):
    (folder / f"pid-{os.getpid()}").touch()
    print("under way", flush=True)
    while not desk.stopping:
        time.sleep(0.01)
    (folder / f"saved-{os.getpid()}").touch()


def complain(desk, folder):
    until_stopped(desk, folder) if desk.place else _complain(folder)


def _complain(folder):
    while not list(folder.glob("pid-*")):  # the other is under way, and must end too
        time.sleep(0.01)
    raise ValueError("the field must be another")


def die(desk, folder):
    raise RuntimeError("no use")


def told_to_end(desk, folder):
    """The first is told to stop by somebody who is not its parent, and the second while it is between two things."""
    desk.say("here")
    for way in ("within", "between"):
        if make(folder, way):
            os.kill(os.getpid(), signal.SIGTERM)
            if way == "within":
                raise Interrupted(signal.SIGTERM, "Saved.")
            assert desk.stopping
            return
    make(folder, "peace")


def no_room(desk, folder):
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
    heard, ticks = [], []
    Crew(2, heard.append, lambda: ticks.append(1), tmp_path / "output.txt").work(die_once, tmp_path)
    assert len(list(tmp_path.glob("peace-*"))) == 2
    assert len(heard) == 4 and {place for _, place in heard} == {0, 1} and ticks
    assert "a mistake of ours" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow
def test_a_users_mistake_is_raised_and_the_others_end(tmp_path):
    with pytest.raises(ValueError, match="the field must be another"):
        Crew(2, output=tmp_path / "output.txt").work(complain, tmp_path)
    (other,) = tmp_path.glob("pid-*")
    assert (tmp_path / other.name.replace("pid", "saved")).exists()


@pytest.mark.slow
def test_a_crew_that_only_dies_is_given_up(tmp_path):
    with pytest.raises(WorkersDie, match=r"one after another.*no use.*What they said is in .*output.txt"):
        Crew(1, output=tmp_path / "output.txt").work(die, tmp_path)


@pytest.mark.slow
def test_who_is_told_to_stop_alone_is_replaced(tmp_path):
    Crew(1, output=tmp_path / "output.txt").work(told_to_end, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"within", "between", "peace"}


@pytest.mark.slow
def test_what_is_not_there_for_a_worker_stops_the_search(tmp_path):
    with pytest.raises(ValueError, match="No space left"):
        Crew(1, output=tmp_path / "output.txt").work(no_room, tmp_path)


def test_a_parent_that_is_gone_is_not_told(capsys):
    gone = Gone()
    with pytest.raises(SystemExit):
        _work(gone, 0, None, no_room, None)
    assert gone.tried and "No space left" in capsys.readouterr().err


PARENT = """
import sys
from pathlib import Path
from fullbatch.trials.crew import Crew
from fullbatch.training.interruption import Interrupted
from tests.trials.test_crew import until_stopped

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        Crew(2, output=folder / "output.txt").work(until_stopped, folder)
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
    assert process.wait(timeout=120) == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not any(map(is_alive, workers)))
    assert len(list(tmp_path.glob("saved-*"))) == 2
