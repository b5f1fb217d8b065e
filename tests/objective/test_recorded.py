"""A replayed step of the objective is the step.  Where there is no GPU, the graph is one that computes it again."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

import fullbatch as fb
from fullbatch.objective import advice, recorded
from tests.conftest import unit_rows

_FEW = {"prototypes": 96, "updates": 3}
SETTINGS = {
    "neuclip": {**_FEW, "restart_every": 11},
    "rolling": _FEW,
    "queue": {"prototypes": 96},
    "xbm": {"queue": 96, "starts_after": 12},
}
METHODS = (
    "openclip", "siglip", "simclr", "cyclip", "vicreg", "sogclr", "fastclip_v3", "isogclr", "scent", "xbm", "amorlip",
    "tempnet", "tuneclip", "neuclip", "rolling", "queue",
)  # fmt: skip
COUNT, WIDTH = 48, 16
pytestmark = pytest.mark.filterwarnings("ignore:rho=")


class Again:
    """In a graph's place: computes the step again, into the memory that the first one left."""

    def __init__(self, step, result, counters, recorded_at):
        self.step, self.result, self.counters, self.recorded_at = step, result, counters, recorded_at

    def replay(self):
        """No Python runs when a graph does: counters are what they were while it was recorded."""
        now = [getattr(module, name) for module, name in self.counters]
        set_counters(self.counters, self.recorded_at)
        new = self.step()
        set_counters(self.counters, now)
        pairs = zip(self.result.gradients, new.gradients, strict=True)
        for kept, found in [(self.result.loss, new.loss), (self.result.numbers, new.numbers), *pairs]:
            if kept is not None:
                kept.copy_(found)


def set_counters(counters, values):
    for (module, name), value in zip(counters, values, strict=True):
        setattr(module, name, value)


def captured_again(self, step):
    """What is computed while a graph is recorded changes nothing."""
    owner = next(module for module, _ in self.counters if isinstance(module, fb.Objective))
    tensors = [*owner.parameters(), *owner.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    counted = [getattr(module, name) for module, name in self.counters]
    result = step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.data.copy_(old)
    return Again(step, result, self.counters, counted), result


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ]
)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(recorded.Recordings, "_captured", captured_again)
        monkeypatch.setattr(recorded, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(advice, "check_unit_rows", lambda name, rows: None)  # a GPU seldom looks
        for name, stand_in in {
            "graph_pool_handle": lambda: 0,
            "Stream": lambda device: None,
            "device": lambda device: nullcontext(),
            "is_current_stream_capturing": lambda: False,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
    return request.param


@pytest.fixture
def replays(monkeypatch):
    """A list as long as steps were taken from recordings."""
    taken = []
    replay = recorded.Recordings.replay
    monkeypatch.setattr(recorded.Recordings, "replay", lambda self, *given: taken.append(1) or replay(self, *given))
    return taken


def rows_of(step, device, dtype=torch.float32, count=COUNT):
    return [unit_rows(count, WIDTH, 2 * step + side).to(device, dtype).requires_grad_() for side in (0, 1)]


def steps(objective, device, count=30, dtype=torch.float32, weigh=lambda loss: loss, more=lambda step: ()):
    """Losses, gradients and metrics of some steps, and the state they leave."""
    found = []
    for step in range(count):
        rows = rows_of(step, device, dtype)
        ids = (torch.arange(COUNT) * 7 + 5 * step).remainder(200).to(device)
        output = objective(*rows, ids, *more(step))
        weigh(output.loss).backward()
        metrics = {name: float(value) for name, value in output.metrics.items()}
        found.append((output.loss.detach(), *(row.grad for row in rows), metrics))
    own = [p.grad for p in objective.parameters()]
    return found, {**objective.state_dict(), **{f"gradient {place}": g for place, g in enumerate(own) if g is not None}}


def made(method, device, **more):
    torch.manual_seed(0)
    settings = {"width": WIDTH, "num_samples": 200, **SETTINGS.get(method, {}), **more}
    return fb.make_objective(method, **settings).to(device)


def pair(method, device, **more):
    """One that is run plainly, and one that may be recorded."""
    plain, replayed = made(method, device, **more), made(method, device, **more)
    replayed.record()
    return plain, replayed


def assert_same(one, other, **close):
    close = close or {"rtol": 0.0, "atol": 0.0}
    for (loss, image, text, metrics), (loss_2, image_2, text_2, metrics_2) in zip(one[0], other[0], strict=True):
        for a, b in ((loss, loss_2), (image, image_2), (text, text_2)):
            torch.testing.assert_close(a, b, **close)
        assert metrics == pytest.approx(metrics_2, rel=1e-6, nan_ok=True)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], equal_nan=True, **close)


