"""What a person sees on a terminal: bars at the bottom, every message a line of its own above them."""

import io
import logging
import re
from contextlib import redirect_stderr
from dataclasses import replace

import pytest

from fullbatch.cli.command import Terminal
from fullbatch.finetuning.finetune import finetune
from fullbatch.training.display import Display
from tests.finetuning.making import make_base, tuning_config


class Screen(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        """What was ever written on a line, from its beginning or from where it was cleared."""
        text = re.sub(r"\x1b\[\??[0-9;]*[A-JL-Za-z]", "", self.getvalue().replace("\x1b[2K", "\n"))
        return [line.strip() for line in re.split(r"[\r\n]+", text)]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_messages_of_a_tuning_are_lines_of_their_own_and_evaluations_have_a_bar(tmp_path):
    base = make_base(tmp_path / "base", steps=5, lr=1e-3)
    config = tuning_config(tmp_path / "tuning", base, epochs=1)
    with redirect_stderr(Screen()) as screen:
        finetune(replace(config, run=replace(config.run, quiet=False)))
    lines = screen.lines()
    assert any(line.startswith("base: mean ") for line in lines), lines[-20:]
    assert any(line.startswith("epoch 1: mean ") for line in lines)
    assert not any("training" in line and "mean " in line for line in lines), "no message shares a line with a bar"
    assert any(line.startswith("evaluating") and "shard.tar" in line for line in lines)


def test_a_warning_is_a_line_of_its_own():
    log = logging.getLogger("fullbatch")
    handler = Terminal()
    log.addHandler(handler)
    try:
        with redirect_stderr(Screen()) as screen, Display(first=True, quiet=False).running(0, 10):
            log.warning("look out")
    finally:
        log.removeHandler(handler)
    assert "look out" in screen.lines()


def test_nobody_elses_text_is_markup_in_a_bar():
    with redirect_stderr(Screen()) as screen:
        display = Display(first=True, quiet=False)
        with display.running(0, 10):
            for done in range(3):
                display.measured("[red]emoji[bold].csv", done, 2)
                display.say(f"{done} done")  # which draws anew
            display.measured("another", 0, 5)
        assert any("[red]emoji[bold].csv" in line for line in screen.lines())
        silent = Display(first=True, quiet=True)
        with silent.running(0, 10):
            silent.measured("quietly", 0, 2)
    assert "quietly" not in screen.getvalue()
