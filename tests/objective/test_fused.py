"""The fused kernels against float64, no further from it than twice what rounding the operands alone costs.

On a GPU they run as they are.  Where there is none, one test starts this file again with Triton's interpreter, which
computes the same programs on the CPU.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import fullbatch as fb
from fullbatch.config.axes import Identity, Prototypes, Sigmoid, SquaredHinge
from fullbatch.objective import chunked, kernel
from fullbatch.objective.kernel import layout_of_batch, log_mean_exp
from fullbatch.objective.pairs import Table
from fullbatch.objective.prototypes import Pool
from tests.conftest import unit_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
fused_here = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")
LOSSES = {"identity": Identity(), "hinge": SquaredHinge(0.3), "sigmoid": Sigmoid()}
SHAPES = [(1, 1, 1), (7, 3, 5), (3, 70, 20), (70, 131, 40)]  # less than a tile, and more than one
if not INTERPRETED:
    SHAPES += [(1000, 999, 100), (129, 4097, 512)]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="these tests run by themselves")
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    told = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels take what lies on the CPU."""
    if INTERPRETED:
        takes = lambda rows, operands: rows.dtype == torch.float32 and operands != "float32"  # noqa: E731
        monkeypatch.setattr(kernel, "runs_fused", takes)


def rounded(rows):
    """What float16 leaves of them."""
    return rows.half().to(rows.dtype)


@contextmanager
def rounded_products():
    """The torch code with the other operand of its last products, the gradient to the similarities, in 11 bits too."""
    with pytest.MonkeyPatch.context() as patch:

        def pull_back_block(*given, exact=chunked.pull_back_block):
            pull = exact(*given)
            mantissa, exponent = torch.frexp(pull.sim_RC)
            return replace(pull, sim_RC=torch.ldexp((mantissa * 2048).round(), exponent - 11))

        patch.setattr(chunked, "pull_back_block", pull_back_block)
        yield


