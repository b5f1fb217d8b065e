"""Which slots a phase has, from what the phases before it found."""

from collections import Counter

import optuna
import pytest

from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict
from fullbatch.trials.phases import Ended, NoWinner, Slot, fronts, owed, ranked, slots_of
from fullbatch.trials.search import sampler_of
from fullbatch.trials.search_plan import search_from

BASE = to_dict(train_config([])[0])


def plan(**values):
    usual = {
        "name": "small",
        "base": BASE,
        "metrics": ["mean_r1"],
        "methods": ["openclip", "sogclr", "neuclip"],
        "optimizers": ["adamw", "sgd"],
        "space": {"lr": {"low": 1e-4, "high": 1e-2, "log": True}, "gamma": {"low": 0.5, "high": 1.0}},
        "choices": {"trials": 5},
        "grid": {"methods": 2, "optimizers": 2},
        "fine": {"trials": 3},
        "finals": {"best": 2, "seeds": [0, 1], "baselines": ["openclip"]},
    }
    return search_from({**usual, **values})


def ended(number, value, status="done", **params):
    usual = {"method": "openclip", "optimizer": "adamw"}
    values = None if value is None else (value,)
    return Ended(Slot(number), status, {**usual, **params}, values, error="no memory" if value is None else "")


def test_the_first_choices_try_everything_once():
    slots = slots_of("choices", plan(), {})
    assert [slot.number for slot in slots] == list(range(5))
    assert {slot.params["method"] for slot in slots[:3]} == {"openclip", "sogclr", "neuclip"}
    assert {slot.params["optimizer"] for slot in slots[:3]} == {"adamw", "sgd"}
    assert all(not slot.params for slot in slots[3:])
    assert all(not slot.params for slot in slots_of("choices", plan(choices={"trials": 5, "cover": False}), {}))


def test_pairs_that_can_all_be_tried_are_tried_once():
    slots = slots_of("choices", plan(choices={"trials": 50}), {})
    pairs = [(slot.params["method"], slot.params["optimizer"]) for slot in slots]
    assert len(pairs) == len(set(pairs)) == 6 and owed(plan(choices={"trials": 50}))["choices"] == 6
    with_rates = plan(choices={"trials": 50, "over": ["method", "optimizer", "lr"]})
    assert len(slots_of("choices", with_rates, {})) == owed(with_rates)["choices"] == 50


def test_an_even_phase_tries_every_pair_equally_often_and_all_of_every_range():
    even = plan(choices={"trials": 24, "over": ["method", "optimizer", "lr"], "sampler": "even"})
    slots = slots_of("choices", even, {})
    assert set(Counter((slot.params["method"], slot.params["optimizer"]) for slot in slots).values()) == {4}
    study, rates = optuna.create_study(), {}
    for slot in slots:
        sampler = sampler_of(even, "choices", slot)
        trial = study.ask()
        drawn = [
            sampler.sample_independent(study, trial, "lr", optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True))
            for _ in range(2)
        ]
        assert drawn[0] == drawn[1], "a worker that takes the slot over draws the same"
        rates.setdefault(tuple(slot.params.values()), []).append(even.space["lr"].place(drawn[0]))
    assert all(sorted(int(4 * place) for place in of_pair) == [0, 1, 2, 3] for of_pair in rates.values())
    assert len({round(place, 6) for of_pair in rates.values() for place in of_pair}) == 24


def test_the_grid_is_the_best_of_each():
    choices = [
        ended(0, 0.1, method="openclip", optimizer="adamw"),
        ended(1, 0.3, method="sogclr", optimizer="sgd"),
        ended(2, 0.2, method="neuclip", optimizer="adamw"),
        ended(3, 0.9, status="pruned", method="openclip", optimizer="sgd"),
        ended(4, None, status="failed", method="openclip"),
    ]
    pairs = [
        (slot.params["method"], slot.params["optimizer"]) for slot in slots_of("grid", plan(), {"choices": choices})
    ]
    assert pairs == [("sogclr", "sgd"), ("sogclr", "adamw"), ("neuclip", "sgd"), ("neuclip", "adamw")]


