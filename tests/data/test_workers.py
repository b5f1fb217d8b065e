"""Data workers end with the process that started them, and the death of one is a sentence, in a place that is known."""

import json
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from fullbatch.data.workers import WorkerDied, read_ahead
from tests.training.small import TOWERS, write_inputs
from tests.waiting import HANG, wait_for


class Slow:
    """Item 3 takes for ever."""

    def __getitem__(self, item):
        time.sleep(600 if item == 3 else 0.01)
        return item


class Wrong:
    def __getitem__(self, item):
        raise ValueError(f"item {item} is wrong")


class Faults:
    """How many pages the kernel gave while blocks of memory came and went."""

    def __getitem__(self, item):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            [bytearray(1 << 20) for _ in range(8)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def children():
    return {process.pid for process in multiprocessing.active_children()}


def workers_of(stream):
    before = children()
    next(stream)
    return sorted(children() - before)


def wait_until_gone(workers):
    wait_for(lambda: not children() & set(workers))


def test_a_death_is_told_when_the_next_item_is_asked_for():
    """Not in the middle of whatever the process does by then, such as a save."""
    stream = read_ahead(Slow(), [range(3)], 2)
    workers = workers_of(stream)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: workers[0] not in children())
    with pytest.raises(WorkerDied, match=r"killed by SIGKILL.*memory.*--workers"):
        list(stream)
    wait_until_gone(workers)


def test_a_death_is_told_while_an_item_is_waited_for():
    stream = read_ahead(Slow(), [range(2, 5)], 1)
    (worker,) = workers_of(stream)
    threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()
    with pytest.raises(WorkerDied):
        list(stream)


@pytest.mark.slow
def test_a_death_is_told_while_another_loader_is_waited_for():
    training, evaluation = read_ahead(Slow(), [range(3)], 1), read_ahead(Slow(), [range(3, 5)], 1)
    (worker,) = workers_of(training)
    threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()
    with pytest.raises(WorkerDied):
        list(evaluation)
    training.close()


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_hold_up_the_end():
    stream = read_ahead(Slow(), [range(2, 5)], 2)
    workers = workers_of(stream)
    began = time.monotonic()
    stream.close()
    wait_until_gone(workers)
    assert time.monotonic() - began < 60, "the worker itself takes ten minutes"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_worker_refuses_is_said_as_it_was(workers):
    with pytest.raises(ValueError, match=r"^item 0 is wrong$"):
        list(read_ahead(Wrong(), [range(4)], workers))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have rules of their own")
def test_a_worker_keeps_its_memory():
    _, *later = read_ahead(Faults(), [range(3)], 1)
    assert max(later) < 1000  # of 20,480 pages that were needed


def small_run(folder, *more):
    (folder / "towers.json").write_text(json.dumps(TOWERS))
    command = [sys.executable, "-m", "fullbatch", "train", "--model", str(folder / "towers.json")]
    usual = ["--workers", "2", "--batch-size", "8", "--runs", str(folder), "--name", "run", "--no-tensorboard"]
    return [*command, *usual, *more]


@pytest.mark.slow
def test_a_table_without_its_images_ends_the_command(tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text("image,caption\n" + "".join(f"{number}.jpg,a caption\n" for number in range(300)))
    done = subprocess.run(
        small_run(tmp_path, "--data", str(table), "--evaluate"), capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 1
    assert "in a row could not be read" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_killed_worker_ends_the_command_which_goes_on_later(tmp_path):
    data, _ = write_inputs(tmp_path)
    command = small_run(tmp_path, "--data", data, "--samples", "800000", "--save-every", "10", "--log-every", "1")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), process)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        os.kill(int(file.read().split()[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 1
    last = said.strip().splitlines()[-1]
    assert "A data worker died" in last and "memory" in last and "Traceback" not in said
    assert last.endswith(f"Go on with: fullbatch train --resume {tmp_path / 'run'}")
    step = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    again = [sys.executable, "-m", "fullbatch", "train", "--resume", str(tmp_path / "run")]
    done = subprocess.run([*again, "--samples", str(8 * (step + 5))], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


UNCLOSED = """
import sys
from fullbatch.data.workers import read_ahead
class Items:
    def __getitem__(self, item):
        return item
kept = read_ahead(Items(), [range(1000)], 2)
next(kept)
raise SystemError("an error that nobody expects, while the stream is kept")
"""


def test_workers_end_with_a_process_that_never_closed_them():
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1 and "SystemError" in done.stderr
