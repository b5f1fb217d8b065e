"""Plans of searches: what is read is what is stored, what is sampled is what is trained, and mistakes are named."""

import json
import re
import subprocess
import sys

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbatch.cli.train import train_config
from fullbatch.config.methods import METHODS, settings_of
from fullbatch.config.optimization import OPTIMIZER_SETTINGS, OPTIMIZERS
from fullbatch.config.tree import to_dict, write_values
from fullbatch.recipes import recipe_values
from fullbatch.trials.comparison_plan import read_plan
from fullbatch.trials.search_plan import SearchPlan, search_from
from fullbatch.trials.space import Real, place_of, value_in
from tests.trials.plans import BASE, plan_of, sampled

LR = {"low": 1e-4, "high": 1e-2, "log": True}
# A range of everything that a method or an optimizer may have; which values it takes does not matter here.
SETTINGS = sorted({name for method in METHODS.values() for name in settings_of(method)})
OWN = ("beta1", "beta2", "eps", "momentum")
EVERYTHING = {
    "lr": LR,
    **{name: {"low": 0.1, "high": 0.9} for name in OWN},
    **{f"settings.{name}": {"low": 0.1, "high": 0.9} for name in SETTINGS},
}


quickly = settings(max_examples=25)


def who(method, optimizer):
    return {"method": method, "optimizer": optimizer}


# ---------------------------------------------------------------------------------------------------------------------
# the conditional space


@pytest.fixture(scope="module")
def whole():
    return plan_of(
        methods=list(METHODS), optimizers=list(OPTIMIZERS), space=EVERYTHING, choices={"trials": 30}, finals=None
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_candidate_has_exactly_the_settings_of_its_method_and_its_optimizer(whole, method):
    for optimizer in OPTIMIZERS:
        found = set(whole.dimensions("fine", method, optimizer))
        expected = {place_of(f"settings.{name}", "space").key for name in settings_of(METHODS[method])}
        assert found == {"lr", *OPTIMIZER_SETTINGS[optimizer], *expected}


def test_a_part_that_the_base_replaces_brings_its_own_settings():
    base = to_dict(train_config(["--normalizer", "mlp"])[0])
    plan = plan_of(
        base=base, methods=["openclip", "sogclr"], space={"lr": LR, "restart_every": {"low": 64, "high": 512}}
    )
    assert set(plan.dimensions("fine", "sogclr", "adamw")) == {"lr", "restart_every"}
    with pytest.raises(ValueError, match=r"space.gamma: none of the methods"):
        plan_of(base=base, methods=["openclip", "sogclr"], space={"lr": LR, "gamma": {"low": 0.1, "high": 1.0}})


def test_over_and_changes_narrow_it():
    plan = plan_of(
        choices={"trials": 9, "over": ["method", "optimizer", "lr"], "changes": {"epochs": 2}},
        fine={"trials": 4, "changes": {"gamma": 0.9, "sgd.lr": 0.1}},
    )
    assert set(plan.dimensions("choices", "sogclr", "adamw")) == {"lr"}
    assert set(plan.dimensions("choices", "sogclr", "sgd")) == {"sgd.lr"}
    common = {"weight_decay", "schedule", "warmup_epochs"}
    assert set(plan.dimensions("fine", "sogclr", "adamw")) == common | {"lr", "beta2"}
    assert set(plan.dimensions("fine", "sogclr", "sgd")) == common
    assert plan.dimensions("grid", "sogclr", "sgd") == plan.dimensions("finals", "sogclr", "sgd") == {}
    fine = plan_of(fine={"trials": 4, "over": ["lr", "gamma"]})
    assert set(fine.dimensions("fine", "sogclr", "sgd")) == {"sgd.lr", "gamma"}
    assert set(fine.dimensions("fine", "openclip", "adamw")) == {"lr"}


@pytest.fixture(scope="module")
def all_at_once():
    return plan_of(choices={"trials": 9, "over": None, "changes": {"epochs": 2, "data_share": 0.2}})


@quickly
@given(chance=st.randoms(use_true_random=False))
def test_what_the_sampler_chooses_is_what_is_asked_for(all_at_once, chance):
    """With Optuna: fixed params come back, the others are of the candidate's space, one name is one range."""
    plan = all_at_once
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(chance.randrange(99)))
    for phase in ("choices", "choices", "choices"):
        given_ = chance.choice([{}, who("sogclr", "sgd"), {**who("openclip", "adamw"), "lr": 2e-3}])
        study.enqueue_trial(given_)
        trial = study.ask()
        params = plan.suggest(phase, trial, given_)
        assert given_.items() <= params.items()
        chosen = plan.dimensions(phase, params["method"], params["optimizer"])
        assert set(params) == set(trial.params) == {"method", "optimizer", *chosen}
        assert all(dimension.holds(params[name]) for name, dimension in chosen.items())
        assert plan.params_of(params)["lr"] == params["sgd.lr" if params["optimizer"] == "sgd" else "lr"]
        study.tell(trial, 0.0)


