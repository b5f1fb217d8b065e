"""When things go wrong: divergence, a full disk, signals, bad data; and what a run leaves behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import fullbatch.cli
from fullbatch.config.optimization import Optimizer
from fullbatch.config.tree import write_yaml
from fullbatch.run import load_trained, train
from fullbatch.training import checkpoint
from fullbatch.training.average import WeightAverage
from fullbatch.training.run_folder import Folder
from fullbatch.training.trainer import Diverged
from tests.data.making import captioned, write_shard
from tests.training.small import renamed, saved_state, small_config


def test_what_a_run_leaves_behind(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, tensorboard=True))
    run = train(config).folder
    names = {path.name for path in run.iterdir()}
    assert names == {"config.yaml", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "tensorboard"}
    assert Folder(run).read_config() == config
    assert list((run / "tensorboard").iterdir())
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "epoch", "samples", "loss", "lr", "tau", "gradient_norm", "samples_per_second"} <= set(line)
    assert json.loads((run / "environment.json").read_text())["versions"]["torch"]


def test_learning_lowers_the_loss(tmp_path):
    config = replace(small_config(tmp_path, "openclip", steps=250), optimizer=Optimizer(lr=5e-3))
    run = train(config).folder
    losses = [json.loads(text)["loss"] for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    gradient = fullbatch.training.trainer.GradientRule.__call__

    def spoilt(self, model, objective, batch, step, scaler):
        if step == 14:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return gradient(self, model, objective, batch, step, scaler)

    monkeypatch.setattr(fullbatch.training.trainer.GradientRule, "__call__", spoilt)
    with pytest.raises((Diverged, ValueError), match=r"finite|unit") as stopped:
        train(config)
    assert "Traceback" not in str(stopped.value)
    good = checkpoint.last_good(tmp_path / "run" / "checkpoints")
    assert good is not None
    assert good.name == "step-000000010"
    assert all(weight.isfinite().all() for weight in saved_state(tmp_path / "run", 10)["model"].values())


def test_a_loss_that_runs_away_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(fullbatch.training.trainer, "DIVERGED", -0.9)  # a tenth of the first loss is too much
    config = small_config(tmp_path, "openclip")
    with pytest.raises(Diverged, match=r"ran away.*--lr"):
        train(config)


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    config = small_config(tmp_path, "sogclr")
    save, calls = torch.save, []

    def full(part, path):
        calls.append(path)
        if "000000020" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(part, path)

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(OSError, match=r"The disk is full.*last good checkpoint is .*step-000000010.*--resume"):
        train(config)
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-000000010"]
    assert checkpoint.last_good(root) is not None


def test_too_many_bad_samples_stop_the_run(tmp_path):
    samples = captioned(40)
    for _, parts in samples[::3]:
        parts["jpg"] = parts["jpg"][:40]
    config = small_config(tmp_path, steps=60)
    path = write_shard(tmp_path / "bad.tar", samples)
    config = replace(config, data=replace(config.data, data=(str(path),)))
    with pytest.raises(ValueError, match=r"samples could not be read, more than --max-bad 0.05"):
        train(config)
    assert "skipped a bad sample" in (tmp_path / "run" / "log.txt").read_text()
    allowed = replace(renamed(config, "allowed"), data=replace(config.data, max_bad=0.5))
    train(allowed)
    assert saved_state(tmp_path / "allowed", 60)["position"]["bad"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(tmp_path, number):
    config = small_config(tmp_path, steps=100_000)
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(config))
    command = [sys.executable, "-m", "fullbatch", "train", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=os.getcwd())
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size > 1000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert f"Stopped by {number.name}. Go on with: fullbatch train --resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    steps = [json.loads(text)["step"] for text in metrics.read_text().splitlines()]
    good = checkpoint.last_good(tmp_path / "run" / "checkpoints")
    assert good is not None
    assert checkpoint.read(good)["position"]["step"] == steps[-1]


def test_saving_by_the_clock(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, save_every=None, save_minutes=1e-6))
    run = train(config).folder
    assert len(checkpoint.checkpoints(run / "checkpoints")) == config.run.keep


def test_the_average_follows_the_weights(tmp_path):
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model, decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1.0
    average.update(step=100)
    with average.in_use():
        torch.testing.assert_close(model.weight.detach(), start + 0.5)
    torch.testing.assert_close(model.weight.detach(), start + 1.0)


def test_the_last_checkpoint_loads_for_use(tmp_path):
    run = train(small_config(tmp_path, ema=0.9)).folder
    loaded = load_trained(run)
    plain = load_trained(run, average=False)
    assert loaded.step == 20
    assert 0.01 <= loaded.temperature <= 1.0
    weight = "backbone.text_projection"
    assert not torch.equal(loaded.model.state_dict()[weight], plain.model.state_dict()[weight])
