"""Runs with a selection that are killed again and again end where the undisturbed one did."""

import multiprocessing
import os
import random
import signal
from dataclasses import replace

import pytest
import torch

from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.selection.planned import SELECTIONS, config_for, lines, loss_lines
from tests.training.small import differences, renamed, saved_state


def go(config, resume, die_in_step):
    """In a process of its own, which kills itself in that one of its steps; 0: in none."""
    torch.set_num_threads(1)
    step, count = Trainer.train_step, 0

    def counted(self, batch):
        nonlocal count
        count += 1
        if count == die_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch)

    Trainer.train_step = counted
    train(config, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral, two steps a plan, blocks of two", "ordered"])
def test_killed_many_times(tmp_path, name):
    """By SIGKILL, with planners of its own: they end with it, and the run ends where the undisturbed one did."""
    config = config_for(tmp_path, SELECTIONS[name])
    config = replace(config, training=replace(config.training, samples=8 * 120))
    config = replace(config, run=replace(config.run, save_every=4, keep=2))
    whole = train(config).folder
    config = renamed(replace(config, selection=replace(config.selection, planners=1)), "killed")
    run, rng = tmp_path / "killed", random.Random(3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fullbatch.training_run", "open_clip", "tests.training.small"])
    for die_in_step in [*(rng.randint(2, 18) for _ in range(7)), 0]:  # too few, in all, to come to the end
        resume = run if (run / "config.yaml").exists() else None
        process = context.Process(target=go, args=(config, resume, die_in_step))
        process.start()
        process.join(200)
        assert process.exitcode == (-signal.SIGKILL if die_in_step else 0)
    assert differences(saved_state(whole, 120), saved_state(run, 120)) == []
    assert lines(whole) == lines(run) and loss_lines(whole) == loss_lines(run)
