"""Behaviour of the objective as a whole: schedules, notices, the guard, the settings users know by name."""

import copy
import logging
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import fullbatch as fb
from fullbatch.objective.log_domain import log_moving_average
from tests.conftest import unit_rows

TABLE = {
    *("openclip", "siglip", "gcl_batch", "sogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"),
    *("isogclr", "isogclr_new", "isogclr_new_v2", "tempnet", "amorlip", "neuclip", "tuneclip", "simclr"),
    *("cyclip", "vicreg"),
}


def rows(count=8, width=6, seed=0, dtype=torch.float32):
    return unit_rows(count, width, seed, dtype)


@pytest.mark.parametrize("method", ["neuclip", "rolling", "queue", "fastclip_v3"])
def test_the_budget_is_chosen_from_the_number_of_samples(method):
    """Half of the largest KL there can be; so no data set is too small for the default."""
    for count in (3, 100, 105_900):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            objective = fb.make_objective(method, width=6, num_samples=count)
        assert objective.method.temperature.rho == pytest.approx(0.5 * math.log(count - 1))
    assert fb.make_objective(method, width=6, num_samples=100, rho=1.5).method.temperature.rho == 1.5
    with pytest.raises(ValueError, match=r"RobustGlobal.rho must be a number or None, got 'x'"):
        fb.make_objective(method, width=6, num_samples=100, rho="x")


def test_without_their_number_the_budget_is_that_of_cc3m():
    assert fb.make_objective("neuclip", width=6).method.temperature.rho == 6.5


def test_the_methods_of_the_table_exist():
    assert set(fb.METHODS) >= TABLE


def test_the_call_of_the_readme():
    objective = fb.make_objective(
        "neuclip", width=512, temperature=0.07, rho=6.5, prototypes=4096, updates=10, restart_every=500
    )
    assert objective.method.normalizer.prototypes == 4096
    image, text = (rows(16, 512, seed).requires_grad_() for seed in (1, 2))
    out = objective(image, text)
    out.loss.backward()
    assert {"global_loss", "tau", "log_normalizer_image", "guarded"} <= set(out.metrics)
    assert image.grad is not None
    assert [name for name, _ in objective.named_parameters()] == ["temperatures.both.log_temperature"]


def test_axes_are_values():
    swapped = fb.make_objective(
        "neuclip", width=6, num_samples=90, pairwise=fb.SquaredHinge(0.1), temperature=fb.PerSample(rho=2.0)
    )
    assert swapped.method == fb.Method(fb.SquaredHinge(0.1), fb.Prototypes(), fb.PerSample(rho=2.0))
    same = fb.make_objective("fastclip_v1", num_samples=90, temperature=fb.RobustGlobal(0.07), gamma=0.2)
    assert same.method == fb.make_objective("fastclip_v3", num_samples=90).method


def test_published_prototypes_are_one_keyword_away():
    paper = fb.make_objective("neuclip", width=6, normalizer=fb.Prototypes.as_published())
    assert paper.normalizers["image"].lr == 1.0
    assert fb.make_objective("neuclip", width=6, prototype_lr=1.0).normalizers["image"].lr == 1.0
    assert math.isclose(fb.make_objective("neuclip", width=400).normalizers["image"].lr, 0.0025)


def test_settings_of_a_method():
    assert {"prototypes", "updates", "restart_every", "rho", "temperature"} <= set(
        fb.settings_of(fb.METHODS["neuclip"])
    )


# -- schedules --------------------------------------------------------------------------------------------------------


