"""Methods whose loss is a formula of the batch: value and gradients against the loops."""

import math

import pytest
import torch

import fullbatch as fb
from tests.conftest import unit_rows
from tests.reference import papers

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
CHUNKS = [None, 3]


def pair(count=6, width=4, seed=0):
    image, text = unit_rows(count, width, seed), unit_rows(count, width, seed + 1)
    return image.requires_grad_(), text.requires_grad_()


def assert_same(loss, expected, inputs):
    torch.testing.assert_close(loss, expected, **CLOSE)
    for got, want in zip(torch.autograd.grad(loss, inputs[0]), torch.autograd.grad(expected, inputs[1]), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_openclip_is_infonce(chunk):
    image, text = pair()
    objective = fb.make_objective("openclip", temperature=0.2, chunk=chunk).double()
    log_tau = objective.temperatures["both"].log_temperature
    tau_parameter = log_tau.detach().clone().requires_grad_()
    expected = papers.infonce(image, text, tau_parameter.exp())
    assert_same(objective(image, text).loss, expected, [(image, text, log_tau), (image, text, tau_parameter)])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_siglip(chunk):
    image, text = pair()
    objective = fb.make_objective("siglip", temperature=0.3, bias=-1.5, chunk=chunk).double()
    log_tau, bias = objective.temperatures["both"].log_temperature, objective.bias
    own_log_tau, own_bias = (p.detach().clone().requires_grad_() for p in (log_tau, bias))
    expected = papers.siglip(image, text, torch.exp(-own_log_tau), own_bias)
    out = objective(image, text)
    assert_same(out.loss, expected, [(image, text, log_tau, bias), (image, text, own_log_tau, own_bias)])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_simclr(chunk):
    first, second = pair()
    objective = fb.make_objective("simclr", temperature=0.25, chunk=chunk).double()
    expected = papers.nt_xent(first, second, 0.25)
    assert_same(objective(first, second).loss, expected, [(first, second), (first, second)])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("margin", [None, 0.3])
def test_gcl_batch_is_the_global_loss_on_the_batch(chunk, margin):
    image, text = pair()
    pairwise, loss = (fb.Identity(), papers.identity) if margin is None else (
        fb.SquaredHinge(margin), papers.squared_hinge(margin))  # fmt: skip
    objective = fb.make_objective(
        "gcl_batch", pairwise=pairwise, temperature=fb.RobustGlobal(0.2, rho=1.3), epsilon=1e-3, chunk=chunk
    ).double()
    log_tau = objective.temperatures["both"].log_temperature
    own = log_tau.detach().clone().requires_grad_()
    expected = papers.global_loss(image, text, own.exp(), 1.3, 1e-3, loss)
    assert_same(objective(image, text).loss, expected, [(image, text, log_tau), (image, text, own)])


def test_cyclip():
    image, text = pair()
    objective = fb.make_objective("cyclip", temperature=fb.Constant(0.2), in_modal=0.3, cross_modal=0.7).double()
    expected = papers.infonce(image, text, torch.tensor(0.2, dtype=torch.float64))
    expected = expected + papers.cyclip_penalty(image, text, 0.3, 0.7)
    assert_same(objective(image, text).loss, expected, [(image, text), (image, text)])


def test_vicreg():
    image, text = pair(7, 4)
    expected = papers.vicreg(image, text, 5.0, 3.0, 0.8)
    objective = fb.make_objective("vicreg", invariance=5.0, variance=3.0, covariance=0.8).double()
    assert_same(objective(image, text).loss, expected, [(image, text), (image, text)])


def test_infonce_is_the_batch_mean_with_epsilon_one_over_negatives():
    """The fact the family rests on: log(1 + sum) = log(B - 1) + log(1/(B - 1) + g)."""
    image, text = pair()
    clip = fb.make_objective("openclip", temperature=fb.Constant(0.2)).double()
    ours = fb.make_objective("gcl_batch", epsilon=1 / 5, temperature=0.2).double()
    expected = ours(image, text).loss / (2 * 0.2) + math.log(5)
    torch.testing.assert_close(clip(image, text).loss, expected, **CLOSE)
    got, want = (torch.autograd.grad(loss, image)[0] for loss in (clip(image, text).loss, expected))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("pairwise", [fb.Identity(), fb.SquaredHinge(0.2)])
@pytest.mark.parametrize("chunk", [3, 100])
def test_exact_log_normalizers_of_both_directions(pairwise, chunk):
    image, text = (t.detach() for t in pair(11, 5))
    loss = papers.identity if isinstance(pairwise, fb.Identity) else papers.squared_hinge(0.2)
    tau_image, tau_text = torch.linspace(0.1, 0.3, 11).double(), torch.linspace(0.4, 0.2, 11).double()
    anchors = torch.tensor([0, 4, 10, 3])
    got = fb.exact_log_normalizers(image, text, (tau_image, tau_text), 1e-2, anchors, pairwise=pairwise, chunk=chunk)
    for (_, anchor, other), tau, found in zip(papers.directions(image, text), (tau_image, tau_text), got, strict=True):
        want = [torch.log(1e-2 + papers.inner_mean(anchor, other, int(i), tau[i], loss)) for i in anchors]
        torch.testing.assert_close(found, torch.stack(want), **CLOSE)
