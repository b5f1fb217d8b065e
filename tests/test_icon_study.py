"""The icon study's plans are sound before a GPU is asked, and its tables are those of the runs that were kept."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fullbatch.training.run_folder import Folder
from fullbatch.trials.checks import check_begun, check_same_plan
from fullbatch.trials.comparison_plan import plan_from
from fullbatch.trials.trial import Outcome, outcome_of

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks" / "icons"), str(ROOT / "benchmarks")]

import comparing  # noqa: E402
import figures  # noqa: E402
import icon_arms  # noqa: E402
import study  # noqa: E402

STUDY = ROOT / "docs" / "studies" / "icons"
SETTING = study.Setting(Path("icons"), 1000, "cpu")


def comparison_of(scores):
    """As comparison.json has it: label, batch size and R@1, or None for a run that failed."""
    return {
        "runs": [
            {
                "method": label,
                "batch_size": size,
                "status": "failed" if score is None else "done",
                "results": {} if score is None else {"retrieval:x mean_r1": score},
            }
            for label, size, score in scores
        ]
    }


def test_every_arm_is_tuned_alike_on_what_is_not_reported():
    grids = study.first_rates(list(icon_arms.ARMS), study.FIRST_SIZES)
    plan = plan_from(study.rates_plan(grids, SETTING))
    assert len(plan.planned) == 9 * len(icon_arms.ARMS)
    for run in plan.planned:
        config = plan.config(run, "runs")
        assert config.training.seed == study.TUNING_SEED not in study.SEEDS
        assert config.optimizer.lr in study.FIRST_RATES[run.batch_size]
        assert "train-00019" in config.evaluation.evaluate[0] and "00018}" in config.data.data[0]


def test_a_grid_widens_until_its_best_is_inside():
    grids = {"openclip": {64: [1e-4, 2e-4, 4e-4], 256: [4e-4, 8e-4, 1.6e-3]}}
    runs = [("openclip lr=0.0001", 64, 0.1), ("openclip lr=0.0002", 64, 0.2), ("openclip lr=0.0004", 64, 0.3)]
    runs += [("openclip lr=0.0004", 256, 0.3), ("openclip lr=0.0008", 256, 0.4), ("openclip lr=0.0016", 256, None)]
    scores = study.scores_of(comparison_of(runs), grids)
    wider = study.widened(grids, scores)
    assert wider == {"openclip": {64: [1e-4, 2e-4, 4e-4, 8e-4], 256: [4e-4, 8e-4, 1.6e-3]}}
    scores["openclip", 64, 8e-4] = 0.25
    assert study.widened(wider, scores) == wider
    assert study.best_rates(wider, scores) == {"openclip": {64: 4e-4, 256: 8e-4}}
    assert figures.at_the_edge(grids, scores) == ["openclip at B 64"] and figures.at_the_edge(wider, scores) == []


def test_a_plan_of_rates_that_was_begun_only_grows():
    begun = {"openclip": {64: [2e-4, 4e-4, 8e-4, 1.6e-3]}}
    plan = study.rates_plan(begun, SETTING)
    assert study.grids_in(yaml.safe_load(yaml.safe_dump(plan))) == begun
    grown = study.joined(begun, study.first_rates(["openclip", "neuclip"], [64, 256]))
    assert grown["openclip"] == {64: begun["openclip"][64], 256: [4e-4, 8e-4, 1.6e-3]}
    assert set(grown["neuclip"]) == {64, 256}


def test_what_new_captions_decided_stays(tmp_path):
    grids = {"openclip": {64: [1e-4, 2e-4, 4e-4]}}
    (tmp_path / "rates-new").mkdir()
    (tmp_path / "rates-new" / "plan.yaml").write_text(yaml.safe_dump(study.rates_plan(grids, SETTING)))
    study.choose({"openclip": {64: 2e-4}}, study.NEW_CAPTIONS, tmp_path)
    study.choose({"openclip": {64: 4e-4, 256: 8e-4}, "neuclip": {64: 4e-4}}, study.WHOLE_SHARD, tmp_path)
    assert study.chosen_rates(tmp_path) == {"openclip": {64: 2e-4, 256: 8e-4}, "neuclip": {64: 4e-4}}
    below = study.rates_below(study.chosen_rates(tmp_path), ["openclip", "rolling"], [64])
    assert below == {"openclip": {64: [5e-5, 1e-4, 2e-4]}, "rolling": {64: [1e-4, 2e-4, 4e-4]}}


def test_the_race_has_the_rate_of_each_cell():
    chosen = {"openclip": {64: 4e-4, 256: 8e-4}, "neuclip": {64: 2e-4}}
    blocks = [
        {"methods": ["openclip", "neuclip"], "batch_sizes": [64]},
        {"methods": ["openclip"], "batch_sizes": [256]},
    ]
    plan = plan_from(study.race_plan(chosen, blocks, SETTING))
    found = {(run.row.name, run.batch_size): plan.config(run, "runs").optimizer.lr for run in plan.planned}
    assert found == {("openclip", 64): 4e-4, ("neuclip", 64): 2e-4, ("openclip", 256): 8e-4}
    assert [run.seed for run in plan.planned] == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert all("test-00000" in plan.config(run, "runs").evaluation.evaluate[0] for run in plan.planned)


def test_the_runs_that_were_kept_count():
    """Also after defaults have changed: a later call goes on from them, and need not train them again."""
    race = yaml.safe_load((STUDY / "race" / "plan.yaml").read_text())
    setting = study.Setting(Path("icons"), study.SAMPLES)
    plans = {"race": study.race_plan(study.chosen_rates(STUDY), race["runs"], setting)}
    for judge in (study.WHOLE_SHARD, study.NEW_CAPTIONS):
        half = replace(setting, samples=study.SAMPLES // 2)
        plans[judge.stage] = study.rates_plan(study.begun_grids(judge, STUDY), half, judge)
    for stage, values in plans.items():
        kept, plan = plan_from(yaml.safe_load((STUDY / stage / "plan.yaml").read_text())), plan_from(values)
        check_same_plan(kept, plan, STUDY / stage)
        configs = plan.configs(STUDY / stage)
        check_begun(configs)
        begun = [config.run.name for config in configs if Folder.of(config).begun]
        assert sorted(begun) == sorted(path.name for path in (STUDY / stage / "runs").iterdir())


def test_a_cell_with_another_rate_is_trained_anew(tmp_path, capsys):
    spectral = "neuclip spectral, none"
    chosen = {"openclip": {64: 4e-4, 128: 4e-4}, "neuclip default": {64: 2e-4}, spectral: {64: 1e-4}}
    asked = [{"methods": list(chosen), "batch_sizes": [64]}, {"methods": ["openclip"], "batch_sizes": [128]}]
    begun = study.race_plan(chosen, asked, SETTING)
    (tmp_path / "race").mkdir()
    plan = tmp_path / "race" / "plan.yaml"
    plan.write_text(yaml.safe_dump(begun))
    names = [run.name for run in plan_from(begun).planned]
    assert len(names) == 12
    for name in names:
        (tmp_path / "race" / "runs" / name).mkdir(parents=True)
    study.forget_other_rates(chosen, tmp_path)
    assert yaml.safe_load(plan.read_text()) == begun and capsys.readouterr().out == ""
    chosen |= {"openclip": {64: 2e-4, 128: 4e-4}, spectral: {64: 2e-4}}
    study.forget_other_rates(chosen, tmp_path)
    left = {path.name for path in (tmp_path / "race" / "runs").iterdir()}
    assert left == {name for name in names if name.startswith(("openclip-b128", "neuclip_default"))}
    assert "openclip-b64-seed0: trained anew, at 0.0002" in capsys.readouterr().out
    assert yaml.safe_load(plan.read_text()) == study.race_plan(chosen, asked, SETTING), "what was asked for stays"


def test_of_training_steps_some_lines_are_kept():
    def line(step, **more):
        return json.dumps({"step": step, **more}) + "\n"

    lines = [line(0, kind="audit"), *(line(step) for step in range(1, 101)), line(100, kind="evaluation")]
    steps = [*range(5, 101, 5)]
    assert comparing.thinned(lines) == [lines[0], *map(line, steps), lines[-1]]
    assert comparing.thinned(comparing.thinned(lines)) == comparing.thinned(lines)
    assert comparing.thinned(lines[:13]) == lines[:13]


def test_a_run_that_died_at_its_start_is_kept_as_one_that_failed(tmp_path):
    run = tmp_path / "out" / "race" / "runs" / "openclip-b64-seed0"
    Outcome("failed", "its process ended with signal 9, 3 times", again=True).write(run)
    comparing.keep_runs(tmp_path / "out", tmp_path / "kept", ["race", "parts"])
    kept = tmp_path / "kept" / "race" / "runs" / run.name
    assert outcome_of(kept).status == "failed" and [path.name for path in kept.iterdir()] == ["outcome.json"]


def test_minutes_are_counted_from_the_first_plan(monkeypatch):
    monkeypatch.setattr(comparing, "BEGAN", 0.0)
    monkeypatch.setattr(comparing.time, "monotonic", lambda: 90.0)
    assert comparing._until(["--jobs", "2", "--stop-after", "5.0"]) == ["--jobs", "2", "--stop-after", "3.5"]
    assert comparing._until(["--stop-after", "1"]) == ["--stop-after", "1e-06"] and comparing._until([]) == []


def test_a_refused_plan_ends_a_stage(tmp_path, monkeypatch):
    """Its exit status is that of a comparison in which runs failed, and what earlier runs left is no answer."""
    (tmp_path / "x").mkdir()
    summary = tmp_path / "x" / "comparison.json"
    summary.write_text(json.dumps({"runs": [{"status": "done"}]}))
    monkeypatch.setattr(comparing, "fullbatch", lambda arguments: 1)
    with pytest.raises(SystemExit) as stopped:
        comparing.compare({"name": "x"}, tmp_path, [])
    assert stopped.value.code == 1

    def some_fail(arguments):
        summary.unlink()
        summary.write_text(json.dumps({"runs": [{"status": "failed"}]}))
        return 1

    monkeypatch.setattr(comparing, "fullbatch", some_fail)
    assert comparing.compare({"name": "x"}, tmp_path, []) == {"runs": [{"status": "failed"}]}


def test_one_thing_is_changed_at_a_time():
    chosen = {"openclip": {64: 4e-4}, "neuclip": {64: 2e-4}, "rolling": {64: 8e-4}}
    plan = plan_from(study.variants_plan("parts", chosen, [64], SETTING))
    configs = {run.row.name: plan.config(run, "runs") for run in plan.planned}
    assert set(configs) == set(icon_arms.PARTS) and {run.seed for run in plan.planned} == {0}
    own = dict(configs["neuclip"].objective.settings)
    for name, config in configs.items():
        others = name == "openclip" or name.startswith("rolling")
        assert config.optimizer.lr == (2e-4 if not others else 4e-4 if name == "openclip" else 8e-4)
        if not others and not name.startswith(("MLP", "simultaneous", "neuclip")):
            found = dict(config.objective.settings)
            changed = {key for key in {*own, *found} if own.get(key) != found.get(key)}
            assert len(changed) == 1, name


def test_a_stage_without_its_rates_says_so():
    with pytest.raises(SystemExit, match="no rate yet of rolling at B 64; run the stage rates first"):
        study.variants_plan("parts", {"openclip": {64: 4e-4}, "neuclip": {64: 2e-4}}, [64], SETTING)


def test_windows_change_the_order_alone():
    chosen = {"openclip": {256: 4e-4}, "neuclip": {256: 2e-4}}
    plan = plan_from(study.variants_plan("windows", chosen, [256], SETTING))
    configs = {run.row.name: plan.config(run, "runs") for run in plan.planned}
    assert [name for name in configs if name.startswith("neuclip")] == [
        f"neuclip, {order}" for order in ("full", "1,024 mixed", "4,096 mixed", "16,384 mixed", "65,536 mixed")
    ]
    less = study.variants_plan("windows", chosen, [256], SETTING, ["neuclip"])
    assert [row["name"] for row in less["methods"]] == [name for name in configs if name.startswith("neuclip")]
    for name, config in configs.items():
        arm, _, order = name.partition(", ")
        assert config.optimizer.lr == chosen[arm][256] and config.objective.method == arm
        assert config.data.shuffle == ("full" if order == "full" else "blocks")


# ---------------------------------------------------------------------------------------------------------------------
# what is said of the runs


def cell(arm, size, scores, hits=None):
    return {seed: figures.Run(arm, size, seed, score, hits, 0.2, 0.9) for seed, score in enumerate(scores)}


def test_a_match_needs_both_bounds():
    rng = np.random.default_rng(1)
    hits = (rng.random(3000) < 0.3).astype(float)
    cells = {
        ("openclip", 64): cell("openclip", 64, (20.0, 20.1, 19.9), hits),
        ("openclip", 256): cell("openclip", 256, (26.0, 26.1, 25.9), hits),
        ("openclip", 1024): cell("openclip", 1024, (25.0, 25.0, 25.0), hits),
        ("neuclip", 64): cell("neuclip", 64, (26.1, 26.2, 26.0), hits),
        ("queue", 64): cell("queue", 64, (29.0, 22.0, 27.0), hits),
        ("rolling", 64): cell("rolling", 64, (27.0, 27.0, 27.0)),
    }
    assert figures.best_size(cells) == 256, "openclip at 1024 is undertrained: k does not count there"
    text = figures.matches_table(cells)
    assert "| `neuclip` | 64 | 256 | 4 | +0.10 (+0.10, +0.10, +0.10) | +0.10 … +0.10 | +0.00 … +0.00 |" in text
    assert "| `queue` | 64 | none |" in text, "its seeds differ too much"
    assert "| `rolling` | 64 | none |" in text, "without the hits of its pairs nothing is said"


def test_the_bootstrap_is_of_the_pairs():
    gap = np.zeros(3000)
    gap[:300] = 100.0  # points: found by one and not by the other
    low, high = figures.bootstrap(gap)
    assert low == pytest.approx(10.0 - 1.96 * 30.0 / 3000**0.5, abs=0.1)
    assert high == pytest.approx(10.0 + 1.96 * 30.0 / 3000**0.5, abs=0.1)


def test_hits_come_back_from_their_bits(tmp_path):
    hits = np.array([1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1], np.uint8)
    kept = {"pairs": 11, "image_to_text": np.packbits(hits).tobytes().hex(), "text_to_image": "0000"}
    (tmp_path / "hits.json").write_text(json.dumps(kept))
    assert figures.read_hits(tmp_path / "hits.json").tolist() == (hits / 2).tolist()
    assert figures.read_hits(tmp_path / "none.json") is None


def test_the_tables_are_those_of_the_kept_runs():
    text, page = ((STUDY / name).read_text() for name in ("tables.md", "README.md"))
    best, edges = {}, []
    for stage in ("rates", "rates-new"):
        grids, scores = figures.read_rates(STUDY / stage)
        for line in figures.rates_table(grids, scores).splitlines()[2:]:
            assert line in text and line in page
        best |= {
            (arm, size): rate for arm, rates in study.best_rates(grids, scores).items() for size, rate in rates.items()
        }
        edges += figures.at_the_edge(grids, scores)
        for path in sorted((STUDY / stage / "runs").glob("*/results.json")):
            kept = json.loads(path.read_text())["results"][0]["mean_r1"]
            arm, size = path.parent.name.split("_lr=")[0], int(path.parent.name.split("-b")[1].split("-")[0])
            rate = float(path.parent.name.split("_lr=")[1].split("-b")[0])
            assert scores[arm, size, rate] == pytest.approx(kept)
    for arm, rates in json.loads((STUDY / "chosen.json").read_text()).items():
        for size, rate in rates.items():
            assert best[arm, int(size)] == rate and f"{arm} at B {size}" not in edges
    cells = figures.read_race(STUDY / "race")
    for made in (figures.race_table, figures.differences_table, figures.matches_table, figures.error_table):
        for line in made(cells).splitlines()[2:]:
            assert line in text and line in page


def test_variants_have_tables_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shutil.copytree(STUDY / "rates", tmp_path / "rates")
    shutil.copytree(STUDY / "race", tmp_path / "windows")
    monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path)])
    figures.main()
    text = (tmp_path / "tables.md").read_text()
    assert f"## Blocks mixed in windows\n\n{figures.race_table(figures.read_race(STUDY / 'race'))}\n" in text
    assert "## Blocks mixed in windows: normalizer error" in text and "One thing changed" not in text