def test_in_the_grid_nothing_is_left_to_the_sampler():
    study = optuna.create_study()
    params = {**who("sogclr", "sgd"), "sgd.lr": 0.1}
    assert plan_of().suggest("grid", study.ask(), params) == params


# ---------------------------------------------------------------------------------------------------------------------
# from params to a run


@quickly
@given(chance=st.randoms(use_true_random=False), phase=st.sampled_from(["choices", "fine"]))
def test_a_config_has_the_params_and_is_the_bases_otherwise(all_at_once, chance, phase):
    plan = all_at_once
    pair = {} if phase == "choices" else who(chance.choice(plan.methods), chance.choice(plan.optimizers))
    params = sampled(plan, phase, pair, chance)
    config = plan.config(phase, params, 7, "somewhere", "trial")
    for name, value in params.items():
        if name not in ("method", "optimizer"):
            assert value_in(config, place_of(name, "x")) == value
    assert (config.objective.method, config.optimizer.optimizer) == (params["method"], params["optimizer"])
    assert (config.training.seed, config.run.runs, config.run.name) == (7, "somewhere", "trial")
    assert config.training.epochs == plan.phases[phase].changes["epochs"]
    assert config.data.data_share == (0.2 if phase == "choices" else 1.0)
    assert (config.training.batch_size, config.model, config.evaluation) == (128, BASE.model, BASE.evaluation)
    again = plan.config(phase, plan.params_of(params), 7, "somewhere", "trial")
    assert again == config  # by plain names too


def test_settings_of_the_recipe_are_its_methods_own():
    plan = plan_of()
    own = recipe_values("emoji")["objective"]["settings"]
    assert plan.config("grid", who("neuclip", "adamw"), 0, "", "").objective.settings == own
    assert plan.config("grid", who("openclip", "adamw"), 0, "", "").objective.settings == {}
    sampled_one = plan.config("fine", {**who("sogclr", "adamw"), "gamma": 0.7}, 0, "", "")
    assert sampled_one.objective.settings == {"gamma": 0.7}


def test_a_sampled_warm_up_displaces_the_recipes_share():
    config = plan_of().config("fine", {**who("openclip", "adamw"), "warmup_epochs": 1}, 0, "", "")
    assert (config.schedule.warmup_epochs, config.schedule.warmup_share) == (1, None)


def test_defaults_are_the_candidates_and_not_the_baselines():
    plan = plan_of(defaults={"temperature": 0.03, "sgd.lr": 0.5, "gamma": 0.6}, grid={"changes": {"temperature": 0.04}})
    assert plan.config("choices", who("sogclr", "sgd"), 0, "", "").objective.settings == {
        "temperature": 0.03,
        "gamma": 0.6,
    }
    assert plan.config("choices", who("sogclr", "sgd"), 0, "", "").optimizer.lr == 0.5
    assert plan.config("choices", who("sogclr", "adamw"), 0, "", "").optimizer.lr == 1e-3
    assert plan.config("grid", who("openclip", "adamw"), 0, "", "").objective.settings == {"temperature": 0.04}
    assert plan.config("fine", {**who("sogclr", "sgd"), "gamma": 0.9}, 0, "", "").objective.settings["gamma"] == 0.9
    baseline = plan.config("finals", {"method": "sogclr"}, 0, "", "")
    assert baseline.objective.settings == {} and baseline.optimizer.optimizer == "adamw"
    assert baseline.training.epochs == 4