def error(got, want):
    """Relative, over the whole tensor."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def assert_as_good(got, plain, want, floor=2e-6):
    """``got`` is at most twice as far from ``want`` as ``plain``, which is float32 of rounded operands."""
    for name in want:
        allowed = 2.0 * error(plain[name], want[name]) + floor
        assert error(got[name], want[name]) <= allowed, (name, error(got[name], want[name]), allowed)


def on_cpu(found):
    return {name: t.cpu() for name, t in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# anchors against others that every rank holds


def rectangle(rows, columns, width, tau=0.05):
    generator = torch.Generator().manual_seed(rows)
    anchor, other = unit_rows(rows, width, 1), unit_rows(columns, width, 2)
    reference = torch.rand(rows, generator=generator, dtype=torch.float64) - 0.5
    return anchor, other, reference, tau * (1.0 + torch.rand(rows, generator=generator, dtype=torch.float64))


def weights(count):
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)


def value_and_gradients(given, weight, device, dtype, **options):
    leaves = [t.to(device, dtype).requires_grad_() for t in given]
    value = log_mean_exp(*leaves, **options)
    grads = torch.autograd.grad(value @ weight.to(device, dtype), leaves)
    names = ("value", "anchor", "other", "reference", "tau")
    return on_cpu(dict(zip(names, (value.detach(), *grads), strict=True)))


def check_rectangle(given, weight, **options):
    want = value_and_gradients(given, weight, "cpu", torch.float64, **options)
    close = (*(rounded(t) for t in given[:2]), *given[2:])
    with rounded_products():
        plain = value_and_gradients(close, weight, "cpu", torch.float32, **options, operands="float32")
    assert_as_good(value_and_gradients(given, weight, DEVICE, torch.float32, **options), plain, want)


@fused_here
@pytest.mark.parametrize("loss", ["identity", "hinge"])
@pytest.mark.parametrize("shape", SHAPES)
def test_anchors_against_others(shape, loss):
    check_rectangle(rectangle(*shape), weights(shape[0]), pairwise=LOSSES[loss])


@fused_here
@pytest.mark.parametrize("loss", ["identity", "hinge"])
@pytest.mark.parametrize("first_pair", [0, 5])
def test_own_positives_among_the_others(first_pair, loss):
    """They are left out, though their terms would drown the others."""
    anchor, other, reference, tau = rectangle(66, 80, 24, tau=0.005)
    other[first_pair : first_pair + 66] = anchor
    check_rectangle((anchor, other, reference, tau), weights(66), pairwise=LOSSES[loss], first_pair=first_pair)


@fused_here
@pytest.mark.parametrize("chunk", [None, 20])
def test_a_gradient_in_pieces(chunk, monkeypatch):
    """Over rows and over columns; pieces in which an own positive lies, and in which none does."""
    from fullbatch.objective import fused

    monkeypatch.setattr(fused, "PIECE", 32)
    check_rectangle(rectangle(70, 90, 24), weights(70), chunk=chunk, first_pair=3)


@fused_here
@pytest.mark.parametrize("size", [1e-20, 1e10])
def test_gradients_of_any_size(size):
    check_rectangle(rectangle(40, 50, 24), size * weights(40))


@fused_here
def test_no_gradient_is_zero():
    found = value_and_gradients(rectangle(40, 50, 24), torch.zeros(40), DEVICE, torch.float32)
    assert all(torch.equal(found[name], torch.zeros_like(found[name])) for name in ("anchor", "other", "tau"))


@fused_here
@pytest.mark.parametrize("loss", ["identity", "hinge", "sigmoid"])
def test_what_is_no_number_stays_none(loss):
    """A run that diverges is to notice it."""
    image, text, *taus = pairs(40, 24)
    image[3, 5] = float("nan")
    found = of_batch((image, text, *taus), loss, 1, DEVICE, torch.float32)
    assert found["value 0"][3].isnan() and found["rows"].isnan().any() and found["columns"].isnan().any()


@fused_here
def test_split_operands():
    """Values as good as those of float32; gradients keep the rounding of the last products."""
    given, weight = rectangle(70, 90, 40, tau=0.005), weights(70)
    want = value_and_gradients(given, weight, "cpu", torch.float64)
    single, split = (
        value_and_gradients(given, weight, DEVICE, torch.float32, operands=operands)
        for operands in ("float16", "split")
    )
    errors = {name: (error(split[name], want[name]), error(single[name], want[name])) for name in want}
    assert errors["value"][0] < 1e-6 < 1e-5 < errors["value"][1], errors
    assert errors["tau"][0] < 1e-5 and errors["anchor"][0] < 5e-4 < 1e-3 < errors["anchor"][1], errors


# ---------------------------------------------------------------------------------------------------------------------
# the two directions of a batch, on one rank and on several


def pairs(count, width, tau=0.05):
    image, text = unit_rows(count, width, 1), unit_rows(count, width, 2)
    generator = torch.Generator().manual_seed(count)
    taus = [tau * (1.0 + torch.rand(count, generator=generator, dtype=torch.float64)) for _ in range(2)]
    return image, text, *taus


def of_batch(given, loss, ranks, device, dtype, operands="float16", bias=None):
    """Values, means and gradients of a batch that is spread over so many ranks, which take their turns here."""
    image, text, *taus = (t.to(device, dtype) for t in given)
    positive = (image * text).sum(1)
    references = [positive if bias is None else -bias * tau for tau in taus]
    tables = [
        Table(t, t, reference, reference, tau, tau)
        for t, reference, tau in zip((image, text), references, taus, strict=True)
    ]
    count, both = len(image), loss != "sigmoid"
    bounds = [rank * count // ranks for rank in range(ranks + 1)]
    options = {"pairwise": LOSSES[loss], "operands": operands, "with_mean": both, "columns_are_anchors": both}
    layouts = [layout_of_batch(*tables, slice(*span), **options) for span in pairwise(bounds)]
    engine = kernel.engine_for(layouts[0])
    reduced = [engine.reduce(layout, True) for layout in layouts]
    sides = range(1 + both)
    values = [torch.cat([found[side].value for found, _ in reduced]) for side in sides]
    grads = [(weights(count) / count).to(device, dtype) for _ in sides]
    pulled = [
        engine.pull_back(layout, values, grads, kept, (True, True))
        for layout, (_, kept) in zip(layouts, reduced, strict=True)
    ]
    found = {"rows": torch.cat([p.row_BD for p in pulled]), "columns": torch.cat([p.column_BD for p in pulled])}
    for side in sides:
        found[f"value {side}"] = values[side]
        if both:
            found[f"mean {side}"] = torch.cat([parts[side].mean for parts, _ in reduced])
        for place, name in enumerate(("reference", "tau")):
            found[f"{name} {side}"] = torch.cat([p.scalars[side][place] for p in pulled])
    return on_cpu(found)


def check_batch(given, loss, ranks, **options):
    want = of_batch(given, loss, 1, "cpu", torch.float64, **options)
    close = (*(rounded(t) for t in given[:2]), *given[2:])
    with rounded_products():
        plain = of_batch(close, loss, 1, "cpu", torch.float32, "float32", **options)
    assert_as_good(of_batch(given, loss, ranks, DEVICE, torch.float32, **options), plain, want)


@fused_here
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("loss", ["identity", "hinge", "sigmoid"])
def test_a_batch_on_some_ranks(loss, ranks):
    check_batch(pairs(70 if INTERPRETED else 1000, 24), loss, ranks)


@fused_here
@pytest.mark.parametrize("tau", [0.07, 0.01, 0.005])
def test_raw_similarities(tau):
    check_batch(pairs(66, 24, tau), "identity", 1, bias=0.0)


@fused_here
def test_small_terms_of_a_sigmoid():
    """Where a term is 1e-7, log(1 + e) must not be computed as it is written."""
    check_batch(pairs(66, 24, tau=1.0), "sigmoid", 1, bias=-16.0)


# ---------------------------------------------------------------------------------------------------------------------
# where they are used


def training(name, device, dtype, see=lambda rows: rows, steps=3, count=40, width=24, **settings):
    """The gradients and the state after a few steps."""
    objective = fb.make_objective(name, width=width, num_samples=1000, **settings).to(device, dtype)
    for step in range(steps):
        ids = (count * step + torch.arange(count)).to(device)
        rows = [see(unit_rows(count, width, seed + step)).to(device, dtype).requires_grad_() for seed in (1, 2)]
        grads = torch.autograd.grad(objective(*rows, ids).loss, rows)
    state = {key: t for key, t in objective.state_dict().items() if t.is_floating_point()}
    return on_cpu({"image": grads[0], "text": grads[1], **{key: t.detach() for key, t in state.items()}})


METHODS = {
    "openclip": {},
    "siglip": {},
    "simclr": {},
    "isogclr": {},
    "xbm": {"queue": 100, "starts_after": 1},
    "neuclip": {"prototypes": 32, "rho": 2.0, "updates": 2},
    "rolling": {"prototypes": 64, "updates": 2},
}


@fused_here
@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    want = training(name, "cpu", torch.float64, **METHODS[name])
    with rounded_products():
        plain = training(name, "cpu", torch.float32, rounded, operands="float32", **METHODS[name])
    got = training(name, DEVICE, torch.float32, **METHODS[name])
    assert_as_good(*({key: t.nan_to_num() for key, t in found.items()} for found in (got, plain, want)), floor=1e-3)


FITS = {
    "plain": {},
    "no epsilon": {"epsilon": 0.0},
    "large epsilon": {"epsilon": 0.5},
    "separate": {"fit": "separate"},
    "hinge": {"pairwise": SquaredHinge(0.3)},
    "in pieces": {"chunk": 20},
    "own positives left out": {"first_pair": 3},
}


def fitted(see, device, dtype, operands, pairwise=Identity(), chunk=None, first_pair=None, **changed):
    """How prototypes, of any length, and their accumulators change in three updates.  These are far from zero, so that
    a step is as large as its gradient; a first one is as large as the rate, whatever the gradient."""
    anchor, unit, reference, tau = rectangle(70, 90, 40, tau=0.03)
    used = see(unit) * (1.0 + torch.rand(90, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    start = [t.to(device, dtype) for t in (used, 1e-2 * torch.ones(90, 40))]
    config = Prototypes(prototypes=90, updates=3, prototype_lr=1e-3, **changed)
    direction = SimpleNamespace(
        anchor=SimpleNamespace(all_ND=see(anchor).to(device, dtype)),
        log_g_N=weights(70).to(device, dtype),
        reference_N=reference.to(device, dtype),
        tau_N=tau.to(device, dtype),
        guard=8.0,
    )
    after = [t.clone() for t in start]
    Pool(config, pairwise, {"chunk": chunk, "operands": operands}).fit(direction, *after, first_pair)
    return on_cpu({name: a - b for name, a, b in zip(("prototypes", "accumulator"), after, start, strict=True)})


@fused_here
@pytest.mark.parametrize("kind", FITS)
def test_prototypes_learn_alike(kind):
    want = fitted(lambda rows: rows, "cpu", torch.float64, "float32", **FITS[kind])
    plain = fitted(rounded, "cpu", torch.float32, "float32", **FITS[kind])
    got = fitted(lambda rows: rows, DEVICE, torch.float32, "float16", **FITS[kind])
    # weights, and prototypes between updates, are rounded too, each by 2^-12 on average; squares count twice
    assert_as_good(got, plain, want, floor=2.0**-10)
    split = fitted(lambda rows: rows, DEVICE, torch.float32, "split", **FITS[kind])
    assert error(split["prototypes"], want["prototypes"]) < error(got["prototypes"], want["prototypes"])


@fused_here
@pytest.mark.parametrize("name", METHODS)
def test_float32_operands_take_the_torch_code(name, monkeypatch):
    from fullbatch.objective import fused

    monkeypatch.delattr(fused, "reduce_block")
    training(name, DEVICE, torch.float32, operands="float32", **METHODS[name])
    with pytest.raises(NameError, match="reduce_block"):
        training(name, DEVICE, torch.float32, **METHODS[name])


@on_cuda
def test_the_same_bits_every_time():
    found = [of_batch(pairs(1000, 64), "identity", 1, DEVICE, torch.float32) for _ in range(3)]
    for again in found[1:]:
        assert all(torch.equal(again[name], found[0][name]) for name in again)


@on_cuda
def test_a_recorded_step_can_be_replayed():
    """The graph reads the rows that lie there when it runs."""
    objective = fb.make_objective("openclip").to("cuda")
    rows = [unit_rows(1000, 64, seed, torch.float32).cuda().requires_grad_() for seed in (1, 2)]

    def step():
        loss = objective(*rows).loss
        return loss, *torch.autograd.grad(loss, rows)

    for _ in range(9):
        step()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        for row, seed in zip(rows, (3, 4), strict=True):
            row.copy_(unit_rows(1000, 64, seed, torch.float32))
    graph.replay()
    for got, want in zip(recorded, step(), strict=True):
        assert torch.equal(got, want)
