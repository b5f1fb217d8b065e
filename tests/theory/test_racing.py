"""Acceptance of the synthetic study: after 500 steps OSGD and spectral batches are nearer to the optimum than SGD."""

import pytest
import torch

from fullbatch.theory.embeddings import all_batches, batch_losses, random_pairs
from fullbatch.theory.minimizers import AS_PUBLISHED, AS_WRITTEN, Reading, planned, race

SEEDS = 10


def finals(count, width, reading, methods=("SGD", "OSGD", "spectral")):
    return [race(method, count, width, 2, reading, 0.5, SEEDS, looks=4).final_R for method in methods]


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 8), (16, 32), (16, 8))]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "width"), [(8, 16), (8, 4), *SLOW])
def test_ordered_and_spectral_end_nearer_than_sgd(count, width):
    uniform, ordered, spectral = finals(count, width, AS_WRITTEN)
    for chosen in (ordered, spectral):
        assert bool((chosen < uniform).all()), "on every seed"
        assert float(chosen.mean()) < 0.6 * float(uniform.mean())


def test_in_the_plane_four_pairs_get_stuck():
    """The exception, N = 4 and d = 2: where each step takes the hardest batch, some starts go round for ever."""
    (ordered,) = finals(4, 2, AS_WRITTEN, ["OSGD"])
    assert float(ordered.min()) < 0.5 and float(ordered.max()) > 1.5


@pytest.mark.slow
def test_in_the_plane_spectral_batches_get_stuck_too():
    (spectral,) = finals(4, 2, AS_WRITTEN, ["spectral"])
    assert float(spectral.min()) < 0.5 and float(spectral.max()) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("count", "width"), [(8, 16), (8, 4)])
def test_as_published_they_nearly_converge_and_sgd_does_not(count, width):
    uniform, ordered, spectral = finals(count, width, AS_PUBLISHED)
    assert float(ordered.max()) < 0.2 and float(spectral.max()) < 0.3 and float(uniform.min()) > 0.5


@pytest.mark.parametrize("method", ["SGD", "spectral"])
def test_an_epoch_is_a_partition(method):
    pairs = random_pairs(8, 4, seeds=3)
    for epoch in range(3):
        for run in planned(method, pairs, 2, epoch):
            assert sorted(run.flatten().tolist()) == list(range(8))


def test_ordered_takes_the_batch_of_largest_loss():
    pairs, every = random_pairs(6, 4, seeds=4), all_batches(6, 2)
    chosen = planned("OSGD", pairs, 2, 0)
    assert chosen.shape == (4, 1, 2)
    losses = batch_losses(pairs.gram_RNN, every)
    assert torch.equal(batch_losses(pairs.gram_RNN, chosen)[:, 0], losses.max(-1).values)
    of_partition = batch_losses(pairs.gram_RNN, planned("OSGD of a partition", pairs, 2, 0))[:, 0]
    assert bool((of_partition <= losses.max(-1).values).all())


def test_with_replacement_batches_come_again_before_all_were_there():
    pairs = random_pairs(8, 4, seeds=1)
    drawn = torch.cat([planned("SGD with replacement", pairs, 2, step)[0] for step in range(200)])
    assert bool((drawn[:, 0] != drawn[:, 1]).all())
    assert len({tuple(sorted(batch)) for batch in drawn.tolist()}) == 28
    assert sorted(drawn[:4].flatten().tolist()) != list(range(8))


@pytest.mark.parametrize("method", ["SGD", "SGD with replacement", "OSGD of a partition", "spectral"])
def test_a_race_is_the_same_again_whatever_runs_beside_it(method):
    reading = Reading(steps=6, epochs=True, free=False)
    few, many = (race(method, 6, 3, 2, reading, 0.5, seeds, looks=3) for seeds in (2, 3))
    assert few.at == (0, 6, 12, 18)
    torch.testing.assert_close(few.distance_TR, many.distance_TR[:, :2], rtol=1e-9, atol=1e-12)
