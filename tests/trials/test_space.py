"""Dimensions and their names: what a range is, and that a setting is searched exactly where it counts."""

import re
from itertools import product

import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullbatch.config.methods import METHODS, settings_of
from fullbatch.config.optimization import OPTIMIZER_SETTINGS, OPTIMIZERS, Optimizer
from fullbatch.training.optimizer import make_optimizer
from fullbatch.trials.space import (
    Choice,
    Real,
    Whole,
    dimension_as_dict,
    dimension_from,
    known_to_one,
    place_of,
    resolved,
    searched_place,
    value_in,
)
from tests.trials.plans import plan_of

# ---------------------------------------------------------------------------------------------------------------------
# dimensions

lows = st.floats(1e-6, 1e3)
reals = st.builds(lambda low, width, log: Real(low, low + width, log), lows, st.floats(0.01, 1e3), st.booleans())
stepped = st.builds(
    lambda low, step, count: Real(low * 0.5, low * 0.5 + step * 0.25 * count, step=step * 0.25),
    st.integers(-9, 9), st.integers(1, 9), st.integers(1, 9),
)  # fmt: skip
wholes = st.builds(
    lambda low, step, count: Whole(low, low + step * count, step=step),
    st.integers(-50, 50), st.integers(1, 9), st.integers(1, 9),
)  # fmt: skip
logs = st.builds(lambda low, width: Whole(low, low + width, log=True), st.integers(1, 50), st.integers(1, 500))
plain = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["cosine", "tanh", ""])
choices = st.builds(Choice, st.lists(plain, min_size=2, max_size=5, unique_by=lambda v: v).map(tuple))
dimensions = reals | stepped | wholes | logs | choices


@given(dimensions)
def test_a_dimension_is_read_as_it_is_written(dimension):
    assert dimension_from("x", dimension_as_dict(dimension)) == dimension


@settings(max_examples=50)
@given(dimensions)
def test_ends_are_held_and_the_sampler_stays_within(dimension):
    assert all(dimension.holds(end) for end in dimension.ends)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    for _ in range(3):
        trial = study.ask()
        value = dimension.suggest(trial, "x")
        assert dimension.holds(value)


def test_what_is_not_held():
    assert not Real(0.0, 1.0).holds(1.5) and not Real(0.0, 1.0).holds(None) and not Real(0.0, 1.0).holds("a")
    assert not Real(0.0, 1.0, step=0.25).holds(0.3) and Real(0.0, 1.0, step=0.25).holds(0.75)
    assert Whole(0, 6, step=2).holds(4.0) and not Whole(0, 6, step=2).holds(3) and not Whole(0, 6, step=2).holds(2.5)
    assert Choice((0, 1.5)).holds(0.0) and not Choice((0, 1.5)).holds(False) and not Choice((0, 1.5)).holds(None)
    assert Choice((None, 1)).holds(None)


