"""The study of batches: the pack gives its data back, its plans are sound, and its tables are those of the runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fullbatch.config.data import Source
from fullbatch.data.sources import open_source
from fullbatch.trials.comparison_plan import plan_from
from tests.data.making import picture

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "batches"))

import batch_figures
import batch_study
import cifar
import purity

DATA = Path("photographs")


def photographs(count):
    return np.stack([np.asarray(picture((32, 32), seed)) for seed in range(count)]), [n % 10 for n in range(count)]


def test_from_pack_to_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "A_SHEET", 40)
    monkeypatch.setattr(cifar, "A_SHARD", 30)
    found = {"train": photographs(100), "test": photographs(12)}
    noise = cifar.write_pack(tmp_path / "pack.tar", found, quality=92)
    assert 30.0 < noise < 60.0
    back = cifar.read_pack(tmp_path / "pack.tar")
    for part, (pictures, labels) in found.items():
        assert back[part][1] == labels and back[part][0].shape == pictures.shape
        assert np.abs(back[part][0].astype(int) - pictures).mean() < 3.0
    assert cifar.write_shards(back, tmp_path / "data") == {"train": 100, "test": 12}
    train = open_source(Source(f"{tmp_path}/data/train-{{00000..00003}}.tar"))
    assert len(train) == 100 and train.read(37).captions == (cifar.CLASSES[7],)
    assert len(open_source(Source(f"{tmp_path}/data/test.tar"))) == 12


def test_photographs_take_nothing_from_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "A_SHEET", 40)
    black_and_noise = np.zeros((40, 32, 32, 3), np.uint8)
    black_and_noise[1::2] = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    cifar.write_pack(tmp_path / "pack.tar", {"train": (black_and_noise, [0] * 40)}, quality=75)
    assert (cifar.read_pack(tmp_path / "pack.tar")["train"][0][::2] == 0).all()


SETTING = batch_study.Cifar(DATA, device="cpu")


def test_the_runs_are_in_the_order_of_what_is_asked():
    plan = plan_from(batch_study.cifar_plan(SETTING))
    runs = plan.planned
    assert [(run.row.name, run.seed) for run in runs[:6]] == [
        (f"SogCLR {batches}", seed) for seed in range(3) for batches in ("SGD", "SC")
    ]
    assert [run.row.name for run in runs[6:]] == ["SimCLR SGD", "SimCLR SC", "SogCLR OSGD", "SimCLR OSGD"]
    assert [run.seed for run in runs[6:]] == [0] * 4
    for run in runs:
        config = plan.config(run, "runs")
        assert config.optimizer.lr == pytest.approx(0.075 * 32**0.5) and config.optimizer.optimizer == "lars"
        assert config.training.epochs == 30 and config.schedule.warmup_share == 0.1 and run.batch_size == 32
        assert config.model.view_stem == "small" and not config.training.graphs
        assert len(config.evaluation.evaluate) == 4
        assert config.selection.correction == "none"  # the published runs had none
    of = {run.row.name: plan.config(run, "runs") for run in runs}
    assert of["SogCLR SC"].selection.batches == "spectral" and of["SimCLR OSGD"].selection.batches == "ordered"
    sogclr = of["SogCLR SGD"].objective.build()
    assert sogclr.negatives == "both" and sogclr.normalizer.shared and sogclr.normalizer.gamma == 0.9
    assert {config.objective.build().temperature.temperature for config in of.values()} == {0.1}


def test_further_runs_are_the_seeds_that_lack_and_variants():
    first, plan = plan_from(batch_study.cifar_plan(SETTING)), plan_from(batch_study.further_plan(SETTING))
    done = {(run.row.name, run.seed): first.config(run, "runs") for run in first.planned}
    further = {(run.row.name, run.seed): plan.config(run, "runs") for run in plan.planned}
    assert not done.keys() & further.keys() and len(further) == 23
    every = {**done, **further}
    for label in ("SGD", "SC", "OSGD", "SC k 5", "SC late"):
        assert all((f"{loss} {label}", seed) in every for loss in batch_study.LOSSES for seed in range(3))

    def selection(label):
        return every[f"SogCLR {label}", 0].selection

    assert replace(selection("SC k 5"), block_batches=40) == selection("SC")
    assert replace(selection("SC late"), uniform_epochs=0) == selection("SC")
    assert selection("SC late").uniform_epochs == 20
    assert replace(selection("SC corrected"), correction="none") == selection("SC")
    one, other = every["SimCLR SC", 0], every["SimCLR SC", 1]
    assert replace(one, run=other.run, training=replace(one.training, seed=1)) == other


def test_purity_is_that_of_the_others():
    assert purity.purity(np.array([[0, 0, 0, 0], [1, 1, 2, 2]])) == pytest.approx((1.0 + 1 / 3) / 2)


def test_the_icons_have_both_kinds_of_batches_and_the_settings_chosen_before():
    plan = plan_from(batch_study.icons_plan(Path("icons"), 1000, "cpu", True, 2))
    names = [run.row.name for run in plan.planned]
    assert names[:4] == ["openclip uniform", "openclip spectral", "neuclip uniform", "neuclip spectral"]
    assert len(names) == 12
    for run in plan.planned:
        config = plan.config(run, "runs")
        assert config.training.batch_size * config.selection.block_batches == 32 * 40
        assert config.optimizer.lr == 5e-4


def test_tables_of_a_few_runs(tmp_path):
    folder = tmp_path / "runs" / "cifar"
    runs = []
    for label, scores in {"SogCLR SGD": (0.2, 0.3), "SogCLR SC": (0.5, 0.5), "SimCLR SGD": (0.4,)}.items():
        for seed, score in enumerate(scores):
            tasks = batch_study.tasks(DATA)
            results = {f"{task} {batch_figures.TASKS[name][1]}": score for name, task in tasks.items()}
            name = f"{label.replace(' ', '_')}-b32-seed{seed}"
            runs.append({"name": name, "method": label, "seed": seed, "seconds": 100.0, "results": results})
            runs[-1] |= {"status": "done"}
            lines = [{"step": 1, "selection_stall": 1.5, "selection_seconds": 20.0}, {"step": 2, "loss": 1.0}]
            kept = folder / "runs" / name
            (kept / "batches").mkdir(parents=True)
            (kept / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            if "SC" in label:
                line = {"period": 2, "step": 9, "mean": 3.0, "uniform_mean": 2.0, "edges": [0, 2, 4]}
                line |= {"counts": [0, 5], "uniform_counts": [3, 2]}
                (kept / "batches" / "losses.jsonl").write_text(json.dumps(line))
                (kept / "purity.json").write_text(json.dumps({"own": 0.25 + seed / 4, "uniform": 0.1}))
    runs.append({"name": "x", "method": "SimCLR SC", "seed": 0, "status": "failed", "seconds": 1.0, "results": {}})
    (folder / "comparison.json").write_text(json.dumps({"runs": runs}))
    cells = batch_figures.cells_of(batch_figures.read_runs(folder))
    clean = batch_figures.accuracy_table(cells, "clean")
    assert "| SGD | 40.00 | 25.00 ± 7.07 (2) | 46.91 | 12.34 |" in clean
    assert "| SC | not done | 50.00 ± 0.00 (2) | 56.67 | 47.42 |" in clean
    gains = batch_figures.paired_table(cells, [("SogCLR SGD", "SogCLR SC")], ["clean"])
    assert "| SogCLR SC less SogCLR SGD | 25.00 ± 7.07 (2) |" in gains
    assert "| SogCLR SC | 100 | 1.5 (1.5%) | 20 |" in batch_figures.cost_table(cells)
    assert "| SogCLR SC | 3.000 / 2.000 | 3.000 / 2.000 | 1.50 |" in batch_figures.hardness_table(cells)
    assert "| SogCLR SC | 37.50 ± 17.68 (2) | 10.00 ± 0.00 (2) |" in batch_figures.purity_table(cells)
    assert "SC k 5" not in clean and "SGD |" not in batch_figures.purity_table(cells)
    pytest.importorskip("matplotlib")
    batch_figures.plot_accuracies(cells, tmp_path / "a.svg")
    batch_figures.plot_batch_losses(cells, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000 and (tmp_path / "b.svg").stat().st_size > 1000
