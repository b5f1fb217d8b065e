"""Spectral batches against brute force on few pairs, on real embeddings, and on tables that have something wrong."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from threadpoolctl import threadpool_limits
from torch.nn.functional import normalize

from fullbatch.selection.ordered import batch_losses, losses_at
from fullbatch.selection.spectral import (
    blocks,
    even_clusters,
    first_eigenvectors,
    laplacian,
    order_of_block,
    pair_weights,
    spectral_order,
    unit_rows,
)
from tests import conftest
from tests.selection.real import emoji_embeddings


def related_rows(count, width, seed, noise=0.5):
    """Images and texts that have something in common."""
    shared = conftest.unit_rows(count, width, seed)
    return tuple(
        normalize(shared + noise * conftest.unit_rows(count, width, 1000 * seed + side), dim=-1) for side in (1, 2)
    )


def weight(u, v, k, l, tau, size):  # noqa: E741
    """w(k, l), by the formula."""
    total = 0.0
    for i, j in ((k, l), (l, k)):
        total += math.log(1 + (size - 1) * math.exp(float(u[i] @ v[j] - u[i] @ v[i]) / tau))
        total += math.log(1 + (size - 1) * math.exp(float(v[i] @ u[j] - v[i] @ u[i]) / tau))
    return total


@cache
def all_partitions(rows, size):
    """Every way to cut range(rows) into batches: the batch of each row, (partitions, rows)."""

    def cut(left):
        if not left:
            yield []
            return
        first, *rest = left
        for mates in itertools.combinations(rest, size - 1):
            for others in cut([row for row in rest if row not in mates]):
                yield [(first, *mates), *others]

    labels = []
    for partition in cut(list(range(rows))):
        label = np.empty(rows, np.int64)
        for number, batch in enumerate(partition):
            label[list(batch)] = number
        labels.append(label)
    return np.stack(labels)


def cuts(weights, labels):
    """The weight between batches, of each partition."""
    return ((labels[:, :, None] != labels[:, None, :]) * weights).sum((1, 2)) / 2


def label_of(places_kB):
    label = np.empty(places_kB.size, np.int64)
    label[places_kB] = np.arange(len(places_kB))[:, None]
    return label


# ---------------------------------------------------------------------------------------------------------------------
# the steps of Algorithm 3


@pytest.mark.parametrize("tau", [0.02, 0.1, 1.0])
def test_weights_are_the_formula(tau):
    u, v = related_rows(7, 5, 3)
    found = pair_weights(u, v, tau, batch_size=4)
    expected = [[0.0 if k == m else weight(u, v, k, m, tau, 4) for m in range(7)] for k in range(7)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(pair_weights(u.float(), v.float(), tau, 4).double(), found, rtol=1e-4, atol=1e-4)


@settings(max_examples=40)
@given(size=st.integers(2, 9), seed=st.integers(0, 10**6), tau=st.sampled_from([0.05, 0.3, 1.0]))
def test_the_weights_of_a_batch_bound_its_loss(size, seed, tau):
    """L_con >= sum of w over the batch's pairs / (B (B - 1)): appendix C.1, by Jensen; equal for batches of two."""
    u, v = related_rows(size, 4, seed)
    loss = float(batch_losses(u[None], v[None], tau)[0])
    bound = float(pair_weights(u, v, tau, size).sum()) / 2 / (size * (size - 1))
    assert bound <= loss * (1 + 1e-12)
    if size == 2:
        assert bound == pytest.approx(loss, rel=1e-12)


def test_eigenvectors_are_the_first_ones():
    matrix = laplacian(pair_weights(*related_rows(12, 4, 0), 0.2, 3))
    before = matrix.clone()
    torch.testing.assert_close(matrix.sum(1), torch.zeros(12, dtype=torch.float64), atol=1e-11, rtol=0)
    found = first_eigenvectors(matrix, 4)
    values, vectors = np.linalg.eigh(matrix.numpy())
    np.testing.assert_allclose(found.T @ matrix @ found, np.diag(values[:4]), atol=1e-10)
    np.testing.assert_allclose(found @ found.T, vectors[:, :4] @ vectors[:, :4].T, atol=1e-8)
    assert torch.equal(matrix, before)


def test_a_row_of_zeros_stays_zero():
    rows = unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]]))
    assert torch.equal(rows, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))