def test_whole_numbers_make_a_dimension_of_whole_numbers():
    assert dimension_from("x", {"low": 0, "high": 5}) == Whole(0, 5)
    assert dimension_from("x", {"low": 0, "high": 6, "step": 2}) == Whole(0, 6, step=2)
    assert dimension_from("x", {"low": 0.0, "high": 5}) == Real(0.0, 5)
    assert dimension_from("x", {"low": 0, "high": 1, "step": 0.25}) == Real(0, 1, step=0.25)
    assert dimension_from("x", ["a", "b"]) == dimension_from("x", {"choices": ["a", "b"]}) == Choice(("a", "b"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"low": 2, "high": 2}, "space.lr: Whole.low must be less than high (2), got 2"),
        ({"low": 3.0, "high": 2.0}, "space.lr: Real.low must be less than high (2.0), got 3.0"),
        ({"low": 0.0, "high": 1.0, "log": True}, "space.lr: Real.low must be positive with log, got 0.0"),
        ({"low": -1, "high": 1, "log": True}, "Whole.low must be positive with log, got -1"),
        ({"low": "small", "high": 1.0}, "Real.low must be a number, got 'small'"),
        ({"low": 0.0, "high": float("inf")}, "Real.high must be a number, got inf"),
        ({"low": 0, "high": 5, "step": 2}, "Whole.step must divide high - low (5), got 2"),
        ({"low": 0.0, "high": 1.0, "step": 0.3}, "Real.step must divide high - low (1), got 0.3"),
        ({"low": 0.1, "high": 1.0, "step": 0.1, "log": True}, "Real.step must be left out with log"),
        ({"low": 0.1, "high": 1.0, "log": "yes"}, "Real.log must be true or false, got 'yes'"),
        ({"low": 1.0}, "space.lr must have low and high, or choices"),
        ({"low": 1.0, "hihg": 2.0}, "space.lr has no 'hihg'; did you mean 'high'?"),
        ({"choices": [1]}, "Choice.values must be at least two, all different, got (1,)"),
        ({"choices": [1, 1.0]}, "Choice.values must be at least two, all different"),
        ({"choices": [[1, 2], [3, 4]]}, "Choice.values must be words, numbers, true, false or null"),
        ({"choices": "ab"}, "space.lr: choices are a list"),
        ({"choices": [1, 2], "low": 1}, "space.lr: choices are a list, without low"),
        (0.1, "space.lr must be {low: ..., high: ...} or {choices: [...]}, got 0.1"),
    ],
)
def test_a_wrong_dimension_is_refused(values, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        dimension_from("lr", values)


# ---------------------------------------------------------------------------------------------------------------------
# names

SETTINGS = sorted({name for method in METHODS.values() for name in settings_of(method)})


def test_three_names_are_flags_and_settings():
    both = [name for name in SETTINGS if place_of(name, "space").group]
    assert both == ["ema", "schedule", "temperature_lr"]
    for name in both:
        setting = place_of(f"settings.{name}", "space")
        assert (setting.group, setting.plain, setting.key) == ("", f"settings.{name}", f"settings.{name}")
        assert place_of(f"isogclr.settings.{name}", "space").key == f"isogclr.settings.{name}"


def test_a_setting_has_one_key():
    assert place_of("settings.gamma", "space") == place_of("gamma", "space")
    assert place_of("sogclr.gamma", "space").plain == "gamma"
    assert place_of("gamma", "x").grouped(0.5) == {"objective": {"settings": {"gamma": 0.5}}}
    assert place_of("sgd.lr", "x").grouped(0.5) == {"optimizer": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("gama", "space: neither a run nor a method has 'gama'; did you mean 'gamma'?"),
        ("settings.lr", "space: neither a run nor a method has 'lr'"),
        ("adanw.lr", "space.adanw.lr: there is no method or optimizer 'adanw'; did you mean 'adamw'?"),
        ("sgd.moment", "neither a run nor a method has 'moment'; did you mean 'momentum'?"),
        ("method", "space.method cannot be set there: `methods` names them all."),
        ("optimizer", "space.optimizer cannot be set there: `optimizers` names them all."),
        ("seed", "space.seed cannot be set there"),
        ("settings", "name the settings themselves, such as gamma"),
        ("normalizer", "it decides which settings there are; name it under `base`"),
        ("evaluate_every", "space.evaluate_every is no dimension"),
        ("log_every", "space.log_every is no dimension"),
    ],
)
def test_a_wrong_name_is_refused(key, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        searched_place(key)


@pytest.mark.parametrize("name", METHODS)
def test_settings_count_exactly_for_the_methods_that_have_them(name):
    method = METHODS[name]
    counted = [key for key in SETTINGS if place_of(f"settings.{key}", "space").counts(name, method, "adamw")]
    assert tuple(counted) == settings_of(method)
    other = next(other for other in METHODS if other != name)
    assert not any(place_of(f"{other}.settings.{key}", "x").counts(name, method, "adamw") for key in SETTINGS)


def test_the_temperatures_rate_counts_where_the_optimizer_moves_it():
    place = place_of("temperature_lr", "space")
    moved = {name for name, method in METHODS.items() if place.counts(name, method, "adamw")}
    assert moved == {
        "openclip", "siglip", "cyclip", "xbm", "fastclip_v0", "fastclip_v3", "tempnet", "neuclip", "rolling", "queue",
        "amorlip",
    }  # fmt: skip


OWN = ("beta1", "beta2", "eps", "momentum")


@pytest.mark.parametrize(("name", "field"), list(product(OPTIMIZERS, OWN)))
def test_an_optimizer_reads_exactly_the_settings_of_its_own(name, field):
    """As the trainer makes it: a setting counts where the weights after some steps depend on it."""
    assert set(OPTIMIZER_SETTINGS) == set(OPTIMIZERS)
    made = [_after_steps(Optimizer(optimizer=name, **{field: value})) for value in (0.9, 0.97)]
    assert (not torch.equal(*made)) == (field in OPTIMIZER_SETTINGS[name])
    assert place_of(field, "x").counts("openclip", METHODS["openclip"], name) == (field in OPTIMIZER_SETTINGS[name])


def _after_steps(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(model, config, "cpu")
    for step in range(8):  # in its first five RAdam does not look at the second moment
        optimizer.zero_grad()
        (model(torch.tensor([0, 1, 2])) - step).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_scoped_value_stands_in_the_plain_ones_place():
    values = {"sgd.lr": 1, "lr": 2, "sogclr.gamma": 3, "momentum": 4}
    openclip, sogclr = METHODS["openclip"], METHODS["sogclr"]

    def keys(*who):
        return {place.key: value for place, value in resolved(values, "space", *who).items()}

    assert keys("openclip", openclip, "adamw") == {"lr": 2}
    assert keys("openclip", openclip, "sgd") == {"sgd.lr": 1, "momentum": 4}
    assert keys("sogclr", sogclr, "sgd") == {"sgd.lr": 1, "sogclr.gamma": 3, "momentum": 4}
    with pytest.raises(ValueError, match=r"sgd\.lr and sogclr\.lr both say what lr is for sogclr with sgd"):
        resolved({"sgd.lr": 1, "sogclr.lr": 2}, "space", "sogclr", sogclr, "sgd")


def test_a_name_that_counts_for_nobody_is_refused():
    pairs = [(name, METHODS[name], "adamw") for name in ("openclip", "simclr")]
    known_to_one(["lr", "beta2", "temperature_lr"], "space", pairs)
    for key in ("gamma", "momentum", "sgd.lr", "sogclr.temperature"):
        with pytest.raises(ValueError, match=rf"space\.{key}: none of the methods and optimizers here has it"):
            known_to_one([key], "space", pairs)


def test_what_a_config_has():
    """A field at None stands for another's value where it means one."""
    plan = plan_of(methods=["isogclr_new"], optimizers=["adamw", "sgd"], space={"lr": {"low": 1e-4, "high": 1e-2}})
    config = plan.config("fine", {"method": "isogclr_new", "optimizer": "adamw"}, 0, "runs", "x")
    assert value_in(config, place_of("rho_image", "x")) == 8.0
    assert value_in(config, place_of("settings.temperature_lr", "x")) == 1e-5
    assert value_in(config, place_of("temperature_lr", "x")) is None
    assert value_in(config, place_of("cooldown_epochs", "x")) == 0
    assert value_in(config, place_of("warmup_epochs", "x")) is None  # the recipe has a share
    assert value_in(config, place_of("embed_dim", "x")) is None  # the model's own
