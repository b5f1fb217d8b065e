"""Stopped in either stage, or killed while it keeps the best weights: it ends where the undisturbed run did."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace

import pytest

from fullbatch import loading
from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.finetuning import record
from fullbatch.finetuning.finetune import finetune
from fullbatch.models.build import build_model
from fullbatch.training import checkpoint
from fullbatch.training.interruption import Interrupted
from fullbatch.training.trainer import Trainer
from tests.finetuning.making import said, tuning_config
from tests.killing import Fatal, exit_code, started
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state

END = 20


def models(run):
    return {name: build_model(Model(pretrained=str(run / name))).state_dict() for name in ("base", "tuned")}


def check_same_end(one, other):
    assert said(one) == said(other)
    assert differences(models(one), models(other)) == []
    assert differences(saved_state(one, END), saved_state(other, END)) == []
    assert not [path.name for path in other.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base):
    config = tuning_config(tmp_path_factory.mktemp("whole"), base)
    return config, finetune(config).trained.folder


class Stopped(Exception):
    pass


@pytest.mark.parametrize("step", first([5, 11], of=[2, 5, 11, 18]))
def test_stopped_in_either_stage(tmp_path, whole, monkeypatch, step):
    """A recovery of 5 steps, epochs that end at 10, 15 and 20, checkpoints every 4."""
    config, run = whole
    original = Trainer.train_step

    def train_step(trainer, batch):
        if trainer.state.position.step == step:
            raise Stopped
        return original(trainer, batch)

    copy = renamed(config, f"stopped-{step}")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(Stopped):
            finetune(copy)
    stopped = run.parent / f"stopped-{step}"
    assert said(stopped)["outcome"] is None
    finetune(copy, resume=stopped)
    check_same_end(run, stopped)


@pytest.mark.parametrize(("part", "call"), [("replace_folder", 1), ("write_record", 1), ("write_record", 2)])
def test_stopped_while_the_best_is_kept(whole, monkeypatch, part, call):
    config, run = whole
    original = getattr(record, part)
    calls = 0

    def once(*args):
        nonlocal calls
        calls += 1
        if calls == call and part == "write_record":
            raise Stopped
        original(*args)
        if calls == call:
            raise Stopped

    copy = renamed(config, f"kept-{part}-{call}")
    with monkeypatch.context() as patch:
        patch.setattr(record, part, once)
        with pytest.raises(Stopped):
            finetune(copy)
    finetune(copy, resume=run.parent / copy.run.name)
    check_same_end(run, run.parent / copy.run.name)


def test_a_signal_says_how_to_go_on(whole, monkeypatch):
    config, run = whole
    original = Trainer.train_step

    def train_step(trainer, batch):
        if trainer.state.position.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer, batch)

    copy = renamed(config, "signal")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(Interrupted, match=r"fullbatch finetune --resume \S+signal"):
            finetune(copy)
    assert checkpoint.last_good(run.parent / "signal" / "checkpoints").name.endswith("8")
    finetune(copy, resume=run.parent / "signal")
    check_same_end(run, run.parent / "signal")


def test_a_finished_run_says_it_again(whole, capsys):
    _, run = whole
    before = said(run)
    assert main(["finetune", "--resume", str(run)]) == 0
    assert said(run) == before and f"Take {run / 'tuned'}." in capsys.readouterr().out


def test_a_tolerance_may_change_and_a_metric_may_not(whole, tmp_path):
    config, run = whole
    copy = shutil.copytree(run, tmp_path / "copy")
    config = renamed(config, "copy")
    assert finetune(config, tolerance=0.5, resume=copy).record.tolerance == 0.5
    with pytest.raises(ValueError, match="--resume cannot change the metric"):
        finetune(config, metric=f"{config.evaluation.evaluate[0]} mean_r1", resume=copy)
    with pytest.raises(ValueError, match=r"--resume goes on with the model of .*, not with ViT-B-32"):
        finetune(replace(config, model=Model("ViT-B-32")), resume=copy)
    other = replace(config.evaluation, evaluate=(f"zero_shot:{config.data.data[0]}",))
    with pytest.raises(ValueError, match="--resume cannot change the tasks: the base was measured on retrieval:"):
        finetune(replace(config, evaluation=other), resume=copy)


def test_before_the_first_epoch_another_metric_may_decide(whole, tmp_path):
    """The base keeps what was measured of it, and is scored anew."""
    config, run = whole
    copy = shutil.copytree(run, tmp_path / "copy")
    for folder in checkpoint.checkpoints(copy / "checkpoints")[1:]:
        shutil.rmtree(folder)
    shutil.rmtree(copy / "tuned")
    begun = json.loads((copy / "finetune.json").read_text())
    begun |= {"epochs": begun["epochs"][:1], "best_step": None, "outcome": None, "result": None}
    (copy / "finetune.json").write_text(json.dumps(begun))
    with pytest.raises(ValueError, match="the base was not measured by it, but by"):
        finetune(renamed(config, "copy"), metric=f"{config.evaluation.evaluate[0]} text_to_image_r5", resume=copy)
    metric = f"{config.evaluation.evaluate[0]} mean_r1"
    ended = finetune(renamed(config, "copy"), metric=metric, resume=copy)
    assert ended.record.base.score == begun["epochs"][0]["values"][metric]
    assert (
        ended.record.metric == metric
        and ended.verdict.outcome == json.loads((run / "finetune.json").read_text())["outcome"]
    )


def go(config, resume, die_in_call):
    """Killed in that call of a step or of a part of keeping and saving."""
    fatal = Fatal(die_in_call)
    fatal.among(Trainer, "train_step")
    fatal.among(checkpoint.torch, "save")
    fatal.among(loading, "sync", "settle", "export")
    fatal.among(record, "replace_folder", "write_record")
    finetune(config, resume=resume)


@pytest.mark.slow
def test_killed_many_times(whole):
    config, run = whole
    config, killed, rng = renamed(config, "killed"), run.parent / "killed", random.Random(3)
    kills = 0
    for die_in_call in [*(rng.randint(1, 20) for _ in range(20)), 0]:
        begun = (killed / "config.yaml").exists()
        code = exit_code(started(go, config, killed if begun else None, die_in_call))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert code == 0 and kills >= 6
    check_same_end(run, killed)
