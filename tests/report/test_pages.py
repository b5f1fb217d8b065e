"""Pages of one run, several, and a comparison; and what they say when something is missing."""

import html
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fullbatch.cli import main
from fullbatch.report.blocks import Html, Page, Section, first_shown
from fullbatch.report.charts import Chart, Series, figures
from fullbatch.report.collect import newest_run, read_run
from fullbatch.report.curves import run_charts
from fullbatch.report.embedded import Pictures
from fullbatch.report.page import DETAILS, MAX_BYTES, fitting, render, write_page
from fullbatch.report.wording import TIMES, lower_is_better
from tests.data.making import encoded
from tests.report.making import SCRIPT


def text_of(path):
    return path.read_text(encoding="utf-8")


def data_of(path):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text_of(path), re.S)[1])


def test_a_run_has_all_its_sections(pages):
    text = text_of(pages["run"])
    for key in ("results", "curves", "pictures", "suspects", "config"):
        assert f'<section id="{key}">' in text
    charts = {chart["key"]: chart for chart in data_of(pages["run"])["charts"]}
    assert {"loss", "tau", "lr", "samples_per_second", "gradient_norm", "normalizer_error"} <= charts.keys()
    assert [line["label"] for line in charts["loss"]["series"]] == ["isogclr", "openclip (baseline)"]
    assert charts["loss"]["series"][0]["x"] == list(range(1, 21))
    assert "● changed" in text and "openclip (baseline)" in text
    assert (pages["run"].parent / "suspects.csv").is_file()


def test_hostile_captions_stay_text(runs, pages):
    for path in pages.values():
        text = text_of(path)
        assert len(text.encode()) < MAX_BYTES
        assert SCRIPT not in text
        assert html.escape(SCRIPT) in text
        assert text.count("<script") == 2  # the data and page.js
        assert not re.search(r"<(iframe|svg onload|img src)", text)
        assert not re.search(r'(src|href)="(?!#)', text)
        assert "x" * 400 not in text and "word " * 100 not in text
        assert "\u2028" not in text and "\u202e" not in text
    lines = (runs[1] / "log.txt").read_text().splitlines()
    own = sum(" WARNING " in line and SCRIPT not in line for line in lines)  # the run has warnings of its own
    assert text_of(pages["run"]).count("of a sample&#x27;s name") == 40 - own  # of a hundred


def test_the_policy_allows_our_script_and_style_only(pages):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text_of(pages["run"]))[1]
    assert "default-src &#x27;none&#x27;" in policy and "unsafe" not in policy
    assert " style=" not in text_of(pages["run"])


def test_several_runs_side_by_side(pages):
    text, data = text_of(pages["several"]), data_of(pages["several"])
    assert "★" in text and "objective </span>method" in text
    assert data["shared"] and len(data["runs"]) == 2
    curves = [chart for chart in data["charts"] if chart["x"]["scale"] == "step"]
    assert {line["label"] for chart in curves for line in chart["series"]} == {"openclip", "isogclr"}


def test_a_comparison_is_complete(pages):
    text, data = text_of(pages["comparison"]), data_of(pages["comparison"])
    assert "b at 8 beats a" in text
    assert "10.00 ± 1.00%" in text and "20.00 ± 1.00%" in text and "★" in text
    assert "+10.00 ± 1.00" in text
    assert "broken-b16-seed1" in text and "1 failed" in text
    keys = {chart["key"] for chart in data["charts"]}
    assert {"points-0", "points-normalizer_error", "loss"} <= keys
    bars = next(chart for chart in data["charts"] if chart["key"] == "points-0")["series"][0]
    assert (bars["low"], bars["y"], bars["high"]) == ([0.09, 0.19], [0.1, 0.2], [0.11, 0.21])
    assert "samples = 160<" in text


def comparison_on(folder, task, difference=0.03, spread=0.001, seeds=3):
    """Two methods at one batch size, without run folders."""
    metric = f"{task} mean_r1"
    cell = {"batch_size": 64, "metric": metric, "sd": spread}
    said = {
        "name": "x", "metric": metric, "baseline": "openclip", "budget": {}, "matches": [],
        "runs": [
            {"name": name, "method": name, "batch_size": 64, "seed": 0, "status": "done", "results": {metric: mean}}
            for name, mean in (("openclip", 0.05), ("neuclip", 0.08))
        ],
        "table": [
            {**cell, "method": name, "mean": mean, "values": [mean] * seeds}
            for name, mean in (("openclip", 0.05), ("neuclip", 0.08))
        ],
        "differences": [
            {**cell, "method": "neuclip", "against": "openclip", "mean": difference, "values": [difference] * seeds}
        ],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(said))
    return text_of(write_page([folder], folder / "page.html"))


def test_a_run_whose_folder_is_gone_is_named(tmp_path):
    assert comparison_on(tmp_path / "x", "retrieval:a.csv").count("done, folder gone") == 2


