"""NovoGrad against loops written from Ginsburg et al. 2019, Algorithm 1, in float64."""

import math

import pytest
import torch

from fullbatch.training.layerwise import NovoGrad

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def flat(tensor):
    return [float(value) for value in tensor.flatten()]


def by_hand(weights, gradients_of_steps, rates, beta1, beta2, eps, decay):
    """A list of numbers per layer; gradients are given, so that both sides see the same."""
    weights = [list(layer) for layer in weights]
    first, second = [None] * len(weights), [None] * len(weights)
    for gradients, rate in zip(gradients_of_steps, rates, strict=True):
        for layer, gradient in enumerate(gradients):
            square = math.fsum(g * g for g in gradient)
            if second[layer] is None:
                second[layer] = square
                moved = [g / math.sqrt(square) + decay * w for g, w in zip(gradient, weights[layer], strict=True)]
                first[layer] = moved
            else:
                second[layer] = beta2 * second[layer] + (1 - beta2) * square
                root = math.sqrt(second[layer]) + eps
                pairs = zip(first[layer], gradient, weights[layer], strict=True)
                first[layer] = [beta1 * m + (g / root + decay * w) for m, g, w in pairs]
            weights[layer] = [w - rate * m for w, m in zip(weights[layer], first[layer], strict=True)]
    return weights


def a_problem(steps=6):
    generator = torch.Generator().manual_seed(3)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = [(4, 3), (5,), ()]
    return [draw(s) for s in shapes], [[0.1 * draw(s) for s in shapes] for _ in range(steps)]


def run(optimizer, weights, gradients_of_steps, rates):
    for gradients, rate in zip(gradients_of_steps, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize(("beta1", "beta2", "eps", "decay"), [(0.95, 0.98, 1e-8, 0.0), (0.9, 0.5, 1e-2, 0.1)])
def test_novograd_is_algorithm_1(beta1, beta2, eps, decay):
    start, gradients = a_problem()
    rates = [0.1, 0.3, 0.2, 0.05, 0.4, 0.1]
    weights = [torch.nn.Parameter(w.clone()) for w in start]
    run(NovoGrad(weights, betas=(beta1, beta2), eps=eps, weight_decay=decay), weights, gradients, rates)
    numbers = [[flat(g) for g in step] for step in gradients]
    expected = by_hand([flat(w) for w in start], numbers, rates, beta1, beta2, eps, decay)
    for weight, values in zip(weights, expected, strict=True):
        want = torch.tensor(values, dtype=torch.float64).reshape(weight.shape)
        torch.testing.assert_close(weight.detach(), want, **CLOSE)


def test_gradients_are_left_as_they_were():
    start, gradients = a_problem(steps=1)
    weights = [torch.nn.Parameter(w.clone()) for w in start]
    run(NovoGrad(weights, weight_decay=0.1), weights, gradients, [0.1])
    assert all(torch.equal(weight.grad, gradient) for weight, gradient in zip(weights, gradients[0], strict=True))


def test_a_gradient_of_zeros_moves_nothing_and_starts_nothing():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = NovoGrad([weight], lr=0.5)
    run(optimizer, [weight], [[torch.zeros(3, dtype=torch.float64)]], [0.5])
    assert torch.equal(weight.detach(), torch.ones(3, dtype=torch.float64))
    gradient = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    run(optimizer, [weight], [[gradient]], [0.5])
    torch.testing.assert_close(weight.detach(), 1.0 - 0.5 * gradient / 5.0, **CLOSE)


def test_nvidias_variant_is_the_same_but_for_the_first_steps_epsilon():
    timm = pytest.importorskip("timm.optim")
    start, gradients = a_problem()
    rates = [0.1] * len(gradients)
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    settings = {"betas": (0.95, 0.98), "eps": 1e-14, "weight_decay": 0.1}
    run(NovoGrad(ours, **settings), ours, gradients, rates)
    run(timm.NvNovoGrad(theirs, **settings), theirs, gradients, rates)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)  # it keeps the second moment in float32
