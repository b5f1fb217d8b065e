"""What cannot work is said before a trial starts: one sentence, naming the phase and the value."""

import re

import pytest
import torch

from fullbatch.trials.checks import CheckedSearch, check_search, tried
from fullbatch.trials.search_plan import search_from
from tests.data.making import write_coco
from tests.models.conftest import text_folder as text_folder
from tests.training.small import write_inputs

LR = {"low": 1e-4, "high": 1e-2, "log": True}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def plan_with(inputs):
    data, model = inputs

    def made(groups=None, **changes):
        base = {
            "data": {"data": [data], "workers": 0},
            "model": {"model": model},
            "training": {"batch_size": 8, "epochs": 4, "device": "cpu"},
            "evaluation": {"evaluate": [f"retrieval:{data}", f"zero_shot:{data}"], "evaluations": 3},
        }
        for name, values in (groups or {}).items():
            base[name] = {**base.get(name, {}), **values}
        usual = {
            "name": "small",
            "base": base,
            "metrics": ["mean(text_to_image_r1, image_to_text_r1, accuracy)"],
            "methods": ["openclip", "sogclr"],
            "optimizers": ["adamw", "sgd"],
            "space": {"lr": LR, "gamma": {"low": 0.5, "high": 1.0}},
            "choices": {"trials": 4, "changes": {"epochs": 2, "data_share": 0.5}},
            "grid": {"methods": 2, "optimizers": 1, "changes": {"epochs": 3}},
            "fine": {"trials": 3},
            "finals": {"best": 1, "seeds": [0, 1], "baselines": ["siglip"], "changes": {"evaluations": 1}},
            "pruner": "asha",
        }
        return search_from({**usual, **changes})

    return made


def test_a_good_plan_is_told_its_steps_and_evaluations(plan_with):
    """40 samples in batches of 8: five steps an epoch, two of the half."""
    checked = check_search(plan_with())
    assert checked == CheckedSearch(
        steps={"choices": 4, "grid": 15, "fine": 20, "finals": 20},
        evaluations={"choices": 3, "grid": 3, "fine": 3, "finals": 1},
    )