def test_the_seed_is_the_plans_unless_the_slot_has_one():
    plan = plan_of(seed=5)
    assert plan.config("grid", who("openclip", "adamw"), None, "", "").training.seed == 5
    assert plan.config("grid", who("openclip", "adamw"), 0, "", "").training.seed == 0


def test_the_values_of_a_run_on_the_dimensions():
    plan = plan_of()
    at = plan.values_at("fine", {**who("sogclr", "sgd"), "sgd.lr": 0.3})
    assert at == {"sgd.lr": 0.3, "weight_decay": 0.1, "schedule": "cosine", "gamma": 0.8}  # warm-up: a share
    adamw = plan.values_at("fine", who("openclip", "adamw"))
    assert adamw == {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.98, "schedule": "cosine"}
    assert "lr" not in plan.values_at("fine", {**who("openclip", "adamw"), "lr": 1.0})  # outside the range
    base = to_dict(train_config(["--warmup-epochs", "2"])[0])
    warm = plan_of(base=base).values_at("fine", who("openclip", "adamw"))["warmup_epochs"]
    assert warm == 2 and isinstance(warm, int)


# ---------------------------------------------------------------------------------------------------------------------
# in and out


def test_a_plan_goes_through_json_and_yaml(tmp_path):
    plan = plan_of(pruner="asha", patience=2, defaults={"gamma": 0.7}, fine=None)
    assert search_from(json.loads(json.dumps(plan.as_dict()))) == plan
    path = tmp_path / "plan.yaml"
    path.write_text(write_values(plan.as_dict()))
    assert search_from(read_plan(path, SearchPlan)) == plan


@quickly
@given(data=st.data())
def test_a_range_goes_through_json_bit_by_bit(all_at_once, data):
    low = data.draw(st.floats(1e-6, 1e-1))
    high = data.draw(st.floats(low, 1.0, exclude_min=True))
    plan = search_from({**all_at_once.as_dict(), "space": {"lr": {"low": low, "high": high}}})
    assert search_from(json.loads(json.dumps(plan.as_dict()))).space["lr"] == Real(low, high)


