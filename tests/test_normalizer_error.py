"""The prototypes work by default: on held-out anchors of clustered embeddings they beat the batch, and updates help."""

import argparse

import pytest
import torch

import fullbatch as fb
from benchmarks.normalizer_error import HELD_OUT, Clusters, batch_estimate, error, run

ARGS = argparse.Namespace(
    width=64, batch=128, samples=12800, clusters=256, zipf=1.0, spread=0.5, gap=0.5, drift=0.0, temperature=0.1,
    prototypes=4096, restart_every=500, steps=560, seed=0, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def errors():
    """Held-out errors after these steps, with the default settings and with restarts alone (n/B = 100)."""
    steps = [100, 499, 500, 510, 559]
    data = Clusters(ARGS)
    torch.set_num_threads(2)
    found = {
        "updated": dict(zip(steps, run(data, ARGS, steps), strict=True)),
        "restarted": dict(zip(steps, run(data, ARGS, steps, updates=0), strict=True)),
    }
    torch.set_num_threads(1)
    image, text = data.at(0)
    held = torch.arange(ARGS.samples, ARGS.samples + HELD_OUT)
    exact = fb.exact_log_normalizers(image, text, ARGS.temperature, anchors=held)
    found["batch"] = error(batch_estimate(data, 0, ARGS), exact)
    return found


def test_updates_lower_the_error(errors):
    for step in (100, 499, 510, 559):
        assert errors["updated"][step] < errors["restarted"][step], step
    assert errors["updated"][499] < 0.7 * errors["restarted"][499]


def test_a_restart_is_not_wiped_out_by_its_updates(errors):
    """Step 500 restarts; its ten updates, with AdaGrad's memory kept, must not undo it."""
    assert errors["updated"][500] <= errors["restarted"][500]
    assert errors["updated"][510] < errors["updated"][500]


def test_the_batch_estimate_is_beaten_clearly(errors):
    for step in (100, 499, 500, 510, 559):
        assert errors["updated"][step] < 0.25 * errors["batch"], step


def test_the_published_learning_rate_would_wipe_it_out():
    """The contrary result that the default answers: lr 1.0 with a fresh accumulator loses to the restart itself."""
    short = argparse.Namespace(**{**vars(ARGS), "steps": 41, "restart_every": 40, "prototypes": 1024})
    data = Clusters(short)
    paper = fb.Prototypes(1024, updates=10, restart_every=40, prototype_lr=1.0, reset_accumulator=True)
    (published,) = run(data, short, [40], normalizer=paper)
    (restarted,) = run(data, short, [40], updates=0)
    assert published > 3 * restarted
