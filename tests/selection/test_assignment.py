"""Even assignment against scipy's Hungarian method, which solves the same problem with copies of every centre."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fullbatch.selection.spectral import equals_apart, even_assignment


def least_cost(cost, capacity):
    rows, copies = linear_sum_assignment(np.repeat(cost, capacity, axis=1))
    return cost[rows, copies // capacity].sum()


@settings(max_examples=60)
@given(
    centres=st.integers(1, 7),
    capacity=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["any", "crowded", "ties", "equal", "free rows"]),
)
def test_it_is_even_and_costs_the_least(centres, capacity, seed, kind):
    rng = np.random.default_rng(seed)
    cost = rng.random((centres * capacity, centres))
    match kind:
        case "crowded":
            cost[:, 0] -= 0.9
        case "ties":
            cost = np.floor(3 * cost)
        case "equal":
            cost[:] = 0.5
        case "free rows":
            cost[rng.random(len(cost)) < 0.4] = 0.0
    found = even_assignment(cost, capacity)
    assert np.bincount(found, minlength=centres).tolist() == [capacity] * centres
    assert cost[np.arange(len(cost)), found].sum() == pytest.approx(least_cost(cost, capacity), rel=1e-10, abs=1e-12)
    assert (even_assignment(cost, capacity) == found).all()


def test_it_leaves_its_argument_alone():
    cost = np.random.default_rng(0).random((12, 3))
    before = cost.copy()
    even_assignment(cost, 4)
    assert (cost == before).all()


def test_all_rows_crowd_at_one_centre():
    rng = np.random.default_rng(1)
    cost = np.abs(rng.normal(size=(240, 1)) - np.linspace(4, 6, 12))
    found = even_assignment(cost, 20)
    assert cost[np.arange(240), found].sum() == pytest.approx(least_cost(cost, 20), rel=1e-10)


def meetings(centre, texts):
    """Pairs of equal texts at one centre."""
    same = (centre[:, None] == centre) & (texts[:, None] == texts) & (texts != 0)
    return int(np.triu(same, 1).sum())


@settings(max_examples=60)
@given(centres=st.integers(2, 7), capacity=st.integers(1, 6), texts=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_equal_texts_are_kept_apart(centres, capacity, texts, seed):
    """Sizes stay, meetings become fewer, and none is left where each text is at few rows."""
    rng = np.random.default_rng(seed)
    cost = rng.random((centres * capacity, centres))
    text = rng.integers(0, texts, len(cost))
    before = even_assignment(cost, capacity)
    after = equals_apart(before, cost, text)
    assert np.bincount(after, minlength=centres).tolist() == [capacity] * centres
    assert meetings(after, text) <= meetings(before, text)
    if not meetings(before, text):
        assert (after == before).all()
    pairs = np.arange(len(cost)) // 2 + 1
    if centres > 2:
        assert not meetings(equals_apart(before, cost, pairs), pairs)


def test_what_changes_places_costs_least():
    cost = np.array(
        [[0.0, 5.0, 5.0], [0.0, 1.0, 2.0], [9.0, 0.0, 9.0], [3.0, 0.0, 9.0], [9.0, 9.0, 0.0], [1.0, 9.0, 0.0]]
    )
    before, texts = np.array([0, 0, 1, 1, 2, 2]), np.array([7, 7, 0, 0, 0, 0])
    assert equals_apart(before, cost, texts).tolist() == [0, 2, 1, 1, 2, 0]
