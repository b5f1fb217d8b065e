"""The seconds of training in metrics.jsonl: without evaluations, and continued when a run goes on."""

import json
import time
from dataclasses import replace

import pytest
import torch

from fullbatch.training import checkpoint
from fullbatch.training.trainer import Stopwatch
from fullbatch.training_run import train
from tests.resume.test_resume import go_on_from
from tests.training.small import renamed, small_config


def test_what_is_paused_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Stopwatch(5.0)
    now = 103.0
    assert watch.seconds == pytest.approx(8.0)
    with watch.paused():
        now = 150.0
    assert watch.seconds == pytest.approx(8.0)
    now = 151.0
    assert watch.seconds == pytest.approx(9.0)


def test_steps_that_wait_on_a_gpu_count_and_what_is_measured_there_does_not(monkeypatch):
    now, queued = 100.0, 4.0

    def synchronize(device):
        nonlocal now, queued
        assert device.type == "cuda"
        now, queued = now + queued, 0.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watch = Stopwatch(0.0, torch.device("cuda"))
    now = 101.0
    with watch.paused():
        now, queued = now + 10.0, 3.0
    assert watch.seconds == pytest.approx(5.0) and queued == 0.0


def test_the_time_between_the_last_line_and_the_checkpoint_is_kept(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, log_every=20, save_every=15))
    whole = train(config).folder
    saved = checkpoint.folder_of(whole / "checkpoints", 15)
    manifest = json.loads((saved / "manifest.json").read_text())
    (line,) = map(json.loads, (whole / "metrics.jsonl").open())
    assert 0.0 < manifest["seconds"] < line["seconds"]

    copy = go_on_from(whole, tmp_path / "copy", step=15)
    at = checkpoint.folder_of(copy / "checkpoints", 15) / "manifest.json"
    at.write_text(json.dumps({**manifest, "seconds": 1000.0}))
    train(renamed(config, "copy"), resume=copy)
    (line,) = map(json.loads, (copy / "metrics.jsonl").open())
    assert 1000.0 < line["seconds"] < 1060.0

    older = go_on_from(whole, tmp_path / "older", step=15)
    at = checkpoint.folder_of(older / "checkpoints", 15) / "manifest.json"
    at.write_text(json.dumps({key: value for key, value in manifest.items() if key != "seconds"}))
    train(renamed(config, "older"), resume=older)


def test_a_resumed_run_counts_on(tmp_path):
    def seconds(run):
        return {line["step"]: line["seconds"] for line in map(json.loads, (run / "metrics.jsonl").open())}

    config = small_config(tmp_path)
    whole = train(config).folder
    before = seconds(whole)
    assert list(before.values()) == sorted(before.values()) and before[1] >= 0.0
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    text = (copy / "metrics.jsonl").read_text().replace(f'"seconds": {before[10]}', '"seconds": 1000.0')
    (copy / "metrics.jsonl").write_text(text)
    train(renamed(config, "copy"), resume=copy)
    after = seconds(copy)
    assert after[9] == before[9] and 1000.0 < after[11] < after[20] < 1000.0 + 60.0
