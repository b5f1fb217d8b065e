"""The order is a function of (seed, epoch, position) and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbatch.data.order import Blocks, Order, key_of, shuffled, shuffled_by_blocks


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
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


@given(size=st.integers(1, 800), key=st.integers(0, 2**64 - 1), block=st.integers(1, 60), window=st.integers(1, 9))
@settings(max_examples=80)
def test_a_shuffle_by_blocks_is_a_bijection(size, key, block, window):
    """And a window, but for a short block within it, is of whole blocks: each is read in one go, once."""
    slots = shuffled_by_blocks(np.arange(size), size, key, Blocks(block, window))
    assert sorted(slots) == list(range(size))
    for first in range(0, size, block * window):
        here = np.sort(slots[first : first + block * window])
        pieces = np.split(here, np.flatnonzero(np.diff(here) > 1) + 1)
        assert len(pieces) <= window + 2, "a short block shifts the others by a part of one"
    alone = [int(shuffled_by_blocks(np.array([place]), size, key, Blocks(block, window))[0]) for place in (0, size - 1)]
    assert alone == [slots[0], slots[-1]]


@pytest.mark.slow
def test_blocks_that_hold_everything_are_a_full_shuffle():
    """Every place is equally likely for every sample: one window, or blocks of one sample."""
    for blocks in (Blocks(4, 3), Blocks(12, 1), Blocks(1, 12)):
        counts = np.zeros((12, 12))
        for key in range(3000):
            counts[np.arange(12), shuffled_by_blocks(np.arange(12), 12, key, blocks)] += 1
        assert ((counts - 250) ** 2 / 250).sum() < 185, blocks


def test_a_window_that_holds_all_is_the_full_shuffle():
    for weights in ((1.0,), (2.5,)):
        order = Order((100,), weights, 3)
        places = np.arange(order.epoch_size)
        same, other = (replace(order, blocks=Blocks(10, window)) for window in (25, 5))
        assert np.array_equal(order.ids(1, places), same.ids(1, places))
        assert not np.array_equal(order.ids(1, places), other.ids(1, places))


def test_each_window_has_other_blocks_in_another_epoch():
    order = Order((4000,), (1.0,), 0, Blocks(100, 8))
    first, second = (set((order.ids(epoch, np.arange(800)) // 100).tolist()) for epoch in (0, 1))
    assert len(first) == len(second) == 8 and first != second


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.5]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    blocks=st.none() | st.builds(Blocks, st.integers(1, 20), st.integers(1, 5)),
)
@settings(max_examples=100)
def test_an_epoch_shows_each_sample_as_often_as_its_weight_says(lengths, weights, seed, blocks):
    order = Order(tuple(lengths), tuple(weights[: len(lengths)]), seed, blocks)
    ids = order.ids(3, np.arange(order.epoch_size))
    counts = np.bincount(ids, minlength=order.num_samples)
    first = 0
    for length, weight, slots in zip(lengths, weights, order.slots, strict=False):
        own = counts[first : first + length]
        assert own.sum() == slots == round(length * weight)
        assert own.min() >= int(slots / length)
        assert own.max() <= -(-slots // length)
        first += length


def test_a_weight_below_one_shows_whole_blocks_from_everywhere():
    order = Order((2000,), (0.2,), 0, Blocks(20, 4))
    shown = [np.unique(order.ids(epoch, np.arange(400)) // 20) for epoch in range(40)]
    assert {len(blocks) for blocks in shown} == {20}
    assert all(np.ptp(blocks) > 50 for blocks in shown) and len(np.unique(shown)) == 100


@pytest.mark.parametrize("length", [10, 20, 30, 33, 50])
@pytest.mark.parametrize("weight", [0.2, 0.5, 1.5])
def test_a_weight_favours_no_sample_of_a_source_of_few_blocks(length, weight):
    """The others of its mix make the order one by blocks; over many epochs each sample comes equally often."""
    order, epochs = Order((length, 200), (weight, 1.0), 0, Blocks(20, 2)), 400
    shown = np.concatenate([order.ids(epoch, np.arange(order.epoch_size)) for epoch in range(epochs)])
    extra = np.bincount(shown[shown < length], minlength=length) - epochs * int(weight)
    share = weight % 1
    assert np.abs(extra / epochs - share).max() < 5 * np.sqrt(share * (1 - share) / epochs)


@given(place=st.integers(0, 999), blocks=st.none() | st.builds(Blocks, st.integers(1, 60), st.integers(1, 5)))
def test_what_a_position_is_mixed_with(place, blocks):
    order = Order((1000,), (1.0,), 0, blocks)
    near, span = order.neighbourhood(place), 1000 if blocks is None else blocks.size * blocks.window
    assert place in near and len(near) == span and near.start >= 0 and near.stop <= 1000


@pytest.mark.parametrize("blocks", [None, Blocks(7, 3)])
def test_any_position_can_be_asked_for_by_itself(blocks):
    order = Order((100, 30), (1.0, 1.5), seed=4, blocks=blocks)
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