def test_a_pair_inherits_what_was_searched_with_it():
    searched = {"trials": 5, "over": ["method", "optimizer", "lr", "gamma"]}
    choices = [
        ended(0, 0.4, method="sogclr", optimizer="sgd", lr=4e-4, gamma=0.6),
        ended(1, 0.3, method="sogclr", optimizer="adamw", lr=3e-4, gamma=0.7),
        ended(2, 0.2, method="openclip", optimizer="adamw", lr=2e-4),
    ]
    made = slots_of("grid", plan(choices=searched), {"choices": choices})
    found = {(slot.params["method"], slot.params["optimizer"]): slot.params for slot in made}
    assert found["sogclr", "sgd"] == {"method": "sogclr", "optimizer": "sgd", "lr": 4e-4, "gamma": 0.6}
    assert found["sogclr", "adamw"] == {"method": "sogclr", "optimizer": "adamw", "lr": 3e-4, "gamma": 0.7}
    assert found["openclip", "sgd"] == {"method": "openclip", "optimizer": "sgd", "lr": 4e-4}, "the optimizer's rate"


def test_the_fine_search_starts_from_the_winner():
    grid = [ended(0, 0.1), ended(1, 0.2, method="sogclr")]
    slots = slots_of("fine", plan(), {"choices": [ended(0, 0.9)], "grid": grid})
    assert slots[0].params == {"method": "sogclr", "optimizer": "adamw", "lr": 1e-3, "gamma": 0.8}
    assert [dict(slot.params) for slot in slots[1:]] == [{"method": "sogclr", "optimizer": "adamw"}] * 2
    of_choices = slots_of("fine", plan(grid=None), {"choices": [ended(0, 0.9)]})
    assert of_choices[0].params == {"method": "openclip", "optimizer": "adamw", "lr": 1e-3}


def test_what_the_fine_search_leaves_alone_is_the_winners_in_all_its_trials():
    values = {"choices": {"trials": 5, "over": ["method", "optimizer", "lr", "gamma"]}, "grid": None}
    values["space"] = {**plan().as_dict()["space"], "weight_decay": {"low": 1e-3, "high": 0.5, "log": True}}
    found = {"choices": [ended(0, 0.9, method="sogclr", lr=4e-3, gamma=0.6), ended(1, 0.1)]}
    slots = slots_of("fine", plan(**values, fine={"trials": 3, "over": ["weight_decay"]}), found)
    kept = {"method": "sogclr", "optimizer": "adamw", "lr": 4e-3, "gamma": 0.6}
    assert [dict(slot.params) for slot in slots[1:]] == [kept] * 2
    assert slots[0].params == {**kept, "weight_decay": slots[0].params["weight_decay"]}

    settled = plan(**values, fine={"trials": 3, "over": ["weight_decay"], "changes": {"lr": 1e-3}})
    for slot in slots_of("fine", settled, found):
        config = settled.config("fine", slot.params, None, "runs", "x")
        assert "lr" not in slot.params and config.optimizer.lr == 1e-3, "the change counts for all"


@pytest.mark.parametrize(("changes", "over"), [({"warmup_steps": 7}, ["lr"]), ({}, ["lr", "warmup_steps"])])
def test_a_length_in_another_unit_gives_way_as_well(changes, over):
    lengths = {name: {"low": 1, "high": 5} for name in ("warmup_epochs", "warmup_steps")}
    values = {"grid": None, "finals": {"best": 1, "changes": changes}}
    values["space"] = {"lr": {"low": 1e-4, "high": 1e-2, "log": True}, **lengths}
    values["choices"] = {"trials": 5, "over": ["method", "optimizer", "warmup_epochs"]}
    made = plan(**values, fine={"trials": 2, "over": over, "changes": changes})
    slots = slots_of("fine", made, {"choices": [ended(0, 0.9, warmup_epochs=2)]})
    assert all("warmup_epochs" not in slot.params for slot in slots)
    params = {"warmup_steps": 3, **slots[1].params} if not changes else slots[1].params
    assert made.config("fine", params, None, "runs", "x").schedule.warmup_epochs is None


