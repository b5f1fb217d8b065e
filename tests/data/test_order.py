"""The order is a function of (seed, epoch, position) and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbatch.data.order import Order, key_of, shuffled


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_a_bijection(size, key):
    assert sorted(shuffled(np.arange(size), size, key)) == list(range(size))


@pytest.mark.slow
def test_every_position_is_equally_likely_everywhere():
    size, keys = 12, 12_000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), shuffled(np.arange(size), size, key)] += 1
    expected = keys / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 185  # 121 degrees of freedom; 185 is passed by chance once in 10,000 seeds


def test_neighbours_part():
    """A pair that is adjacent in one epoch is hardly ever so in another."""
    size = 2000
    adjacent = [set() for _ in range(2)]
    for epoch, pairs in enumerate(adjacent):
        order = shuffled(np.arange(size), size, key_of(0, epoch))
        pairs.update(zip(order[:-1].tolist(), order[1:].tolist(), strict=True))
    assert len(adjacent[0] & adjacent[1]) < 8


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.5]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_shows_each_sample_as_often_as_its_weight_says(lengths, weights, seed):
    order = Order(tuple(lengths), tuple(weights[: len(lengths)]), seed)
    ids = order.ids(3, np.arange(order.epoch_size))
    counts = np.bincount(ids, minlength=order.num_samples)
    first = 0
    for length, weight, slots in zip(lengths, weights, order.slots, strict=False):
        own = counts[first : first + length]
        assert own.sum() == slots == round(length * weight)
        assert own.min() >= int(slots / length)
        assert own.max() <= -(-slots // length)
        first += length


def test_any_position_can_be_asked_for_by_itself():
    order = Order((100, 30), (1.0, 1.5), seed=4)
    whole = order.ids(2, np.arange(order.epoch_size))
    assert whole.tolist() == [int(order.ids(2, np.array([p]))[0]) for p in range(order.epoch_size)]


def test_epochs_and_seeds_differ():
    ids = [Order((500,), (1.0,), seed).ids(epoch, np.arange(500)).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert ids[0] != ids[1] != ids[2] != ids[0]


def test_keys_do_not_collide():
    keys = {key_of(seed, epoch, sample) for seed in range(5) for epoch in range(5) for sample in range(200)}
    assert len(keys) == 5 * 5 * 200
    assert key_of(1, 2) != key_of(2, 1)
    with pytest.raises(AssertionError):
        shuffled(np.array([5]), 5, 0)
