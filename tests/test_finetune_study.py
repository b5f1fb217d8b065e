"""The fine-tuning study: parts that do not overlap, plans that are sound before a GPU is asked, honest tables."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from fullbatch.trials.comparison_plan import plan_from

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "icons"))
sys.path.insert(0, str(ROOT / "benchmarks" / "finetune"))

import held_out  # noqa: E402
import icon_parts  # noqa: E402
import tuning_figures  # noqa: E402
import tuning_study  # noqa: E402
from icon_pack import Entry  # noqa: E402

DATA = Path("parts")
BEST = {"openclip": 1e-4, "fastclip_v3": 1e-4, "tuneclip": 3e-5, "GCL + OSR": 1e-4, "OSR + SGD": 0.1}
KEPT = ROOT / "docs" / "studies" / "finetune" / "runs"


# ---------------------------------------------------------------------------------------------------------------------
# data


def corpus(each=40):
    """A few sets of every part; names repeat within a part, and across them."""
    sets = {"lucide": "train", "game-icons": "train", "streamline-color": "train", "noto": "train", "twemoji": "train"}
    found = [
        (Entry(name, f"{name}-{number}", split, "", "", (f"thing {number % 25}",)), f"{name}{number}".encode())
        for name, split in sets.items()
        for number in range(each)
    ]
    found += [
        (Entry(name, f"{name}-test", "test", "", "", (f"unseen {name}",)), b"test")
        for name in ("lucide", "maki", "noto")
    ]
    return found


def test_parts_are_cut_by_set_and_share_no_picture():
    parts = icon_parts.domain_parts(corpus())
    pictures = {name: {pair[1] for pair in pairs} for name, pairs in parts.items()}
    for one, other in (("base", "tune"), ("base", "base-check"), ("tune", "tune-check"), ("tune", "emoji-once")):
        assert pictures[one].isdisjoint(pictures[other])
    for name, pairs in parts.items():
        expected = name.split("-")[0]
        assert {icon_parts.part_of(entry.set) for entry, _ in pairs} == {expected}
    assert "twemoji" not in {entry.set for entry, _ in parts["emoji-once"]}
    assert [entry.set for entry, _ in parts["base-test"]] == ["lucide"]


def test_every_emoji_set_of_the_corpus_is_in_neither_part():
    for name in ("twemoji", "noto", "fluent-emoji-flat", "emojione-monotone", "streamline-emojis", "circle-flags"):
        assert icon_parts.part_of(name) == "emoji"
    assert icon_parts.part_of("streamline-pixel") == icon_parts.part_of("maki") == "tune"
    assert icon_parts.part_of("tabler") == "base"


def test_names_once_and_often():
    tuning = icon_parts.domain_parts(corpus())["tune"]
    once = icon_parts.once(tuning)
    names = [icon_parts.name_of(entry) for entry, _ in once]
    assert len(set(names)) == len(names) == len({icon_parts.name_of(entry) for entry, _ in tuning})
    often = icon_parts.often(tuning, 20)
    assert len(often) == 20 and sorted(Counter(icon_parts.name_of(entry) for entry, _ in often).values())[1] >= 3


def test_noise_hands_captions_on():
    tuning = icon_parts.domain_parts(corpus(200))["tune"]
    noisy = icon_parts.noisy(tuning)
    assert [image for _, image in noisy] == [image for _, image in tuning]
    assert Counter(e.captions for e, _ in noisy) == Counter(e.captions for e, _ in tuning)
    changed = sum(a.captions != b.captions for (a, _), (b, _) in zip(noisy, tuning, strict=True))
    assert 0.2 * len(tuning) < changed <= round(icon_parts.NOISY_SHARE * len(tuning))


def test_titles_of_clip_art():
    def svg(title):
        return f"<svg><dc:title>{title}</dc:title></svg>"

    assert held_out.title_of(svg("Clipart by Nicu Buculei - book_01")) == "book"
    assert held_out.title_of(svg("Ice Cream Cone (1 scoop) (B and W)")) == "ice cream cone"
    assert held_out.title_of("<svg/>") == ""
    titles = {Path(f"a/{number}.svg"): "card" for number in range(9)}
    titles |= {Path("b/bat.svg"): "bat", Path("b/bat2.svg"): "bat", Path("c/prugna.svg"): "la prugna"}
    assert held_out.chosen_titles(titles, {"card", "bat"}) == {Path("b/bat.svg"): "bat"}


# ---------------------------------------------------------------------------------------------------------------------
# plans


def test_every_way_of_tuning_gets_as_many_rates():
    plan = plan_from(tuning_study.rates_plan(DATA, Path("base"), 5, "cpu"))
    runs = plan.planned
    assert len(runs) == len(tuning_study.ways(5)) * len(tuning_study.RATES)
    for run in runs:
        config = plan.config(run, "runs")
        assert config.training.seed == tuning_study.TUNING_SEED and "test" not in str(config.evaluation.evaluate)
        assert "temperature" not in config.objective.settings  # it stays as the base has it


def test_the_race_is_in_the_order_of_what_is_asked():
    plan = plan_from(tuning_study.race_plan(DATA, Path("base"), BEST, 5, "cpu"))
    runs = plan.planned
    assert [(run.row.name, run.seed) for run in runs[:9]] == [
        (name, seed) for seed in range(3) for name in ("openclip", "fastclip_v3", "tuneclip")
    ]
    assert all(run.seed == 0 and run.batch_size == tuning_study.BATCH for run in runs[9:])
    assert [run.row.name for run in runs[9:13]] == ["carry none", "carry moments", "carry memory", "GCL + OSR"]
    configs = {run.row.name: plan.config(run, "runs") for run in runs}
    assert configs["openclip"].recovery.recovery_epochs is None
    assert configs["tuneclip"].recovery.recovery_epochs == 5.0 and configs["tuneclip"].optimizer.lr == 3e-5
    larger = configs["larger frozen batches"].recovery
    assert (larger.recovery_batch, larger.carry) == (2 * tuning_study.BATCH, "moments")
    assert configs["SGD, warm-up"].recovery.recovery_epochs == 0.0
    assert configs["SGD, warm-up"].schedule.warmup_from == pytest.approx(0.01)
    assert configs["openclip, twice as long"].training.epochs == 10
    assert configs["margin 0.4"].objective.build().pairwise.margin == 0.4
    assert configs["GCL on names once"].data.data == ("parts/tune-once.tar",)
    assert all(config.evaluation.evaluate_start for config in configs.values())


def test_only_adamw_is_recorded():
    for values in (
        tuning_study.rates_plan(DATA, Path("base"), 5, "cuda"),
        tuning_study.race_plan(DATA, Path("base"), BEST, 5, "cuda"),
    ):
        plan = plan_from(values)
        for run in plan.planned:
            config = plan.config(run, "runs")
            assert config.training.graphs == (config.optimizer.optimizer == "adamw")


def test_the_best_rate_by_both_checks():
    tune, base = tuning_study.checks(DATA)
    values = {"tuneclip lr=3e-05": (0.2, 0.2), "tuneclip lr=0.0001": (0.5, 0.0)}
    for way, (_, rates) in tuning_study.ways(5).items():
        values.setdefault(tuning_study.label(way, rates[0]), (0.1, 0.1))
    runs = [
        {"method": name, "status": "done", "results": {f"{tune} mean_r1": a, f"{base} mean_r1": b}}
        for name, (a, b) in values.items()
    ]
    best = tuning_study.choose({"runs": runs}, DATA, 5)
    assert best["tuneclip"] == 1e-4 and best["openclip"] == 3e-5 and best["OSR + SGD"] == 0.01
    with pytest.raises(SystemExit, match="no run of openclip has ended well"):
        tuning_study.choose({"runs": []}, DATA, 5)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def kept(folder):
    """A study of which the first question is answered, and one run has failed."""
    (folder / "race" / "metrics").mkdir(parents=True)
    measured = [*tuning_study.tasks(DATA).values(), *tuning_study.checks(DATA)]
    runs = []
    for seed in range(3):
        for name in ("openclip", "fastclip_v3", "tuneclip"):
            run = {"name": f"{name}-{seed}", "method": name, "seed": seed, "status": "done", "tau": 0.05, "error": ""}
            runs.append(run)
            gain = {"openclip": -0.01, "fastclip_v3": 0.0, "tuneclip": 0.02}[name] + 0.001 * seed
            lines = [
                {"kind": "evaluation", "step": epoch, "seconds": 1.0}
                | {f"{t} {'accuracy' if 'cifar' in t else 'mean_r1'}": 0.2 + gain * epoch for t in measured}
                for epoch in range(3)
            ]
            text = "\n".join(json.dumps(line) for line in [{"step": 1, "loss": 0.5}, *lines])
            (folder / "race" / "metrics" / f"{run['name']}.jsonl").write_text(text)
    failed = {
        "name": "f",
        "method": "carry none",
        "seed": 0,
        "status": "failed",
        "error": "The loss ran away",
        "tau": None,
    }
    stage = {"stage": "training", "steps": 4, "samples": 8, "seconds": 2.0, "device_hours": 0.1}
    written = {
        "race/comparison.json": {"runs": [*runs, failed]},
        "race/costs.json": {run["name"]: {"devices": 1, "stages": [stage]} for run in runs},
        "study.json": {"data": str(DATA), "epochs": 5},
        "chosen.json": BEST,
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_tables_give_changes_and_name_what_failed_or_is_missing(tmp_path):
    study = tuning_figures.read_study(kept(tmp_path))
    text = tuning_figures.document(study)
    assert "| base, % | 20.00 | 20.00 | 20.00 | 20.00 | 20.00 |" in text
    assert "| tuneclip | 3 | +4.20 ± 0.20 | +4.20 ± 0.20 |" in text
    assert "| openclip | 3 | -1.80 ± 0.20 |" in text
    assert "| openclip | 0 | 0 | +0.00 | +0.00 |" in text  # the base is its best epoch
    assert "| carry none |  | failed: The loss ran away |" in text and "| carry moments |  | not done |" in text
    assert "| openclip | training | 4 | 8 | 2.00 ± 0.00 | 0.1000 |" in text


@pytest.mark.skipif(not KEPT.is_dir(), reason="the runs of the study are not there")
def test_the_tables_are_those_of_the_kept_runs():
    study = tuning_figures.read_study(KEPT)
    assert tuning_figures.document(study) == (KEPT.parent / "tables.md").read_text()