def test_every_tasks_main_number_is_shown_and_the_others_are_folded():
    tables = [f"<p>{number}</p>" for number in range(5)]
    body = str(first_shown([Html(each) for each in tables], 2, "metric"))
    assert body.index("<p>1</p>") < body.index("<details") < body.index("<p>2</p>") and "3 more metrics" in body


@pytest.mark.parametrize("path", ["data/tobias/pairs.csv", "gibson.csv", "my loss/frank terror.csv"])
def test_a_path_does_not_tell_what_is_better(tmp_path, path):
    text = comparison_on(tmp_path / "race", f"retrieval:{path}")
    assert re.findall(r'<td class="best">([^<]*?) <span', text) == ["8.00 ± 0.10%"]
    assert "+3.00 ± 0.10<" in text and "<td>8.0%</td>" in text
    assert lower_is_better(f"retrieval:{path} image_to_text_median_rank")
    assert not lower_is_better(f"retrieval:{path} mean_r1") and lower_is_better("normalizer_error")
    run = replace(read_run_of_one_line(tmp_path), evaluations=[{"step": 1, f"retrieval:{path} mean_r1": 0.1}] * 2)
    charts = run_charts([run, run], ["a", "b"], [0, 1])
    assert [chart.y.percent for chart in charts if chart.key.startswith("evaluation")] == [True]


@pytest.mark.parametrize(
    ("seeds", "errors", "clear"),
    [
        (2, 50.0, False),
        (3, 4.2, False),
        (3, 4.4, True),
        (5, 2.7, False),
        (5, 2.9, True),
        (40, 2.0, False),
        (40, 2.1, True),
    ],
)
def test_a_difference_is_marked_by_students_t(tmp_path, seeds, errors, clear):
    text = comparison_on(tmp_path / "race", "retrieval:a.csv", errors * 0.01 / seeds**0.5, 0.01, seeds)
    cell = re.search(rf"± 1\.00<span class=\"quiet\"> \({seeds}\)</span>(.*?)</td>", text)[1]
    assert ("●" in cell) is clear
    assert "95 % interval (Student&#x27;s t" in text and "± 4.30 standard errors at 3" in text


def read_run_of_one_line(folder, probes=(), audits=None):
    run = folder / "one"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("training:\n  batch_size: 8\n")
    lines = [{"step": 1, "loss": 1.0}, *({"kind": "audit", **probe} for probe in probes)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if audits is not None:
        (run / "audit.json").write_text(json.dumps({"checkpoints": audits}))
    return read_run(run)


def test_probes_and_audits_are_not_mixed(tmp_path):
    probes = [{"step": step, "normalizer_error": 0.10, "batch_error": 0.08} for step in (10, 20, 30, 40)]
    probed = read_run_of_one_line(tmp_path, probes)
    assert str(probed.last_normalizer_error()) == "0.1 (probe during training, step 40)"
    (chart,) = run_charts([probed], ["one"], [0])
    assert chart.note.endswith("(probe during training)")
    both = read_run_of_one_line(tmp_path, probes, [{"step": 20, "normalizer_error": 0.05, "batch_error": 0.12}])
    assert str(both.last_normalizer_error()) == "0.05 (fullbatch audit, step 20)"
    (chart,) = run_charts([both], ["one"], [0])
    assert chart.note.endswith("(probe during training and fullbatch audit)")
    assert {line.label: (list(line.x), list(line.y)) for line in chart.series} == {
        "the method's estimate, probe during training": ([10, 20, 30, 40], [0.10] * 4),
        "the batch's own, probe during training": ([10, 20, 30, 40], [0.08] * 4),
        "the method's estimate, fullbatch audit": ([20], [0.05]),
        "the batch's own, fullbatch audit": ([20], [0.12]),
    }
    assert len({line.color for line in chart.series}) == 4
    twice = replace(both, audits=[{"step": 20, "normalizer_error": 0.05}, {"step": 40, "normalizer_error": 0.04}])
    charts = run_charts([twice, probed], ["a", "b"], [0, 1])
    assert [(chart.key, [line.label for line in chart.series]) for chart in charts] == [
        ("normalizer_error", ["a", "b"]),
        ("normalizer_audit", ["a"]),
    ]
    assert "fullbatch audit" in charts[1].note and "audit" not in charts[0].note
    page = text_of(write_page([both.path], tmp_path / "page.html", pictures=False))
    assert "<dd>0.05 (fullbatch audit, step 20)</dd>" in page


def test_without_pictures_no_model_is_needed(runs, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "results.json"):
        shutil.copy(runs[0] / name, bare)
    page = write_page([bare], pictures=False)
    assert page == bare / "report.html"
    assert "--no-pictures" in text_of(page) and "holds no environment.json" in text_of(page)
    # asked for pictures, it says why there are none
    assert "There are no pictures, because the model cannot be loaded" in text_of(write_page([bare]))


def test_data_that_moved_are_named(runs, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(runs[0], moved)
    config = (moved / "config.yaml").read_text().replace("hostile.tar", "gone.tar")
    (moved / "config.yaml").write_text(config)
    text = text_of(write_page([moved]))
    assert text.count("gone.tar") >= 2
    assert "There are no pictures of retrieval:" in text and "The training data were not looked at, because" in text
    assert '<section id="curves">' in text


def test_a_run_that_has_just_begun(runs, tmp_path):
    young = tmp_path / "young"
    young.mkdir()
    shutil.copy(runs[0] / "config.yaml", young)
    (young / "results.json").write_text("{ cut o")
    text = text_of(write_page([young], pictures=False))
    assert "There are no curves" in text and "results.json cannot be read" in text


def test_what_evaluate_found_later_is_shown(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs[0], run, ignore=shutil.ignore_patterns("checkpoints"))
    found = {
        "step": 20,
        "results": [{"task": "wds:food101", "main": "acc1", "chance": 0.01, "size": 101, "acc1": 0.5, "notes": []}],
        "gaps": [{"task": "wds:cars", "kind": "missing", "reason": "no such folder"}],
        "averages": [{"name": "VTAB", "value": 0.2, "found": 3, "of": 7, "text": "20.0 (3 of 7 tasks)"}],
    }
    (run / "evaluation.json").write_text(json.dumps(found))
    data = read_run(run)
    assert [result["task"] for result in data.results][-1] == "wds:food101" and len(data.results) == 2
    text = text_of(write_page([run], pictures=False))
    assert "20.0 (3 of 7 tasks)" in text and "wds:cars is missing: no such folder" in text and f"50.0{TIMES}" in text
    (run / "evaluation.json").write_text(json.dumps({**found, "average": False}))
    assert len(read_run(run).results) == 1, "of the weights beside the average"


def test_the_page_stays_small_whatever_the_pictures():
    pictures = Pictures(10**6)
    rng = np.random.default_rng(0)
    for _ in range(360):
        noise = Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8))
        pictures.add(encoded(noise, "JPEG", quality=95), "noise")
    again = pictures.add(encoded(noise, "JPEG", quality=95), "noise")
    assert len(pictures) == 360 and again == 359
    line = Series("loss", list(range(20_000)), [0.5] * 20_000, run=0)
    section = Section("c", "t", figures([Chart(f"c{k}", "t", "", [line]) for k in range(20)]))
    page = Page("t", Html("<h1>t</h1>"), [section], [{"batch": 1, "clock": [[0], [0]], "filter": "1"}], pictures)
    assert len(render(page, DETAILS[0]).encode()) > MAX_BYTES
    text = fitting(page)
    assert len(text.encode()) <= MAX_BYTES and "data:image" in text
    with pytest.raises(ValueError, match="name fewer runs"):
        fitting(Page("t", Html("x" * MAX_BYTES), []))