def test_gamma_follows_the_samples_seen():
    objective = fb.make_objective("fastclip_v1", num_samples=16, gamma=0.2, gamma_epochs=4)
    gammas = [float(objective(rows(), rows(seed=1), torch.arange(8)).metrics["gamma"]) for _ in range(12)]
    expected = [0.5 * (1 + math.cos(math.pi * min(e / 4, 1))) * 0.8 + 0.2 for e in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    assert gammas == pytest.approx(expected)
    assert objective.epoch == 6


def test_set_epoch_overrides_the_count_and_is_saved():
    objective = fb.make_objective("fastclip_v1", num_samples=16, gamma=0.2, gamma_epochs=4)
    objective.set_epoch(4)
    assert objective(rows(), rows(seed=1), torch.arange(8)).metrics["gamma"] == pytest.approx(0.2)
    other = fb.make_objective("fastclip_v1", num_samples=16, gamma=0.2, gamma_epochs=4)
    other.load_state_dict(objective.state_dict())
    assert other.epoch == 4


def test_gamma_is_constant_without_gamma_epochs():
    objective = fb.make_objective("sogclr", num_samples=16, gamma=0.3)
    for _ in range(5):
        assert objective(rows(), rows(seed=1), torch.arange(8)).metrics["gamma"] == 0.3


# -- what the moving average means ------------------------------------------------------------------------------------


def test_gamma_one_is_the_batch_gradient():
    """u = epsilon + g: SogCLR with gamma 1 is the plain mini-batch estimate."""
    image, text = (rows(seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2))
    found = []
    for objective in (
        fb.make_objective("sogclr", num_samples=8, gamma=1.0, temperature=0.1),
        fb.make_objective("gcl_batch", temperature=0.1),
    ):
        found.append(torch.autograd.grad(objective.double()(image, text, torch.arange(8)).loss, (image, text)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_with_a_frozen_model_u_converges_to_the_data_set():
    """The mean of u over many epochs is the exact normalizer (the batch mean is unbiased), far better than a batch."""
    image, text = rows(64, 8, 1, torch.float64), rows(64, 8, 2, torch.float64)
    objective = fb.make_objective("sogclr", num_samples=64, gamma=0.02, temperature=0.3).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        for ids in torch.randperm(64, generator=generator).split(8):
            objective(image[ids], text[ids], ids)
    exact = fb.exact_log_normalizers(image, text, 0.3)
    for name, want in zip(("image", "text"), exact, strict=True):
        error = (objective.normalizers[name].log_u.values - want).square().mean()
        assert error < 0.01


@settings(max_examples=50)
@given(
    st.lists(st.floats(-300, 300), min_size=1, max_size=6),
    st.floats(-300, 300),
    st.floats(1e-4, 1.0),
)
def test_log_moving_average_never_overflows(old, new, gamma):
    log_u = torch.tensor(old, dtype=torch.float64)
    got = log_moving_average(log_u, torch.full_like(log_u, new), gamma)
    assert torch.isfinite(got).all()
    assert torch.all(got <= torch.maximum(log_u, torch.full_like(log_u, new)) + 1e-9)
    assert torch.all(got >= torch.minimum(log_u, torch.full_like(log_u, new)) - 1e-9)


# -- the guard and the notices ----------------------------------------------------------------------------------------


def stale_objective():
    """Prototypes that point away from everything: alpha is far too low for the batch that follows."""
    objective = fb.make_objective("neuclip", width=6, prototypes=8, updates=0, restart_every=None, temperature=0.01)
    one = rows(1, 6, 3).repeat(8, 1)
    objective(-one, -one)
    return objective, one


def test_stale_prototypes_are_guarded_and_logged(caplog):
    objective, one = stale_objective()
    image, text = one.clone().requires_grad_(), one.clone().requires_grad_()
    with caplog.at_level(logging.WARNING, logger="fullbatch"):
        out = objective(image, text)
    out.loss.backward()
    assert float(out.metrics["guarded"]) == 1.0
    assert float(out.metrics["log_ratio_image"]) == pytest.approx(8.0)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(image.grad).all()
    assert "stale" in caplog.text
    assert "restart_every" in caplog.text


def test_notices_become_rare(caplog):
    objective, one = stale_objective()
    with caplog.at_level(logging.WARNING, logger="fullbatch"):
        for _ in range(20):
            objective(one, one)
    assert len([r for r in caplog.records if "stale" in r.message]) == 5  # 1st, 2nd, 4th, 8th, 16th


def test_a_temperature_on_its_bound_is_noticed(caplog):
    objective = fb.make_objective("fastclip_v3", num_samples=10_000, rho=3.0)
    with torch.no_grad():
        objective.temperatures["both"].log_temperature.fill_(-20.0)
    with caplog.at_level(logging.WARNING, logger="fullbatch"):
        out = objective(rows(), rows(seed=1), torch.arange(8))
    assert float(out.metrics["tau"]) == pytest.approx(0.01)
    assert "lower bound 0.01" in caplog.text


def test_temperatures_of_single_samples_on_their_bound_are_noticed(caplog):
    """With a budget of 8 the first visit takes each one there: 0.01 - 0.001 * 0.9 * (about 8) < 0.005."""
    objective = fb.make_objective("isogclr_new_v2", num_samples=10_000)
    with caplog.at_level(logging.WARNING, logger="fullbatch"):
        for _ in range(2):
            out = objective(rows(), rows(seed=1), torch.arange(8))
    assert float(out.metrics["tau"]) == pytest.approx(0.005)
    assert "lower bound 0.005" in caplog.text


def test_a_temperature_that_starts_on_its_bound_is_not_noticed(caplog):
    with caplog.at_level(logging.WARNING, logger="fullbatch"):
        fb.make_objective("openclip", temperature=0.01)(rows(), rows(seed=1))
    assert caplog.text == ""


def test_an_unreachable_rho_is_warned_of_with_its_bound():
    with pytest.warns(UserWarning, match=r"rho=6.5 .* = 4.60 of the data set \(100 samples\).*rho below 4.60"):
        fb.make_objective("fastclip_v3", num_samples=100, rho=6.5)
    batch = fb.make_objective("gcl_batch", temperature=fb.RobustGlobal(rho=3.0))
    with pytest.warns(UserWarning, match=r"log\(negatives\) = 1.95 of the batch \(8 samples\)"):
        batch(rows(), rows(seed=1))
    with pytest.warns(UserWarning, match=r"rho=9.0"):
        fb.make_objective("isogclr_new", num_samples=1000, rho=1.0, rho_text=9.0)


# -- modules ----------------------------------------------------------------------------------------------------------


def test_deep_copies_are_independent():
    objective = fb.make_objective("neuclip", width=6, prototypes=8)
    objective(rows(), rows(seed=1))
    twin = copy.deepcopy(objective)
    objective(rows(seed=2), rows(seed=3))
    assert twin.step == 1
    assert objective.step == 2


@pytest.mark.parametrize("name", list(fb.METHODS))
def test_objectives_can_be_pickled(name):
    objective = fb.make_objective(name, width=6, num_samples=90)
    twin = pickle.loads(pickle.dumps(objective))
    ids = torch.arange(8)
    assert torch.equal(twin(rows(), rows(seed=1), ids).loss, objective(rows(), rows(seed=1), ids).loss)


def test_a_second_backward_gives_the_same_gradient():
    image, text = rows().requires_grad_(), rows(seed=1).requires_grad_()
    loss = fb.make_objective("neuclip", width=6, prototypes=8)(image, text).loss
    first = torch.autograd.grad(loss, (image, text), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (image, text)), strict=True))


def test_a_temperature_out_of_bounds_is_clamped_in_eval_too():
    objective = fb.make_objective("openclip").eval()
    with torch.no_grad():
        objective.temperatures["both"].log_temperature.fill_(-20.0)
    assert float(objective(rows(), rows(seed=1)).metrics["tau"]) == pytest.approx(0.01)


def test_the_guard_bounds_the_gradient():
    """A stale normalizer must not make a step that ruins the optimizer's moments."""
    norms = {}
    for guard in (1.0, 8.0):
        objective = fb.make_objective(
            "neuclip", width=6, prototypes=8, updates=0, restart_every=None, temperature=0.01, guard=guard
        )
        one = rows(1, 6, 3).repeat(8, 1)
        objective(-one, -one)
        image = normalize(one + 0.05 * rows(seed=4), dim=-1).requires_grad_()
        objective(image, normalize(one + 0.05 * rows(seed=5), dim=-1)).loss.backward()
        norms[guard] = float(image.grad.norm())
    assert norms[1.0] < 10.0
    assert norms[1.0] < norms[8.0] < 1e5


def test_works_under_autocast_and_no_grad():
    objective = fb.make_objective("fastclip_v3", num_samples=10_000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = objective(rows(), rows(seed=1), torch.arange(8))
    assert out.loss.dtype == torch.float32
    with torch.no_grad():
        assert torch.isfinite(objective(rows(), rows(seed=1), torch.arange(8)).loss)
    assert objective.step == 2


def test_a_moving_average_is_asked_for_what_it_remembers():
    """The rows that ask must not improve the answer."""
    image, text = rows(64, 6, 1), rows(64, 6, 2)
    objective = fb.make_objective("sogclr", num_samples=64, gamma=0.9, temperature=0.2)
    for ids in torch.arange(64).split(8):
        objective(image[ids], text[ids], ids)
    believed, _ = objective.log_normalizers(image, text, torch.arange(64))
    torch.testing.assert_close(believed, objective.normalizers["image"].log_u.values)


def test_log_normalizers_are_what_the_method_believes():
    image, text = rows(32, 6, 1), rows(32, 6, 2)
    exact = fb.exact_log_normalizers(image, text, 0.2)
    batch = fb.make_objective("gcl_batch", temperature=0.2).log_normalizers(image, text)
    prototypes = fb.make_objective("neuclip", width=6, temperature=fb.Constant(0.2), prototypes=32, updates=0)
    prototypes(image, text)
    for got, want in zip(batch, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    before = copy.deepcopy(prototypes.state_dict())
    believed = prototypes.log_normalizers(image, text)
    assert all(torch.isfinite(b).all() for b in believed)
    for key, value in prototypes.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no normalizer"):
        fb.make_objective("siglip").log_normalizers(image, text)
