"""A replayed step is the step.  CI has no GPU: there these tests skip and say so."""

import json
import multiprocessing
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch

import fullbatch.assembly
from fullbatch.config.optimization import Recovery
from fullbatch.models.build import build_model
from fullbatch.objective.objective import Objective
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:rho="),
]

METHODS = (
    "openclip", "siglip", "sogclr", "fastclip_v3", "isogclr", "amorlip", "neuclip", "rolling", "queue", "xbm",
    "scent", "tempnet",
)  # fmt: skip


def on_gpu(folder, method, steps=40, **training):
    config = small_config(folder, method, steps=steps, **training)
    return replace(config, training=replace(config.training, device="cuda"))


def losses(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(autouse=True)
def plainly(monkeypatch):
    """A plain run launches kernel by kernel, the objective's too."""
    monkeypatch.setattr(Objective, "record", lambda self: None)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_replayed_run_is_the_plain_run(tmp_path, method, in_memory):
    config = on_gpu(tmp_path, method)
    config = replace(config, data=replace(config.data, in_memory=in_memory))
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(config.training, graphs=True)), "graphs")).folder
    assert losses(graphs) == pytest.approx(losses(plain), rel=2e-3, abs=2e-3)
    ours, theirs = (saved_state(run, 40)["objective"] for run in (graphs, plain))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        exact = name.endswith("_extra_state")
        close = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=2e-2, atol=2e-2, equal_nan=True)
        assert close(ours[name], value), name


class Around(torch.nn.Module):
    """An image tower with something done to what it gives."""

    def __init__(self, inner, then):
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, x, *args, **kwargs):
        return self.then(self.inner(x, *args, **kwargs))


def with_image_tower(then):
    """``build_model`` with an image tower of that kind."""
    build = fullbatch.assembly.build_model

    def built(*args, **kwargs):
        model = build(*args, **kwargs)
        model.backbone.visual = Around(model.backbone.visual, then)
        return model

    return built


def test_towers_that_draw_noise(tmp_path, monkeypatch):
    """The masks of a replayed step are those of a plain one."""
    config = on_gpu(tmp_path, "openclip")
    monkeypatch.setattr(fullbatch.assembly, "build_model", with_image_tower(torch.nn.Dropout(0.5)))
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(config.training, graphs=True)), "graphs")).folder
    assert losses(graphs) == pytest.approx(losses(plain), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("method", ["openclip", "neuclip"])
def test_resume(tmp_path, method):
    config = on_gpu(tmp_path, method, graphs=True)
    whole = train(config).folder
    copy = shutil.copytree(whole, tmp_path / "copy")
    for step in (30, 40):
        shutil.rmtree(checkpoint.folder_of(copy / "checkpoints", step))
    train(renamed(config, "copy"), resume=copy)
    assert losses(copy) == pytest.approx(losses(whole), rel=1e-3, abs=1e-3)
    found = differences(saved_state(whole, 40)["objective"], saved_state(copy, 40)["objective"])
    assert not [name for name in found if name.endswith("_extra_state")]


def test_the_averaged_weights_and_clipping_go_on(tmp_path):
    config = on_gpu(tmp_path, "sogclr", ema=0.9)
    config = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5))
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(config.training, graphs=True)), "graphs")).folder
    ours, theirs = (saved_state(run, 40)["average"] for run in (graphs, plain))
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-2, atol=1e-3), name


@pytest.mark.parametrize(("carry", "pairs"), [("all", 8), ("none", 16)])
@pytest.mark.parametrize("method", ["tuneclip", "neuclip"])
def test_a_recovery_before_it(tmp_path, method, carry, pairs):
    """Frozen steps are recorded as such, and recorded anew when the weights begin to move."""
    recovery = Recovery(recovery_steps=20, recovery_batch=pairs, carry=carry)
    config = replace(on_gpu(tmp_path, method), recovery=recovery)
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(config.training, graphs=True)), "graphs")).folder
    assert losses(graphs) == pytest.approx(losses(plain), rel=2e-3, abs=2e-3)
    torch.manual_seed(config.training.seed)
    base, frozen = build_model(config.model).state_dict(), saved_state(graphs, 20)["model"]
    assert differences(base, frozen) == []


def test_other_optimizers_are_refused(tmp_path):
    config = on_gpu(tmp_path, "openclip", graphs=True)
    with pytest.raises(ValueError, match="adam, adamw and lars, not SGD"):
        train(replace(config, optimizer=replace(config.optimizer, optimizer="sgd")))


def _wait(rows):
    """Reads a number off the device."""
    return rows * (1.0 if float(rows.detach().float().sum()) else 0.0)


def _train_waiting(folder):
    fullbatch.assembly.build_model = with_image_tower(_wait)
    try:
        train(on_gpu(folder, "openclip", graphs=True))
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_a_model_that_cannot_be_recorded_is_named(tmp_path):
    """In a process of its own: CUDA's generator does not recover from a recording that broke off."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        said = pool.submit(_train_waiting, tmp_path).result()
    assert re.search(r"cannot be recorded .* leave --graphs out", said), said
