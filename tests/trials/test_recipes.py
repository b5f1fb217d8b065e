"""The recipes of searches: plans that can be made, and the course report's numbers where it gives them."""

import math
import re
from dataclasses import replace

import pytest

from fullbatch.cli import main
from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict
from fullbatch.recipes import RECIPES, SEARCHES, first_line, recipe_text, search_recipe, search_text
from fullbatch.trials.checks import check_search, tried
from fullbatch.trials.search_plan import search_from
from fullbatch.trials.space import Choice, Real, Whole
from tests.trials.test_planted import run


def plan_of_recipe(name, *flags):
    values = search_recipe(name)
    recipe = ["--recipe", values["recipe"]] if "recipe" in values else []
    return search_from({**values, "base": to_dict(train_config([*recipe, *flags], values["base"])[0])})


def test_they_are_these():
    assert SEARCHES == ("course-report", "quick")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_recipe_opens_with_what_one_asks_first(name):
    lines = search_text(name).splitlines()
    assert lines[0].startswith("# ") and lines[0].endswith(".") and max(map(len, lines)) <= 120
    head = "\n".join(line for line in lines if line.startswith("#"))
    assert f"# command    fullbatch search --recipe {name}" in head
    for word in ("hardware", "hours", "result"):
        assert re.search(rf"^# {word:<8}   \S", head, re.MULTILINE), word


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_every_run_at_the_ends_of_the_space_has_a_config(name):
    plan = plan_of_recipe(name)
    assert plan.name == name
    for phase in ("choices", "grid", "fine", "finals"):
        for params in tried(plan, phase):
            plan.config(phase, params, 0, "runs", "x")


def test_quick_passes_the_checks():
    plan = plan_of_recipe("quick")
    checked = check_search(plan)
    assert (len(plan.methods), len(plan.optimizers)) == (3, 3)
    assert plan.pruner == "asha" and checked.evaluations["choices"] >= 2 and checked.evaluations["fine"] >= 2
    assert plan.finals.baselines == ("openclip", "sogclr") and len(plan.finals.seeds) >= 3
    for method, optimizer in plan.candidates:  # the winner as it is lies within the ranges, so that it is tried first
        found = plan.values_at("fine", {"method": method, "optimizer": optimizer})
        assert set(found) == set(plan.dimensions("fine", method, optimizer))


def test_the_course_report_is_the_reports():
    plan = plan_of_recipe("course-report")
    assert plan.methods == ("sogclr", "isogclr_new", "isogclr_new_v2")
    # Adam and FusedAdam, AdamW, RAdam, NovoGrad, NVNovoGrad and FusedNovoGrad, RMSProp, Momentum, FusedLAMB
    assert set(plan.optimizers) == {"adam", "adamw", "radam", "novograd", "nvnovograd", "rmsprop", "sgd", "lamb"}
    assert plan.space == {  # Table 3, less cooldown_epochs, which its code does not act on
        "lr": Real(1e-4, 1e-2, log=True),
        "weight_decay": Real(1e-6, 1e-2, log=True),
        "embed_dim": Choice((64, 128, 256, 512, 1024)),
        "gamma": Real(0.5, 1.0),
        "rho_image": Real(1.0, 10.0),
        "rho_text": Real(1.0, 10.0),
        "temperature": Real(0.01, 0.1, log=True),
        "min_lr": Real(1e-7, 1e-5, log=True),
        "warmup_epochs": Whole(0, 5),
        "warmup_from": Real(1e-5, 1e-3, log=True),
        "schedule": Choice(("cosine", "tanh")),
    }
    assert (plan.grid.methods, plan.grid.optimizers) == (3, 3)
    assert [metric.short for metric in plan.measures] == ["mean(text_to_image_r1, image_to_text_r1, accuracy)"]
    length = {"choices": (10, 0.2), "grid": (15, 1.0), "fine": (30, 1.0), "finals": (30, 1.0)}
    for phase, (epochs, share) in length.items():
        for method, optimizer in plan.candidates:  # Table 1, before anything is searched
            config = plan.config(phase, {"method": method, "optimizer": optimizer}, 0, "runs", "x")
            built = config.objective.build()
            assert (config.training.epochs, config.data.data_share) == (epochs, share)
            assert (config.training.batch_size, config.model.embed_dim, config.optimizer.lr) == (128, 256, 2e-4)
            assert (config.schedule.warmup_epochs, config.schedule.cooldown_epochs) == (5, None)
            assert config.schedule.clock == "albef"
            assert (built.normalizer.gamma, built.temperature.temperature) == (0.8, 0.01)
            if method != "sogclr":
                assert (built.temperature.rho_image, built.temperature.rho_text) == (8.0, 8.0)
    assert plan.choices.over == ("method", "optimizer", "lr") and plan.choices.trials > len(list(plan.candidates))
    for method, optimizer in plan.candidates:
        found = plan.values_at("fine", {"method": method, "optimizer": optimizer})
        assert set(found) == set(plan.dimensions("fine", method, optimizer))


def test_flags_of_a_run_change_a_recipes_base():
    plan = plan_of_recipe("course-report", "--data", "mine.csv", "--batch-size", "64")
    config = plan.config("grid", {"method": "sogclr", "optimizer": "lamb"}, 0, "runs", "x")
    assert (config.data.data, config.training.batch_size, config.training.epochs) == (("mine.csv",), 64, 15)


def test_they_are_listed_in_a_section_of_their_own(capsys):
    assert main(["recipes"]) == 0
    shown, _, searches = capsys.readouterr().out.partition("\nSearches:\n")
    for name in SEARCHES:
        assert re.search(rf"^{name} +{re.escape(first_line(search_text(name)))}$", searches, re.MULTILINE)
    assert "quick" not in shown and "fullbatch search --recipe NAME" in searches


def test_one_is_shown(capsys):
    for name in SEARCHES:
        assert main(["recipes", "search", name]) == 0
        assert capsys.readouterr().out == search_text(name)
    assert main(["recipes", "quick"]) == 0
    assert capsys.readouterr().out == search_text("quick")
    assert "course-report" in RECIPES and main(["recipes", "course-report"]) == 0  # a run's has the shorter way
    assert capsys.readouterr().out == recipe_text("course-report")


@pytest.mark.parametrize("arguments", [["search"], ["search", "quick", "x"], ["search", "quik"], ["quik"]])
def test_a_wrong_name_is_answered(arguments, capsys):
    assert main(["recipes", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("did you mean 'quick'?" in said) == ("quik" in arguments)


def test_phase_1_of_the_course_report_is_bayesian():
    """More trials than pairs, the rate among what is chosen: the sampler comes back to what is good."""
    plan = replace(plan_of_recipe("course-report"), grid=None, fine=None, finals=None)

    def worth(params, seed):
        rate = abs(math.log10(params["lr"] / 2e-3))
        return 0.3 + 0.2 * (params["optimizer"] == "radam") + 0.05 * (params["method"] == "isogclr_new") - 0.1 * rate

    tried = [params for _, params in run(plan, worth)[1]]
    assert len(tried) == plan.choices.trials > 24
    assert {(params["method"], params["optimizer"]) for params in tried} <= set(plan.candidates)
    late = tried[len(tried) // 2 :]
    assert sum(params["optimizer"] == "radam" for params in late) > 3 * len(late) / 8, "by chance an eighth"
    assert min(abs(math.log10(params["lr"] / 2e-3)) for params in late) < 0.1
