"""`fullbatch compare` from its command line to comparison.json."""

import json
import re

import pytest

from fullbatch import cli
from fullbatch.data.durable import read_lines
from fullbatch.evaluation.metric_names import CLASSIFICATION, RETRIEVAL, named_numbers
from fullbatch.training.run_folder import Folder
from fullbatch.trials.checks import check_runs
from fullbatch.trials.comparison_plan import plan_from, read_plan
from fullbatch.trials.trial import execute
from tests.trials.comparison_making import arguments, small_plan


def compare(plan, *more):
    return cli.main(arguments(plan, *more))


def summary_of(plan):
    return json.loads((plan.parent / "small" / "comparison.json").read_text())


@pytest.mark.slow
def test_a_comparison_with_a_row_that_fails(tmp_path, capsys):
    methods = ["openclip", "sogclr", {"name": "too fast", "method": "openclip", "lr": 1e30}]
    plan = small_plan(tmp_path, methods=methods, seeds=[0, 1])
    assert compare(plan) == 1, "a run failed"
    summary, told = summary_of(plan), capsys.readouterr()
    status = {run["name"]: run["status"] for run in summary["runs"]}
    assert status == {
        "openclip-b8-seed0": "done", "sogclr-b8-seed0": "done", "too_fast-b8-seed0": "failed",
        "openclip-b8-seed1": "done", "sogclr-b8-seed1": "done", "too_fast-b8-seed1": "failed",
    }  # fmt: skip
    failed = next(run for run in summary["runs"] if run["status"] == "failed")
    assert "finite" in failed["error"] and failed["results"] == {}
    assert "too_fast-b8-seed1 failed" in told.out and "sogclr at 8" in told.out

    run = summary["runs"][0]
    assert run["steps"] == 20 and run["samples"] == 160 and run["seconds"] > 0 and run["memory_gib"] > 0
    assert run["samples_per_second"] == pytest.approx(160 / run["seconds"])
    assert run["results"] == named_numbers(Folder(tmp_path / "small" / run["folder"]).read_results())
    for task, names in zip(summary["tasks"], (RETRIEVAL, CLASSIFICATION), strict=True):
        assert {name for name in run["results"] if name.startswith(task)} == {f"{task} {name}" for name in names}

    metric = summary["metric"]
    assert metric == f"{summary['tasks'][0]} mean_r1" and summary["baseline"] == "openclip"
    openclip, sogclr = (
        [run["results"][metric] for run in summary["runs"] if run["method"] == name] for name in ("openclip", "sogclr")
    )
    (cell,) = [c for c in summary["table"] if c["metric"] == metric and c["method"] == "sogclr"]
    assert cell["values"] == sogclr and cell["mean"] == pytest.approx(sum(sogclr) / 2)
    (less,) = [c for c in summary["differences"] if c["metric"] == metric]
    assert less["values"] == pytest.approx([ours - theirs for ours, theirs in zip(sogclr, openclip, strict=True)])
    assert [found["method"] for found in summary["matches"]] == ["sogclr"]

    assert compare(plan, "--equal-time", "openclip") == 1, "finished runs do not stand under another budget"
    assert "equal_time was None and is now 'openclip'" in capsys.readouterr().err
    config = tmp_path / "small" / run["folder"] / "config.yaml"
    kept = config.read_text()
    config.write_text(kept.replace("samples: 160", "samples: 80"))
    assert compare(plan) == 1
    assert "training.samples was 80 and is now 160" in capsys.readouterr().err
    config.write_text(kept)

    # The same command once more has nothing to do; a larger plan only what is new.
    before = (tmp_path / "small" / run["folder"] / "results.json").stat().st_mtime_ns
    small_plan(tmp_path, methods=["openclip", "sogclr", methods[2], "gcl_batch"], seeds=[0, 1])
    compare(plan, "--stop-after", "1e-9")
    assert [r["status"] for r in summary_of(plan)["runs"] if r["method"] == "gcl_batch"] == ["open", "open"]
    assert "go on with: fullbatch compare --resume" in capsys.readouterr().out
    assert (tmp_path / "small" / run["folder"] / "results.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--batch-sizes", "8", "41"), "openclip-b41-seed0: a batch of 41 is more than the 40 samples"),
        (("--metric", "mean_r2"), "none of the tasks gives it; did you mean 'mean_r1'"),
        (("--evaluate",), "needs something to measure"),
        (("--evaluate", "retrieval:nowhere.tar"), "nowhere.tar"),
        (("--seeds",), "at least one seed"),
        (("--method", "openclip"), "takes no --method: --methods names them all"),
        (("--batch-size=8",), "takes no --batch-size"),
        (("--settings.rho", "4"), "write --settings-of METHOD.NAME=VALUE"),
        (("--settings-of", "neuklip.rho=4"), "the methods here are openclip, neuclip"),
        (("--settings-of", "openclip.rho=4"), "The row 'openclip'"),
        (("--settings-of", "openclip.lr=["), r"--settings-of 'openclip.lr=\[': '\[' is not a value as YAML has them"),
        (("--methods", "openclip"), "--plan has its own methods"),
        (("--jobs", "0"), "jobs must be a whole number of at least 1"),
        (("--resume", "nowhere"), "leave --plan out|leave --comparisons out"),
        (("--warmup-steps", "50"), "openclip-b8-seed0: Schedule: a warm-up of 50 steps"),
        (("--baseline", "siglip"), "no row is called 'siglip'"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(tmp_path, capsys, more, words):
    plan = small_plan(tmp_path)
    assert compare(plan, *more) == 1
    told = capsys.readouterr().err
    assert re.search(words, told) and told.count("\n") == 1, told
    assert not (tmp_path / "small").exists()


def test_methods_from_the_command_line(capsys):
    assert cli.main(["compare", "--methods", "openclip", "neuclib", "--name", "never"]) == 1
    assert "Unknown method 'neuclib'; did you mean 'neuclip'?" in capsys.readouterr().err
    assert cli.main(["compare", "--resume", "nowhere"]) == 1
    assert "nowhere is not the folder of a comparison" in capsys.readouterr().err
    assert cli.main(["compare", "--resume", "nowhere", "--lr", "1"]) == 1
    assert "leave --lr out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"batches": "ordered", "reading": "averaged", "drawn_batches": 4, "kept_batches": 2}, 10),
        ({"batches": "spectral", "block_batches": 2}, 20),
        ({"recovery_steps": 3}, 23),
    ],
)
def test_a_run_has_as_many_steps_as_were_counted(tmp_path, changes, steps):
    plan = plan_from(
        read_plan(small_plan(tmp_path, baseline="x", methods=[{"name": "x", "method": "sogclr", **changes}]))
    )
    (config,) = plan.configs(tmp_path)
    assert check_runs([config]) == {config.run.name: steps}
    execute(config)
    assert max(line["step"] for line in read_lines(Folder.of(config).metrics)) == steps


@pytest.mark.slow
def test_two_arms_that_learned_nothing_do_not_match(tmp_path, capsys):
    plan = small_plan(tmp_path, methods=["openclip", "sogclr"])
    assert compare(plan, "--samples", "8", "--lr", "1e-9") == 0
    (found,) = summary_of(plan)["matches"]
    assert found["text"] == "neither sogclr at 8 nor openclip at 8 is above chance (2.5 %)"
    assert (found["matches"], found["about"]) == (None, None) and found["text"] in capsys.readouterr().out
