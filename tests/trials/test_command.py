"""`fullbatch search` from its command line to best.yaml."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from fullbatch import cli
from fullbatch.cli.search import Search, plan_values
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict
from fullbatch.trials.search_plan import search_from
from tests.trials.search_making import arguments, small_search
from tests.waiting import wait_for


def summary_of(folder):
    return json.loads((folder / "search.json").read_text())


@pytest.mark.slow
def test_a_search_ends_with_a_config_that_trains(tmp_path, capsys):
    plan = small_search(tmp_path)
    assert cli.main(arguments(plan, "--jobs", "2", "--page")) == 0, capsys.readouterr().err
    folder, told = tmp_path / "small", capsys.readouterr()
    summary = summary_of(folder)
    assert {phase["name"]: len(phase["trials"]) for phase in summary["phases"]} == {
        "choices": 3, "grid": 2, "fine": 2, "finals": 4,
    }  # fmt: skip
    assert all(trial["status"] == "done" for phase in summary["phases"] for trial in phase["trials"])
    assert summary["winner"]["seeds"] == [0, 1] and summary["winner"]["sd"][0] is not None
    assert "device-hours" in told.err + told.out and "train it: fullbatch train --config" in told.out
    assert (folder / "report.html").is_file() and len((folder / "search.csv").read_text().splitlines()) == 12
    assert len(list((folder / "trials").iterdir())) == 11

    assert cli.main(["train", "--config", str(folder / "best.yaml"), "--runs", str(tmp_path), "--name", "won"]) == 0
    winner = yaml.safe_load((folder / "best.yaml").read_text())
    ours = yaml.safe_load((tmp_path / "won" / "config.yaml").read_text())
    assert winner["optimizer"] == ours["optimizer"] and winner["objective"] == ours["objective"]
    scored = [trial for trial in summary["phases"][-1]["trials"] if trial["label"] == summary["winner"]["label"]]
    results = json.loads((tmp_path / "won" / "results.json").read_text())
    again = json.loads((folder / scored[0]["folder"] / "results.json").read_text())
    assert results["results"] == again["results"], "the winner again, to the bit"

    # The same command once more has nothing to do, and another plan under the same name is refused.
    before = {path: path.stat().st_mtime_ns for path in (folder / "trials").rglob("results.json")}
    assert cli.main(arguments(plan)) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "trials").rglob("results.json")} == before
    small_search(tmp_path, fine={"trials": 3})
    assert cli.main(arguments(plan)) == 1
    assert "was begun with another plan (fine.trials was 2 and is now 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        ({"methods": ["opnclip"]}, (), "Unknown method 'opnclip'; did you mean 'openclip'"),
        ({"optimizers": ["adamx"]}, (), "Unknown optimizer 'adamx'"),
        ({"metrics": ["mean_r2"]}, (), "none of the tasks gives it"),
        ({"space": {}, "choices": {"trials": 3}}, (), "space"),
        ({"choices": None}, (), "cannot be left out"),
        ({"space": {"lr": {"low": 1e-2, "high": 1e-4}}}, (), "lr"),
        ({"pruner": "asha", "metrics": ["accuracy", "seconds"]}, (), "several metrics"),
        ({}, ("--study", "postgresql://nobody@127.0.0.1:1/none"), "postgresql"),
        ({}, ("--study", "nosuch://here"), "nosuch"),
        ({}, ("--method", "sogclr"), "--methods names them all"),
        ({}, ("--jobs", "0"), "jobs"),
        ({}, ("--recipe", "quick"), "be left out with"),
        ({}, ("--data", "nowhere.tar"), "nowhere.tar"),
        ({}, ("--job", "2"), "`fullbatch search` has no --job; did you mean 'jobs'? `fullbatch search --help`"),
        ({}, ("--lost-after", "29"), "at least 30"),
        ({}, ("--name", "[red]"), "plain folder name"),
        ({}, ("--name", "a\nb"), "plain folder name"),
        ({}, ("--name=-a",), "plain folder name"),
    ],
)
def test_mistakes_are_said_before_a_trial(tmp_path, capsys, values, more, words):
    plan = small_search(tmp_path, **values)
    assert cli.main(arguments(plan, *more)) == 1
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told and told.startswith("fullbatch: ")
    assert not (tmp_path / "small" / "trials").exists()


def test_a_recipe_that_measures_on_other_data_than_the_users_is_refused(capsys):
    for recipe, opening in (
        ((), "Without --recipe and --plan the recipe is 'quick', which"),
        (("--recipe", "quick"), ""),
    ):
        assert cli.main(["search", *recipe, "--data", "mine.tar"]) == 1
        told = capsys.readouterr().err
        assert opening in told and "measures on the built-in emoji" in told and "--evaluate retrieval:" in told
        assert cli.main(["search", *recipe, "--data", "mine.tar", "--evaluate", "retrieval:mine.tar"]) == 1
        assert "the tasks" in capsys.readouterr().err, "quick's metric needs an accuracy; past the check"
    base = from_dict(RunConfig, plan_values(Search(recipe="quick"), ["--data", "emoji"])["base"])
    assert base.data.sources[0].path == "emoji"


def test_the_command_line_displaces_what_the_plan_says_in_another_unit(tmp_path):
    plan = small_search(tmp_path, recipe=None)
    values = plan_values(Search(plan=plan), ["--evaluate-every", "1"])
    assert values["base"]["evaluation"]["evaluate_every"] == 1 and values["base"]["evaluation"]["evaluations"] is None
    assert plan_values(Search(plan=plan), [])["base"]["evaluation"]["evaluations"] == 2
    finals = {"best": 1, "seeds": [0], "changes": {"evaluations": 3}}
    made = search_from({**values, "finals": finals})
    config = made.config("finals", {"method": "openclip"}, None, "runs", "x")
    assert (config.evaluation.evaluate_every, config.evaluation.evaluations) == (0, 3)


def test_folders_that_are_none(tmp_path, capsys):
    assert cli.main(["search", "--resume", str(tmp_path)]) == 1
    assert "is not the folder of a search" in capsys.readouterr().err
    assert cli.main(["search", "--study", str(tmp_path / "new.db"), "--searches", str(tmp_path)]) == 1
    assert "There is no search in this storage yet" in capsys.readouterr().err


def outcomes(folder):
    phases = summary_of(folder)["phases"]
    return [
        (phase["name"], trial["slot"], trial["params"], trial["values"], trial["evaluations"])
        for phase in phases
        for trial in phase["trials"]
    ]


@pytest.mark.slow
def test_killed_wherever_it_is_it_goes_on_as_if_nothing_had_happened(tmp_path):
    """SIGKILL for the command and its worker, as soon as a trial has a checkpoint; one worker, so that what is drawn
    does not depend on who is first."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = (small_search(tmp_path / name) for name in ("whole", "killed"))
    assert cli.main(arguments(whole)) == 0
    folder = tmp_path / "killed" / "small"
    for trial in ("choices-001", "grid-000", "fine-001", "finals-002"):
        command = [sys.executable, "-m", "tests.trials.halting", trial, *arguments(killed)]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        seen = folder / "trials" / trial / "checkpoints"
        wait_for(lambda seen=seen: list(seen.glob("step-*")), process)
        workers = children_of(process.pid)
        for pid in (process.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert cli.main(arguments(killed)) == 0
    said = outcomes(folder)
    expected = outcomes(tmp_path / "whole" / "small")
    assert [one[:4] for one in said] == [one[:4] for one in expected]
    attempts = [trial["attempts"] for phase in summary_of(folder)["phases"] for trial in phase["trials"]]
    assert sum(attempts) == len(attempts) + 4


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


@pytest.mark.slow
def test_the_quick_recipe_is_killed_and_goes_on_to_a_config_that_trains(tmp_path):
    """As a user has it, on the built-in data, but at half the pixels: 31 trials.  Killed once in each phase."""
    command = [sys.executable, "-m", "fullbatch", "search", "--recipe", "quick", "--image-size", "16"]
    command += ["--searches", str(tmp_path), "--quiet"]
    folder = tmp_path / "quick"
    for trial in ("choices-004", "grid-001", "fine-002", "finals-003", None):
        process = subprocess.Popen(command, start_new_session=True)
        seen = None if trial is None else folder / "trials" / trial / "metrics.jsonl"
        while process.poll() is None and not (seen is not None and seen.is_file() and seen.stat().st_size):
            time.sleep(0.05)
        if trial is not None:
            assert process.poll() is None, f"{trial} was over before it could be killed"
            for pid in (process.pid, *children_of(process.pid)):
                os.kill(pid, signal.SIGKILL)
        assert process.wait() == (-signal.SIGKILL if trial else 0)
    summary = summary_of(folder)
    assert {phase["name"]: len(phase["trials"]) for phase in summary["phases"]} == {
        "choices": 12, "grid": 4, "fine": 6, "finals": 9,
    }  # fmt: skip
    attempts = [trial["attempts"] for phase in summary["phases"] for trial in phase["trials"]]
    assert sum(attempts) == 31 + 4, "each kill cost one attempt, and no trial was lost or counted twice"
    assert summary["winner"]["seeds"] == [0, 1, 2] and (folder / "report.html").is_file()
    trained = ["train", "--config", str(folder / "best.yaml"), "--samples", "1280", "--runs", str(tmp_path)]
    assert cli.main([*trained, "--name", "won", "--quiet"]) == 0
