"""Micro-batches change nothing: the gradient is that of the whole batch, for every method, dropout included."""

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import fullbatch as fb
from fullbatch.config.model import Model
from fullbatch.data.loader import LoadedBatch
from fullbatch.models.build import build_model
from fullbatch.training.gradient import GradientRule
from tests.combinations import COMBINATIONS, SAMPLES, WIDTH, make, tiered
from tests.training.small import write_inputs

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
BATCH, STEPS = 8, 3


class Towers(nn.Module):
    """Two small towers in float64 with dropout."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        towers = [nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, WIDTH)) for _ in range(2)]
        self.image, self.text = (tower.double() for tower in towers)

    def forward(self, images, tokens):
        return normalize(self.image(images), dim=-1), normalize(self.text(tokens), dim=-1)


class InOneGraph(GradientRule):
    """The truth: every piece embedded with gradient, all graphs kept, one backward."""

    def __call__(self, model, objective, batch, step, scaler):
        embedded = [self._embed(model, piece, step, place) for place, piece in enumerate(batch.split(self.micro_batch))]
        image, text = (torch.cat(rows) for rows in zip(*embedded, strict=True))
        output = objective(image, text, batch.ids)
        output.loss.backward()
        return output


def train(rule, name, dropout):
    model, objective = Towers(dropout), make(name).double()
    weights = [*model.parameters(), *objective.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for step in range(STEPS):
        noise = torch.Generator().manual_seed(step)
        ids = torch.randperm(SAMPLES, generator=noise)[:BATCH]
        inputs = (torch.randn(BATCH, 5, generator=noise, dtype=torch.float64) for _ in range(2))
        optimizer.zero_grad()
        output = rule(model, objective, LoadedBatch(ids, *inputs), step, scaler)
        found.append([output.loss.detach(), *(w.grad.clone() for w in weights if w.grad is not None)])
        optimizer.step()
    return found, objective.state_dict()


def check(rule, truth, name, dropout):
    (got, got_state), (want, want_state) = train(rule, name, dropout), train(truth, name, dropout)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    for key, value in want_state.items():
        torch.testing.assert_close(got_state[key], value, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", tiered([*fb.METHODS, *COMBINATIONS]))
def test_micro_batches_give_the_gradient_of_the_batch(name):
    check(GradientRule(micro_batch=3), GradientRule(), name, dropout=0.0)


@pytest.mark.parametrize("name", fb.METHODS)
def test_with_dropout_too(name):
    check(GradientRule(micro_batch=3, seed=5), InOneGraph(micro_batch=3, seed=5), name, dropout=0.5)


def test_dropout_differs_from_piece_to_piece_and_step_to_step():
    rule, model = GradientRule(seed=1), Towers(0.5)
    piece = LoadedBatch(torch.arange(4), *(torch.ones(4, 5, dtype=torch.float64) for _ in range(2)))
    draws = [rule._embed(model, piece, step, place)[0] for step, place in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("locked", [{}, {"lock_image": True}, {"lock_text": True}])
def test_with_real_towers(tmp_path, locked):
    _, path = write_inputs(tmp_path)
    grads = []
    for micro_batch in (None, 3):
        torch.manual_seed(0)
        model = build_model(Model(model=path, **locked))
        images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        batch = LoadedBatch(torch.arange(8), images, model.tokenize([f"picture {i}" for i in range(8)]))
        objective = fb.make_objective("neuclip", width=model.width, prototypes=16, num_samples=40, rho=1.0)
        rule = GradientRule(micro_batch=micro_batch)
        rule(model, objective, batch, 0, torch.amp.GradScaler("cpu", enabled=False))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6)
