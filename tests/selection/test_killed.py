"""Runs with a selection that are killed again and again end where the undisturbed one did."""

import random
import signal
from dataclasses import replace

import pytest

from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.killing import Fatal, exit_code, started
from tests.selection.planned import SELECTIONS, config_for, lines, loss_lines
from tests.training.small import differences, renamed, saved_state


def go(config, resume, die_in_step):
    Fatal(die_in_step).among(Trainer, "train_step")
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
    for die_in_step in [*(rng.randint(2, 18) for _ in range(7)), 0]:  # too few, in all, to come to the end
        resume = run if (run / "config.yaml").exists() else None
        assert exit_code(started(go, config, resume, die_in_step)) == (-signal.SIGKILL if die_in_step else 0)
    assert differences(saved_state(whole, 120), saved_state(run, 120)) == []
    assert lines(whole) == lines(run) and loss_lines(whole) == loss_lines(run)
