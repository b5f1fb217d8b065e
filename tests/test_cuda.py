"""On a GPU: the numbers of the CPU, and no step that makes the host wait.  Skipped where there is none, as in CI."""

import pytest
import torch

import fullbatch as fb
from tests.combinations import COMBINATIONS, SAMPLES, WIDTH, make
from tests.conftest import unit_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
EVERYTHING = [*COMBINATIONS, *fb.METHODS]
BATCH = 8


def run(name, device, steps=4, **changes):
    objective = make(name, **changes).double().to(device)
    record = []
    for step in range(steps):
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH].to(device)
        image, text = (unit_rows(BATCH, WIDTH, seed + step).to(device).requires_grad_() for seed in (1, 2))
        out = objective(image, text, ids)
        record.append([out.loss.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(out.loss, (image, text)))])
    return record


@pytest.mark.parametrize("name", [n for n in EVERYTHING if "predicted" not in n and n != "tempnet"])
def test_equal_to_the_cpu(name):
    """TempNet's dropout draws from the device's generator, and so does a random subset of prototypes."""
    changes = {"prototypes": 40} if "separate" in name else {}
    for got, want in zip(run(name, "cuda", **changes), run(name, "cpu", **changes), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", EVERYTHING)
def test_bf16_is_finite(name):
    objective = make(name).to("cuda")
    for step in range(3):
        image, text = (unit_rows(BATCH, WIDTH, s + step).to("cuda", torch.bfloat16).requires_grad_() for s in (1, 2))
        with torch.autocast("cuda", torch.bfloat16):
            loss = objective(image, text, torch.arange(BATCH)).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(image.grad).all()


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_host_never_waits(name):
    """After the first calls no operation reads from the device: the GPU's queue stays full."""
    objective = make(name).to("cuda")
    ids = torch.arange(BATCH, device="cuda")
    image, text = (unit_rows(BATCH, WIDTH, s, torch.float32).to("cuda").requires_grad_() for s in (1, 2))
    for _ in range(9):
        objective(image, text, ids).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            objective(image, text, ids).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert objective.step == 12
