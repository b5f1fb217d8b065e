"""What every combination of pairwise x normalizer x temperature promises, whatever it is made of."""

import dataclasses
import io

import pytest
import torch

import fullbatch as fb
from tests.combinations import COMBINATIONS, SAMPLES, WIDTH, make, parts, tiered
from tests.conftest import unit_rows

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
BATCH = 8
EVERYTHING = [*COMBINATIONS, *fb.METHODS]


def batch(step, dtype=torch.float64, count=BATCH):
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
    rows = [unit_rows(SAMPLES, WIDTH, seed + step)[order[:count]] for seed in (100, 200)]
    return (*(r.to(dtype).requires_grad_() for r in rows), order[:count])


def gradients(objective, image, text, ids):
    out = objective(image, text, ids)
    parameters = list(objective.parameters())
    found = torch.autograd.grad(out.loss, (image, text, *parameters), allow_unused=True)
    return out, found[:2], found[2:]


def step(objective, image, text, ids):
    """One training step in which the objective's own parameters move as well."""
    out, rows, own = gradients(objective, image, text, ids)
    with torch.no_grad():
        for parameter, gradient in zip(objective.parameters(), own, strict=True):
            if gradient is not None:
                parameter -= 0.01 * gradient
    return out, rows, own


EMBEDDINGS = {
    "random": lambda: (unit_rows(BATCH, WIDTH, 1), unit_rows(BATCH, WIDTH, 2)),
    "identical": lambda: (unit_rows(1, WIDTH, 1).repeat(BATCH, 1),) * 2,
    "antipodal": lambda: (unit_rows(1, WIDTH, 1).repeat(BATCH, 1), -unit_rows(1, WIDTH, 1).repeat(BATCH, 1)),
    "aligned": lambda: (unit_rows(BATCH, WIDTH, 1),) * 2,
}


@pytest.mark.parametrize("name", tiered(EVERYTHING))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_the_smallest_temperature(name, dtype):
    """Value and gradient at tau = 0.005 for random, identical, antipodal and aligned embeddings, in turn."""
    changes = {}
    temperature = make(name).method.temperature
    bounds = {"temperature_min": 0.005, "temperature_max": 0.006}
    own = {field.name for field in dataclasses.fields(temperature)}
    changes = {key: value for key, value in {"temperature": 0.005, **bounds}.items() if key in own}
    changed = dataclasses.replace(temperature, **changes)
    objective = make(name, temperature=changed)
    for kind, rows in EMBEDDINGS.items():
        image, text = (r.to(dtype).requires_grad_() for r in rows())
        out, found, own_found = gradients(objective, image, text, torch.arange(BATCH))
        assert torch.isfinite(out.loss), kind
        assert all(torch.isfinite(g).all() for g in found), kind
        assert all(torch.isfinite(g).all() for g in own_found if g is not None), kind
        assert all(torch.isfinite(torch.as_tensor(v)) for v in out.metrics.values()), kind
        assert found[0].dtype == dtype


@pytest.mark.parametrize("name", tiered(EVERYTHING))
def test_relabelling_the_batch_permutes_the_gradient(name):
    changes = {"dropout": 0.0} if "predicted" in name or name == "tempnet" else {}
    if "predicted" in name:
        changes = {"temperature": dataclasses.replace(parts(name)["temperature"], dropout=0.0, centers=BATCH)}
    if name == "tempnet":
        changes["centers"] = BATCH
    if "separate" in name:
        changes["prototypes"] = BATCH
    first, second = make(name, **changes).double(), make(name, **changes).double()
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(5))
    for number in range(3):
        image, text, ids = batch(number)
        out, rows, _ = step(first, image, text, ids)
        shuffled = [t.detach()[order].requires_grad_() for t in (image, text)]
        other, other_rows, _ = step(second, *shuffled, ids[order])
        torch.testing.assert_close(other.loss, out.loss, rtol=1e-8, atol=1e-10)
        for a, b in zip(other_rows, rows, strict=True):
            torch.testing.assert_close(a, b[order], rtol=1e-6, atol=1e-9)


ROTATES = [
    name
    for name in EVERYTHING
    if not any(part in name for part in ("mlp", "amortized", "amorlip", "predicted", "tempnet", "vicreg"))
]


@pytest.mark.parametrize("name", tiered(ROTATES))
def test_rotation_changes_nothing(name):
    """What reads coordinates is exempt: nets, VICReg's covariances, and AdaGrad's updates."""
    changes = {"updates": 0} if any(part in name for part in ("prototypes", "separate", "neuclip", "rolling")) else {}
    plain, rotated = make(name, **changes).double(), make(name, **changes).double()
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)).double()).Q
    for number in range(3):
        image, text, ids = batch(number)
        out, rows, _ = gradients(plain, image, text, ids)
        turned = [(t.detach() @ turn).requires_grad_() for t in (image, text)]
        other, other_rows, _ = gradients(rotated, *turned, ids)
        torch.testing.assert_close(other.loss, out.loss, rtol=1e-9, atol=1e-11)
        for a, b in zip(other_rows, rows, strict=True):
            torch.testing.assert_close(a, b @ turn, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", tiered(EVERYTHING))
def test_state_comes_back_exactly(name):
    """Save after three steps into bytes, load into a new objective: the next steps are equal to the bit."""
    first = make(name)
    for number in range(3):
        step(first, *batch(number, torch.float32))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(name, seed=0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for number in range(3, 6):
        data = batch(number, torch.float32)
        (out, rows, _), (other, other_rows, _) = step(first, *data), step(second, *data)
        assert torch.equal(out.loss, other.loss)
        assert all(torch.equal(a, b) for a, b in zip(rows, other_rows, strict=True))
    for key, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


@pytest.mark.parametrize("name", tiered(EVERYTHING))
def test_eval_mode_changes_no_state(name):
    objective = make(name)
    step(objective, *batch(0, torch.float32))
    before = {key: torch.as_tensor(value).clone() for key, value in objective.state_dict().items()}
    objective.eval()
    out = objective(*batch(1, torch.float32))
    assert torch.isfinite(out.loss)
    for key, value in objective.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(value), before[key], rtol=0, atol=0, equal_nan=True, msg=key)


@pytest.mark.parametrize("name", tiered(EVERYTHING))
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_change_nothing(name, chunk):
    whole, chunked = make(name).double(), make(name, chunk=chunk).double()
    for number in range(3):
        data = batch(number)
        (out, rows, own), (other, other_rows, other_own) = step(whole, *data), step(chunked, *data)
        torch.testing.assert_close(other.loss, out.loss, rtol=1e-9, atol=1e-11)
        for a, b in zip((*rows, *own), (*other_rows, *other_own), strict=True):
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-10)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(chunked.state_dict()[key], value, rtol=1e-7, atol=1e-9, equal_nan=True, msg=key)


@pytest.mark.parametrize("name", tiered(EVERYTHING))
def test_only_temperatures_are_parameters(name):
    named = [key for key, _ in make(name).named_parameters()]
    allowed = ("temperatures.", "bias") + (("normalizers.",) if "simultaneous" in name else ())
    assert all(key.startswith(allowed) for key in named)