def test_changes_of_the_grid_and_of_the_finals_count_for_all():
    choices = {"trials": 5, "over": ["method", "optimizer", "lr"]}
    found = {"choices": [ended(0, 0.9, lr=4e-3), ended(1, 0.8, lr=3e-3), ended(2, 0.7, method="sogclr", lr=2e-3)]}
    made = plan(choices=choices, grid={"methods": 2, "optimizers": 1, "changes": {"lr": 1e-3}})
    assert all(set(slot.params) == {"method", "optimizer"} for slot in slots_of("grid", made, found))
    finals = {"best": 3, "seeds": [0], "changes": {"lr": 1e-3}}
    slots = slots_of("finals", plan(choices=choices, grid=None, fine=None, finals=finals), found)
    assert [slot.label for slot in slots] == ["choices 0", "choices 2"], "what differed in the rate alone is now one"
    assert all("lr" not in slot.params for slot in slots)


def test_a_phase_in_which_all_failed_or_diverged_yields_no_winner():
    choices = [ended(0, 0.3, method="sogclr"), ended(1, 0.0, "diverged", method="neuclip")]
    for lost in (ended(0, None, "failed"), ended(0, 0.0, "diverged")):
        fine = slots_of("fine", plan(), {"choices": choices, "grid": [lost]})
        assert fine[1].params["method"] == "sogclr"
        finals = slots_of("finals", plan(), {"choices": choices, "grid": [lost], "fine": [lost]})
        assert [slot.label for slot in finals] == ["choices 0", "openclip"] * 2, "the diverged one is no finalist"
    with pytest.raises(NoWinner, match="failed or diverged"):
        slots_of("grid", plan(), {"choices": [ended(0, 0.0, "diverged")]})


def test_finals_repeat_different_ones_over_seeds():
    fine = [ended(0, 0.3, lr=1e-3), ended(1, 0.3, lr=1e-3), ended(2, 0.2, lr=2e-3), ended(3, 0.1, lr=3e-3)]
    slots = slots_of("finals", plan(), {"choices": [], "grid": [], "fine": fine})
    assert [(slot.label, slot.seed) for slot in slots] == [
        ("fine 0", 0), ("fine 2", 0), ("openclip", 0), ("fine 0", 1), ("fine 2", 1), ("openclip", 1),
    ]  # fmt: skip
    assert [slot.number for slot in slots] == list(range(6))
    assert slots[2].params == {"method": "openclip"} and slots[1].params["lr"] == 2e-3


def test_nothing_to_go_on_with_is_said():
    with pytest.raises(ValueError, match=r"All 2 trials of the phase 'choices' failed.*no memory"):
        slots_of("grid", plan(), {"choices": [ended(0, None, "failed"), ended(1, None, "failed")]})


def test_phases_and_what_they_owe():
    assert tuple(plan().phases) == ("choices", "grid", "fine", "finals")
    assert tuple(plan(grid=None, finals=None).phases) == ("choices", "fine")
    assert owed(plan()) == {"choices": 5, "grid": 4, "fine": 3, "finals": 6}
    assert owed(plan(grid={"methods": 9, "optimizers": 9}))["grid"] == 6


def test_ranking():
    trials = [
        ended(0, 0.1),
        ended(1, 0.9, "pruned"),
        ended(2, 0.0, "diverged"),
        ended(3, 0.2, "stopped"),
        ended(4, None, "failed"),
        ended(5, 0.2),
    ]
    assert [one.slot.number for one in ranked(trials, [True])] == [3, 5, 0, 1, 2]
    assert [one.slot.number for one in ranked(trials, [False])] == [0, 3, 5, 1, 2]


def test_fronts():
    costs = [(1.0, 4.0), (2.0, 3.0), (2.0, 3.0), (3.0, 3.0), (0.0, 9.0), (3.0, 9.0)]
    assert fronts(costs) == [0, 0, 0, 1, 0, 2]
    assert fronts([]) == []
