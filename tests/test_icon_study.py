"""The icon study's plans are sound before a GPU is asked, and its tables are those of the runs that were kept."""

import json
import sys
from pathlib import Path

import pytest

from fullbatch.comparison.plan import plan_from

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "icons"))

import figures  # noqa: E402
import study  # noqa: E402

STUDY = ROOT / "docs" / "studies" / "icons"


def test_every_method_gets_the_same_number_of_tuning_runs():
    best = {method: {} for method in study.TRIED}
    for name, grids in study.STAGES.items():
        tried = study.labelled(grids, best)
        assert len({len(settings) for settings in tried.values()}) == 1
        plan = plan_from(study.tuning_plan(name, tried, Path("icons"), 1000, "cpu"))
        for run in plan.planned:
            assert plan.config(run, "runs").training.seed == study.TUNING_SEED


def test_the_race_is_in_the_order_of_what_is_asked():
    best = {method: {"lr": 1e-3} for method in study.TRIED}
    plan = plan_from(study.race_plan(Path("icons"), best, 1000, "cpu"))
    runs = plan.planned
    assert [(run.batch_size, run.seed) for run in runs[:12]] == [(128, 0)] * 6 + [(512, 0)] * 6
    assert {run.seed for run in runs[:36]} == {0, 1, 2} and {run.batch_size for run in runs[:36]} == {128, 512}
    assert [run.row.name for run in runs[36:42]] == [f"{method} n/10" for method in study.FIXED]
    for run in runs:
        config = plan.config(run, "runs")
        assert config.optimizer.lr == pytest.approx(1e-3 * (run.batch_size / 128) ** 0.5)
    assert plan.config(runs[36], "runs").data.data == ("icons/train-{00000..00001}.tar",)


def test_the_best_of_what_ended_well_is_chosen():
    tried = {"openclip": {"openclip a": {"lr": 1.0}, "openclip b": {"lr": 2.0}, "openclip c": {"lr": 3.0}}}
    scores = (("openclip a", 0.1, "done"), ("openclip b", 0.2, "done"), ("openclip c", 0.9, "failed"))
    runs = [{"method": name, "status": status, "results": {"x mean_r1": score}} for name, score, status in scores]
    assert study.choose({"runs": runs}, tried) == {"openclip": {"lr": 2.0}}
    with pytest.raises(SystemExit, match="no tuning run of openclip has ended well"):
        study.choose({"runs": []}, tried)


def test_the_tables_are_those_of_the_kept_runs():
    cells = figures.cells_of(figures.read_runs(STUDY / "icons"))
    text = (STUDY / "tables.md").read_text()
    pages = [path.read_text().replace("**", "") for path in (STUDY / "README.md", ROOT / "README.md")]
    for line in figures.score_table(cells).splitlines()[2:]:
        assert line in text and all(line in page for page in pages)
    errors = (figures.error_summary(cells, "error", "batch"), figures.error_summary(cells, "last_error", "last_batch"))
    for part in (*errors, figures.ablation_table(cells)):
        assert part in text and part in pages[0]
    assert figures.error_table(cells) in text
    neuclip = [run.score for run in cells["neuclip", 128]]
    lines = json.loads((STUDY / "icons" / "comparison.json").read_text())["runs"]
    kept = [
        100 * next(value for key, value in run["results"].items() if key.endswith("mean_r1"))
        for run in lines
        if run["method"] == "neuclip" and run["batch_size"] == 128 and run["status"] == "done"
    ]
    assert neuclip == pytest.approx(kept)


def test_the_paired_differences_are_those_of_the_kept_runs():
    comparison = json.loads((STUDY / "icons" / "comparison.json").read_text())
    page = (STUDY / "README.md").read_text().replace("**", "")
    seen = 0
    for cell in comparison["differences"]:
        if cell["metric"] == comparison["metric"] and cell["method"] in figures.METHODS and cell["sd"] is not None:
            values = ", ".join(f"{100 * value:+.2f}" for value in cell["values"])
            assert f"{100 * cell['mean']:+.2f} ± {100 * cell['sd']:.2f} ({values})" in page
            seen += 1
    assert seen == 10
