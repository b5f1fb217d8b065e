"""Pages of fine-tunings: before and after, curves from the base on, mixtures, cost, and similarities of both models."""

import html
import json
import shutil
from dataclasses import replace

import pytest

from fullbatch.evaluation.metric_names import named_numbers
from fullbatch.report.collect import read_run
from fullbatch.report.curves import clock_of, run_charts
from fullbatch.report.embedded import RunModel, shown_model
from fullbatch.report.finetuning import cost_section, finetuning_section, mixture_chart, task_charts
from fullbatch.report.model_view import (
    MOST_RUNS,
    similarities_section,
    similarity_charts,
    view_of,
    views_of_run,
    views_of_runs,
)
from fullbatch.report.page import write_page
from fullbatch.report.wording import MINUS
from fullbatch.training.run_folder import Folder
from tests.report.making import SCRIPT, cost_of
from tests.report.test_pages import data_of, text_of


def without(run, target, *names):
    """A copy of a run without its models, but for the folders named."""
    gone = {"base", "tuned", "checkpoints", "model"} - set(names)
    shutil.copytree(run, target, ignore=shutil.ignore_patterns(*gone))
    return target


def test_before_and_after(pages):
    text, charts = text_of(pages["tuned"]), {chart["key"]: chart for chart in data_of(pages["tuned"])["charts"]}
    assert '<section id="finetuning">' in text and '<section id="similarities">' in text
    assert "after epoch 2, the best by the mean over the tasks (45.0% → 46.0%)" in text
    assert "No task lost more than 1 point." in text and "▼ regressed" not in text
    assert "+4.00 points against the base" in text and f"{MINUS}1.00 points" in text
    assert html.escape(f"ViT-B-32 {SCRIPT}") in text and "<dd>towers</dd>" not in text
    first, second, third = (charts[f"task-{place}"] for place in range(3))
    assert first["series"][0]["x"] == [0, 8, 12, 16, 20]  # the recovery leaves the weights as they are
    assert first["series"][0]["y"] == [0.3, 0.3, 0.32, 0.34, 0.36]
    assert first["marks"] == [{"label": "base", "y": 0.3}] and first["y"]["percent"]
    assert second["marks"][0]["y"] == 0.6 and not third["y"]["percent"]
    assert "evaluation" not in charts and "mixtures" not in charts
    assert data_of(pages["tuned"])["runs"][0]["recovery"] == 8


def test_a_base_that_is_kept(pages):
    text, charts = text_of(pages["mixed"]), {chart["key"]: chart for chart in data_of(pages["mixed"])["charts"]}
    assert f"The base is kept: {html.escape(SCRIPT)} fell from 60.00% to 56.00%; cars fell too" in text
    assert text.count("▼ regressed") == 1 and ">the base is kept</span>" in text
    assert "the best has 50.0% of the tuned, in interpolated/." in text
    mixtures = charts["mixtures"]
    assert (
        mixtures["x"]["scale"] == "linear"
        and [line["x"] for line in mixtures["series"]] == [[0.0, 0.25, 0.5, 0.75, 1.0]] * 3
    )
    assert "the mean" in {line["label"] for line in mixtures["series"]}
    assert "fullbatch interpolate" not in text.split("<section id=")[1]


def test_interpolation_is_offered_where_there_is_none(tunings, tmp_path):
    run = without(tunings[1], tmp_path / "alone")
    (run / "interpolation.json").unlink()
    text = text_of(write_page([run], pictures=False))
    assert f"<code>fullbatch interpolate {run}</code>" in text
    nothing = json.dumps({"metric": "mean", "points": [], "best_alpha": 0.0, "written": None})
    (run / "interpolation.json").write_text(nothing)
    text = text_of(write_page([run], pictures=False))
    assert "No mixture of base and tuned weights beats the base" in text and "Mixtures" not in text


