"""`fullbatch search` stopped, moved, joined, begun twice, and without a winner: from its command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fullbatch import cli
from tests.data.making import captioned, write_shard
from tests.trials.search_making import arguments, small_search

FEW = {"methods": ["openclip"], "grid": None, "fine": None, "finals": None}
SHORT = {**FEW, "space": {}, "choices": {"trials": 2, "changes": {"samples": 40}}}
AT_ONCE = ("--stop-after", "1e-9")


def trials_of(folder):
    return [one for phase in json.loads((folder / "search.json").read_text())["phases"] for one in phase["trials"]]


def check_trained_once(folder):
    """Every step of every trial was trained by one process."""
    for path in (folder / "trials").glob("*/metrics.jsonl"):
        steps = [line["step"] for line in map(json.loads, path.read_text().splitlines()) if "kind" not in line]
        assert steps == sorted(set(steps)), path


@pytest.mark.slow
def test_stopped_moved_and_gone_on_with_from_elsewhere(tmp_path, monkeypatch, capsys):
    plan = small_search(tmp_path, name="a b", **SHORT)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["search", "--plan", plan.name, "--searches", ".", "--quiet", "--no-page", *AT_ONCE]) == 0
    said = capsys.readouterr()
    assert "0 of 2 trials" in said.out and "go on with: fullbatch search --resume 'a b'" in said.out
    assert not (tmp_path / "a b" / "storage.txt").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.move(tmp_path / "a b", tmp_path / "elsewhere" / "c d")
    resume = ["search", "--resume", "c d", "--quiet", "--no-page"]
    assert cli.main([*resume, "--study", "new.db"]) == 1
    assert "belongs to the storage" in capsys.readouterr().err and not (tmp_path / "elsewhere" / "new.db").exists()
    assert cli.main(resume) == 0
    said = capsys.readouterr()
    assert (
        len(trials_of(tmp_path / "elsewhere" / "c d")) == 2 and "train it: fullbatch train --config 'c d/" in said.out
    )
    assert "[1 of 2], " in said.err and " device-hours, nothing left" in said.err


@pytest.mark.slow
def test_joined_by_the_storage_from_another_folder(tmp_path, monkeypatch, capsys):
    plan = small_search(tmp_path, **SHORT)
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments(plan, "--study", "sqlite:///shared.db", *AT_ONCE)) == 0
    join = ["search", "--study", f"sqlite:///{tmp_path}/shared.db", "--name", "small", "--quiet", "--no-page"]
    assert cli.main([*join, "--searches", "joined"]) == 0, capsys.readouterr().err
    assert len(trials_of(tmp_path / "joined" / "small")) == 2
    assert (tmp_path / "joined" / "small" / "storage.txt").read_text().strip() == f"sqlite:///{tmp_path}/shared.db"
    assert not (tmp_path / "small" / "trials").exists()
    monkeypatch.chdir("/")
    assert cli.main(["search", "--resume", str(tmp_path / "small"), "--quiet", "--no-page"]) == 0
    assert len(trials_of(tmp_path / "small")) == 2 and not (tmp_path / "small" / "trials").exists()


@pytest.mark.slow
def test_without_a_winner_there_are_files_and_a_way_on(tmp_path, capsys):
    """The pictures are none, which only a trial finds out."""
    plan = small_search(tmp_path, **{**SHORT, "finals": {"best": 1, "seeds": [0]}})
    write_shard(tmp_path / "shard.tar", [(key, {**parts, "jpg": b"none"}) for key, parts in captioned(40)])
    for _ in range(2):  # and so it stays
        assert cli.main(arguments(plan, "--page")) == 1
        said, folder = capsys.readouterr(), tmp_path / "small"
        assert "All 2 trials of the phase 'choices' failed or diverged" in said.err and "Traceback" not in said.err
        assert f"{folder}/trials/*/output.txt" in said.err and "another --name" in said.err
        assert [one["status"] for one in trials_of(folder)] == ["failed", "failed"]
        assert "2 of 3 trials" in said.out, "the table"
        assert (folder / "report.html").is_file() and (folder / "search.csv").read_text().count("failed") == 2
        (folder / "search.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_goes_on(tmp_path, number):
    plan = small_search(tmp_path)
    folder = tmp_path / "small"
    command = [sys.executable, "-m", "fullbatch", *arguments(plan, "--jobs", "2")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    seen = folder / "trials" / "choices-001" / "metrics.jsonl"
    while process.poll() is None and not seen.is_file():
        time.sleep(0.02)
    os.kill(process.pid, number)
    told = process.communicate()[1]
    assert process.returncode == 128 + number and f"fullbatch search --resume {folder}" in told
    assert "Traceback" not in told and len(trials_of(folder)) < 11
    assert cli.main(["search", "--resume", str(folder), "--quiet", "--no-page"]) == 0
    assert len(trials_of(folder)) == 11
    check_trained_once(folder)


@pytest.mark.slow
def test_two_commands_at_once_on_one_folder(tmp_path):
    plan = small_search(tmp_path)
    command = [sys.executable, "-m", "fullbatch", *arguments(plan)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = trials_of(tmp_path / "small")
    assert len(found) == 11 and all(one["attempts"] == 1 and one["status"] == "done" for one in found)
    check_trained_once(tmp_path / "small")