def test_a_broken_picture_is_left_out():
    pictures = Pictures(10**6)
    assert pictures.add(b"no picture", "n") is None and len(pictures) == 0


def test_from_the_command_line(runs, tmp_path, capsys, monkeypatch):
    page = tmp_path / "out" / "page.html"
    assert main(["report", str(runs[0]), "--output", str(page), "--no-pictures", "--baseline", str(runs[1])]) == 0
    assert page.is_file() and capsys.readouterr().out.strip() == str(page)
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 1
    assert "There is no run in runs" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "There is no folder" in capsys.readouterr().err
    assert main(["report", str(runs[0].parent)]) == 1
    assert "it holds run folders, so name one" in capsys.readouterr().err


def test_a_comparison_is_named_alone(runs, comparison):
    with pytest.raises(ValueError, match="name it alone"):
        write_page([comparison, runs[0]])
    with pytest.raises(ValueError, match="its own baseline"):
        write_page([comparison], baseline=runs[0])


def test_the_newest_run(tmp_path):
    import os

    for name, when in (("a", 1000), ("b", 3000), ("c", 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
        os.utime(tmp_path / name / "config.yaml", (when, when))
    assert newest_run(tmp_path).name == "b"


def test_batches_that_were_selected_are_shown_beside_uniform_ones(runs, tmp_path):
    """Figure 3 of Cho et al. 2023; a line that was cut off, or is not of this kind, is passed over."""
    copy = shutil.copytree(runs[0], tmp_path / "selected")
    (copy / "batches").mkdir()
    line = {"step": 10, "edges": [0.0, 1.0, 2.0], "counts": [1, 3], "uniform_counts": [3, 1], "mean": 1.3}
    lines = [json.dumps({**line, "period": number, "step": 10 * number}) for number in range(2, 9)]
    (copy / "batches" / "losses.jsonl").write_text("\n".join([*lines, '{"step": 90, "edges": "<b>"}', '{"step"']))
    page = write_page([copy], tmp_path / "page.html", pictures=False)
    titles = [chart["title"] for chart in data_of(page)["charts"] if chart["key"].startswith("batch-losses")]
    assert titles == ["period 2", "period 4", "period 6", "period 8"]
    assert '<section id="batch-losses">' in text_of(page) and "<b>" not in text_of(page)
    assert "batch-losses" not in text_of(write_page([runs[0]], tmp_path / "plain.html", pictures=False))