@pytest.mark.parametrize(
    "said",
    [
        {"model": "m", "metric": "mean", "tolerance": 0.01, "epochs": [], "best_step": None, "tasks": [],
         "outcome": None, "result": None, "cost": None},
        {"epochs": [{"step": 0, "epoch": 0, "values": {"a b": None, "c d": 0.5}, "score": None}, "x", {"values": 3}]},
        {"tasks": [{}, 4, {"task": "t", "metric": "accuracy", "base": None}], "outcome": "tuned", "metric": 7},
        {"outcome": "kept_base", "reasons": "none", "result": "../../elsewhere"},
        {"model": SCRIPT},
    ],
)  # fmt: skip
def test_what_is_not_there_yet_or_damaged(tunings, tmp_path, said):
    run = without(tunings[0], tmp_path / "young")
    (run / "finetune.json").write_text(json.dumps(said))
    text = text_of(write_page([run], pictures=False))
    assert '<section id="finetuning">' in text and SCRIPT not in text
    if said.get("outcome") is None:
        assert "has not ended" in text
    assert shown_model(read_run(run)) is None
    (run / "finetune.json").write_text("{ cut o")
    assert "finetune.json cannot be read" in text_of(write_page([run], pictures=False))


def test_mixtures_with_gaps():
    values = {"t accuracy": 0.5, "t median_rank": 3.0}
    points = [{"alpha": 1.0, "values": values, "score": None}, {"alpha": 0.0, "values": None}, {"alpha": None}, 3]
    chart = mixture_chart({"metric": "mean", "points": points})
    assert [(line.label, line.x, line.y) for line in chart.series] == [("t, accuracy", [1.0], [0.5])]
    assert mixture_chart({}) is None and mixture_chart({"points": points[:1]}) is None


def test_seconds_of_an_evaluation_are_no_metric(tunings):
    run = read_run(tunings[0])
    assert all("seconds" in line for line in run.evaluations)
    plain = replace(run, finetune={})
    charts = run_charts([plain], ["one"], [0]) + run_charts([plain, plain], ["one", "two"], [0, 1])
    said = " ".join(f"{chart.key} {chart.title} {line.label}" for chart in charts for line in chart.series)
    assert "evaluation" in said and "seconds" not in said.lower() and "stage" not in said.lower()
    assert not any("seconds" in name for name in named_numbers(Folder(tunings[0]).read_results()))


def test_a_task_on_the_training_data_is_marked(tunings):
    plain = replace(read_run(tunings[0]), finetune={})
    (chart,) = (chart for chart in run_charts([plain], ["one"], [0]) if chart.key == "evaluation")
    assert [line.label.endswith("which the run trains on") for line in chart.series] == [True, True, True]
    assert "which the run trains on" in task_charts(read_run(tunings[0]))[0].note


def test_pairs_of_a_larger_recovery_batch(tunings):
    run = read_run(tunings[0])
    lines = [{"step": 1, "samples": 32, "stage": "recovery"}, {"step": 2, "samples": 64, "stage": "recovery"}]
    lines += [{"step": 3, "samples": 72, "stage": "tuning", "epoch": 1.8}]
    settings = {**run.settings, "recovery": {"recovery_steps": 2, "recovery_batch": 32}}
    settings["training"] = {**settings["training"], "samples": None, "epochs": 3}
    run = replace(run, training=lines, settings=settings)
    assert run.recovery_steps == 2 and run.pairs_seen == 72
    assert run.planned_steps == 2 + 3 * 5
    assert clock_of(run)[2] == [0, 32, 64, 72]
    assert clock_of(run, most=1)[0] == [0, 1, 2, 3]


def test_cost_by_stage(pages, tunings, tmp_path):
    for name in ("tuned", "tunings"):
        text = text_of(pages[name]).split('<section id="cost">')[1].split("</section>")[0]
        for said in (
            "recovery (frozen weights)",
            "tuning",
            "evaluation",
            "together, 2 devices",
            "1 min 40 s",
            "0.0575",
        ):
            assert said in text
        assert ">20<" in text and ">160<" in text  # steps and pairs, of the stages that have them
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "results.json"):
        shutil.copy(tunings[0] / name, ordinary)
    results = json.loads((ordinary / "results.json").read_text())
    results["cost"] = cost_of({"training": (20, 3.0)})
    (ordinary / "results.json").write_text(json.dumps(results))
    text = text_of(write_page([ordinary], pictures=False)).split('<section id="cost">')[1].split("</section>")[0]
    assert "training" in text and "together" not in text and "3.0 s" in text
    assert not finetuning_section(read_run(ordinary)).body
    run = read_run(ordinary)
    for cost in ({}, {"stages": []}, {"stages": [{"stage": "training", "seconds": None}]}):
        assert not cost_section([replace(run, cost=cost)]).body


