"""What others wrote does nothing to a terminal, a log or a table, and passwords stay out of files."""

import csv
import io
import json
import logging
import re
import sys
import tarfile

import pytest

from fullbatch.cli import main
from fullbatch.config.messages import cell, clean, message
from fullbatch.config.run import RunConfig
from fullbatch.report.blocks import environment_table
from fullbatch.training.run_folder import Folder
from fullbatch.trials.comparison import write_csv
from fullbatch.trials.search_summary import table_of
from tests.data.making import jpeg
from tests.training.small import write_inputs

URLS = (
    "postgresql://me:secret@host/db",
    "--study=postgresql://me:sec@secret@host/db",
    "postgresql://me:my secret@host/db",
    "postgresql://host/db?user=me&password=secret",
)
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\u202e\n2026-01-01 00:00:00,000 WARNING forged\x9b2J"
FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("url", URLS)
def test_passwords_are_in_no_file(tmp_path, monkeypatch, url):
    monkeypatch.setattr(sys, "argv", ["fullbatch", "search", "--study", url])
    Folder(tmp_path).write_config(RunConfig())
    written = (tmp_path / "environment.json").read_text()
    assert "secret" not in written and "***" in written
    assert "secret" not in environment_table({"command": ["fullbatch", "search", "--study", url]}), "of older runs"


def test_passwords_are_in_no_message():
    told = message(f"one {URLS[0]} and another\n{URLS[1]}, {URLS[3]}: gone")
    assert told == (
        "one postgresql://me:***@host/db and another --study=postgresql://me:***@host/db, "
        "postgresql://host/db?user=me&password=*** gone"
    )


def test_the_command_line_of_a_process_keeps_no_password(monkeypatch, capsys):
    """Weights & Biases, and whoever else asks, reads it from sys.argv."""
    monkeypatch.setattr(sys, "argv", ["fullbatch", "search", "--study", URLS[0], "--jobs", "0"])
    assert main() == 1
    assert "must be" in capsys.readouterr().err
    assert "secret" not in " ".join(sys.argv)


def hostile_shard(path):
    """Good samples, two whose names do all they can, and one whose name is not UTF-8."""
    names = [b"good%d" % number for number in range(8)]
    names += [HOSTILE.encode(), HOSTILE.encode() + b"x" * 10_000 + b"/y", b"caf\xe9\xff"]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name in names:
            bad = not name.startswith(b"good")
            for ending, content in ((b".jpg", b"no image" if bad else jpeg()), (b".txt", b"a caption")):
                member = tarfile.TarInfo((name + ending).decode("utf-8", "surrogateescape"))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("in_memory", [False, True])
def test_names_of_bad_samples_are_one_clean_line_each(tmp_path, capsys, in_memory):
    _, model = write_inputs(tmp_path)
    data = hostile_shard(tmp_path / "hostile.tar")
    given = ["--data", str(data), "--model", model, "--samples", "48", "--batch-size", "4", "--workers", "0"]
    given += ["--runs", str(tmp_path), "--name", "run", "--no-tensorboard", "--max-bad", "0.9", "--device", "cpu"]
    given += ["--method", "openclip", "--in-memory" if in_memory else "--no-in-memory"]
    status = main(["train", *given])
    told = capsys.readouterr()
    assert status == 0, told.err
    lines = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in lines)
    assert not any(re.search(r"^\S+ \S+ WARNING forged", line) for line in lines)
    assert not any(FORBIDDEN.search(line) or len(line) > 1000 for line in lines)
    for name in ("caf\ufffd\ufffd: ", "WARNING forged"):
        assert any("a bad sample" in line and name in line for line in lines), "each is named"
    assert "Logging error" not in told.err and not FORBIDDEN.search(told.err + told.out)


def test_an_error_is_one_clean_line_on_the_terminal(capsys):
    assert main(["evaluate", f"no/{HOSTILE}", "--tasks", "retrieval:emoji"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and not FORBIDDEN.search(told)


def test_captions_in_results_are_clean(capsys):

    from fullbatch.cli.printing import measured_lines, print_lines

    example = {"caption": HOSTILE, "rank": 1, "nearest": [HOSTILE + "x" * 10_000, "[b]no markup[/b]"]}
    result = {"task": "t", "main": "mean_r1", "mean_r1": 0.5, "chance": 0.1, "size": 9, "examples": [example]}
    print_lines(measured_lines({"results": [result]}))
    told = capsys.readouterr().out
    assert not FORBIDDEN.search(told) and "[b]no markup[/b]" in told
    assert all(len(line) < 2000 and not line.startswith("2026-01-01") for line in told.splitlines())


def test_tables_hold_text_and_no_formulas(tmp_path):
    """A caption that begins like a formula; numbers stay numbers."""
    row = {"method": "=cmd()", "batch_size": 8, "metric": f"@{HOSTILE}", "mean": -0.5, "sd": None, "values": [-0.5]}
    write_csv({"table": [row]}, tmp_path / "comparison.csv")
    with (tmp_path / "comparison.csv").open(encoding="utf-8", newline="") as file:
        _, written = csv.reader(file)
    assert written[0] == "'=cmd()" and written[2].startswith("'@") and written[3] == "-0.5"
    assert not FORBIDDEN.search("".join(written)) and "\n" not in "".join(written)

    trial = {
        "rank": 1, "slot": 0, "label": HOSTILE, "status": "failed", "values": None, "params": {"lr": -1.0}, "seed": 0,
        "seconds": 1.0, "device_hours": 0.1, "attempts": 1, "folder": "trials/x", "error": f"+{HOSTILE}",
    }  # fmt: skip
    table = table_of({"phases": [{"name": "choices", "trials": [trial]}], "metrics": [{"name": "=m"}]})
    head, one = csv.reader(io.StringIO(table))
    assert "'=m" in head and one[-1].startswith("'+") and not FORBIDDEN.search(table)


@pytest.mark.parametrize(
    "text", ["=1+1", "\n=1+1", "\r=1", "  @SUM(1)", "\uff1d1+1", "\n\uff0b1", "\ufe661+1", "\x1b-1"]
)
def test_what_a_spreadsheet_might_run_is_kept_text(text):
    assert cell(text) == f"'{clean(text).strip()}"
    assert cell(f"a {text}")[0] == "a" and cell("") == "" and cell(-1) == -1 and cell(None) is None


def test_other_peoples_log_lines_keep_their_tracebacks():
    from fullbatch.config.messages import MessageFormatter

    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "%s", (HOSTILE,), sys.exc_info())
    first, second, *_ = MessageFormatter("%(levelname)s: %(message)s").format(record).splitlines()
    assert "forged" in first and not FORBIDDEN.search(first) and second.startswith("Traceback")
    assert json.dumps(clean("\ud800")) == '"\\ufffd"'
