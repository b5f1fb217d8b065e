"""A sample of benchmarks/deaths: commands that are killed, or lose what was not synced, come to the same end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "deaths" / "deaths.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_eight_trials(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--trials", "8", "--seed", "3", "--cases", "train", "find"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == 8 and sum(trial["deaths"] for trial in trials) >= 8
    assert [trial for trial in trials if trial["wrong"]] == []
    summed = subprocess.run([*command[:3], "--summary"], capture_output=True, text=True, check=True).stdout
    assert summed.startswith("| case |") and "| all |" in summed