# ---------------------------------------------------------------------------------------------------------------------
# similarities


def test_similarities_of_base_and_tuned(pages):
    charts = [chart for chart in data_of(pages["tuned"])["charts"] if chart["key"].startswith("similarity-")]
    assert [(chart["title"], chart["key"].split("-")[1]) for chart in charts] == [
        ("base", "image_to_text"), ("tuned", "image_to_text"), ("base", "text_to_image"), ("tuned", "text_to_image"),
    ]  # fmt: skip
    for pair in (charts[:2], charts[2:]):
        assert pair[0]["y"]["reach"] == pair[1]["y"]["reach"]
        assert {tuple(line["x"]) for chart in pair for line in chart["series"]} == {tuple(pair[0]["series"][0]["x"])}
    for chart in charts:
        assert [line["label"] for line in chart["series"]][:2] == ["positives", "5 nearest negatives"]
        assert all(sum(line["y"]) == pytest.approx(1.0, abs=1e-3) for line in chart["series"])
    assert charts[0]["series"] != charts[1]["series"]
    assert "training pairs (all 40)" in text_of(pages["tuned"])


def test_similarities_of_several_runs(pages):
    charts = [chart for chart in data_of(pages["tunings"])["charts"] if "image_to_text" in chart["key"]]
    assert [chart["title"] for chart in charts] == ["base", "hinged", "global"]
    assert '<section id="similarities">' in text_of(pages["several"])


def test_near_negatives_of_two_models_stand_side_by_side(pages, tunings):
    """TuneCLIP's Table 21, s1 and s2 of each false negative."""
    text = text_of(pages["tunings"])
    assert "Near negatives, model by model" in text
    model = RunModel.load(tunings[0], "tuned")
    alone = view_of("alone", model.training(40))
    assert "Near negatives" not in similarities_section([alone], []).body


def test_which_model_is_shown(tunings, tmp_path):
    tuned, kept = (read_run(path) for path in tunings)
    assert (shown_model(tuned), shown_model(kept)) == ("tuned", "base")
    model = RunModel.load(tuned.path, "tuned")
    pairs = model.training(30)
    views, gaps = views_of_run(tuned, "tuned", pairs, 30)
    assert [(view.label, len(view.embedded.ids), len(view.embedded.pool)) for view in views] == [
        ("base", 30, 40),
        ("tuned", 30, 40),
    ] and not gaps
    assert views[0].same == views[1].same
    whole = view_of("whole", model.training(40))
    section = similarities_section([*views, whole], [])
    assert "30 of 40; all 40" in section.lead and "not looked at on the same pairs" in section.body
    assert len(view_of("fewer", pairs, most=15).embedded.ids) == 15

    lost = without(tunings[0], tmp_path / "lost", "tuned")
    (lost / "base").mkdir()
    views, gaps = views_of_run(read_run(lost), "tuned", pairs, 30)
    assert [view.label for view in views] == ["tuned"] and "base are not shown, because" in gaps[0]
    text = text_of(write_page([lost]))
    assert '<section id="similarities">' in text and "The similarities of base are not shown" in text


def test_similarities_that_cannot_be_had(tunings, tmp_path):
    bare = without(tunings[0], tmp_path / "bare")
    views, gaps = views_of_runs([read_run(bare)], ["bare"], None)
    assert views == [] and gaps[0].startswith("bare: similarities on training pairs are not shown, because")
    assert similarity_charts([]) == [] and not similarities_section([], []).body
    run = read_run(bare)
    assert views_of_runs([run] * (MOST_RUNS + 1), ["r"] * (MOST_RUNS + 1), None)[1][0].startswith("Similarities")
    model = RunModel.load(tunings[0], "base")
    few = model.training(11)
    assert "at least 12 pairs" in views_of_run(read_run(tunings[0]), "base", few, 11)[1][0]
    assert '<section id="similarities">' not in text_of(
        write_page([bare, bare.parent / "bare"], tmp_path / "p.html", pictures=False)
    )
