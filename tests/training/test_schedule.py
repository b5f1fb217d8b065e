"""Learning rates against open_clip's and timm's own schedulers, and within their bounds."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullbatch.config.optimization import Optimizer, Schedule
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict
from fullbatch.recipes import recipe_values
from fullbatch.training.optimizer import (
    learning_rate,
    phases,
    temperature_learning_rate,
    temperature_net_learning_rate,
)


def path(schedule, peak, total, per_epoch=10):
    return [learning_rate(schedule, peak, step, total, per_epoch) for step in range(total)]


@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (1, 8), (5, 40), (40, 40)])
def test_cosine_is_open_clips(warmup, total):
    scheduler = pytest.importorskip("open_clip_train.scheduler")
    weight = torch.nn.Parameter(torch.zeros(1))
    rate = scheduler.cosine_lr(torch.optim.SGD([weight], lr=1.0), 3e-4, warmup, total)
    theirs = [rate(step) for step in range(total)]
    assert path(Schedule(warmup_steps=warmup), 3e-4, total) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 4])
def test_tanh_is_timms(warmup):
    scheduler = pytest.importorskip("timm.scheduler")
    total, cooldown, peak, low = 30, 5, 2e-3, 1e-5
    theirs = scheduler.TanhLRScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak),
        t_initial=total - warmup - cooldown,
        lr_min=low,
        warmup_t=warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    schedule = Schedule("tanh", warmup_steps=warmup, min_lr=low, cooldown_steps=cooldown)
    for step in range(warmup, total):
        assert learning_rate(schedule, peak, step, total, 10) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12)


def test_linear_and_constant():
    assert path(Schedule("linear"), 1.0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert path(Schedule("constant", warmup_steps=2), 1.0, 4) == [0.5, 1.0, 1.0, 1.0]
    assert path(Schedule("constant", min_lr=0.1, cooldown_steps=2), 1.0, 4) == [1.0, 1.0, 0.1, 0.1]


def test_epochs_are_steps():
    in_epochs = Schedule(warmup_epochs=1.5, cooldown_epochs=0.5, min_lr=1e-4)
    in_steps = Schedule(warmup_steps=15, cooldown_steps=5, min_lr=1e-4)
    assert phases(in_epochs, 50, 10) == (15, 30, 5)
    assert path(in_epochs, 1e-2, 50) == path(in_steps, 1e-2, 50)


@given(
    kind=st.sampled_from(["cosine", "tanh", "linear", "constant"]),
    peak=st.floats(1e-6, 10.0),
    share=st.floats(1e-3, 1.0),
    lengths=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)),
)
def test_rates_rise_then_fall_within_bounds(kind, peak, share, lengths):
    warmup, _, cooldown = lengths
    low = share * peak
    schedule = Schedule(kind, warmup_steps=warmup, min_lr=low, cooldown_steps=cooldown)
    rates = path(schedule, peak, sum(lengths)) + [learning_rate(schedule, peak, sum(lengths) + 3, sum(lengths), 10)]
    slack = 1e-12 * peak
    assert all(0.0 < rate <= peak + slack for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert not warmup or math.isclose(rising[-1], peak)
    assert all(after <= before + slack for before, after in itertools.pairwise(falling))
    assert all(rate >= low - slack for rate in falling)
    if cooldown:
        assert rates[-cooldown - 1 :] == [low] * (cooldown + 1)


def test_temperature_follows_at_its_own_rate():
    schedule = Schedule(warmup_steps=5, min_lr=1e-4)
    ours, given_rate = Optimizer(lr=1e-3), Optimizer(lr=1e-3, temperature_lr=5e-5)
    for step in range(30):
        rate = learning_rate(schedule, 1e-3, step, 30, 10)
        assert temperature_learning_rate(schedule, ours, step, 30, 10) == pytest.approx(rate / 8)
        assert temperature_learning_rate(schedule, given_rate, step, 30, 10) == pytest.approx(rate / 20)


def test_temperature_slows_down_where_it_is_low():
    config = Optimizer(temperature_lr_drop_below=0.03)
    high, edge, low = (temperature_learning_rate(Schedule(), config, 3, 9, 9, tau) for tau in (0.031, 0.03, 0.01))
    assert edge == low == pytest.approx(high / 3)
    assert temperature_learning_rate(Schedule(), config, 3, 9, 9) == high
    assert temperature_learning_rate(Schedule(), Optimizer(), 3, 9, 9, 0.01) == high


def test_tempnet_decays_by_the_epoch():
    assert temperature_net_learning_rate(Optimizer(), 0) == 3e-5
    assert temperature_net_learning_rate(Optimizer(), 3) == pytest.approx(3e-5 * 0.729)
    assert temperature_net_learning_rate(Optimizer(temperature_lr=1e-4), 1) == pytest.approx(9e-5)


def test_a_run_too_short_for_its_schedule_is_refused():
    with pytest.raises(ValueError, match=r"warm-up of 8 steps and a cool-down of 3 do not fit into a run of 10 steps"):
        learning_rate(Schedule(warmup_steps=8, cooldown_steps=3, min_lr=1e-5), 1e-3, 0, 10, 5)


def test_min_lr_above_the_peak_is_refused():
    with pytest.raises(ValueError, match=r"Schedule.min_lr must be at most the peak rate \(0.001\), got 0.01"):
        learning_rate(Schedule(min_lr=0.01), 1e-3, 0, 10, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cosin"}, "schedule must be one of 'cosine'"),
        ({"warmup_steps": 5, "warmup_epochs": 1.0}, "warmup_epochs must be None where warmup_steps is given"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
        ({"warmup_epochs": -1.0}, "warmup_epochs must be a number of at least 0"),
        ({"min_lr": -1e-3}, "min_lr must be a number of at least 0"),
        ({"cooldown_steps": 5}, "min_lr must be positive where there is a cool-down"),
    ],
)
def test_schedule_checks(fields, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**fields)


# -- ALBEF's clock -----------------------------------------------------------------------------------------------------


def albef_rates(kind, peak, low, start, epochs, warmup, per_epoch):
    """Every step's rate as ALBEF's loop gives it with timm's schedulers of 2020, which iSogCLR's code has from there.

    The clock ticks once in 100 steps of the first epoch until the warm-up is over, then once an epoch, and is ahead.
    """

    def descent(tick):
        if tick >= epochs:
            return low
        if kind == "tanh":
            share = 0.5 * (1 - math.tanh(-6 * (1 - tick / epochs) + 4 * tick / epochs))
        else:
            share = 0.5 * (1 + math.cos(math.pi * tick / epochs))
        return low + share * (peak - low)

    def at(tick):
        top = descent(warmup) if kind == "tanh" else peak
        return start + tick * (top - start) / warmup if tick < warmup else descent(tick)

    rates, rate = [], at(0)
    for epoch in range(epochs):
        for i in range(per_epoch):
            rates.append(rate)
            if epoch == 0 and i % 100 == 0 and i <= 100 * warmup:
                rate = at(i // 100)
        rate = at(epoch + warmup + 1)
    return rates


@pytest.mark.parametrize("kind", ["cosine", "tanh"])
@pytest.mark.parametrize(("epochs", "warmup", "per_epoch"), [(30, 5, 781), (10, 5, 156), (6, 0, 20)])
def test_albefs_clock(kind, epochs, warmup, per_epoch):
    schedule = Schedule(kind, clock="albef", warmup_epochs=warmup, warmup_from=1e-3, min_lr=1e-5)
    expected = albef_rates(kind, 1.64e-4, 1e-5, 1e-3, epochs, warmup, per_epoch)
    assert path(schedule, 1.64e-4, epochs * per_epoch, per_epoch) == pytest.approx(expected, rel=1e-12)


def test_the_course_reports_recipes_have_its_clock():
    """Late in training the two clocks are far apart, so the report's rates are not those of plain `tanh`."""
    recipe = from_dict(RunConfig, recipe_values("course-report"))
    assert recipe.schedule.clock == "albef"
    theirs = albef_rates("tanh", 1.64e-4, 1e-5, 1e-3, 30, 5, 781)
    assert path(recipe.schedule, recipe.optimizer.lr, 30 * 781, 781) == pytest.approx(theirs, rel=1e-12)
    plain = Schedule("tanh", warmup_epochs=5, min_lr=1e-5, cooldown_epochs=1)
    assert learning_rate(plain, 1.64e-4, 20 * 781, 30 * 781, 781) > 4 * theirs[20 * 781]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clock": "epoch"}, "clock must be one of 'steps', 'albef'"),
        ({"clock": "albef", "warmup_steps": 500}, "warmup_steps must be None with clock='albef'"),
        ({"clock": "albef", "warmup_share": 0.1}, "warmup_share must be None with clock='albef'"),
        ({"clock": "albef", "cooldown_epochs": 1, "min_lr": 1e-5}, "cooldown_epochs must be None with clock='albef'"),
    ],
)
def test_albefs_clock_counts_epochs_and_cools_by_itself(fields, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**fields)
