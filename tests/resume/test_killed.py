"""Killed at any moment, also while it saves: the resumed run ends where the undisturbed one did, to the bit."""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.training.small import differences, renamed, saved_state, small_config

STEPS = 120


def die_in_call(number):
    """Have this process kill itself in that call of a part of saving."""
    calls = 0

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    checkpoint.torch.save = counted(checkpoint.torch.save)
    checkpoint.sync = counted(checkpoint.sync)
    checkpoint._describe = counted(checkpoint._describe)
    checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)


def go(config, resume, fatal_call):
    """In a process of its own."""
    torch.set_num_threads(1)
    if fatal_call:
        die_in_call(fatal_call)
    train(config, resume=resume)


def start(config, resume=None, fatal_call=0):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fullbatch.training_run", "open_clip", "tests.training.small"])
    process = context.Process(target=go, args=(config, resume, fatal_call))
    process.start()
    return process


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
        process = start(config, resume, fatal_call=moment if kind == "save" else 0)
        if kind == "time":
            deadline = time.monotonic() + 60
            while not (run / "config.yaml").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(moment)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    process = start(config, run)
    process.join(120)
    assert process.exitcode == 0
    assert killed >= 12, "most of the runs must have been under way"
    assert differences(saved_state(whole, STEPS), saved_state(run, STEPS)) == []
    assert not list((run / "checkpoints").glob(".writing-*"))
