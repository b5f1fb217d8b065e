"""On a GPU: views are those of the CPU, and a recorded step with LARS is the plain one.  CI has none, and says so."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fullbatch.config.data import Views
from fullbatch.data.images import ViewMaker
from fullbatch.objective.objective import Objective
from fullbatch.training_run import train
from tests.training.small import renamed, saved_state
from tests.training.test_graphs import losses
from tests.views.test_training import views_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def plainly(monkeypatch):
    """A plain run launches kernel by kernel, the objective's too."""
    monkeypatch.setattr(Objective, "record", lambda self: None)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_views_are_those_of_the_cpu(size):
    images = torch.randint(256, (64, 3, size, size), dtype=torch.uint8)
    maker = ViewMaker(Views(view_blur=0.5), 1)
    here = maker(images, 3, np.arange(64))
    there = maker(images.cuda(), 3, np.arange(64))
    for one, other in zip(here, there, strict=True):
        assert (one.int() - other.cpu().int()).abs().max() <= 1


CALM = 2e-4  # at the rates one trains with, rounding grows a thousandfold in six steps of these eight samples


@pytest.mark.parametrize("method", ["simclr", "sogclr_views", "sogclr", "neuclip"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_replayed_run_is_the_plain_run(tmp_path, method, precision, channels_last, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = views_config(tmp_path, method, steps=40, precision=precision, channels_last=channels_last)
    training = replace(config.training, device="cuda")
    config = replace(config, data=replace(config.data, in_memory=True), training=training)
    config = replace(config, optimizer=replace(config.optimizer, lr=CALM))
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(training, graphs=True)), "graphs")).folder
    close = 5e-3 if precision == "fp32" else 5e-2
    assert losses(graphs) == pytest.approx(losses(plain), rel=close, abs=close)
    ours, theirs = (saved_state(run, 40) for run in (graphs, plain))
    tracked = [name for name in theirs["model"] if name.endswith("num_batches_tracked")]
    assert tracked and all(torch.equal(ours["model"][name], theirs["model"][name]) for name in tracked)
    ours_p, theirs_p = (torch.cat([m.flatten() for m in momenta(state)]) for state in (ours, theirs))
    assert theirs_p.norm() > 0 and (ours_p - theirs_p).norm() < 10 * close * theirs_p.norm()


def momenta(state):
    """In the order of the weights, whatever they lie like in memory."""
    found = state["optimizer"]["state"]
    return [found[key]["momentum_buffer"].contiguous() for key in found]
