"""Killed at any moment, also while it saves: the resumed run ends where the undisturbed one did, to the bit."""

import os
import random
import signal
import time
from dataclasses import replace

import pytest

from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.killing import Fatal, exit_code, started
from tests.training.small import differences, renamed, saved_state, small_config
from tests.waiting import wait_for

STEPS = 120


def die_in_call(number):
    """Have this process kill itself in that call of a part of saving."""
    fatal = Fatal(number)
    fatal.among(checkpoint.torch, "save")
    fatal.among(checkpoint, "sync", "_describe")
    fatal.among(checkpoint.shutil, "rmtree")


def go(config, resume, fatal_call):
    die_in_call(fatal_call)
    train(config, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["neuclip", "isogclr"])
def test_killed_twenty_times(tmp_path, method):
    config = small_config(tmp_path, method, steps=STEPS)
    config = replace(config, run=replace(config.run, save_every=4, keep=2))
    whole = train(config).folder
    rng = random.Random(7)
    run = tmp_path / "killed"
    config = renamed(config, "killed")
    moments = [("time", rng.uniform(0.05, 1.2)) for _ in range(8)] + [("save", rng.randint(1, 60)) for _ in range(12)]
    rng.shuffle(moments)
    killed = 0
    for kind, moment in moments:
        resume = run if (run / "config.yaml").exists() else None
        process = started(go, config, resume, moment if kind == "save" else 0)
        if kind == "time":
            wait_for((run / "config.yaml").exists)
            time.sleep(moment)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        assert exit_code(process) in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    assert exit_code(started(go, config, run, 0)) == 0
    assert killed >= 12, "most of the runs must have been under way"
    assert differences(saved_state(whole, STEPS), saved_state(run, STEPS)) == []
    assert not list((run / "checkpoints").glob(".writing-*"))
