"""Even assignment against scipy's Hungarian method, which solves the same problem with copies of every centre."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fullbatch.selection.spectral import even_assignment


def least_cost(cost, capacity):
    rows, copies = linear_sum_assignment(np.repeat(cost, capacity, axis=1))
    return cost[rows, copies // capacity].sum()


@settings(deadline=None, max_examples=60)
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
