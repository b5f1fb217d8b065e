"""The loss and its step against loops written from the paper."""

import math
from itertools import combinations

import pytest
import torch

from fullbatch.theory.embeddings import (
    FreePairs,
    all_batches,
    batch_losses,
    contrastive_loss,
    descended,
    gram_gradient,
    random_pairs,
)


def loss_by_loops(u, v, members):
    """Eq. (2) on a batch."""
    total = 0.0
    for one, other in ((u, v), (v, u)):
        for i in members:
            below = sum(math.exp(float(one[i] @ other[j])) for j in members)
            total -= math.log(math.exp(float(one[i] @ other[i])) / below) / len(members)
    return total


@pytest.mark.parametrize("size", [2, 3, 6])
def test_losses_of_all_batches_are_the_papers(size):
    pairs = random_pairs(6, 4, seeds=2)
    losses = batch_losses(pairs.gram_RNN, all_batches(6, size))
    for run in range(2):
        u, v = pairs.unit_2RND[:, run]
        expected = [loss_by_loops(u, v, members) for members in combinations(range(6), size)]
        assert losses[run].tolist() == pytest.approx(expected, rel=1e-12)


def gradients(u, v, batches):
    u, v = u.clone().requires_grad_(), v.clone().requires_grad_()
    unit_u, unit_v = u / u.norm(dim=-1, keepdim=True), v / v.norm(dim=-1, keepdim=True)
    loss = torch.stack([contrastive_loss(unit_u[:, b] @ unit_v[:, b].mT) for b in batches]).mean(0).sum()
    return torch.autograd.grad(loss, (u, v))


@pytest.mark.parametrize("batches", [all_batches(6, 2), all_batches(6, 4)[3:9], all_batches(6, 6)], ids=len)
def test_a_free_step_is_autograds_through_the_normalisation(batches):
    pairs = random_pairs(6, 4, seeds=3, free=True)
    u, v = pairs.unit_2RND * pairs.length_2RN1
    stepped = descended(pairs, batches, 0.3, free=True)
    vectors = stepped.unit_2RND * stepped.length_2RN1
    for reached, start, gradient in zip(vectors, (u, v), gradients(u, v, batches), strict=True):
        torch.testing.assert_close(reached, start - 0.3 * gradient, rtol=1e-11, atol=1e-12)


def test_a_step_goes_along_the_gradient_of_the_raw_products_and_comes_back_to_the_sphere():
    pairs, batches = random_pairs(5, 3, seeds=2), all_batches(5, 2)
    u, v = (unit.clone().requires_grad_() for unit in pairs.unit_2RND)
    torch.stack([contrastive_loss(u[:, b] @ v[:, b].mT) for b in batches]).mean(0).sum().backward()
    stepped = descended(pairs, batches, 0.5)
    for reached, start in zip(stepped.unit_2RND, (u, v), strict=True):
        moved = start.detach() - 0.5 * start.grad
        torch.testing.assert_close(reached, moved / moved.norm(dim=-1, keepdim=True), rtol=1e-12, atol=1e-12)


def test_runs_may_have_batches_of_their_own():
    pairs = random_pairs(6, 4, seeds=3)
    own = torch.tensor([[[0, 1]], [[2, 5]], [[3, 4]]])
    together = descended(pairs, own, 0.5)
    for run in range(3):
        alone = FreePairs(pairs.unit_2RND[:, run], pairs.length_2RN1[:, run])
        torch.testing.assert_close(descended(alone, own[run], 0.5).gram_RNN, together.gram_RNN[run], rtol=0, atol=1e-14)


def test_what_a_batch_does_not_see_stays():
    slope = gram_gradient(random_pairs(6, 4, seeds=1).gram_RNN, torch.tensor([[1, 4]]))[0]
    assert slope.nonzero().tolist() == [[1, 1], [1, 4], [4, 1], [4, 4]]


def test_a_start_depends_on_its_seed_alone():
    few, many = random_pairs(4, 3, seeds=2), random_pairs(4, 3, seeds=5)
    assert torch.equal(few.unit_2RND, many.unit_2RND[:, :2])
