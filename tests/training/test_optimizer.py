"""Every optimizer learns, resumes exactly, decays what should decay, and is refused by the right words."""

import copy
import io

import pytest
import torch
from torch import nn

import fullbatch as fb
from fullbatch.config.optimization import OPTIMIZERS, Optimizer, Schedule
from fullbatch.training.optimizer import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    make_temperature_optimizer,
    set_learning_rates,
    split_parameters,
)
from fullbatch.training.stages import Stages
from tests.conftest import unit_rows

RATES = {"sgd": 0.02, "lars": 0.4, "rmsprop": 2e-3, "novograd": 5e-3, "nvnovograd": 5e-3}  # others: 0.01


class Small(nn.Module):
    """Words to numbers, with every kind of parameter of a tower: table, position, matrix, convolution, gain, scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 16)
        self.position = nn.Parameter(0.1 * torch.randn(6, 16))
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def no_weight_decay(self):
        return {"position"}

    def forward(self, words):
        x = self.table(words) + self.position
        x = self.convolution(x.mT).mT
        return self.scale * self.head(self.norm(x).relu().mean(1))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Small()

    def forward(self, words):
        return self.tower(words)


def a_batch(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(12, (64, 6), generator=generator)
    target = torch.stack([(words == k).sum(1) for k in range(4)], 1).float()
    return words.to(device), target.to(device)


def a_config(name):
    return Optimizer(optimizer=name, lr=RATES.get(name, 0.01), weight_decay=1e-3)


def train(model, optimizer, steps, device="cpu"):
    words, target = a_batch(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(words) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learns(name):
    model = Small()
    losses = train(model, make_optimizer(model, a_config(name), "cpu"), 80)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumes_exactly(name):
    config = a_config(name)
    straight = Small()
    optimizer = make_optimizer(straight, config, "cpu")
    train(straight, optimizer, 10)

    before = Small()
    first = make_optimizer(before, config, "cpu")
    train(before, first, 5)
    saved = saved_and_loaded({"model": before.state_dict(), "optimizer": first.state_dict()})
    after = Small()
    second = make_optimizer(after, config, "cpu")
    after.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert_equal(second.state_dict(), first.state_dict())
    train(after, second, 5)
    assert_equal(after.state_dict(), straight.state_dict())
    assert_equal(second.state_dict(), optimizer.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learns_on_cuda(name):
    model = Small().cuda()
    optimizer = make_optimizer(model, a_config(name), "cuda")
    losses = train(model, optimizer, 80, "cuda")
    assert losses[-1] < 0.5 * losses[0]
    assert bool(optimizer.param_groups[0].get("fused")) == (name in ("adamw", "adam", "sgd"))


def names_of(model, parameters):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for p in parameters}


@pytest.mark.parametrize(("model", "prefix"), [(Small(), ""), (Nested(), "tower.")])
def test_only_matrices_decay(model, prefix):
    decayed, undecayed = split_parameters(model)
    assert names_of(model, decayed) == {prefix + n for n in ("table.weight", "convolution.weight", "head.weight")}
    assert {prefix + n for n in ("position", "scale", "norm.weight", "head.bias")} < names_of(model, undecayed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_groups_hold_every_trainable_parameter_once(name):
    model = Small()
    model.convolution.requires_grad_(False)
    optimizer = make_optimizer(model, Optimizer(optimizer=name, weight_decay=0.3), "cpu")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held})
    assert names_of(model, held) == {n for n, _ in model.named_parameters() if not n.startswith("convolution")}
    decayed = [p for group in optimizer.param_groups if group["weight_decay"] == 0.3 for p in group["params"]]
    assert names_of(model, decayed) == {"table.weight", "head.weight"}
    assert all(group["weight_decay"] in (0.0, 0.3) for group in optimizer.param_groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_and_buffers_stay(name):
    model = Small()
    model.table.requires_grad_(False)
    before = copy.deepcopy(model.table.state_dict())
    train(model, make_optimizer(model, a_config(name), "cpu"), 3)
    assert_equal(model.table.state_dict(), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_of_scalars_only(name):
    model = nn.ParameterDict({"scale": torch.tensor(1.0), "bias": torch.zeros(3)})
    optimizer = make_optimizer(model, a_config(name), "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):  # ADOPT's first step only looks
        optimizer.step()
    assert model["scale"].item() < 1.0
    assert float(model["bias"].detach().max()) < 0.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_reach_the_optimizer(name):
    config = Optimizer(optimizer=name, lr=0.123, beta1=0.7, beta2=0.8, eps=1e-3, momentum=0.6)
    model = Small()
    group = make_optimizer(model, config, "cpu").param_groups[-1]
    assert group["lr"] == 0.123
    assert group.get("betas", (0.7, 0.8)) == (0.7, 0.8)
    assert group.get("momentum", 0.6) == 0.6
    assert "betas" in group or group["momentum"] == 0.6
    if name != "lars":  # its eps guards a norm, not a second moment
        assert group.get("eps", 1e-3) == 1e-3


def test_muon_orthogonalises_linear_maps_only():
    model = Small()
    optimizer = make_optimizer(model, a_config("muon"), "cpu")
    train(model, optimizer, 1)
    by_muon = [p for p in model.parameters() if optimizer.state[p]["use_muon"]]
    assert names_of(model, by_muon) == {"convolution.weight", "head.weight"}


def test_lamb_does_not_clip_behind_our_back():
    one, ten = Small(), Small()
    for model, factor in ((one, 1.0), (ten, 10.0)):
        optimizer = make_optimizer(model, a_config("lamb"), "cpu")
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, factor)
        optimizer.step()
        assert all(torch.equal(p.grad, torch.full_like(p, factor)) for p in model.parameters())


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_matrices_are_scaled_by_their_norms_without_decay_too(name):
    model = Small()
    optimizer = make_optimizer(model, Optimizer(optimizer=name, weight_decay=0.0), "cpu")
    assert [group["always_adapt"] for group in optimizer.param_groups] == [True, False]


def test_nothing_to_train_is_refused():
    model = Small().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_optimizer(model, Optimizer(), "cpu")


def test_unknown_optimizers_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no 'adamW2'; did you mean 'adamw'\? The optimizers are adamw, adam, radam"):
        Optimizer(optimizer="adamW2")
    with pytest.raises(ValueError, match=r"no 'zzz'\. The optimizers are"):
        Optimizer(optimizer="zzz")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": "fast"}, "lr must be a positive number"),
        ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
        ({"beta1": 1.0}, r"beta1 must lie in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must lie in \[0, 1\)"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"clip_norm": 0.0}, "clip_norm must be a positive number"),
        ({"temperature_lr": -1.0}, "temperature_lr must be a positive number"),
        ({"temperature_lr_drop_below": 0.0}, "temperature_lr_drop_below must be a number in"),
    ],
)
def test_optimizer_checks(fields, message):
    with pytest.raises(ValueError, match=message):
        Optimizer(**fields)


# -- the objective's own -----------------------------------------------------------------------------------------------

SIMULTANEOUS = fb.Prototypes(prototypes=8, schedule="simultaneous", prototype_lr=0.01)
LEARNERS = {
    "openclip": {"temperature"},
    "siglip": {"temperature"},
    "fastclip_v3": {"temperature"},
    "tempnet": {"temperature_net"},
}


def an_objective(name, **settings):
    torch.manual_seed(0)
    return fb.make_objective(name, num_samples=64, width=8, **settings)


def learn(objective, optimizer, steps, first=0):
    for step in range(first, first + steps):
        rows = unit_rows(6, 8, 2 * step, torch.float32), unit_rows(6, 8, 2 * step + 1, torch.float32)
        optimizer.zero_grad()
        ids = torch.arange(6) + 6 * (step % 8)
        objective(*rows, sample_ids=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", LEARNERS)
def test_what_the_objective_learns_is_left_to_adamw(name):
    objective = an_objective(name)
    optimizer = make_temperature_optimizer(objective, Optimizer(optimizer="lars", lr=8.0, weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["learns"] for group in optimizer.param_groups} == LEARNERS[name]
    assert all(group["weight_decay"] == 0.0 for group in optimizer.param_groups)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in objective.parameters()}


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "simclr"])
def test_an_objective_that_learns_nothing_has_none(name):
    assert make_temperature_optimizer(an_objective(name), Optimizer()) is None


@pytest.mark.parametrize("name", LEARNERS)
def test_the_objectives_optimizer_resumes_exactly(name):
    config = Optimizer(lr=0.05)
    straight, before, after = (an_objective(name) for _ in range(3))
    whole, first, second = (make_temperature_optimizer(o, config) for o in (straight, before, after))
    start = [p.detach().clone() for p in straight.parameters()]
    learn(straight, whole, 10)
    assert not all(torch.equal(p, q) for p, q in zip(straight.parameters(), start, strict=True))
    learn(before, first, 5)
    saved = saved_and_loaded({"objective": before.state_dict(), "optimizer": first.state_dict()})
    after.load_state_dict(saved["objective"])
    second.load_state_dict(saved["optimizer"])
    learn(after, second, 5, first=5)
    assert_equal(dict(after.named_parameters()), dict(straight.named_parameters()))
    assert_equal(second.state_dict(), whole.state_dict())


def test_rates_of_every_group():
    config, schedule = Optimizer(lr=8e-3), Schedule(warmup_steps=2)
    model = Small()
    encoders = make_optimizer(model, config, "cpu")
    objective = an_objective("neuclip", normalizer=SIMULTANEOUS)
    own = make_temperature_optimizer(objective, config)
    assert {g["learns"]: g["lr"] for g in own.param_groups} == {"temperature": 1e-3, "prototypes": 0.01}
    for step in (0, 1, 5):
        rate = set_learning_rates(encoders, own, config, schedule, Stages(5, 10), step)
        assert rate == learning_rate(schedule, 8e-3, step, 10, 5)
        assert all(group["lr"] == rate for group in encoders.param_groups)
        rates = {g["learns"]: g["lr"] for g in own.param_groups}
        assert rates == {"temperature": pytest.approx(rate / 8), "prototypes": pytest.approx(0.01 * rate / 8e-3)}
    net = make_temperature_optimizer(an_objective("tempnet"), config)
    set_learning_rates(encoders, net, config, schedule, Stages(5, 10), 7)
    assert net.param_groups[0]["lr"] == pytest.approx(3e-5 * 0.9)
    set_learning_rates(encoders, None, config, schedule, Stages(5, 10), 7)


# -- clipping ----------------------------------------------------------------------------------------------------------


def two_gradients():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0]), torch.tensor(4.0)
    return weights


@pytest.mark.parametrize(("max_norm", "left"), [(None, 5.0), (10.0, 5.0), (0.5, 0.5)])
def test_clipping_returns_the_norm_before_it(max_norm, left):
    weights = two_gradients()
    assert float(clip_gradients(iter(weights), max_norm)) == pytest.approx(5.0)
    assert float(clip_gradients(weights, None)) == pytest.approx(left, rel=1e-5)


def test_clipping_nothing():
    assert float(clip_gradients([], None)) == 0.0
    assert float(clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)) == 0.0
