"""Whole runs on a GPU.  CI has none: there these tests skip and say so."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from fullbatch.objective.objective import Objective
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:rho="),
]


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]  # an audit has a line of its own


def on_gpu(folder, method="neuclip", **training):
    config = small_config(folder, method, **training)
    return replace(config, training=replace(config.training, device="cuda"))


@pytest.mark.parametrize("method", ["openclip", "sogclr", "neuclip"])
def test_the_gpu_follows_the_cpu(tmp_path, method):
    on_cpu = train(small_config(tmp_path, method)).folder
    there = train(renamed(on_gpu(tmp_path, method), "gpu")).folder
    assert losses(there)[:5] == pytest.approx(losses(on_cpu)[:5], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("method", ["openclip", "sogclr", "neuclip"])
def test_a_recorded_objective_trains_alike(tmp_path, method, monkeypatch):
    recorded = train(on_gpu(tmp_path, method, steps=40)).folder
    monkeypatch.setattr(Objective, "record", lambda self: None)
    plain = train(renamed(on_gpu(tmp_path, method, steps=40), "plain")).folder
    assert losses(recorded) == pytest.approx(losses(plain), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("compile", [False, True])
def test_low_precision_and_compiled(tmp_path, precision, compile):
    plain = train(on_gpu(tmp_path)).folder
    changed = on_gpu(tmp_path, precision=precision, compile=compile, micro_batch=4, ema=0.9)
    run = train(renamed(changed, "changed")).folder
    assert losses(run)[:3] == pytest.approx(losses(plain)[:3], rel=0.05, abs=0.02)


@pytest.mark.parametrize("method", ["openclip", "isogclr", "neuclip"])
def test_resume_is_exact_where_kernels_are_deterministic(tmp_path, method):
    try:
        config = on_gpu(tmp_path, method, deterministic=True)
        whole = train(config).folder
        copy = shutil.copytree(whole, tmp_path / "copy")
        shutil.rmtree(checkpoint.folder_of(copy / "checkpoints", 20))
        train(renamed(config, "copy"), resume=copy)
        assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    finally:
        torch.use_deterministic_algorithms(False)
