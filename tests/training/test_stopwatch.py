"""The seconds of training in metrics.jsonl: without evaluations, and continued when a run goes on."""

import json
import time

import pytest

from fullbatch.run import train
from fullbatch.training.stopwatch import Stopwatch
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
