"""A replayed step of the objective is the step.  CI has no GPU: there most of these tests skip and say so."""

import copy
import pickle

import pytest
import torch

import fullbatch as fb
from fullbatch.objective import recorded
from tests.conftest import unit_rows

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SETTINGS = {
    "neuclip": {"prototypes": 96, "updates": 3, "restart_every": 11},
    "rolling": {"prototypes": 96, "updates": 3},
}
METHODS = (
    "openclip", "siglip", "simclr", "cyclip", "vicreg", "sogclr", "fastclip_v3", "isogclr", "scent", "xbm", "amorlip",
    "tempnet", "tuneclip", "neuclip", "rolling", "queue",
)  # fmt: skip
COUNT, WIDTH = 48, 16


def steps(objective, device, count=30, dtype=torch.float32):
    """Losses, gradients and metrics of some steps, and the state they leave."""
    found = []
    for step in range(count):
        rows = [unit_rows(COUNT, WIDTH, 2 * step + side, dtype).to(device).requires_grad_() for side in (0, 1)]
        ids = (torch.arange(COUNT) * 7 + 5 * step).remainder(200).to(device)
        output = objective(*rows, ids)
        output.loss.backward()
        metrics = {name: float(value) for name, value in output.metrics.items()}
        found.append((output.loss.detach(), *(row.grad for row in rows), metrics))
    return found, objective.state_dict()


def made(method, device):
    torch.manual_seed(0)
    settings = {"width": WIDTH, "num_samples": 200, **SETTINGS.get(method, {})}
    return fb.make_objective(method, **settings).to(device)


def assert_same(one, other):
    for (loss, image, text, metrics), (loss_2, image_2, text_2, metrics_2) in zip(one[0], other[0], strict=True):
        for a, b in ((loss, loss_2), (image, image_2), (text, text_2)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert metrics == pytest.approx(metrics_2, rel=1e-4, abs=1e-5, nan_ok=True)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.fixture
def replays(monkeypatch):
    """How often a step was taken from a recording."""
    taken = []
    take = recorded.Recordings.take
    monkeypatch.setattr(recorded.Recordings, "take", lambda self, *given: taken.append(1) or take(self, *given))
    return taken


@pytest.mark.filterwarnings("ignore:rho=")
@on_cuda
@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_are_the_steps(method, replays):
    plain, replayed = made(method, "cuda"), made(method, "cuda")
    replayed.record()
    want = steps(plain, "cuda")
    assert not replays
    got = steps(replayed, "cuda")
    assert_same(got, want)
    assert len(replays) > 10 or method == "tempnet", "its dropout is seeded by the host"


@on_cuda
def test_gradients_wait_for_their_backward_pass():
    """As when several batches are embedded before the first is pulled back."""
    plain, replayed = made("openclip", "cuda"), made("openclip", "cuda")
    replayed.record()
    for objective in (plain, replayed):
        steps(objective, "cuda", 20)
    found = []
    for objective in (plain, replayed):
        rows = [unit_rows(COUNT, WIDTH, seed, torch.float32).cuda().requires_grad_() for seed in range(4)]
        first, second = objective(*rows[:2]).loss, objective(*rows[2:]).loss
        (3.0 * first + second).backward()
        found.append([row.grad for row in rows] + [objective.temperatures["both"].log_temperature.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_cuda
def test_what_is_moved_is_recorded_anew(replays):
    plain, replayed = made("sogclr", "cuda"), made("sogclr", "cuda")
    replayed.record()
    steps(plain, "cuda", 20), steps(replayed, "cuda", 20)
    replayed.load_state_dict(replayed.cpu().state_dict())
    replayed.cuda()
    count = len(replays)
    assert_same(steps(replayed, "cuda", 20), steps(plain, "cuda", 20))
    assert len(replays) > count + 10


@on_cuda
def test_batches_of_many_sizes(replays):
    objective = made("openclip", "cuda")
    objective.record()
    steps(objective, "cuda", 12)
    for count in range(10, 30):
        rows = [unit_rows(count, WIDTH, seed, torch.float32).cuda().requires_grad_() for seed in (0, 1)]
        objective(*rows).loss.backward()
    assert len(objective._replayer.inputs) == recorded.MOST_SHAPES


@pytest.mark.filterwarnings("ignore:rho=")
@pytest.mark.parametrize("method", ["openclip", "sogclr", "neuclip"])
def test_elsewhere_steps_are_as_ever(method):
    plain, asked = made(method, "cpu"), made(method, "cpu")
    asked.record()
    assert_same(steps(asked, "cpu", 12), steps(plain, "cpu", 12))
    for twin in (copy.deepcopy(asked), pickle.loads(pickle.dumps(asked))):
        assert_same(steps(twin, "cpu", 2), steps(copy.deepcopy(plain), "cpu", 2))
