"""The primitive by itself: against a naive reference, by finite differences, in odd shapes, and in memory."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fullbatch as fb
from fullbatch.objective.chunked import gradient_to_others
from fullbatch.objective.kernel import Table, log_mean_exp, log_mean_exp_of_batch
from tests.conftest import unit_rows

PAIRWISE = [fb.Identity(), fb.SquaredHinge(0.3)]


def naive(anchor, other, reference, tau, pairwise, exclude_own):
    gap = anchor @ other.T - reference[:, None]
    if isinstance(pairwise, fb.SquaredHinge):
        gap = (gap + pairwise.margin).clamp(min=0) ** 2
    x = gap / tau[:, None]
    if exclude_own:
        x = x.masked_fill(torch.eye(len(anchor), dtype=torch.bool), -math.inf)
    return torch.logsumexp(x, 1) - math.log(other.shape[0] - int(exclude_own))


def inputs(rows, columns, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    anchor, other = unit_rows(rows, width, seed), unit_rows(columns, width, seed + 1)
    reference = torch.rand(rows, generator=generator, dtype=torch.float64) - 0.5
    tau = 0.05 + torch.rand(rows, generator=generator, dtype=torch.float64)
    return [t.requires_grad_() for t in (anchor, other, reference, tau)]


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (7, 3, 5), (3, 11, 2), (8, 8, 8)])
def test_against_the_naive_form(rows, columns, width, chunk, pairwise):
    given = inputs(rows, columns, width)
    weights = torch.linspace(-1.0, 2.0, rows, dtype=torch.float64)
    got = log_mean_exp(*given, pairwise=pairwise, chunk=chunk)
    want = naive(*given, pairwise, False)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), given),
        torch.autograd.grad((want * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("chunk", [None, 3])
def test_both_directions_of_a_batch(pairwise, chunk):
    """Rows and columns as anchors at once equal two naive calls with the tables swapped."""
    count, width = 7, 4
    image, text = unit_rows(count, width, 1).requires_grad_(), unit_rows(count, width, 2).requires_grad_()
    positive = (image * text).sum(1)
    taus = [(0.1 + torch.rand(count, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    tables = [
        Table(rows, rows.detach(), positive, positive.detach(), tau, tau.detach())
        for rows, tau in zip((image, text), taus, strict=True)
    ]
    found = log_mean_exp_of_batch(*tables, slice(0, count), pairwise=pairwise, chunk=chunk, with_mean=True)
    want = [
        naive(a, b, positive, tau, pairwise, True) for a, b, tau in ((image, text, taus[0]), (text, image, taus[1]))
    ]
    weights = torch.linspace(-1.0, 2.0, count, dtype=torch.float64)
    leaves = (image, text, *taus)
    got_grads = torch.autograd.grad(sum((f.log_mean_B * weights).sum() for f in found), leaves, retain_graph=True)
    want_grads = torch.autograd.grad(sum((w * weights).sum() for w in want), leaves, retain_graph=True)
    for f, w, tau in zip(found, want, taus, strict=True):
        torch.testing.assert_close(f.log_mean_B, w, rtol=1e-12, atol=1e-12)
        (d_tau,) = torch.autograd.grad(w.sum(), tau, retain_graph=True)
        torch.testing.assert_close(f.mean_exponent_N, -tau.detach() * d_tau, rtol=1e-9, atol=1e-12)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_gradcheck(pairwise):
    given = inputs(5, 4, 3)
    assert torch.autograd.gradcheck(lambda *a: log_mean_exp(*a, pairwise=pairwise), given)
    assert torch.autograd.gradcheck(lambda *a: log_mean_exp(*a, pairwise=pairwise, chunk=2), given)


@pytest.mark.parametrize("pairwise", PAIRWISE)
@pytest.mark.parametrize("chunk", [None, 2])
def test_gradient_to_others_in_closed_form(pairwise, chunk):
    anchor, other, reference, tau = inputs(6, 5, 3)
    value = log_mean_exp(anchor, other, reference, tau, pairwise=pairwise)
    (want,) = torch.autograd.grad((value.sin()).sum(), other)
    got = gradient_to_others(
        *(t.detach() for t in (anchor, other, reference, tau)), lambda v, here: v.cos(), pairwise=pairwise, chunk=chunk
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_tower_costs_no_gradient(frozen):
    image, text = unit_rows(6, 4, 1), unit_rows(6, 4, 2)
    both = [image.clone().requires_grad_(), text.clone().requires_grad_()]
    fb.make_objective("fastclip_v3", num_samples=9000).double()(*both, torch.arange(6)).loss.backward()
    one = [image.clone().requires_grad_(frozen != "image"), text.clone().requires_grad_(frozen != "text")]
    fb.make_objective("fastclip_v3", num_samples=9000).double()(*one, torch.arange(6)).loss.backward()
    for whole, half in zip(both, one, strict=True):
        if half.requires_grad:
            torch.testing.assert_close(half.grad, whole.grad, rtol=1e-12, atol=1e-14)
        else:
            assert half.grad is None


def test_low_precision_is_as_good_as_float32_allows():
    """bf16 inputs are widened first, so the result is the float32 one of the rounded rows."""
    image, text = unit_rows(32, 64, 1).bfloat16(), unit_rows(32, 64, 2).bfloat16()
    low = fb.make_objective("openclip", temperature=0.01)(image, text).loss
    high = fb.make_objective("openclip", temperature=0.01).double()(image.double(), text.double()).loss
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["openclip", "siglip", "simclr", "fastclip_v3", "isogclr", "tuneclip", "neuclip"])
def test_no_square_matrix_at_a_fixed_chunk(name):
    """The largest tensor of a step grows linearly with the batch: chunk x B, never B x B."""
    chunk, width = 8, 4
    for count in (128, 256):
        image, text = (unit_rows(count, width, seed, torch.float32).requires_grad_() for seed in (1, 2))
        settings = {"prototypes": 64, "rho": 2.0} if name == "neuclip" else {}
        objective = fb.make_objective(name, width=width, num_samples=count, chunk=chunk, **settings)
        with LargestTensor() as seen:
            objective(image, text, torch.arange(count)).loss.backward()
        assert seen.largest <= max(chunk * count, 2 * count * width), (count, seen.largest)