def test_a_recipe_is_left_to_the_command(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("recipe: emoji\nname: x\n")
    values = read_plan(path, SearchPlan)
    assert values == {"recipe": "emoji", "name": "x"}
    assert plan_of(recipe="emoji") == plan_of()


def test_phases_have_defaults_and_may_be_left_out():
    plan = plan_of(grid=None, fine=None, finals=None)
    assert (plan.grid, plan.fine, plan.finals) == (None, None, None)
    values = {key: value for key, value in plan_of().as_dict().items() if key not in ("grid", "fine", "finals")}
    assert search_from(values).finals.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ["openclip", "sogclear"]}, "Unknown method 'sogclear'; did you mean 'sogclr'?"),
        ({"optimizers": ["adanw"]}, "Unknown optimizer 'adanw'; did you mean 'adamw'?"),
        ({"methods": []}, "SearchPlan.methods must name at least one"),
        ({"methods": ["sogclr", "sogclr"]}, "SearchPlan.methods must all be different"),
        ({"metrics": []}, "SearchPlan.metrics must name at least one"),
        ({"methods": None}, "A search needs `methods`"),
        ({"base": [1]}, "base must map names to values"),
        ({"name": "a/b"}, "SearchPlan.name must be a plain folder name"),
        ({"spaces": {}}, "Unknown key 'spaces'; did you mean 'space'?"),
        ({"space": [1]}, "space must map names to dimensions"),
        ({"space": {"lr": LR, "gama": LR}}, "neither a run nor a method has 'gama'; did you mean 'gamma'?"),
        ({"space": {"lr": LR, "rho_image": LR}}, "space.rho_image: none of the methods and optimizers here has it"),
        ({"space": {"lr": LR, "lion.lr": LR}}, "space.lion.lr: none of the methods and optimizers here has it"),
        ({"space": {"sgd.lr": LR, "sogclr.lr": LR, "lr": LR}}, "sgd.lr and sogclr.lr both say what lr is"),
        ({"defaults": {"rho_image": 1.0}}, "defaults.rho_image: none of the methods"),
        ({"defaults": {"evaluate": []}}, "defaults.evaluate cannot be set there"),
        ({"grid": {"changes": {"epoch": 1}}}, "grid.changes: neither a run nor a method has 'epoch'; did you mean"),
        ({"grid": {"changes": {"seed": 1}}}, "grid.changes.seed cannot be set there"),
        ({"grid": {"changes": {"method": "openclip"}}}, "grid.changes.method cannot be set there"),
        ({"finals": {"changes": {"sgd.evaluate": []}}}, "finals.changes.sgd.evaluate cannot be set there"),
        ({"grid": {"methods": 0}}, "Grid.methods must be a whole number of at least 1, got 0"),
        ({"choices": None}, "The phase `choices` cannot be left out"),
        ({"choices": {"trials": 0}}, "Choices.trials must be a whole number of at least 1, got 0"),
        ({"choices": {"trials": 3}}, "choices.trials must be at least 4 to try each method and each optimizer"),
        ({"choices": {"over": ["method"]}}, "choices.over must have 'optimizer', since there are several"),
        ({"choices": {"over": ["method", "optimizer", "lrr"]}}, "choices.over: the space has no 'lrr'; did you mean"),
        ({"fine": {"over": ["method"]}}, "The winner keeps its method and its optimizer."),
        ({"fine": {"over": ["lr"], "changes": {"lr": 1.0}}}, "fine.over has 'lr', which fine.changes sets"),
        ({"finals": {"seeds": []}}, "Finals.seeds must be different whole numbers"),
        ({"finals": {"seeds": [1, 1]}}, "Finals.seeds must be different whole numbers"),
        ({"finals": {"baselines": ["open_clip"]}}, "Unknown method 'open_clip'; did you mean 'openclip'?"),
        ({"finals": {"best": 0}}, "Finals.best must be a whole number of at least 1"),
        ({"pruner": "ash"}, "SearchPlan.pruner must be one of 'asha', 'hyperband', 'median', 'none', got 'ash'"),
        ({"pruner_factor": 1}, "SearchPlan.pruner_factor must be a whole number of at least 2"),
        ({"patience": 0}, "SearchPlan.patience must be a whole number of at least 1"),
        ({"take": "first"}, "SearchPlan.take must be one of 'best', 'last'"),
        ({"seed": -1}, "SearchPlan.seed must be a whole number of at least 0"),
    ],
)
def test_a_mistake_is_named(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {}}, "The space of the phase 'fine' is empty for openclip with adamw, which may win"),
        ({"space": {"gamma": {"low": 0.1, "high": 1.0}}}, "The space of the phase 'fine' is empty for openclip"),
        (
            {"methods": ["openclip"], "optimizers": ["adamw"], "space": {"lr": LR}},
            "The space of the phase 'choices' is empty: there is one method, one optimizer and no dimension",
        ),
        (
            {"methods": ["openclip"], "optimizers": ["adamw"], "space": {}, "choices": {"over": None}},
            "The space of the phase 'choices' is empty",
        ),
    ],
)
def test_an_empty_space_is_refused(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan_of(**changes)


def test_one_candidate_is_enough_with_a_dimension():
    plan = plan_of(methods=["openclip"], optimizers=["adamw"], space={"lr": LR}, choices={"trials": 2, "over": ["lr"]})
    params = plan.suggest("choices", optuna.create_study().ask(), {})
    assert params == {**who("openclip", "adamw"), "lr": params["lr"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [("metric: [mean_r1]", "a search has no 'metric'; did you mean 'metrics'?"), ("base: 3", "base must map names")],
)
def test_a_wrong_file_is_named(tmp_path, text, said):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: {re.escape(said)}"):
        read_plan(path, SearchPlan)


@pytest.mark.slow
def test_a_plan_does_without_optuna():
    """It is a search's alone: a run must not wait for it, nor need it."""
    code = "import sys, fullbatch.cli.train, fullbatch.trials.checks; assert 'optuna' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
