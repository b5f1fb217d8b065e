"""A comparison whose parent or workers are killed, or told to stop, ends with the numbers of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trials.comparison_making import NEUCLIP, arguments, small_plan
from tests.waiting import HANG, wait_for

SAMPLES = 8 * 80


def start(plan, *more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fullbatch", *arguments(plan, "--samples", str(SAMPLES), *more)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def workers_of(parent):
    """Children of the process, but for multiprocessing's own helper."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            command = status.with_name("cmdline").read_text()
        except OSError:
            continue
        if fields["PPid"].strip() == str(parent) and "spawn_main" in command:
            found.append(int(fields["Pid"]))
    return found


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def lines_under(folder):
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl"))


def numbers(folder):
    summary = json.loads((folder / "comparison.json").read_text())
    assert {run["status"] for run in summary["runs"]} == {"done"}
    return {run["name"]: (run["results"], run["steps"], run["tau"]) for run in summary["runs"]}, summary["matches"]


@pytest.mark.slow
def test_killed_in_many_ways_it_ends_the_same(tmp_path):
    plan = small_plan(tmp_path, methods=["openclip", "sogclr", NEUCLIP], batch_sizes=[4, 8], seeds=[0, 1])
    folder = tmp_path / "small"

    def under_way(lines):
        process = start(plan, "--jobs", "2")
        before = lines_under(folder)
        wait_for(lambda: lines_under(folder) >= before + lines, process)
        return process, wait_for(lambda: len(found := workers_of(process.pid)) == 2 and found, process)

    # The parent: its workers save and end by themselves.
    process, workers = under_way(30)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, workers)))

    # A worker: it is replaced, and the comparison goes on; then everything at once.
    process, workers = under_way(30)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: len(set(workers_of(process.pid)) - set(workers)) >= 1)
    for pid in (process.pid, *workers_of(process.pid)):
        os.kill(pid, signal.SIGKILL)
    assert "its process ended by SIGKILL; it is tried again" in process.communicate()[1]

    # Told to stop: it says how to go on, and leaves no process behind.
    process, workers = under_way(30)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=HANG)
    assert process.returncode == 143 and f"fullbatch compare --resume {folder}" in told
    assert not any(map(is_alive, workers))

    for name in ("small", "whole"):
        process = start(plan, "--jobs", "2", "--name", name)
        _, told = process.communicate(timeout=600)
        assert process.returncode == 0, told
    assert numbers(folder) == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_two_commands_share_the_runs_of_one_comparison(tmp_path):
    plan = small_plan(tmp_path, methods=["openclip", "sogclr"], seeds=[0, 1])
    both = [start(plan) for _ in range(2)]
    told = [process.communicate(timeout=600)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    runs, _ = numbers(tmp_path / "small")
    assert len(runs) == 4
    for path in (tmp_path / "small").glob("runs/*/metrics.jsonl"):
        steps = [line["step"] for line in map(json.loads, path.read_text().splitlines()) if "kind" not in line]
        assert steps == sorted(set(steps)), "every step was trained by one process"