def test_the_ends_are_tried_alone_and_two_by_two(plan_with):
    plan = plan_with()
    assert len(list(tried(plan, "choices"))) == 4  # the candidates
    fine = list(tried(plan, "fine"))
    chosen = {"method": "sogclr", "optimizer": "adamw"}
    for params in ({"lr": 1e-4}, {"gamma": 1.0}, {"lr": 1e-2, "gamma": 0.5}):
        assert {**chosen, **params} in fine
    assert all("gamma" not in params for params in fine if params["method"] == "openclip")
    assert {"method": "siglip"} in tried(plan, "finals")
    assert {**chosen, "lr": 1e-2, "gamma": 0.5} in tried(plan, "finals")  # what was found comes along


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"gamma": {"low": 0.0, "high": 1.0}}, "The phase 'fine', sogclr with adamw, gamma = 0.0: MovingAverage.gamma"),
        ({"momentum": {"low": 0.5, "high": 1.0}}, "with sgd, momentum = 1.0: Optimizer.momentum must lie in [0, 1)"),
        ({"schedule": {"choices": ["cosine", "cosinus"]}}, "schedule = cosinus: Schedule.schedule must be one of"),
        ({"embed_dim": {"choices": [64, 128]}}, "embed_dim = 64: Model.embed_dim must be left out"),
        ({"min_lr": {"low": 1e-6, "high": 1e-3}}, "lr = 0.0001, min_lr = 0.001: Schedule.min_lr must not exceed"),
        ({"warmup_epochs": {"low": 0, "high": 5}}, "warmup_epochs = 5: Schedule: a warm-up of 25 steps"),
        ({"batch_size": {"choices": [8, 64]}}, "batch_size = 64: a batch of 64 is more than the 40 samples"),
    ],
)
def test_a_value_that_a_run_refuses_is_found_at_an_end(plan_with, space, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_search(plan_with(space={"lr": LR, **space}))


def test_what_fits_where_it_is_found_must_fit_into_the_finals(plan_with):
    plan = plan_with(
        space={"lr": LR, "warmup_epochs": {"low": 0, "high": 3}},
        finals={"best": 1, "seeds": [0], "changes": {"epochs": 2}},
    )
    with pytest.raises(
        ValueError, match="The phase 'finals', openclip with adamw, warmup_epochs = 3: Schedule: a warm"
    ):
        check_search(plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metrics": ["acuracy"]}, "The phase 'choices': metrics 'acuracy': none of the tasks gives it; did you mean"),
        ({"metrics": ["mean(mean_r1, f1)"]}, "metrics 'f1': none of the tasks gives it"),
        ({"metrics": ["accuracy", "mean_r1"]}, "SearchPlan.pruner must be 'none' with several metrics, got 'asha'"),
        ({"choices": {"trials": 4, "changes": {"data_share": 0.1}}}, "a batch of 8 is more than the 4 samples"),
        ({"choices": {"trials": 4, "changes": {"data": ["gone.csv"]}}}, "The phase 'choices', openclip with adamw: "),
        ({"choices": {"trials": 4, "changes": {"epochs": 0}}}, "Training.epochs must be a whole number of at least 1"),
        ({"finals": {"changes": {"evaluate": ["retrieval:gone.csv"]}}}, "The phase 'finals': metrics 'accuracy'"),
        (
            {"metrics": ["mean_r1"], "finals": {"changes": {"evaluate": ["retrieval:gone.csv"]}}},
            "The phase 'finals', openclip with adamw: ",
        ),
        ({"pruner_start": 3}, "pruner 'asha' acts after 3 evaluation(s) and before a run's last one"),
        ({"fine": {"changes": {"keep_best": "accuracy"}}}, "The phase 'fine': keep_best must be left out of a trial"),
        ({"patience": 2}, "patience 2 can end no run early, since runs have at most 3 evaluation(s)"),
    ],
)
def test_a_mistake_is_named_before_a_trial(plan_with, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_search(plan_with(**changes))


def test_a_phase_1_without_anything_to_sample_says_so(plan_with, caplog):
    check_search(plan_with(choices={"trials": 4, "changes": {"epochs": 2, "data_share": 0.5}}))
    words = "the phase 'choices' is a grid: it tries each of 4 pairs once, and leaves nothing to the sampler"
    assert words in caplog.text and "choices.over" in caplog.text
    caplog.clear()
    over = ["method", "optimizer", "lr"]
    check_search(plan_with(choices={"trials": 4, "over": over, "changes": {"epochs": 2, "data_share": 0.5}}))
    check_search(plan_with(choices={"trials": 3, "changes": {"epochs": 2, "data_share": 0.5}}))
    assert "is a grid" not in caplog.text


def test_a_pruner_needs_evaluations_during_training(plan_with):
    groups = {"evaluation": {"evaluations": None}}
    said = "pruner 'hyperband' acts after 1 evaluation(s) and before a run's last one, but runs have at most 1"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_search(plan_with(groups, pruner="hyperband"))
    assert check_search(plan_with(groups, pruner="none")).evaluations["fine"] == 1
    by_epoch = {"evaluation": {"evaluations": None, "evaluate_every": 3}}
    finals = {"best": 1, "seeds": [0]}
    checked = check_search(plan_with(by_epoch, finals=finals))
    assert checked.evaluations == {"choices": 1, "grid": 1, "fine": 2, "finals": 2}  # after epoch 3 and at the end


def test_nothing_to_measure(plan_with):
    groups = {"evaluation": {"evaluate": [], "evaluations": None}}
    with pytest.raises(ValueError, match="something to measure"):
        check_search(plan_with(groups, pruner="none"))
    with pytest.raises(ValueError, match="runs have at most 0"):
        check_search(plan_with(groups, metrics=["seconds"]))
    assert check_search(plan_with(groups, metrics=["seconds"], pruner="none")).evaluations["fine"] == 0


def test_a_model_that_is_not_there(plan_with):
    with pytest.raises(ValueError, match=r"The phase 'choices', openclip with adamw: .*ViT-Z-99"):
        check_search(plan_with({"model": {"model": "ViT-Z-99"}}))


def test_finals_may_be_measured_on_data_that_nothing_was_chosen_by(plan_with, inputs):
    tasks = [f"retrieval:{inputs[0]}?weight=1", f"zero_shot:{inputs[0]}?weight=1"]
    plan = plan_with(finals={"best": 1, "changes": {"evaluate": tasks}})
    check_search(plan)
    assert plan.measures_in("finals")[0].parts[0] == f"{tasks[0]} text_to_image_r1"
    assert plan.measures_in("fine") == plan.measures
    one = plan_with(metrics=["mean_r1"], finals={"best": 1, "changes": {"evaluate": tasks[0]}})
    assert one.measures_in("finals")[0].parts == (f"{tasks[0]} mean_r1",)
    assert plan.maximise == (True,)


def test_a_task_whose_pictures_are_not_there(plan_with, tmp_path):
    coco = write_coco(tmp_path / "captions_val2017.json", {"0.jpg": ["a"], "1.jpg": ["b"]})
    tasks = {"evaluation": {"evaluate": [f"retrieval:{coco}"]}}
    with pytest.raises(ValueError, match=r"The phase 'choices', openclip with adamw: .*none of 2 samples can be read"):
        check_search(plan_with(tasks, metrics=["mean_r1"]))


def test_a_file_of_weights_that_does_not_fit(plan_with, text_folder, tmp_path):
    torch.save({"stranger": torch.zeros(2)}, tmp_path / "odd.pth")
    towers = {"model": "tiny", "image_tower": "test_vit", "text_tower": text_folder, "context_length": 8}
    plan = plan_with({"model": {**towers, "image_weights": str(tmp_path / "odd.pth")}})
    with pytest.raises(ValueError, match=r"The phase 'choices', openclip with adamw: .*odd.pth"):
        check_search(plan)
