"""`--wandb PROJECT` with the real library, offline: its file holds every line of the log."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("wandb", reason="wandb is not installed")

TRAINING = """
import sys
from dataclasses import replace
from pathlib import Path
import fullbatch as fb
from tests.training.small import small_config
config = small_config(Path(sys.argv[1]), steps=6)
fb.train(replace(config, run=replace(config.run, wandb="pairs")))
"""


@pytest.mark.slow
def test_what_is_logged_offline(tmp_path):
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    away = {**os.environ, **wandb, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path)], env=away, check=True, timeout=300)
    (written,) = tmp_path.glob("wandb/offline-run-*/run-run.wandb")
    raw = written.read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and b"pairs" in raw
    for line in lines:
        assert json.dumps(line["loss"]).encode() in raw
