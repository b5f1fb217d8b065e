"""A planted optimum: a fake objective whose best is known; each phase finds it."""

import math

import pytest
from optuna.storages import InMemoryStorage

from fullbatch.trials.phases import Score
from fullbatch.trials.search import PhaseQueues, work_off
from fullbatch.trials.search_plan import search_from
from tests.trials.test_phases import BASE

METHODS, OPTIMIZERS = ["openclip", "sogclr", "neuclip"], ["adamw", "sgd", "radam", "lamb"]
BEST = {"method": "sogclr", "optimizer": "radam", "lr": 2e-3, "gamma": 0.7, "schedule": "tanh"}


def planned(**values):
    usual = {
        "name": "planted",
        "base": BASE,
        "metrics": ["mean_r1"],
        "methods": METHODS,
        "optimizers": OPTIMIZERS,
        "space": {
            "lr": {"low": 1e-5, "high": 1e-1, "log": True},
            "gamma": {"low": 0.3, "high": 1.0},
            "rho": {"low": 1.0, "high": 9.0},
            "schedule": {"choices": ["cosine", "tanh", "linear"]},
        },
        "choices": {"trials": 30, "over": ["method", "optimizer", "lr"]},
        "grid": {"methods": 2, "optimizers": 2},
        "fine": {"trials": 40},
        "finals": {"best": 2, "seeds": [0, 1, 2], "baselines": ["openclip"]},
    }
    return search_from({**usual, **values})


def worth(params, seed=0):
    """The optimizer counts for more than the method, the rate for as much as both; gamma is sogclr's alone."""
    value = 0.6
    value -= {"sogclr": 0.0, "neuclip": 0.08, "openclip": 0.12}[params["method"]]
    value -= {"radam": 0.0, "adamw": 0.1, "lamb": 0.25, "sgd": 0.3}[params.get("optimizer", "adamw")]
    value -= 0.1 * min(2.0, abs(math.log10(params.get("lr", 1e-3) / BEST["lr"])))
    if params["method"] == "sogclr":
        value -= 0.3 * abs(params.get("gamma", 0.8) - BEST["gamma"])
    value -= 0.02 * (params.get("schedule", "cosine") != BEST["schedule"])
    return value + 0.001 * seed


def run(plan, worth=worth):
    tried = []

    def train(phase, lease, params, report, given_up):
        tried.append((phase, dict(params)))
        value = worth(params, lease.slot.seed or 0)
        return Score("done", (value,), seconds=1.0) if math.isfinite(value) else Score("diverged", (0.0,))

    queues = PhaseQueues(InMemoryStorage(), plan, dict.fromkeys(plan.phases, 1))
    work_off(queues, train)
    ended = {}
    for phase in plan.phases:
        ended[phase] = queues.queue(phase, ended).ended()
    return ended, tried


def best(ended):
    return max(ended, key=lambda one: one.values)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_phase_finds_it(seed):
    ended, tried = run(planned(seed=seed))
    assert [len(ended[phase]) for phase in ("choices", "grid", "fine", "finals")] == [30, 4, 40, 9]

    first = best(ended["choices"]).params
    assert first["optimizer"] == "radam", "what counts most"
    pairs = {(one.params["method"], one.params["optimizer"]) for one in ended["grid"]}
    assert len(pairs) == 4 and ("sogclr", "radam") in pairs
    winner = best(ended["grid"]).params
    assert (winner["method"], winner["optimizer"]) == ("sogclr", "radam")

    assert ended["fine"][0].params["lr"] == winner["lr"], "it starts from the winner"
    assert all(one.params["method"] == "sogclr" and "rho" not in one.params for one in ended["fine"])
    fine = best(ended["fine"])
    assert fine.params["schedule"] == "tanh"
    assert abs(math.log10(fine.params["lr"] / BEST["lr"])) < 0.5 and abs(fine.params["gamma"] - BEST["gamma"]) < 0.15
    assert fine.values > best(ended["grid"]).values

    finals = ended["finals"]
    labels = {one.slot.label for one in finals}
    assert len(labels) == 3 and "openclip" in labels and f"fine {fine.slot.number}" in labels
    assert best(finals).params == fine.params
    assert len(tried) <= 30 + 4 + 40 + 9


def test_the_sampler_does_better_than_chance():
    """Of as many random trials, over many seeds: the mean best of the fine phase is beaten."""
    plan = planned(fine={"trials": 30}, finals=None, grid=None, choices={"trials": 12})
    import random

    found, by_chance = [], []
    for seed in range(5):
        ended, _ = run(search_from({**plan.as_dict(), "seed": seed}))
        found.append(best(ended["fine"]).values[0])
        draw = random.Random(seed)
        params = [
            {
                **{name: ended["fine"][0].params[name] for name in ("method", "optimizer")},
                "lr": 10 ** draw.uniform(-5, -1),
                "gamma": draw.uniform(0.3, 1.0),
                "schedule": draw.choice(["cosine", "tanh", "linear"]),
            }
            for _ in range(30)
        ]
        by_chance.append(max(worth(one) for one in params))
    assert sum(found) > sum(by_chance)


def test_what_runs_away_is_a_result_and_no_crash():
    def fragile(params, seed=0):
        return math.nan if params.get("optimizer") == "radam" else worth(params, seed)

    ended, _ = run(planned(), fragile)
    away = [one for one in ended["choices"] if one.params["optimizer"] == "radam"]
    assert away and all(one.status == "diverged" and one.values == (0.0,) for one in away)
    assert all(one.params["optimizer"] != "radam" for one in ended["grid"])


def test_the_same_settings_are_trained_once():
    plan = planned(choices={"trials": 11}, grid=None, fine=None, finals=None)
    ended, tried = run(plan)
    settings = [tuple(sorted(params.items())) for _, params in tried]
    assert len(settings) == len(set(settings)), "the sampler may draw a pair twice; it is not trained twice"
    assert len(ended["choices"]) == 11
    repeated = [one for one in ended["choices"] if one.error]
    assert all("not trained again" in one.error and one.seconds == 0.0 for one in repeated)
    assert len(repeated) + len(tried) == 11


@pytest.mark.parametrize("stop", [1, 7, 31, 40, 75])
def test_a_search_that_stops_and_goes_on_makes_the_trials_it_would_have_made(stop):
    """One worker: what a slot draws depends on its number and on what has ended."""
    whole, _ = run(planned())
    plan, storage, count = planned(), InMemoryStorage(), 0

    class Gone(Exception):
        pass

    def train(phase, lease, params, report, given_up):
        nonlocal count
        count += 1
        if count == stop:
            lease.release()
            raise Gone
        return Score("done", (worth(params, lease.slot.seed or 0),), seconds=1.0)

    queues = PhaseQueues(storage, plan, dict.fromkeys(plan.phases, 1))
    with pytest.raises(Gone):
        work_off(queues, train)
    work_off(queues, train)
    ended = {}
    for phase in plan.phases:
        ended[phase] = queues.queue(phase, ended).ended()
        assert [one.params for one in ended[phase]] == [one.params for one in whole[phase]]
        assert [one.values for one in ended[phase]] == [one.values for one in whole[phase]]
