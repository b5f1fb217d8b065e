"""docs/how-to/finetune.md: its commands and the flags in its table are understood."""

import re
import shlex
from pathlib import Path

import pytest

import fullbatch as fb
from fullbatch.cli.finetune import FINETUNE
from fullbatch.cli.train import train_config

TEXT = (Path(fb.__file__).parent.parent / "docs" / "how-to" / "finetune.md").read_text()
COMMANDS = re.findall(r"^    fullbatch finetune (.*)$", TEXT, flags=re.MULTILINE)
ROWS = [flags for line in TEXT.splitlines() if line.startswith("|") for flags in re.findall(r"`(--[^`]*)`", line)]


@pytest.mark.parametrize("words", [*(text for text in COMMANDS if "--resume" not in text), *ROWS])
def test_flags(words):
    config, resume = train_config(shlex.split(words), command=FINETUNE)
    assert resume is None and config.recovery.recovery_epochs in (0, 2, 5) and config.optimizer.weight_decay == 0.02


def test_there_are_some():
    assert len(COMMANDS) >= 3 and len(ROWS) >= 12


def test_the_ablation_of_the_loss_keeps_its_normalizer():
    words = next(row for row in ROWS if "--pairwise" in row)
    plain, _ = train_config(shlex.split(words), command=FINETUNE)
    hinged, _ = train_config([], command=FINETUNE)
    one, other = plain.objective.build(), hinged.objective.build()
    assert one.normalizer == other.normalizer and one.temperature == other.temperature
    assert type(one.pairwise) is not type(other.pairwise)
