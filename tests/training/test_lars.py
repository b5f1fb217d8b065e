"""Our LARS against timm's, and what a CUDA graph asks of it."""

import copy

import pytest
import torch
from torch import nn

from fullbatch.config.optimization import Optimizer
from fullbatch.training.layerwise import Lars, trust_ratios
from fullbatch.training.optimizer import make_optimizer


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5, bias=False)).double()


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_timms(decay, momentum):
    from timm.optim import Lars as Theirs

    ours, theirs = a_model(), a_model()
    config = Optimizer(optimizer="lars", lr=0.4, momentum=momentum, weight_decay=decay)
    optimizer = make_optimizer(ours, config, "cpu")
    names = {id(p): name for name, p in ours.named_parameters()}
    parameters = dict(theirs.named_parameters())
    groups = [
        {"params": [parameters[names[id(p)]] for p in group["params"]],
         "weight_decay": group["weight_decay"], "always_adapt": group["always_adapt"]}
        for group in optimizer.param_groups
    ]  # fmt: skip
    other = Theirs(groups, lr=0.4, momentum=momentum)
    for step in range(5):
        for each in (optimizer, other):
            for group in each.param_groups:
                group["lr"] = 0.4 / (step + 1)
        for model, each in ((ours, optimizer), (theirs, other)):
            gradients(model, step)
            each.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-14)


def test_the_learning_rate_may_be_a_tensor_and_gradients_stay_as_they_are():
    plain, on_device = a_model(), a_model()
    pair = [(model, make_optimizer(model, Optimizer(optimizer="lars", lr=0.3), "cpu")) for model in (plain, on_device)]
    for group in pair[1][1].param_groups:
        group["lr"] = torch.tensor(0.3, dtype=torch.float64)
    for step in range(3):
        for model, optimizer in pair:
            gradients(model, step)
            before = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))
    for one, two in zip(plain.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


def test_trust_is_one_where_a_norm_is_zero():
    weights = [torch.zeros(3), torch.ones(3), torch.full((4,), 2.0)]
    grads = [torch.ones(3), torch.zeros(3), torch.full((4,), 0.5)]
    expected = torch.tensor([1.0, 1.0, 0.001 * 4.0 / (1.0 + 0.1 * 4.0 + 1e-8)])
    torch.testing.assert_close(trust_ratios(weights, grads, 0.001, 0.1, 1e-8), expected)


def test_state_goes_on_from_a_checkpoint():
    model = a_model()
    optimizer = Lars(model.parameters(), 0.1)
    gradients(model, 0)
    optimizer.step()
    twin = copy.deepcopy(model)
    other = Lars(twin.parameters(), 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((model, optimizer), (twin, other)):
        gradients(each, 1)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
