"""The clean-up study: parts differ in noise alone, plans are sound before a GPU is asked, tables say what is met."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from fullbatch.trials.comparison_plan import plan_from
from tests.test_finetune_study import corpus

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "icons"))
sys.path.insert(0, str(ROOT / "benchmarks" / "finetune"))

import cleanup_figures  # noqa: E402
import cleanup_study  # noqa: E402
import icon_parts  # noqa: E402
import tuning_study  # noqa: E402
from cleanup_study import Base, Setting  # noqa: E402
from unpack import draw_order  # noqa: E402

KEPT = ROOT / "docs" / "studies" / "finetune" / "cleanup"
SETTING = Setting(Path("parts"), "cpu")
BASE, WARMER = Base("OUT/held", 0.015), Base("OUT/learned", 0.04)
ARMS = cleanup_study.arms(BASE, WARMER, 4)


# ---------------------------------------------------------------------------------------------------------------------
# data


def drawn_corpus():
    return sorted(corpus(200), key=lambda pair: draw_order(pair[0]))


def test_the_parts_are_of_all_sets_and_share_no_picture():
    parts = icon_parts.clean_up_parts(drawn_corpus())
    pictures = [image for chosen in parts.values() for _, image in chosen if image != b"test"]
    assert len(pictures) == len(set(pictures))
    names = {part: {icon_parts.name_of(entry) for entry, _ in chosen} for part, chosen in parts.items()}
    assert names["check"].isdisjoint(names["base"] | names["tune"]) and len(parts["check"]) == len(names["check"]) > 0
    assert {entry.set for entry, _ in parts["base"]} == {entry.set for entry, _ in parts["tune"]} and parts["test"]
    assert len(parts["base"]) == pytest.approx(4 * len(parts["tune"]), abs=4)


def test_only_the_bases_captions_are_handed_round():
    true = {image: entry.captions for entry, image in drawn_corpus()}
    parts = icon_parts.clean_up_parts(drawn_corpus())
    wrong = {part: sum(entry.captions != true[image] for entry, image in of) for part, of in parts.items()}
    assert 0.28 < wrong["base"] / len(parts["base"]) <= 0.35 and wrong["tune"] == wrong["check"] == 0
    own = Counter(true[image] for _, image in parts["base"])
    assert Counter(entry.captions for entry, _ in parts["base"]) == own
    assert parts == icon_parts.clean_up_parts(drawn_corpus()), "the same every time"


# ---------------------------------------------------------------------------------------------------------------------
# plans


@pytest.fixture
def out(tmp_path):
    bases = {"base": vars(BASE), "warmer": vars(WARMER), "gain_of_doubling": 0.001}
    (tmp_path / "bases.json").write_text(json.dumps(bases))
    return tmp_path


class Compared:
    """In place of ``fullbatch compare``: what R@1 a label, a row and a rate give."""

    def __init__(self, score):
        self.score, self.plans = score, []

    def __call__(self, plan, out, more):
        self.plans.append(plan)
        plan_from(plan)
        (out / plan["name"]).mkdir(exist_ok=True)
        (out / plan["name"] / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        runs = [
            {
                "method": row["name"],
                "batch_size": size,
                "status": "done",
                "results": {"retrieval:x mean_r1": self.score(row["name"].rpartition(" lr=")[0], row["lr"])},
                "tau": 0.04,
                "folder": row["name"],
            }
            for row in plan["methods"]
            for size in row["batch_sizes"]
        ]
        return {"runs": runs}


def configs(plan):
    plan = plan_from(plan)
    return {run.row.name: plan.config(run, "runs") for run in plan.planned}


def test_every_loss_is_tuned_cold_and_recovered():
    shared, rows = tuning_study.tuning_base(SETTING.data, Path(BASE.pretrained), 4, "cpu"), ARMS
    found = configs(cleanup_study.race_plan({**shared, "evaluation": {"evaluate": ["retrieval:x"]}}, rows, rates(rows)))
    for loss in ("openclip", "GCL", "HGCL"):
        cold, recovered = found[f"{loss}, cold"], found[f"{loss}, recovery"]
        assert cold.recovery.recovery_epochs is None and recovered.recovery.recovery_epochs == 4.0
        assert cold.objective == recovered.objective and recovered.recovery.carry == "all"
    for name, config in found.items():
        method = config.objective.build()
        assert "temperature" not in config.objective.settings, "it stays as the base has it"
        assert config.model.pretrained == (WARMER if "warmer" in name else BASE).pretrained
        if name.startswith(("HGCL", "m = ")):
            assert type(method.pairwise).__name__ == "SquaredHinge"
        elif name.startswith("GCL"):
            assert type(method.pairwise).__name__ == "Identity" and method.normalizer.gamma == 0.9
        if not name.startswith("openclip"):
            assert method.normalizer.unit_mean == name.endswith("mean weight 1")
            assert method.normalizer.gamma_epochs == cleanup_study.EPOCHS
        if ", carry " in name:
            assert config.recovery.carry == name.split()[-1] and config.recovery.recovery_epochs == 4.0


def rates(rows):
    return dict.fromkeys(rows, 1e-4)


def test_margins_follow_both_rules_at_both_temperatures():
    assert cleanup_study.margins(0.01)["m = 10 tau"] == pytest.approx(cleanup_study.margins(0.01)["m = sqrt tau"])
    found = {name: row["settings"]["margin"] for name, row in ARMS.items() if "margin" in row.get("settings", {})}
    assert found["HGCL, cold"] == found["HGCL, recovery"] == pytest.approx(0.15)
    assert "m = 10 tau" not in found and found["m = 40 tau"] == pytest.approx(0.6)
    assert found["m = sqrt tau"] == pytest.approx(math.sqrt(0.015))
    assert found["m = sqrt tau, warmer base"] == pytest.approx(0.2) == found["m = 5 tau, warmer base"]
    assert found["m = 10 tau, warmer base"] == pytest.approx(0.4)
    assert all(margin <= 2.0 for margin in cleanup_study.margins(0.2).values())
    alone = cleanup_study.arms(BASE, None, 4)
    assert list(alone) == [arm for arm in ARMS if "warmer" not in arm]


def test_rates_are_judged_on_the_check_and_bracketed(out, monkeypatch):
    best = {"openclip, cold": 1e-5, "GCL, cold": 1e-3}
    near = Compared(lambda arm, rate: 1.0 - abs(math.log(rate / best.get(arm, 9e-5))))
    monkeypatch.setattr(cleanup_study, "compare", near)
    cleanup_study.choose_rates(SETTING, out, [])
    chosen = json.loads((out / "chosen.json").read_text())
    assert list(chosen) == list(ARMS)
    assert chosen["openclip, cold"] == 1e-5 and chosen["GCL, cold"] == 8.1e-4 and chosen["HGCL, cold"] == 9e-5
    for config in configs(near.plans[-1]).values():
        assert config.training.seed == 100 not in cleanup_study.SEEDS
        assert config.evaluation.evaluate == (SETTING.check,) and config.data.data == ("parts/tune.tar",)
    asked = len(near.plans)
    cleanup_study.choose_rates(SETTING, out, [])
    assert len(near.plans) == asked + 1 and near.plans[-1] == near.plans[-2], "it goes on where it stopped"
    monkeypatch.setattr(cleanup_study, "compare", lambda *plan: pytest.fail("without a base nothing is compared"))
    (out / "bases.json").unlink()
    with pytest.raises(SystemExit, match="no base"):
        cleanup_study.race(SETTING, out, [])


def test_the_race_is_measured_from_an_eighth_of_an_epoch(out, monkeypatch):
    (out / "chosen.json").write_text(json.dumps({arm: 1e-6 * place for place, arm in enumerate(ARMS, start=1)}))
    plans = []
    monkeypatch.setattr(cleanup_study, "compare", lambda plan, *others: plans.append(plan))
    cleanup_study.race(SETTING, out, [])
    plan = plan_from(plans[0])
    assert [run.row.name for run in plan.planned[: len(ARMS)]] == list(ARMS), "a seed of all before a second of any"
    assert Counter(run.seed for run in plan.planned) == dict.fromkeys(cleanup_study.SEEDS, len(ARMS))
    for place, config in enumerate(configs(plans[0]).values(), start=1):
        assert config.optimizer.lr == pytest.approx(1e-6 * place)
        assert config.evaluation.evaluate == (SETTING.test, SETTING.check)
        assert config.evaluation.evaluations == 8 * config.training.epochs and config.evaluation.evaluate_start


@pytest.fixture
def exported(monkeypatch):
    """Which run of which stage became which base."""
    found = {}

    def best(comparison, out, stage, name):
        chosen = max(comparison["runs"], key=lambda run: run["results"]["retrieval:x mean_r1"])
        found[name] = (stage, chosen["method"])
        return chosen

    monkeypatch.setattr(cleanup_study, "export_best", best)
    return found


def test_the_base_is_trained_until_longer_does_not_help(tmp_path, monkeypatch, exported):
    gains = {1_500_000: 0.1, 3_000_000: 0.2, 6_000_000: 0.25, 12_000_000: 0.251}

    def score(arm, rate):
        return 0.3 * (rate == 2.5e-4) if arm == "held" else gains[int(arm.split()[1])] * (rate == 1e-3)

    compared = Compared(score)
    monkeypatch.setattr(cleanup_study, "compare", compared)
    cleanup_study.train_base(SETTING, tmp_path, [])
    assert exported["learned"] == ("pretraining", "samples 12000000 lr=0.001")
    assert exported["held"] == ("holding", "held lr=0.00025")
    bases = json.loads((tmp_path / "bases.json").read_text())
    assert bases["base"] == {"pretrained": str(tmp_path / "held"), "tau": 0.015}
    assert bases["warmer"]["tau"] == 0.04 and bases["gain_of_doubling"] == pytest.approx(0.001)
    for config in configs(compared.plans[-1]).values():
        assert config.objective.build().temperature.temperature == 0.015 and config.training.samples == 6_000_000
        assert type(config.objective.build().temperature).__name__ == "Constant"
        assert config.data.data == ("parts/base.tar",) and config.evaluation.evaluate == (SETTING.check,)
    asked = len(compared.plans)
    cleanup_study.train_base(SETTING, tmp_path, [])
    assert len(compared.plans) == asked + 2, "the lengths that were begun, then the held ones, and no more"


def test_a_cold_temperature_is_not_held(tmp_path, monkeypatch, exported):
    compared = Compared(lambda arm, rate: 0.2 * (rate == 1e-3))
    monkeypatch.setattr(cleanup_study, "compare", compared)
    monkeypatch.setattr(cleanup_study, "HELD", 0.05)
    cleanup_study.train_base(SETTING, tmp_path, [])
    assert list(exported) == ["learned"]
    assert "warmer" not in json.loads((tmp_path / "bases.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# tables


def kept(folder, end):
    """A study whose main arms have run, twelve steps an epoch; ``end``: where `openclip` cold ends, in points."""
    done = {"openclip, cold": end, "GCL, cold": -1.0, "GCL, recovery": 2.0, "HGCL, recovery": 3.0, "m = 40 tau": 1.0}
    runs = [{"name": "f", "method": "HGCL, cold", "seed": 0, "status": "failed", "error": "The loss ran away"}]
    for arm, last in done.items():
        for seed in range(3):
            run = {"name": f"{arm}-{seed}", "method": arm, "seed": seed, "status": "done"}
            runs.append(run)
            recovers = arm.endswith("recovery") or arm.startswith("m = ")
            frozen = 48 if recovers else 0
            lines = [{"step": 48, "stage": "recovery", "log_ratio_image": -5.0, "log_ratio_text": -5.0}][: frozen // 48]
            for place in range(33):
                step = frozen * (place > 0) + 12 * place / 8
                gain = (last + 0.32 * seed) * place / 32
                numbers = {f"{SETTING.test} mean_r1": 0.3 + gain / 100, f"{SETTING.check} mean_r1": 0.4 + gain / 100}
                lines.append({"kind": "evaluation", "step": step, **numbers})
            ratio = math.log(0.25) if recovers else 0.0
            lines.append({"step": frozen + 6, "log_ratio_image": ratio, "log_ratio_text": ratio})
            (folder / "race" / "runs" / run["name"]).mkdir(parents=True)
            text = "\n".join(json.dumps(line) for line in lines)
            (folder / "race" / "runs" / run["name"] / "metrics.jsonl").write_text(text)
    grids = {arm: {256: [3e-5, 9e-5, 2.7e-4]} for arm in ARMS}
    plan = cleanup_study.rates_plan("rates", {}, ARMS, grids)
    (folder / "rates").mkdir()
    (folder / "rates" / "plan.yaml").write_text(yaml.safe_dump(plan))
    rated = [
        {
            "method": row["name"],
            "batch_size": 256,
            "status": "done",
            "results": {"x mean_r1": 0.4 + 0.01 * (row["lr"] == (3e-5 if "m = 40" in row["name"] else 9e-5))},
        }
        for row in plan["methods"]
    ]
    written = {
        "race/comparison.json": {"runs": runs},
        "rates/comparison.json": {"runs": rated},
        "bases.json": {"base": vars(BASE), "warmer": vars(WARMER), "gain_of_doubling": 0.001},
        "study.json": {"data": str(SETTING.data), "epochs": 4},
        "chosen.json": rates(ARMS),
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return cleanup_figures.read_study(folder)


def test_tables_say_what_changed_and_what_is_missing(tmp_path):
    study = kept(tmp_path, end=-2.0)
    text = cleanup_figures.document(study)
    assert text.startswith(
        "**Premise met**: `openclip`, cold, at its own best rate (0.0001) ends at -1.68 ± 0.32 points"
    )
    assert "premise not met" not in text
    assert "| openclip, cold | 0.0001 | 3 | -0.05 ± 0.01 | -0.42 ± 0.08 | -1.68 ± 0.32 | +0.00 ± 0.00 | 1.00 |" in text
    assert "| GCL, recovery | 0.0001 | 3 | +0.07 ± 0.01 | +0.58 ± 0.08 | +2.32 ± 0.32 | +2.32 ± 0.32 | 0.25 |" in text
    assert "| HGCL, cold |  |  | failed: The loss ran away |" in text and "| GCL, carry none |  |  | not done |" in text
    assert "| Does recovery help? | GCL, recovery less GCL, cold | 3 | +3.00 ± 0.00 | +3.00 … +3.00 |" in text
    assert "| 0.0150 | 0.150 | 10.0 | m ∝ τ | 3 | **+3.32 ± 0.32** |" in text
    assert "| the base | 0.0150 | 40.00 | 30.00 |" in text
    assert "At the edge of its grid: m = 40 tau; m = 40 tau, warmer base." in text


def test_what_is_kept_gives_the_same_figures(tmp_path):
    study = kept(tmp_path / "out", end=-2.0)
    runs = tmp_path / "out" / "race" / "runs"
    for metrics in sorted(runs.glob("*/metrics.jsonl")):
        (metrics.parent / "outcome.json").write_text("{}")
        steps = [{"step": step, "stage": "recovery" if step <= 48 else "tuning"} for step in range(1, 97)]
        if "recovery" in metrics.read_text():
            metrics.write_text("".join(json.dumps(line) + "\n" for line in steps) + metrics.read_text())
    assert cleanup_figures.read_study(tmp_path / "out").runs == study.runs
    cleanup_study.gather(tmp_path / "out", tmp_path / "kept")
    assert cleanup_figures.read_study(tmp_path / "kept").runs == study.runs


def test_a_premise_that_is_not_met_is_said_over_every_table(tmp_path):
    text = cleanup_figures.document(kept(tmp_path, end=-0.1))  # one seed ends above the base
    assert text.startswith("**Premise not met**") and text.count("(premise not met)") == 5


def test_plots_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    study = kept(tmp_path, end=-2.0)
    cleanup_figures.plot_curves(study, tmp_path / "curves.svg")
    cleanup_figures.plot_margins(study, tmp_path / "margins.svg")
    assert "</svg>" in (tmp_path / "curves.svg").read_text() and "</svg>" in (tmp_path / "margins.svg").read_text()


@pytest.mark.skipif(not (KEPT / "race").is_dir(), reason="the runs of the study are not there")
def test_the_tables_are_those_of_the_kept_runs():
    assert cleanup_figures.document(cleanup_figures.read_study(KEPT)) == (KEPT / "tables.md").read_text()
