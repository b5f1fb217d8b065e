"""Which settings mattered: known shares are found, and where nothing can be known it is said why."""

import math
import random
from dataclasses import replace

import pytest

from fullbatch.trials.phases import Ended, Slot
from fullbatch.trials.search_summary import importance_of, within_ranges
from tests.trials.plans import plan_of


def trials(count, value, seed=0, **more):
    chance = random.Random(seed)
    found = []
    for number in range(count):
        params = {
            "optimizer": chance.choice(["adamw", "radam", "sgd"]),
            "method": chance.choice(["openclip", "sogclr"]),
            "lr": 10 ** chance.uniform(-4, -1),
            "schedule": chance.choice([None, True, 3]),
            "fixed": 7,
            **more,
        }
        found.append(Ended(Slot(number), "done", params, (value(params),)))
    return found


def test_the_setting_that_decides_is_found_by_both():
    shares = {"adamw": 0.3, "radam": 0.5, "sgd": 0.1}
    found = importance_of(trials(60, lambda p: shares[p["optimizer"]] + 0.02 * (p["method"] == "sogclr")), {"lr"})
    for forest in ("fanova", "mdi"):
        assert next(iter(found[forest])) == "optimizer" and found[forest]["optimizer"] > 0.9
        assert sum(found[forest].values()) == pytest.approx(1.0)
        assert all(type(share) is float for share in found[forest].values()), "as JSON has them"
    assert found["trials"] == 60 and "fixed" not in found["fanova"] and set(found["fanova"]) >= {"schedule", "lr"}
    again = importance_of(trials(60, lambda p: shares[p["optimizer"]] + 0.02 * (p["method"] == "sogclr")), {"lr"})
    assert again == found, "the forests are seeded"


def test_a_log_scale_counts_decades():
    """The value depends on the small end of lr: on a plain scale that is a thousandth of the range."""
    ended = trials(80, lambda p: float(p["lr"] < 1e-3) + 0.3 * (p["method"] == "sogclr"))
    log, plain = importance_of(ended, {"lr"}), importance_of(ended, ())
    assert log["fanova"]["lr"] > 0.8
    assert plain["fanova"]["lr"] < log["fanova"]["lr"] - 0.3


def test_why_there_is_none():
    assert "fewer than 8" in importance_of(trials(7, lambda p: p["lr"]), ())
    assert "the same value" in importance_of(trials(12, lambda p: 0.0), ())
    alike = [Ended(Slot(n), "done", {"method": "sogclr"}, (float(n),)) for n in range(9)]
    assert "more than one value" in importance_of(alike, ())


def test_without_scikit_learn_its_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'fullbatch[importance]'" in importance_of(trials(12, lambda p: p["lr"]), ())


def test_which_trials_and_settings_count():
    ended = trials(20, lambda p: p["lr"])
    ended[0] = Ended(Slot(0), "pruned", ended[0].params, (9.0,))
    ended[1] = Ended(Slot(1), "failed", ended[1].params, None)
    ended[2] = Ended(Slot(2), "diverged", ended[2].params, (0.0,))
    ended[3] = Ended(Slot(3), "diverged", ended[3].params, None)
    ended[4] = Ended(Slot(4), "done", {**ended[4].params, "gamma": 0.5}, (math.nan,))
    ended[5] = Ended(Slot(5), "stopped", {**ended[5].params, "gamma": 0.5}, ended[5].values)
    found = importance_of(ended, ())
    assert found["pruned"] == 1, "said, for what was left is what the pruner liked"
    few = importance_of([replace(one, status="pruned") for one in ended[:15]] + ended[15:], ())
    assert few == "of whole trials there are 5 (15 were pruned), and fewer than 8 tell nothing"
    assert found["trials"] == 16 and found["left_out"] == ["gamma"] and "gamma" not in found["fanova"]


def test_a_rate_does_not_tell_its_optimizer():
    """The value depends on the optimizer alone; sgd has rates of its own, higher than all others."""
    plan, chance, ended = plan_of(), random.Random(1), []
    for number in range(60):
        optimizer = chance.choice(["adamw", "sgd"])
        key = "sgd.lr" if optimizer == "sgd" else "lr"
        params = {"method": "sogclr", "optimizer": optimizer, key: plan.space[key].at(chance.random())}
        ended.append(Ended(Slot(number), "done", params, (float(optimizer == "sgd"),)))
    assert within_ranges(plan, {"optimizer": "sgd", "sgd.lr": 0.1, "gamma": 0.7}) == {
        "optimizer": "sgd",
        "lr": 0.5,
        "gamma": 0.7,
    }
    placed = [replace(trial, params=within_ranges(plan, trial.params)) for trial in ended]
    plainly = [replace(trial, params=plan.params_of(trial.params)) for trial in ended]
    assert importance_of(placed, ())["fanova"]["optimizer"] > 0.99
    assert importance_of(plainly, {"lr"})["fanova"]["optimizer"] < 0.9
