"""Ordered batches: their losses by hand, the drawing, both readings, and tables with rows never seen."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

import fullbatch as fb
from fullbatch.selection import ordered as module
from fullbatch.selection.ordered import (
    batch_losses,
    batches_of_partition,
    drawn_batches,
    hardest,
    losses_at,
)
from tests.conftest import unit_rows
from tests.selection.real import emoji_embeddings


def loss_by_hand(u, v, tau):
    total = 0.0
    for anchors, others in ((u, v), (v, u)):
        for i in range(len(u)):
            terms = [math.exp(float(anchors[i] @ other) / tau) for other in others]
            total -= math.log(terms[i] / sum(terms)) / len(u)
    return total


def test_losses_are_the_papers_and_twice_openclips():
    u, v = unit_rows(15, 4, 0).reshape(3, 5, 4), unit_rows(15, 4, 1).reshape(3, 5, 4)
    found = batch_losses(u, v, 0.3)
    assert found.tolist() == pytest.approx([loss_by_hand(a, b, 0.3) for a, b in zip(u, v, strict=True)], rel=1e-12)
    objective = fb.make_objective("openclip", width=4, temperature=0.3).double()
    assert found[0].item() == pytest.approx(2 * objective(u[0], v[0]).loss.item(), rel=1e-6)


def test_losses_are_finite_at_small_temperatures_and_half_precision():
    u, v = unit_rows(8, 4, 0, torch.float16)[None], unit_rows(8, 4, 1, torch.float16)[None]
    assert batch_losses(u, v, 1e-3).isfinite().all()


def test_rows_never_seen_are_stood_for_by_the_others():
    u, v = unit_rows(6, 4, 0)[None], unit_rows(6, 4, 1)[None]
    spoilt = u.clone()
    spoilt[0, 4:] = math.nan
    sims = (u[0, :4] @ v[0, :4].T / 0.3).exp()
    expected = 0.0
    for terms in (sims, sims.T):
        for i in range(4):
            others = sum(float(terms[i, j]) for j in range(4) if j != i) / 3 * 5
            expected += math.log(1 + others / float(terms[i, i])) / 4
    assert batch_losses(spoilt, v, 0.3).item() == pytest.approx(expected, rel=1e-12)
    spoilt[0, 1:] = math.nan
    assert batch_losses(spoilt, v, 0.3).item() == -math.inf


def test_many_batches_are_looked_at_some_at_a_time(monkeypatch):
    u, v = unit_rows(30, 4, 0), unit_rows(30, 4, 1)
    places = drawn_batches(30, 5, 11, 0)
    whole = losses_at(u, v, places, 0.2)
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 60)
    torch.testing.assert_close(losses_at(u, v, places, 0.2), whole)


@settings(max_examples=80)
@given(
    places=st.integers(2, 60),
    size=st.integers(2, 12),
    drawn=st.integers(1, 40),
    kept=st.integers(1, 40),
    seed=st.integers(0, 2**70),
    unseen=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_hardest_of_those_drawn_are_kept(places, size, drawn, kept, seed, unseen):
    size, kept = min(size, places), min(kept, drawn)
    u, v = unit_rows(places, 4, seed % 1000), unit_rows(places, 4, seed % 1000 + 1)
    u[torch.from_numpy(np.random.default_rng(seed).random(places) < unseen)] = math.nan
    looked_at = drawn_batches(places, size, drawn, seed)
    assert looked_at.shape == (drawn, size)
    assert all(len(set(batch)) == size for batch in looked_at.tolist())
    whole = places // size
    for start in range(0, drawn, whole):  # no sample twice before a permutation is used up
        here = looked_at[start : start + whole].reshape(-1)
        assert len(set(here.tolist())) == here.size
    found = hardest(u, v, drawn_batches(len(u), size, drawn, seed), kept, 0.2)
    assert found.shape == (kept, size)
    assert (found == hardest(u, v, drawn_batches(len(u), size, drawn, seed), kept, 0.2)).all()
    largest = sorted(losses_at(u, v, looked_at, 0.2).tolist(), reverse=True)[:kept]
    assert losses_at(u, v, found, 0.2).tolist() == pytest.approx(largest, rel=1e-12)
    if unseen == 1.0:  # nothing is known: the first ones drawn
        assert (found == looked_at[:kept]).all()


def test_draws_differ_by_seed():
    assert (drawn_batches(100, 5, 20, 0) != drawn_batches(100, 5, 20, 1)).any()


@settings(max_examples=30)
@given(places=st.integers(2, 60), size=st.integers(2, 12), drawn=st.integers(1, 12))
def test_the_literal_reading_looks_at_a_partition_group_by_group(places, size, drawn):
    size = min(size, places)
    whole = places // size
    groups = [batches_of_partition(places, size, drawn, group) for group in range(-(-whole // drawn))]
    assert np.concatenate(groups).reshape(-1).tolist() == list(range(whole * size))
    assert all(len(group) == drawn for group in groups[:-1])
    u, v = unit_rows(places, 4, 0), unit_rows(places, 4, 1)
    assert len(hardest(u, v, groups[-1], 3, 0.2)) == min(3, len(groups[-1]))


def test_batches_kept_of_real_embeddings_are_harder_than_random_ones():
    image, text = emoji_embeddings()
    gains = []
    for seed in range(10):
        looked_at = losses_at(image, text, drawn_batches(len(image), 16, 60, seed), 0.1)
        kept = losses_at(image, text, hardest(image, text, drawn_batches(len(image), 16, 60, seed), 6, 0.1), 0.1)
        gains.append(float(kept.mean() - looked_at.mean()))
    assert ttest_1samp(gains, 0.0, alternative="greater").pvalue < 1e-6
