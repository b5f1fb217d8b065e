"""Killed at any moment, also while it saves: the resumed run ends where the undisturbed one did, to the bit."""

import os
import random
import signal
import threading
from dataclasses import replace

import pytest

from fullbatch.training import checkpoint
from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.killing import Fatal, exit_code, started
from tests.training.small import differences, renamed, saved_state, small_config

STEPS = 120


def die_in_call(number):
    """Have this process kill itself in that call of a part of saving."""
    fatal = Fatal(number)
    fatal.among(checkpoint.torch, "save")
    fatal.among(checkpoint, "sync", "_describe")
    fatal.among(checkpoint.shutil, "rmtree")


def die_after(step, seconds):
    """Have this process kill itself so long after this step has begun; 0: from now on."""
    train_step, left = Trainer.train_step, [step]

    def begun(*args):
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return train_step(*args)

    Trainer.train_step = begun
    if step == 0:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def go(config, resume, kind, *moment):
    if kind == "save":
        die_in_call(*moment)
    elif kind == "time":
        die_after(*moment)
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
    # too few steps and saves, in all, to come to the end, and so little time that no machine comes much further
    moments = [("time", step, rng.uniform(0.0, 0.2 if step == 0 else 0.03)) for step in (0, 0, 0, 1, 2, 3, 4, 5)]
    moments += [("save", rng.randint(1, 60)) for _ in range(12)]
    rng.shuffle(moments)
    killed = 0
    for moment in moments:
        resume = run if (run / "config.yaml").exists() else None
        process = started(go, config, resume, *moment)
        assert exit_code(process) in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    assert exit_code(started(go, config, run, "none")) == 0
    assert killed >= 12, "most of the runs must have been under way"
    assert differences(saved_state(whole, STEPS), saved_state(run, STEPS)) == []
    assert not list((run / "checkpoints").glob(".writing-*"))
