"""What the names of optimizers give, and how `course-report` sets them, against update rules written out in float64."""

import math

import pytest
import torch
from torch import nn

from fullbatch.config.optimization import Optimizer
from fullbatch.training.optimizer import clip_gradients, make_optimizer
from tests.trials.test_recipes import plan_of_recipe

STEPS = 8  # RAdam's rectification begins with the sixth
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
DECAY = 0.01


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)  # timm keeps NovoGrad's second moment in the default
    yield
    torch.set_default_dtype(torch.float32)


class Layers(nn.Module):
    """A matrix, which decays, and a bias, which does not."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))


def a_gradient(step, name):
    generator = torch.Generator().manual_seed(17 * step + len(name))
    return (0.05 + step) * torch.randn((4, 3) if name == "weight" else (5,), generator=generator)  # long, then longer


def a_rate(step):
    return 1e-3 * (1.0 + math.cos(step))


# -- the rules: (weight, gradient, what is remembered, step, rate, decay) -> weight -----------------------------------


def adam(b1, b2, eps, kind):
    def update(w, g, kept, t, rate, decay):
        if kind == "l2":
            g = g + decay * w
        else:
            w = w - rate * decay * w
        m = kept["m"] = b1 * kept.get("m", 0.0) + (1 - b1) * g
        v = kept["v"] = b2 * kept.get("v", 0.0) + (1 - b2) * g * g
        return w - rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)

    return update


def radam(b1, b2, eps):
    """Liu et al. 2020, Algorithm 2, the decay apart from the gradient as in their code and in timm's of 2020."""

    def update(w, g, kept, t, rate, decay):
        w = w - rate * decay * w
        m = kept["m"] = b1 * kept.get("m", 0.0) + (1 - b1) * g
        v = kept["v"] = b2 * kept.get("v", 0.0) + (1 - b2) * g * g
        longest = 2 / (1 - b2) - 1
        length = longest - 2 * t * b2**t / (1 - b2**t)
        if length < 5:
            return w - rate * m / (1 - b1**t)
        part = ((length - 4) * (length - 2) * longest) / ((longest - 4) * (longest - 2) * length)
        return w - rate * math.sqrt(part) * m / (1 - b1**t) * math.sqrt(1 - b2**t) / (v.sqrt() + eps)

    return update


def novograd(b1, b2, eps, first_eps):
    def update(w, g, kept, t, rate, decay):
        square = float((g * g).sum())
        v = kept["v"] = b2 * kept["v"] + (1 - b2) * square if kept else square
        root = math.sqrt(v) + (eps if t > 1 or first_eps else 0.0)
        kept["m"] = b1 * kept.get("m", 0.0) + g / root + decay * w
        return w - rate * kept["m"]

    return update


def rmsprop(alpha, eps, momentum):
    def update(w, g, kept, t, rate, decay):
        g = g + decay * w
        v = kept["v"] = alpha * kept.get("v", 0.0) + (1 - alpha) * g * g
        kept["m"] = momentum * kept.get("m", 0.0) + g / (v.sqrt() + eps)
        return w - rate * kept["m"]

    return update


def sgd(momentum):
    def update(w, g, kept, t, rate, decay):
        kept["m"] = momentum * kept.get("m", 0.0) + g + decay * w
        return w - rate * kept["m"]

    return update


def lamb(b1, b2, eps):
    """You et al. 2020 as Apex has it: what does not decay takes Adam's plain step."""

    def update(w, g, kept, t, rate, decay):
        m = kept["m"] = b1 * kept.get("m", 0.0) + (1 - b1) * g
        v = kept["v"] = b2 * kept.get("v", 0.0) + (1 - b2) * g * g
        move = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + decay * w
        trust = float(w.norm() / move.norm()) if decay else 1.0
        return w - rate * trust * move

    return update


# The report's code base, with the defaults of the optimizers it calls; FusedAdam is Adam with L2 there.
COURSE = {
    "adam": adam(0.9, 0.999, 1e-8, "l2"),
    "adamw": adam(0.9, 0.999, 1e-8, "decoupled"),
    "radam": radam(0.9, 0.999, 1e-8),
    "novograd": novograd(0.95, 0.98, 1e-8, first_eps=False),  # its paper's own rule
    "nvnovograd": novograd(0.95, 0.98, 1e-8, first_eps=True),
    "rmsprop": rmsprop(0.9, 1e-8, 0.9),
    "sgd": sgd(0.9),
    "lamb": lamb(0.9, 0.999, 1e-6),
}
OURS = {
    "adam": adam(0.9, 0.98, 1e-6, "l2"),
    "adamw": adam(0.9, 0.98, 1e-6, "decoupled"),
    "radam": radam(0.9, 0.98, 1e-6),
    "novograd": novograd(0.9, 0.98, 1e-6, first_eps=False),
    "nvnovograd": novograd(0.9, 0.98, 1e-6, first_eps=True),
    "rmsprop": rmsprop(0.98, 1e-6, 0.9),
    "sgd": sgd(0.9),
    "lamb": lamb(0.9, 0.98, 1e-6),
}


def assert_follows(config, rule, clip):
    model = Layers()
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    kept = {name: {} for name in expected}
    optimizer = make_optimizer(model, config, "cpu")
    for step in range(STEPS):
        gradients = {name: a_gradient(step, name) for name in expected}
        for name, weight in model.named_parameters():
            weight.grad = gradients[name].clone()
        for group in optimizer.param_groups:
            group["lr"] = a_rate(step)
        clip_gradients(model.parameters(), config.clip_norm)
        optimizer.step()
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        shrink = min(clip / (norm + 1e-6), 1.0) if clip is not None else 1.0
        for name, weight in model.named_parameters():
            decay = DECAY if name == "weight" else 0.0
            args = kept[name], step + 1, a_rate(step), decay
            expected[name] = rule(expected[name], shrink * gradients[name], *args)
            torch.testing.assert_close(weight.detach(), expected[name], msg=lambda m, s=step: f"step {s}: {m}", **CLOSE)


@pytest.mark.parametrize("name", COURSE)
def test_the_course_reports_search_has_its_codes_rules(name):
    plan = plan_of_recipe("course-report")
    assert set(plan.optimizers) == set(COURSE)
    config = plan.config("choices", {"method": "sogclr", "optimizer": name, "weight_decay": DECAY}, 0, "runs", "x")
    assert_follows(config.optimizer, COURSE[name], clip=1.0 if name == "lamb" else None)


@pytest.mark.parametrize("name", OURS)
def test_a_name_alone_has_our_defaults(name):
    assert_follows(Optimizer(optimizer=name, weight_decay=DECAY), OURS[name], clip=None)
