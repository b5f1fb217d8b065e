"""Equal time in place of equal samples."""

import json

import pytest

from fullbatch import cli
from fullbatch.cli.compare import Compare, plan_values
from fullbatch.training.run_folder import Folder
from fullbatch.trials import comparison
from fullbatch.trials.comparison import _timed, samples_in_equal_time
from fullbatch.trials.comparison_plan import plan_from
from fullbatch.trials.processes import Pace
from fullbatch.trials.trial import Outcome
from tests.trials.comparison_making import arguments, small_plan


def planned(**options):
    return plan_from(plan_values(Compare(name="t", equal_time="openclip", **options), ["--samples", "800"]))


def test_a_slower_method_sees_fewer_samples():
    plan = planned(methods=("openclip", "neuclip"), batch_sizes=(8, 16), seeds=(0, 1))
    seconds = {"openclip-b8": 0.1, "neuclip-b8": 0.125, "openclip-b16": 0.2, "neuclip-b16": 0.1}
    steps = {run.name: 800 // run.batch_size for run in plan.planned}
    found = samples_in_equal_time(plan, seconds, steps)
    assert found["openclip-b8-seed1"] == 800 and found["neuclip-b8-seed1"] == 80 * 8
    assert found["openclip-b16-seed0"] == 800 and found["neuclip-b16-seed0"] == 100 * 16


def test_the_reference_must_run_at_every_batch_size(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("methods: [{method: openclip, batch_sizes: [8]}, neuclip]\nbatch_sizes: [8, 16]\nseeds: [0]\n")
    plan = planned(plan=path)
    seconds = {"openclip-b8": 0.1, "neuclip-b8": 0.1, "neuclip-b16": 0.1}
    with pytest.raises(
        ValueError, match=r"it does not run at batch size 16, so there is no time for neuclip-b16-seed0"
    ):
        samples_in_equal_time(plan, seconds, {run.name: 10 for run in plan.planned})


def quick_runs(configs, side_by_side, display):
    """In place of processes: a run that takes a second a step."""
    for config in configs:
        name, folder = config.run.name, Folder.of(config).path
        display.started(name)
        assert {path.name for path in folder.iterdir()} <= {".lock"}, "what was left is gone"
        lines = [{"step": step, "seconds": float(step)} for step in (20, 100)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        Outcome("done").write(folder)
        display.ended(name, Outcome("done"))


def test_timing_counts_its_own_runs_and_none_that_was_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "train_runs", quick_runs)
    plan = planned(methods=("openclip", "sogclr", "neuclip"), batch_sizes=(8,), seeds=(0,))
    for run in plan.planned:
        Outcome("done").write(tmp_path / "runs" / run.name)
    done, stopped = tmp_path / "calibration" / "openclip-b8", tmp_path / "calibration" / "sogclr-b8"
    (stopped / "checkpoints" / "step-000000050").mkdir(parents=True)
    for folder in (done, stopped):
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("")
        (folder / "metrics.jsonl").write_text('{"step": 20, "seconds": 1}\n{"step": 100, "seconds": 161}\n')
    Outcome("done").write(done)

    assert _timed(plan, tmp_path, Pace(quiet=True)) == {"openclip-b8": 2.0, "sogclr-b8": 1.0, "neuclip-b8": 1.0}
    assert capsys.readouterr().err.splitlines() == [
        "sogclr-b8: started", "sogclr-b8: timed (done)  [2 of 3]",
        "neuclip-b8: started", "neuclip-b8: timed (done)  [3 of 3]",
    ]  # fmt: skip
    assert _timed(plan, tmp_path, Pace(quiet=True))["openclip-b8"] == 2.0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_steps_are_timed_once_and_recorded(tmp_path):
    plan = small_plan(tmp_path, equal_time="openclip")
    assert cli.main(arguments(plan)) == 0
    folder = tmp_path / "small"
    seconds = json.loads((folder / "calibration.json").read_text())
    assert set(seconds) == {"openclip-b8", "neuclip-b8"} and all(value > 0.0 for value in seconds.values())
    summary = json.loads((folder / "comparison.json").read_text())
    steps = max(1, round(20 * seconds["openclip-b8"] / seconds["neuclip-b8"]))
    assert {run["name"]: run["samples"] for run in summary["runs"]} == {
        "openclip-b8-seed0": 160,
        "neuclip-b8-seed0": 8 * steps,
    }
    assert summary["budget"]["seconds_a_step"] == seconds
    assert cli.main(arguments(plan)) == 0
    assert json.loads((folder / "calibration.json").read_text()) == seconds
