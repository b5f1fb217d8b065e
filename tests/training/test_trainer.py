"""When things go wrong: divergence, a full disk, signals, bad data; and what a run leaves behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import open_clip
import pytest
import torch

import fullbatch.cli
from fullbatch.assembly import assemble
from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer, Recovery
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import write_yaml
from fullbatch.data.loader import TrainingBatches
from fullbatch.loading import load_trained
from fullbatch.models.saved import export
from fullbatch.report.collect import read_run
from fullbatch.report.curves import run_charts
from fullbatch.training import checkpoint
from fullbatch.training.optimizer import WeightAverage
from fullbatch.training.run_folder import Folder
from fullbatch.training.trainer import Diverged
from fullbatch.training_run import train
from tests.data.making import captioned, write_shard
from tests.selection.planned import AVERAGED
from tests.tiers import first
from tests.training.clock import Clock
from tests.training.small import renamed, saved_state, small_config
from tests.waiting import HANG, wait_for


def test_what_a_run_leaves_behind(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, tensorboard=True))
    run = train(config).folder
    names = {path.name for path in run.iterdir()}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "log.txt", "results.json"}
    assert names == files | {"model", "checkpoints", "tensorboard"}
    assert Folder(run).read_config() == replace(config, data=replace(config.data, shuffle="full"))  # as it was chosen
    assert list((run / "tensorboard").iterdir())
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "epoch", "samples", "loss", "lr", "tau", "gradient_norm", "samples_per_second"} <= set(line)
    assert json.loads((run / "environment.json").read_text())["versions"]["torch"]


@pytest.mark.parametrize("starts_after", [19, 20])
def test_a_queue_that_a_short_run_never_comes_to_is_told(starts_after, tmp_path, caplog):
    config = small_config(tmp_path, "xbm")
    settings = {**config.objective.settings, "starts_after": starts_after}
    assemble(replace(config, objective=replace(config.objective, settings=settings)), torch.device("cpu"))
    said = [record.getMessage() for record in caplog.records if "--settings.starts-after" in record.getMessage()]
    assert len(said) == (starts_after == 20)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"selection": AVERAGED}, 21),
        ({"recovery": Recovery(recovery_steps=5)}, 26),
        ({"recovery": Recovery(recovery_steps=5, carry="moments")}, 21),
    ],
)
def test_what_counts_for_a_queue_is_the_batches_that_the_objective_sees(changes, seen, tmp_path, caplog):
    """Several in a step that averages their losses; those of a recovery whose memory is carried on."""
    config = small_config(tmp_path, "xbm", steps=21)
    for starts_after in (seen - 1, seen):
        caplog.clear()
        objective = replace(config.objective, settings={"queue": 24, "starts_after": starts_after})
        assemble(replace(config, objective=objective, **changes), torch.device("cpu"))
        said = [text for text in caplog.messages if "--settings.starts-after" in text]
        assert [f"the objective sees {seen}," in text for text in said] == [True] * (starts_after == seen)


def test_slow_data_is_said_once(tmp_path, monkeypatch, caplog):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(TrainingBatches, "__getitem__", clock.passes(1.0, TrainingBatches.__getitem__))
    run = train(small_config(tmp_path, "openclip")).folder
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0.25 < line["waiting"] <= 1.0 for line in lines[-5:])
    said = [record.getMessage() for record in caplog.records if "waits for data" in record.getMessage()]
    assert len(said) == 1 and "--workers (now 0), or --in-memory" in said[0]


@pytest.mark.slow
def test_learning_lowers_the_loss(tmp_path):
    config = replace(small_config(tmp_path, "openclip", steps=250), optimizer=Optimizer(lr=5e-3))
    run = train(config).folder
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "kind" not in line]  # the run is long enough to audit itself
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    gradient = fullbatch.training.trainer.GradientRule.__call__

    def spoilt(self, model, objective, batch, step, scaler):
        if step == 14:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return gradient(self, model, objective, batch, step, scaler)

    monkeypatch.setattr(fullbatch.training.trainer.GradientRule, "__call__", spoilt)
    with pytest.raises((Diverged, ValueError), match=r"finite|unit") as stopped:
        train(config)
    assert "Traceback" not in str(stopped.value)
    good = checkpoint.last_good(tmp_path / "run" / "checkpoints")
    assert good is not None
    assert good.name == "step-000000010"
    assert all(weight.isfinite().all() for weight in saved_state(tmp_path / "run", 10)["model"].values())


def test_a_loss_that_runs_away_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(fullbatch.training.trainer, "DIVERGED", -0.9)  # a tenth of the first loss is too much
    config = small_config(tmp_path, "openclip")
    with pytest.raises(Diverged, match=r"ran away.*--lr"):
        train(config)


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    config = small_config(tmp_path, "sogclr")
    save, calls = torch.save, []

    def full(part, path):
        calls.append(path)
        if "000000020" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(part, path)

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(OSError, match=r"The disk is full.*last good checkpoint is .*step-000000010.*--resume"):
        train(config)
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-000000010"]
    assert checkpoint.last_good(root) is not None


def test_a_full_disk_is_told_where_a_signal_asked_for_the_checkpoint(tmp_path, monkeypatch):
    """Else the run would say that it can go on, and not that it does so from an earlier step."""
    config = small_config(tmp_path, "sogclr")
    gradient = fullbatch.training.trainer.GradientRule.__call__

    def signalled(self, model, objective, batch, step, scaler):
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(checkpoint.torch, "save", full)
        return gradient(self, model, objective, batch, step, scaler)

    def full(part, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fullbatch.training.trainer.GradientRule, "__call__", signalled)
    with pytest.raises(OSError, match=r"The disk is full.*step-000000014 could not.*checkpoint is .*step-000000010"):
        train(config)


def test_too_many_bad_samples_stop_the_run(tmp_path):
    samples = captioned(40)
    for _, parts in samples[::3]:
        parts["jpg"] = parts["jpg"][:40]
    config = small_config(tmp_path, steps=60)
    path = write_shard(tmp_path / "bad.tar", samples)
    config = replace(config, data=replace(config.data, data=(str(path),)))
    with pytest.raises(ValueError, match=r"samples could not be read, more than --max-bad 0.05"):
        train(config)
    assert "skipped a bad sample" in (tmp_path / "run" / "log.txt").read_text()
    allowed = replace(renamed(config, "allowed"), data=replace(config.data, max_bad=0.5))
    train(allowed)
    assert saved_state(tmp_path / "allowed", 60)["position"]["bad"] > 0


@pytest.mark.parametrize("workers", first([2], of=[0, 2]))
@pytest.mark.parametrize("number", first([signal.SIGTERM], of=[signal.SIGTERM, signal.SIGINT]))
def test_a_signal_saves_and_stops(tmp_path, number, workers):
    """Also one to the whole group of processes, workers among them."""
    config = small_config(tmp_path, steps=100_000)
    config = replace(config, data=replace(config.data, workers=workers))
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(config))
    command = [sys.executable, "-m", "fullbatch", "train", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 1000, process)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 128 + number, said
    assert f"Stopped by {number.name}. Go on with: fullbatch train --resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    steps = [json.loads(text)["step"] for text in metrics.read_text().splitlines()]
    good = checkpoint.last_good(tmp_path / "run" / "checkpoints")
    assert good is not None
    assert checkpoint.read(good)["position"]["step"] == steps[-1]


def test_saving_by_the_clock(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, save_every=None, save_minutes=1e-6))
    run = train(config).folder
    assert len(checkpoint.checkpoints(run / "checkpoints")) == config.run.keep


def test_the_average_follows_the_weights(tmp_path):
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model, decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1.0
    average.update(step=100)
    with average.in_use():
        torch.testing.assert_close(model.weight.detach(), start + 0.5)
    torch.testing.assert_close(model.weight.detach(), start + 1.0)


def test_the_last_checkpoint_loads_for_use(tmp_path):
    run = train(small_config(tmp_path, ema=0.9)).folder
    loaded = load_trained(run)
    plain = load_trained(run, average=False)
    assert loaded.step == 20
    assert 0.01 <= loaded.temperature <= 1.0
    weight = "backbone.text_projection"
    assert not torch.equal(loaded.model.state_dict()[weight], plain.model.state_dict()[weight])


def test_going_on_takes_the_new_settings_of_the_optimizer(tmp_path):
    config = small_config(tmp_path)
    run = train(config).folder
    longer = replace(config, training=replace(config.training, samples=8 * 30))
    train(replace(longer, optimizer=replace(config.optimizer, weight_decay=0.7, beta1=0.5)), resume=run)
    groups = saved_state(run, 30)["optimizer"]["param_groups"]
    assert groups[0]["weight_decay"] == 0.7
    assert groups[0]["betas"] == (0.5, 0.98)


@pytest.mark.parametrize(
    ("group", "change"),
    [
        ("training", {"batch_size": 4}),
        ("training", {"seed": 1}),
        ("optimizer", {"optimizer": "lion"}),
        ("data", {"shuffle": "blocks"}),
    ],
)
def test_a_run_cannot_go_on_as_another_one(tmp_path, group, change):
    config = small_config(tmp_path)
    run = train(config).folder
    before = (run / "config.yaml").read_text()
    with pytest.raises(ValueError, match=f"--resume cannot change --{next(iter(change)).replace('_', '-')}"):
        train(replace(config, **{group: replace(getattr(config, group), **change)}), resume=run)
    assert (run / "config.yaml").read_text() == before


@pytest.mark.parametrize(("shuffle", "fixed"), [("full", False), ("blocks", True)])
def test_a_run_without_blocks_may_go_on_with_others(tmp_path, shuffle, fixed):
    """What they are decides nothing there."""
    config = small_config(tmp_path, "openclip", steps=4)
    config = replace(config, data=replace(config.data, shuffle=shuffle))
    run = train(config).folder
    longer = replace(config.training, samples=8 * 6)
    other = replace(config, training=longer, data=replace(config.data, block_samples=16, window_blocks=2))
    with pytest.raises(ValueError, match="cannot change --block-samples") if fixed else nullcontext():
        train(other, resume=run)


def test_a_run_outlives_the_weights_it_came_from(tmp_path):
    """Resume and export build the model from the run folder: its architecture came with the pretrained weights."""
    first = train(small_config(tmp_path, name="first")).folder
    weights = load_trained(first).export(tmp_path / "weights", "safetensors")
    config = small_config(tmp_path, "openclip", name="second")
    config = replace(config, model=Model(pretrained=str(weights)))
    second = train(config).folder
    shutil.rmtree(weights)
    shutil.rmtree(checkpoint.folder_of(second / "checkpoints", 20))
    train(config, resume=second)
    exported = load_trained(second).export(tmp_path / "out", "open_clip")
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{exported}")
    assert model.visual.image_size in (16, (16, 16))


def test_the_temperature_starts_where_the_weights_left_it(tmp_path):
    first = train(small_config(tmp_path, name="first")).folder
    weights = export(load_trained(first).model, tmp_path / "weights", "safetensors", 0.02, None)
    for method, start in (("openclip", 0.02), ("sogclr", 0.02), ("isogclr", 0.01)):
        config = replace(small_config(tmp_path, method, name=method), model=Model(pretrained=str(weights)))
        run = train(config).folder
        line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        assert line["tau"] == pytest.approx(start, rel=0.01)


def test_a_bad_evaluation_does_not_cost_the_training(tmp_path):
    samples = captioned(8)
    for _, parts in samples:
        parts["jpg"] = b"nothing"
    path = write_shard(tmp_path / "bad.tar", samples)
    config = replace(small_config(tmp_path), evaluation=Evaluation(evaluate=(f"retrieval:{path}",)))
    with pytest.raises(ValueError, match=r"No sample of .* can be evaluated"):
        train(config)
    assert checkpoint.last_good(tmp_path / "run" / "checkpoints").name == "step-000000020"


def test_both_directions_of_retrieval_have_a_curve(tmp_path):
    config = small_config(tmp_path)
    task = f"retrieval:{config.data.data[0]}"
    run = train(replace(config, evaluation=Evaluation(evaluate=(task,), evaluate_every=2))).folder
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    curves = [line for line in lines if line.get("kind") == "evaluation"]
    assert [line["step"] for line in curves] == [10, 20]
    for line in curves:
        both = line[f"{task} image_to_text_r1"], line[f"{task} text_to_image_r1"]
        assert line[f"{task} mean_r1"] == pytest.approx(sum(both) / 2)
    (chart,) = [chart for chart in run_charts([read_run(run)], [""], [0]) if chart.key == "evaluation"]
    assert [len(line.x) for line in chart.series] == [2, 2, 2]


def test_an_evaluation_that_was_missed_is_made_up_for(tmp_path):
    config = small_config(tmp_path, "openclip")
    config = replace(config, evaluation=Evaluation(evaluate=(f"retrieval:{config.data.data[0]}",), evaluate_every=2))
    run = train(config).folder
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in lines if "evaluation" in text] == [10, 20]
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # as if killed right after the last save
    (run / "results.json").unlink()
    train(config, resume=run)
    again = (run / "metrics.jsonl").read_text().splitlines()
    assert again[:-1] == lines[:-1]
    last, before = ({**json.loads(found[-1]), "seconds": None} for found in (again, lines))
    assert last == before
    assert json.loads((run / "results.json").read_text())["step"] == 20


def test_graphs_need_a_gpu_and_plain_batches(tmp_path):
    with pytest.raises(ValueError, match="--graphs works on one GPU"):
        train(small_config(tmp_path, "openclip", graphs=True))
    with pytest.raises(ValueError, match="--compile and --graphs cannot be used together yet"):
        train(small_config(tmp_path, "openclip", graphs=True, compile=True))
    with pytest.raises(ValueError, match="be left out with micro_batch"):
        small_config(tmp_path, "openclip", graphs=True, micro_batch=4)
    with pytest.raises(ValueError, match="be left out with fp16"):
        small_config(tmp_path, "openclip", graphs=True, precision="fp16")


def test_a_data_set_with_too_many_bad_samples_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = small_config(tmp_path, "openclip")
    samples = captioned(40, (20, 16))
    for _, members in samples[:5]:
        members["jpg"] = b"no picture"
    path = write_shard(tmp_path / "bad.tar", samples)
    data = replace(config.data, data=(str(path),), in_memory=True)
    with pytest.raises(ValueError, match=r"5 of 40 samples could not be read, more than --max-bad 0\.05"):
        train(replace(config, data=data))
    for _, members in samples:
        members["jpg"] = b"no picture"
    none = replace(data, data=(str(write_shard(tmp_path / "none.tar", samples)),), max_bad=1.0)
    with pytest.raises(ValueError, match="None of the 40 samples can be read"):
        train(renamed(replace(config, data=none), "none"))
    allowed = train(replace(config, data=replace(data, max_bad=0.2)))
    assert (allowed.folder / "log.txt").read_text().count("left a bad sample out") == 5
