"""The base is measured and written down, the best epoch is kept, and nobody is left worse off without a word."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.config.optimization import Recovery
from fullbatch.config.tree import write_yaml
from fullbatch.evaluation.tasks import BUILTIN_TASKS
from fullbatch.finetuning import record
from fullbatch.finetuning.finetune import finetune, measuring
from fullbatch.loading import load_trained, open_model
from fullbatch.models.build import build_model
from fullbatch.training import checkpoint
from fullbatch.training.trainer import Trainer
from tests.finetuning.making import said, tuning_config
from tests.training.small import differences, saved_state


def weights(folder):
    return build_model(Model(pretrained=str(folder))).state_dict()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, base):
    return finetune(tuning_config(tmp_path_factory.mktemp("tuned"), base))


def test_the_base_is_written_down_as_it_was(tuned, base):
    run = tuned.trained.folder
    assert differences(weights(run / "base"), weights(base)) == []
    first = tuned.record.epochs[0]
    assert (first.step, first.epoch) == (0, 0)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line["step"] for line in lines if line.get("kind") == "evaluation"]
    assert measured == [0, 10, 15, 20] == [each.step for each in tuned.record.epochs]
    assert [each.epoch for each in tuned.record.epochs] == [0, 1, 2, 3]


def test_the_best_epoch_is_kept_with_its_numbers(tuned):
    run, record = tuned.trained.folder, tuned.record
    best = max(record.epochs[1:], key=lambda each: (each.score, -each.step))
    assert record.best == best and said(run)["best_step"] == best.step
    kept = json.loads((run / "tuned" / "measured.json").read_text())
    assert (kept["step"], kept["score"]) == (best.step, best.score)
    if best.step == 20:
        own = {name.removeprefix("backbone."): value for name, value in saved_state(run, 20)["model"].items()}
        found = {name.removeprefix("backbone."): value for name, value in weights(run / "tuned").items()}
        assert [name for name in own if name != "logit_scale" and not torch.equal(own[name], found[name])] == []


def test_the_temperature_is_the_bases(tuned, base):
    wanted = open_model(Model(str(base))).temperature
    run = tuned.trained.folder
    for folder in (run / "base", run / "tuned"):
        assert math.isclose(open_model(Model(str(folder))).temperature, wanted, rel_tol=1e-6)
    assert math.isclose(load_trained(run).temperature, wanted, rel_tol=1e-6)


def test_a_better_model_takes_the_bases_place(tuned):
    run = tuned.trained.folder
    assert tuned.verdict.outcome == "tuned" and tuned.model == run / "tuned"
    read = said(run)
    assert (read["outcome"], read["result"], read["reasons"]) == ("tuned", "tuned", [])
    (task,) = read["tasks"]
    assert task["change"] == pytest.approx(task["tuned"] - task["base"]) and task["change"] > 0.0
    assert task["chance"] == pytest.approx(1 / 40) and not task["regressed"]
    stages = [stage["stage"] for stage in json.loads((run / "finetune.json").read_text())["cost"]["stages"]]
    assert stages == ["recovery", "tuning", "evaluation"]


def test_a_worse_model_does_not(tmp_path, learned, capsys):
    config = tuning_config(tmp_path, learned, epochs=1, lr=0.5, recovery=Recovery(recovery_epochs=0))
    words = ["--config", str(tmp_path / "tune.yaml"), "--metric", f"{config.evaluation.evaluate[0]} text_to_image_r10"]
    (tmp_path / "tune.yaml").write_text(write_yaml(config))
    assert main(["finetune", *words]) == 0
    run, shown = tmp_path / "run", capsys.readouterr()
    read = said(run)
    assert (read["outcome"], read["result"]) == ("kept_base", "base")
    assert any(task["regressed"] for task in read["tasks"]) and any("fell from" in reason for reason in read["reasons"])
    assert "THE BASE IS KEPT" in shown.out and f"fullbatch interpolate {run}" in shown.out
    assert "no recovery: the optimizer starts cold" in shown.err
    assert (run / "tuned" / "fullbatch.safetensors").is_file(), "what was tuned is never thrown away"
    assert main(["train", "--resume", str(run)]) == 1
    assert f"go on with `fullbatch finetune --resume {run}`" in capsys.readouterr().err


def test_what_is_measured_with_an_average_is_what_is_kept(tmp_path, base):
    config = tuning_config(tmp_path, base, epochs=1, lr=1e-2, ema=0.9)
    run = finetune(config).trained.folder
    parts = saved_state(run, 10)
    average = {name.removeprefix("backbone."): value for name, value in parts["average"].items()}
    kept = {name.removeprefix("backbone."): value for name, value in weights(run / "tuned").items()}
    assert all(torch.equal(kept[name], value) for name, value in average.items())


def test_adapters_are_merged_into_what_is_kept(tmp_path, base):
    pytest.importorskip("peft")
    config = tuning_config(tmp_path, base, epochs=1, lr=1e-2)
    run = finetune(replace(config, model=replace(config.model, lora_rank=2))).trained.folder
    before, after = weights(run / "base"), weights(run / "tuned")
    assert before.keys() == after.keys(), "no adapter is left"
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved and not [name for name in moved if "embedding" in name or "ln_" in name]


@pytest.mark.parametrize("named", ["run", "checkpoint", "export", "open_clip file"])
def test_whatever_the_model_is_named_by(tmp_path, base, named):
    run = base.parent / "trained"
    config = tuning_config(tmp_path, base, epochs=1)
    match named:
        case "run":
            model = Model(str(run))
        case "checkpoint":
            model = Model(str(checkpoint.folder_of(run / "checkpoints", 20)))
        case "export":
            model = Model(str(base))
        case _:
            own = open_model(Model(str(base)))
            state = dict(own.model.backbone.state_dict())
            state["logit_scale"] = torch.tensor(-math.log(own.temperature))
            torch.save(state, tmp_path / "plain.pt")
            model = Model(str(tmp_path / "towers.json"), pretrained=str(tmp_path / "plain.pt"))
    found = finetune(replace(config, model=model)).trained.folder
    assert differences(weights(found / "base"), weights(base)) == []


def test_a_run_stands_on_its_own(tmp_path, base):
    """The original may go; the run starts, and after a kill starts again, from its own copy."""
    original = shutil.copytree(base, tmp_path / "original")
    config = tuning_config(tmp_path, original, epochs=1)
    whole = finetune(config).trained.folder
    shutil.rmtree(original)
    moved = shutil.copytree(whole, tmp_path / "moved")
    shutil.rmtree(moved / "tuned")
    shutil.rmtree(moved / "checkpoints")
    (moved / "checkpoints").mkdir()
    (moved / "metrics.jsonl").unlink()
    shutil.rmtree(whole)
    again = finetune(replace(config, run=replace(config.run, name="moved")), resume=moved)
    assert again.record.best is not None and [each.step for each in again.record.epochs] == [0, 10]


def test_the_built_in_tasks_are_measured_unless_the_user_names_some(tmp_path, base):
    config = tuning_config(tmp_path, base)
    config = measuring(replace(config, evaluation=replace(config.evaluation, evaluate=None)))
    assert config.evaluation.evaluate == BUILTIN_TASKS["emoji"]
    assert config.evaluation.evaluate_start and config.evaluation.evaluate_every == 1


def test_any_metric_of_a_task_can_decide(tmp_path, base):
    config = tuning_config(tmp_path, base, epochs=1)
    (task,) = config.evaluation.evaluate
    run = finetune(config, metric=f"{task} text_to_image_r10").trained.folder
    read = said(run)
    assert read["metric"] == f"{task} text_to_image_r10"
    assert read["epochs"][1]["score"] == read["epochs"][1]["values"][read["metric"]]
    assert set(read["epochs"][0]["values"]) == {f"{task} mean_r1", f"{task} text_to_image_r10"}


def test_an_epoch_without_a_score_is_never_the_best(tmp_path, base, monkeypatch, caplog):
    real = record.values_of

    def values_of(measured, metric):
        values_of.calls += 1
        return real(measured, metric) if values_of.calls != 3 else {}

    values_of.calls = 0
    monkeypatch.setattr(record, "values_of", values_of)
    tuned = finetune(tuning_config(tmp_path, base, epochs=2))
    assert tuned.record.epochs[2].score is None and tuned.record.best_step == 10
    assert "has no score" in caplog.text


def test_data_to_measure_on_that_vanish_do_not_lose_the_run(tmp_path, base):
    config = tuning_config(tmp_path, base)
    asked = tmp_path / "asked.tar"
    shutil.copy(config.data.data[0], asked)
    config = replace(config, evaluation=replace(config.evaluation, evaluate=(f"retrieval:{asked}",)))
    step = Trainer.train_step

    def vanishing(self, batch):
        if asked.exists():
            asked.rename(tmp_path / "away.tar")
        return step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", vanishing)
        with pytest.raises(ValueError, match=r"the evaluation at step 10; go on from there with `fullbatch finetune"):
            finetune(config)
    (tmp_path / "away.tar").rename(asked)
    assert len(finetune(config, resume=tmp_path / "run").record.epochs) == 4