@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_are_the_steps(method, device, replays):
    plain, replayed = pair(method, device)
    want = steps(plain, device)
    assert not replays
    # index_add_ on a GPU adds in any order
    close = {"rtol": 1e-5, "atol": 1e-6} if device == "cuda" and plain.method.needs_ids else {}
    assert_same(steps(replayed, device), want, **close)
    assert len(replays) > 10


def test_tables_of_16_bits_are_rounded_alike(device, replays):
    """Their noise is the step's."""
    plain, replayed = pair("sogclr", device, table_dtype=torch.float16)
    want = steps(plain, device)
    assert_same(steps(replayed, device), want, rtol=1e-5, atol=1e-6 if device == "cpu" else 2e-3)
    assert len(replays) > 10


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("method", ["sogclr", "neuclip"])
def test_steps_on_selected_batches(method, weights, device, replays):
    """Each has corrections of its own."""

    def more(step):
        return (torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(step)).to(device),)

    plain, replayed = pair(method, device, correct_weights=weights)
    want = steps(plain, device, more=more)
    close = {"rtol": 1e-5, "atol": 1e-6} if device == "cuda" and plain.method.needs_ids else {}
    assert_same(steps(replayed, device, more=more), want, **close)
    assert len(replays) > 10


@pytest.mark.parametrize("method", ["sogclr", "neuclip"])
def test_a_correction_is_a_number_whatever_it_was_computed_from(method, device, replays):
    """As in a plain step no gradient goes on through it, and the others arrive where they belong."""
    handed_over = []

    def more(step):
        handed_over.append(torch.full((COUNT, 2), -0.1 * step, device=device, requires_grad=True))
        return handed_over[-1:]

    plain, replayed = pair(method, device)
    want = steps(plain, device, 20, more=more)
    assert_same(steps(replayed, device, 20, more=more), want, rtol=1e-5, atol=1e-6)
    assert len(replays) > 5 and all(log_c.grad is None for log_c in handed_over)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 65536.0), (torch.bfloat16, 0.3), (torch.float32, 0.3)])
def test_losses_that_are_weighed(dtype, factor, device, replays):
    """As a gradient scaler does, or one who adds losses; rows of 16 bits get gradients of 16 bits, once.  On a GPU the
    gradient to a similarity is rounded to 11 bits: in the one case before it is weighed, in the other after."""
    plain, replayed = pair("openclip", device)
    want, got = (steps(each, device, 20, dtype, lambda loss: factor * loss)[0] for each in (plain, replayed))
    assert len(replays) > 5 and got[-1][1].dtype == dtype
    rounding = torch.finfo(dtype).eps + (2**-11 if device == "cuda" else 0.0)
    for (loss, *rows, _), (loss_2, *rows_2, _) in zip(got, want, strict=True):
        torch.testing.assert_close(loss, loss_2)
        for row, row_2 in zip(rows, rows_2, strict=True):
            assert (row.double() - row_2.double()).norm() <= 2 * rounding * row_2.double().norm()


def test_a_loss_that_is_still_held(device, replays):
    """It keeps the graph of its step alive, and with it the place where gradients to tau are added up."""
    objective, held = made("openclip", device), []
    objective.record()
    for step in range(20):
        held.append(objective(*rows_of(step, device)).loss)
        held[-1].backward()
    assert len(replays) > 5
    assert device == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()


