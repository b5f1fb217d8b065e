"""Training on two views: every normalizer, resume to the bit, in memory, two ranks, export and audit."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fullbatch.audit import Options
from fullbatch.audit.finished_run import audit_run
from fullbatch.config.data import Views
from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer, Schedule
from fullbatch.config.training import Selection
from fullbatch.loading import load_trained
from fullbatch.models.timm_towers import TwoViews
from fullbatch.training_run import train
from tests.resume.test_resume import go_on_from, lines
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
LARS = Optimizer(optimizer="lars", lr=0.075 * math.sqrt(8), momentum=0.9, weight_decay=1e-6)


def views_config(folder, method="simclr", steps=20, objective=None, **training):
    config = small_config(folder, method, steps=steps, **training)
    return replace(
        config,
        model=Model(view_tower="test_resnet", view_stem="small", projection=(16, 8)),
        data=replace(config.data, image_size=16),
        objective=objective or config.objective,
        optimizer=LARS,
        schedule=Schedule(warmup_share=0.1),
        views=Views(view_blur=0.3),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


OTHERS = {
    "simclr, across": ObjectiveConfig(method="simclr", negatives="across"),
    "sogclr, both": ObjectiveConfig(method="sogclr", negatives="both", settings={"gamma": 0.9, "temperature": 0.1}),
    "sogclr, across, one u": ObjectiveConfig(method="sogclr", settings={"shared": True}),
    "mlp": ObjectiveConfig(normalizer="mlp", settings={"updates": 2, "restart_every": 7, "rho": 1.0}),
}
METHODS = ("sogclr", "sogclr_views", "fastclip_v3", "isogclr", "neuclip", "amorlip", "siglip", "vicreg")


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_every_normalizer_trains(tmp_path, name):
    if name in OTHERS:
        config = views_config(tmp_path, steps=6, objective=OTHERS[name])
    else:
        config = views_config(tmp_path, name, steps=6)
    run = train(config).folder
    losses = [line["loss"] for line in lines(run)]
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("in_memory", first([False], of=[False, True]))
@pytest.mark.parametrize("method", ["simclr", "sogclr_views"])
def test_twenty_steps_are_ten_and_ten(tmp_path, method, in_memory):
    config = views_config(tmp_path, method)
    config = replace(config, data=replace(config.data, in_memory=in_memory))
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    assert lines(whole) == lines(copy)


def test_channels_last_is_a_layout_and_not_another_model(tmp_path):
    calm = replace(LARS, lr=2e-4)
    first = replace(views_config(tmp_path), optimizer=calm)
    last = replace(views_config(tmp_path, channels_last=True), optimizer=calm)
    plain, whole = train(first).folder, train(renamed(last, "last")).folder
    expected, found = ([line["loss"] for line in lines(run)] for run in (plain, whole))
    assert found == pytest.approx(expected, rel=1e-4)
    weight = saved_state(whole, 20)["model"]["backbone.visual.layer1.0.conv2.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(renamed(last, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    assert load_trained(whole).export(tmp_path / "out.safetensors", "safetensors").is_file()


def test_workers_make_the_same_views(tmp_path):
    config = views_config(tmp_path, steps=10)
    alone = train(config).folder
    with_workers = train(renamed(replace(config, data=replace(config.data, workers=2)), "workers")).folder
    assert lines(alone) == lines(with_workers)


def test_views_of_one_image_come_together(tmp_path):
    """Views that keep most of a picture: training makes the two of one picture alike."""
    config = views_config(tmp_path, "simclr", steps=40)
    optimizer = Optimizer(lr=3e-3, weight_decay=0.0)
    run = train(replace(config, optimizer=optimizer, views=Views(view_crop=(0.7, 1.0), view_jitter_chance=0.0))).folder
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.slow
def test_two_ranks_train_and_stay_alike(tmp_path, two_ranks):
    """BatchNorm sees a rank's share, so the numbers are not those of one rank; but they are numbers, and all the same
    samples."""
    from tests.distributed.test_training import on_rank

    config = views_config(tmp_path, "sogclr_views", steps=10)
    two_ranks.run(on_rank, renamed(config, "two"), None)
    one = train(config).folder
    ours, theirs = (saved_state(run, 10)["objective"] for run in (one, tmp_path / "two"))
    for name in ("image", "text"):
        key = f"normalizers.{name}.log_u.values"
        assert torch.equal(ours[key].isnan(), theirs[key].isnan())
    assert torch.equal(theirs["normalizers.image.log_u.values"], theirs["normalizers.text.log_u.values"])


def test_a_run_is_loaded_exported_and_audited(tmp_path):
    config = views_config(tmp_path, "sogclr_views", steps=10)
    config = replace(config, evaluation=replace(config.evaluation, audits=2, audit_anchors=8))
    run = train(config).folder
    audited = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines() if "anchors" in text]
    assert len(audited) == 2
    assert len(audit_run(run, Options(anchors=8, device="cpu")).results["checkpoints"]) == 1
    loaded = load_trained(run)
    assert isinstance(loaded.model, TwoViews) and loaded.temperature == 0.1
    path = load_trained(run).export(tmp_path / "views.safetensors", "safetensors")
    again = replace(config, model=Model(pretrained=str(path)))
    assert train(renamed(again, "again")).folder.is_dir()


def test_a_folder_of_images_needs_no_captions(tmp_path):
    from tests.data.making import png

    (tmp_path / "images").mkdir()
    for index in range(9):
        (tmp_path / "images" / f"{index}.png").write_bytes(png((20, 16), index))
    config = views_config(tmp_path, steps=2)
    run = train(replace(config, data=replace(config.data, data=(f"{tmp_path / 'images'}?captions=none",)))).folder
    assert saved_state(run, 2)["position"]["bad"] == 0


@pytest.mark.parametrize("in_memory", first([True], of=[False, True]))
@pytest.mark.parametrize(
    "selection",
    [
        Selection(batches="spectral", block_batches=3, planners=0),
        Selection(batches="spectral", block_batches=3, planners=0, embeddings="forward", plan_ahead=False),
        Selection(batches="ordered", drawn_batches=6, kept_batches=3, planners=0),
    ],
    ids=["spectral", "forward", "ordered"],
)
def test_batches_are_chosen_by_what_both_views_say(tmp_path, selection, in_memory):
    config = replace(views_config(tmp_path, "sogclr_views"), selection=selection)
    config = replace(config, data=replace(config.data, in_memory=in_memory))
    whole = train(config).folder
    assert list((whole / "batches").glob("plan-*.npy"))
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []


def test_a_task_with_captions_is_refused_before_training(tmp_path):
    config = views_config(tmp_path)
    task = f"retrieval:{config.data.data[0]}"
    config = replace(config, evaluation=replace(config.evaluation, evaluate=(task,)))
    with pytest.raises(ValueError, match=r"needs captions, and a model of two views reads none; take views:SOURCE"):
        train(config)
    assert not (tmp_path / "run").exists()
