"""Four points in the plane: the paper's closed forms, the ratio of first drifts, hitting times."""

import math

import pytest
import torch

from fullbatch.theory.embeddings import batch_losses
from fullbatch.theory.toy import (
    BATCHES,
    BEST_LOSS,
    DRIFT_RATIO,
    GOAL,
    Start,
    angle_gradient,
    drift_ratio,
    heat_map,
    initial_drifts,
    turn,
    walk,
)


def test_losses_and_gradient_are_the_papers():
    epsilon = 0.2
    theta = torch.full((4,), epsilon, dtype=torch.float64)
    losses = dict(zip(map(tuple, BATCHES.tolist()), batch_losses(heat_map(theta), BATCHES).tolist(), strict=True))
    near, opposite, far = (2 * math.log(math.e + math.exp(c)) - 2 for c in (math.cos(0.4), -1.0, -math.cos(0.4)))
    assert [losses[pair] for pair in ((0, 1), (2, 3))] == pytest.approx([near] * 2, rel=1e-12)
    assert [losses[pair] for pair in ((0, 2), (1, 3))] == pytest.approx([opposite] * 2, rel=1e-12)
    assert [losses[pair] for pair in ((0, 3), (1, 2))] == pytest.approx([far] * 2, rel=1e-12)
    growth = 2 * math.sin(2 * epsilon) / (1 + math.exp(1 - math.cos(2 * epsilon)))  # g of the proof of Theorem 8
    assert (-angle_gradient(theta, BATCHES[:1])).tolist() == pytest.approx([growth, growth, 0.0, 0.0], rel=1e-12)


def test_the_gradient_is_the_slope_of_the_loss():
    theta = torch.tensor([0.3, 0.1, 0.7, 0.4], dtype=torch.float64, requires_grad=True)
    batch_losses(heat_map(theta), BATCHES).mean().backward()
    torch.testing.assert_close(angle_gradient(theta.detach(), BATCHES), theta.grad, rtol=1e-12, atol=1e-14)


def test_the_ratio_of_initial_drifts():
    assert pytest.approx(3 * (math.e**2 + 1) / (math.e**2 - 1), rel=1e-15) == DRIFT_RATIO
    assert drift_ratio(1e-5) == pytest.approx(DRIFT_RATIO, rel=1e-9)
    ordered, uniform = initial_drifts(1e-5)
    assert ordered == pytest.approx(1e-5, rel=1e-8)  # eta epsilon a step, the denominators of Theorem 6
    assert uniform == pytest.approx(1e-5 / DRIFT_RATIO, rel=1e-8)
    errors = [drift_ratio(epsilon) / DRIFT_RATIO - 1 for epsilon in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=1e-2)  # it is the limit, of second order


@pytest.mark.parametrize(("epsilon", "rho"), [(0.01, 0.1), (0.1745, 0.1), (0.1745, 0.05)])
def test_ordered_sgd_arrives_some_times_sooner(epsilon, rho):
    paths = {
        method: walk(method, Start(0.05, epsilon), 1200, runs=200, enough=GOAL - rho)
        for method in ("ordered", "uniform", "all_batches", "full")
    }
    times = {method: path.hitting_time(rho) for method, path in paths.items()}
    assert times["ordered"] < times["full"] < times["all_batches"]
    assert 4.0 < times["uniform"] / times["ordered"] < 10.0


def test_the_square_is_the_end():
    path = walk("full", Start(0.5, 0.1745), 200)
    assert pytest.approx(1.253, abs=5e-4) == BEST_LOSS
    assert path.loss_T[-1] == pytest.approx(BEST_LOSS, abs=1e-9)
    assert path.hitting_time(1e-3) is not None and walk("full", Start(0.5, 0.1745), 2).hitting_time(0.1) is None


def test_along_one_angle_the_losses_differ_and_their_minimisers_do_not():
    turned = turn()
    assert turned.best_angle == pytest.approx({"full": 0.0, "mini": 0.0}, abs=1e-12)
    assert turned.ratio["greatest"] / turned.ratio["least"] > 1.1
    assert turned.angle[0] == pytest.approx(-math.pi) and len(turned.full) == len(turned.mini) == 361