def test_under_autocast(device, replays):
    found = []
    for objective in pair("vicreg", device):
        gradients = []
        for step in range(20):
            rows = rows_of(step, device)
            with torch.autocast(device, torch.bfloat16):
                loss = objective(*rows).loss
            loss.backward()
            gradients += [row.grad for row in rows]
        found.append(gradients)
    assert len(replays) > 5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gradients_wait_for_their_backward_pass(device):
    """As when several batches are embedded before the first is pulled back."""
    found = []
    for objective in pair("openclip", device):
        steps(objective, device, 20)
        objective.zero_grad()
        first, second = rows_of(1, device), rows_of(2, device)
        losses = objective(*first).loss, objective(*second).loss
        (4.0 * losses[0] + losses[1]).backward()
        found.append([*(row.grad for row in (*first, *second)), objective.temperatures["both"].log_temperature.grad])
        with pytest.raises(RuntimeError, match="a second time"):
            losses[0].backward()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def freeze(objective):
    objective.temperatures["both"].log_temperature.requires_grad_(False)


def assign(objective):
    objective.load_state_dict(copy.deepcopy(objective.state_dict()), assign=True)


def move(objective):
    device = next(objective.buffers(), next(objective.parameters(), None)).device
    objective.double().float().to(device)


@pytest.mark.parametrize(("method", "change"), [("openclip", freeze), ("sogclr", assign), ("neuclip", move)])
def test_what_is_changed_is_recorded_anew(method, change, device, replays):
    plain, replayed = pair(method, device)
    for each in (plain, replayed):
        steps(each, device, 20)
        each.zero_grad()
        change(each)
    count = len(replays)
    close = {"rtol": 1e-5, "atol": 1e-6} if device == "cuda" and method == "sogclr" else {}
    assert_same(steps(replayed, device, 20), steps(plain, device, 20), **close)
    assert len(replays) > count + 10


def test_batches_of_many_sizes(device, replays):
    objective = pair("openclip", device)[1]
    steps(objective, device, 12)
    for count in [*range(10, 30), *range(10, 30)]:
        objective(*rows_of(1, device, count=count)).loss.backward()
    assert len(objective._replayer.inputs) == recorded.MOST_SHAPES


def test_nothing_to_learn_is_nothing_to_record(device, replays):
    plain, replayed = pair("gcl_batch", device)
    for each in (plain, replayed):
        steps(each, device, 14)
        each(*(row.detach() for row in rows_of(0, device)))
    count = len(replays)
    steps(replayed, device, 3)
    assert len(replays) == count + 3


@pytest.mark.parametrize("problem", [RuntimeError("captured"), torch.OutOfMemoryError("no memory")])
def test_what_cannot_be_recorded_is_run_plainly(problem, device, replays, monkeypatch, caplog):
    plain, replayed = pair("sogclr", device)
    work = fb.Objective.plain_step

    def breaks_off(self, *given):
        output = work(self, *given)
        if len(replays) > before:
            before_now.append(1)
            raise problem
        return output

    before, before_now = 0, []
    want = steps(plain, device, 20)
    monkeypatch.setattr(fb.Objective, "plain_step", breaks_off)

    def replay(self, *given, old=recorded.Recordings.replay):
        try:
            return old(self, *given)
        finally:
            replays.clear()

    monkeypatch.setattr(recorded.Recordings, "replay", replay)
    with caplog.at_level("WARNING", "fullbatch"):
        got = steps(replayed, device, 20)
    assert before_now and "are not recorded" in caplog.text
    assert [line[3]["epoch"] for line in got[0]] == [line[3]["epoch"] for line in want[0]]


@pytest.mark.parametrize("method", ["openclip", "sogclr", "neuclip"])
def test_elsewhere_steps_are_as_ever(method):
    plain, asked = pair(method, "cpu")
    assert_same(steps(asked, "cpu", 12), steps(plain, "cpu", 12))
    for twin in (copy.deepcopy(asked), pickle.loads(pickle.dumps(asked))):
        assert_same(steps(twin, "cpu", 2), steps(copy.deepcopy(plain), "cpu", 2))
