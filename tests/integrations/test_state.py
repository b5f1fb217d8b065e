"""An optimizer that carries an objective: its groups, its state_dict, and what it says to a state that does not fit."""

import pytest
import torch
from torch import nn

import fullbatch as fb
from fullbatch.integrations.state import carry_state, freeze_temperature, write_temperature
from fullbatch.training.optimizer import TEMPERATURE_SHARE
from tests.conftest import unit_rows
from tests.integrations.trainings import differences

METHODS = ["openclip", "sogclr", "isogclr", "fastclip_v3", "neuclip", "rolling", "queue", "siglip", "tempnet"]


def objective_of(method, **settings):
    small = {"prototypes": 16} if "prototypes" in fb.settings_of(fb.METHODS[method]) else {}
    return fb.make_objective(method, num_samples=64, width=8, **small, **settings)


def steps(objective, optimizer, count, first=0):
    for step in range(first, first + count):
        ids = torch.randperm(64, generator=torch.Generator().manual_seed(step))[:16]
        image, text = (unit_rows(16, 8, seed, torch.float32).requires_grad_() for seed in (step, step + 1000))
        objective(image, text, ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def made(method, **settings):
    objective = objective_of(method, **settings)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.01, weight_decay=0.1)
    return objective, carry_state(optimizer, objective)


@pytest.mark.filterwarnings("ignore:rho=")
@pytest.mark.parametrize("method", METHODS)
def test_what_the_optimizer_saves_brings_the_objective_back(tmp_path, method):
    objective, optimizer = made(method)
    steps(objective, optimizer, 5)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again, its_optimizer = made(method)
    its_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for one, other in ((objective, optimizer), (again, its_optimizer)):
        steps(one, other, 5, first=5)
    assert not differences(dict(objective.state_dict()), dict(again.state_dict()))
    assert not differences(optimizer.state_dict(), its_optimizer.state_dict())


def test_the_temperature_is_learned_at_its_own_rate_without_decay():
    objective, optimizer = made("openclip")
    encoders, own = optimizer.param_groups
    assert own["params"] == list(objective.parameters()) and len(encoders["params"]) == 1
    assert own["lr"] == pytest.approx(TEMPERATURE_SHARE * 0.01) and own["weight_decay"] == 0.0
    found_already = torch.optim.AdamW([nn.Parameter(torch.zeros(2)), *objective.parameters()], lr=0.01)
    carry_state(found_already, objective, temperature_lr=0.5)
    assert [len(group["params"]) for group in found_already.param_groups] == [1, 1]
    assert found_already.param_groups[1]["lr"] == 0.5


def test_prototypes_that_an_optimizer_learns_keep_the_methods_rate():
    objective, optimizer = made("neuclip", schedule="simultaneous")
    assert optimizer.param_groups[-1]["lr"] == next(iter(objective.normalizers.values())).lr


def test_carried_twice():
    objective, optimizer = made("sogclr")
    assert carry_state(optimizer, objective) is optimizer and len(optimizer.state_dict()["fullbatch_objectives"]) == 1
    with pytest.raises(ValueError, match="carries another objective already"):
        carry_state(optimizer, objective_of("sogclr"))


def test_a_checkpoint_without_the_objective_is_refused():
    _, optimizer = made("sogclr")
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).state_dict()
    with pytest.raises(ValueError, match="holds no state of the objective"):
        optimizer.load_state_dict(plain)


def test_a_checkpoint_of_another_objective_is_refused():
    _, optimizer = made("sogclr")
    _, other = made("neuclip")
    with pytest.raises(ValueError, match=r"does not fit this one's settings: .*[^.]$"):
        optimizer.load_state_dict(other.state_dict())


def test_the_models_own_temperature_follows():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(1))

    model = Model()
    freeze_temperature(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    write_temperature(model, fb.make_objective("openclip", temperature=0.05))
    assert model.logit_scale.item() == pytest.approx(torch.tensor(20.0).log().item())
    siglip = fb.make_objective("siglip", bias=-3.0)
    write_temperature(model, siglip)
    assert model.logit_bias.item() == -3.0
    write_temperature(model, fb.make_objective("sogclr", num_samples=8, temperature=0.1))
    assert model.logit_scale.item() == pytest.approx(torch.tensor(10.0).log().item())