# ---------------------------------------------------------------------------------------------------------------------
# the cut, against the best of all partitions


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (8, 4), (9, 3), (12, 4)])
def test_the_cut_is_near_the_smallest_of_all_partitions(rows, size):
    """B/2 times the sum of the first k eigenvalues <= the least cut (Ky Fan) <= the cut found.

    The heuristic has no worst-case factor.  Over 30 random graphs, which have no clusters to find, it cuts at most 10 %
    more than the least on average, and it goes more than half the way from a random partition to the best one.
    """
    labels, ratios, ways = all_partitions(rows, size), [], []
    for seed in range(30):
        u, v = related_rows(rows, 3, seed)
        weights = pair_weights(u, v, 0.5, size)
        every = cuts(weights.numpy(), labels)
        found = cuts(weights.numpy(), label_of(even_clusters(u, v, size, 0.5, seed))[None])[0]
        bound = size / 2 * np.linalg.eigvalsh(laplacian(weights).numpy())[: rows // size].sum()
        assert bound <= every.min() + 1e-9
        assert every.min() <= found + 1e-9
        ratios.append(found / every.min())
        ways.append((every.mean() - found) / (every.mean() - every.min()))
    assert np.mean(ratios) < 1.10
    assert np.mean(ways) > 0.5


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (8, 4), (9, 3), (12, 4)])
def test_clusters_that_are_there_are_found(rows, size):
    """Then the cut is the least of all partitions."""
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(rows)
        centres = torch.eye(rows // size, 6, dtype=torch.float64)[order % (rows // size)]
        u, v = (normalize(centres + 0.2 * conftest.unit_rows(rows, 6, seed + side), dim=-1) for side in (50, 90))
        weights = pair_weights(u, v, 0.2, size).numpy()
        found = label_of(even_clusters(u, v, size, 0.2, seed))
        assert cuts(weights, found[None])[0] == pytest.approx(cuts(weights, all_partitions(rows, size)).min())
        assert len({(int(a), int(b)) for a, b in zip(found, order % (rows // size), strict=True)}) == rows // size


@pytest.mark.parametrize("tau", [0.07, 0.2])
@pytest.mark.parametrize("size", [8, 32])
def test_batches_of_real_embeddings_are_harder_than_random_ones(size, tau):
    """Paired by block: the same samples, rearranged."""
    image, text = emoji_embeddings()
    order = spectral_order(image, text, size, block_batches=11, tau=tau, seed=0)
    chosen, uniform = (
        losses_at(image, text, places.reshape(-1, size), tau).numpy() for places in (order, np.arange(len(order)))
    )
    paired = [
        (
            chosen[block.start // size : block.stop // size].mean(),
            uniform[block.start // size : block.stop // size].mean(),
        )
        for block in blocks(len(image), size, 11)
    ]
    assert ttest_rel(*zip(*paired, strict=True), alternative="greater").pvalue < 1e-2
    assert chosen.mean() > 1.2 * uniform.mean()


# ---------------------------------------------------------------------------------------------------------------------
# every table gives a partition


def spoilt(u, v, kind, rng):
    u, v = u.clone(), v.clone()
    rows = torch.from_numpy(rng.random(len(u)) < 0.5)
    match kind:
        case "duplicates":
            u, v = u[torch.arange(len(u)) // 3], v[torch.arange(len(u)) // 3]
        case "equal":
            u[:], v[:] = u[0].clone(), v[0].clone()
        case "zero":
            u[rows], v[rows] = 0.0, 0.0
        case "some unseen":
            u[rows] = math.nan
        case "few seen":
            u[2:], v[3:] = math.nan, math.nan
        case "none seen":
            u[:], v[:] = math.nan, math.inf
        case "half precision":
            u, v = u.half(), v.half()
    return u, v


KINDS = ["sound", "duplicates", "equal", "zero", "some unseen", "few seen", "none seen", "half precision"]


@settings(max_examples=120)
@given(
    count=st.integers(1, 50),
    size=st.integers(2, 9),
    block_batches=st.integers(1, 8),
    tau=st.sampled_from([1e-3, 0.05, 1.0]),  # at 1e-3 weights vanish: the graph falls apart
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
)
def test_every_place_comes_once(count, size, block_batches, tau, seed, kind):
    u, v = spoilt(*related_rows(count, 4, seed), kind, np.random.default_rng(seed))
    order = spectral_order(u, v, size, block_batches, tau, seed)
    whole = count // size * size
    assert sorted(order.tolist()) == list(range(whole))
    assert (spectral_order(u.clone(), v.clone(), size, block_batches, tau, seed) == order).all()
    for number, block in enumerate(blocks(count, size, block_batches)):  # as planners do it, one block at a time
        here = slice(block.start, block.stop)
        assert (order_of_block(u[here], v[here], size, tau, seed, number) == order[here] - block.start).all()
    if block_batches == 1 or whole == size or kind == "none seen":
        assert order.tolist() == list(range(whole))


def test_rows_never_seen_do_not_keep_the_others_apart():
    """Two clusters of three and a row never seen for each: it fills up, it decides nothing."""
    centres = torch.eye(2, 4, dtype=torch.float64)[[0, 1, 0, 1, 0, 1, 0, 0]]
    u = normalize(centres + 0.1 * conftest.unit_rows(8, 4, 5), dim=-1)
    u[6:] = math.nan
    found = [set(batch.tolist()) - {6, 7} for batch in even_clusters(u, u, 4, 0.2, 0)]
    assert found == [{0, 2, 4}, {1, 3, 5}]


def test_components_of_a_graph_that_falls_apart_stay_together():
    """Weights of exactly 0 between clusters: the eigenvalue 0 has several vectors, in any basis."""
    centres = torch.eye(4, dtype=torch.float64)[torch.arange(12) % 4]
    matrix = laplacian(pair_weights(centres, centres, 1e-3, 3))
    assert (torch.linalg.eigvalsh(matrix)[:4].abs() < 1e-9).all()
    assert even_clusters(centres, centres, 3, 1e-3, 0).tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_the_number_of_threads_changes_nothing():
    """An order is a function of table and seed, in a planner of one thread and in a process of many."""
    u, v = (table.float() for table in related_rows(600, 16, 1))
    alone = spectral_order(u, v, 10, 30, 0.1, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threadpool_limits(3):
            assert (spectral_order(u, v, 10, 30, 0.1, 3) == alone).all()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_device_changes_nothing_but_rounding():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    u, v = related_rows(24, 6, 2)
    assert (spectral_order(u.cuda(), v.cuda(), 4, 3, 0.2, 0) == spectral_order(u, v, 4, 3, 0.2, 0)).all()
