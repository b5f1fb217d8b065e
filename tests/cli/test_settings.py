"""YAML files, recipes and flags: what is read, and which one wins."""

import pytest
import yaml

from fullbatch.config.data import Data
from fullbatch.config.methods import METHODS, ObjectiveConfig
from fullbatch.config.run import RunConfig
from fullbatch.config.training import RunFolder
from fullbatch.config.tree import from_dict, read_yaml, write_yaml
from tests.cli.making import answer, config_of


@pytest.mark.parametrize("method", METHODS)
def test_yaml_out_is_yaml_in(method, tmp_path):
    config = RunConfig(objective=ObjectiveConfig(method))
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(config))
    assert from_dict(RunConfig, read_yaml(path)) == config
    assert config_of("--config", str(path)) == config


def test_yaml_keeps_what_looks_like_something_else(tmp_path):
    settings = {"rho": 1e-14, "prototype_lr": None, "reset_accumulator": True, "prototypes": 7}
    config = RunConfig(
        objective=ObjectiveConfig("neuclip", settings=settings),
        data=Data(("1e5", "no", "a b?weight=2", "ünïcode: {0..3}.tar"), crop=(0.5, 1.0)),
        run=RunFolder(name="2024", runs="1.5e3"),
    )
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(config), encoding="utf-8")
    assert config_of("--config", str(path)) == config


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2E-4", 2e-4), (".5", 0.5), ("1", 1.0), ("0.25", 0.25)])
def test_numbers_are_numbers(text, value, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"optimizer:\n  lr: {text}\n")
    assert config_of("--config", str(path)).optimizer.lr == value


def test_empty_yaml_and_empty_groups_are_the_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    for text in ("", "# nothing\n", "optimizer:\n", "objective:\n  settings:\n"):
        path.write_text(text)
        assert config_of("--config", str(path)) == RunConfig()


def test_a_single_value_stands_for_a_list(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  data: a.csv\n")
    assert config_of("--config", str(path)).data.data == ("a.csv",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser: {lr: 1}", "Unknown key 'optimiser'; did you mean 'optimizer'?"),
        ("optimizer: {lrr: 1}", "Unknown key 'lrr' in optimizer; did you mean 'lr'?"),
        ("objective: {settings: {rhoo: 1}}", "'neuclip' has no setting 'rhoo'; did you mean 'rho'?"),
        ("objective: {method: neuclp}", "Unknown method 'neuclp'; did you mean 'neuclip'?"),
        ("objective: {normalizer: moving}", "--normalizer must be one of none, batch_mean,"),
        ("optimizer: {lr: fast}", "optimizer.lr must be a number, got 'fast'."),
        ("optimizer: {lr: true}", "optimizer.lr must be a number, got True."),
        ("training: {epochs: 2.5}", "training.epochs must be a whole number, got 2.5."),
        ("training: {epochs: true}", "training.epochs must be a whole number, got True."),
        ("training: {samples: many}", "training.samples must be a whole number, got 'many'."),
        ("training: {compile: 1}", "training.compile must be true or false, got 1."),
        ("training: {precision: fp64}", "--precision must be one of 'fp32', 'bf16', 'fp16', got 'fp64'."),
        ("model: {model: [a]}", "model.model must be text, got ['a']."),
        ("data: {crop: [0.5, x]}", "data.crop must be a number, got 'x'."),
        ("data: {crop: 0.5}", "--crop must be two shares of the area"),
        ("training: 5", "training must map names to values, got 5."),
        ("objective: 5", "objective must map names to values, got 5."),
        ("objective: {settings: 5}", "objective.settings must map names to values, got 5."),
        ("objective: {settings: {rho: x}}", "rho must be a number or None, got 'x'."),
        ("- a\n- b", "must map names to values, got list."),
        ("optimizer: {lr: 1", "cannot be read: while parsing a flow mapping"),
        ("schedule: {warmup_steps: 1, warmup_epochs: 1}", "--warmup-epochs must be None where --warmup-steps is given"),
    ],
)
def test_mistakes_in_yaml(text, message, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    status, _, err = answer(capsys, "train", "--config", str(path))
    assert status == 1
    assert message in err
    assert err.count("\n") == 1 and err.startswith("fullbatch: ")


def test_a_key_in_the_wrong_place_is_sent_home(tmp_path, capsys):
    (tmp_path / "flat.yaml").write_text("batch_size: 16\n")
    status, _, err = answer(capsys, "train", "--config", str(tmp_path / "flat.yaml"))
    assert status == 1 and "it belongs under 'training'" in err
    with pytest.raises(ValueError, match=r"write settings=\{'gamma': ...\}"):
        RunConfig.of(method="sogclr", gamma=0.3)


def write(path, **groups):
    path.write_text(yaml.safe_dump(groups))
    return str(path)


def test_defaults_then_recipe_then_config_then_flags(tmp_path):
    path = write(tmp_path / "mine.yaml", optimizer={"lr": 0.5, "weight_decay": 0.3})
    both = ("--recipe", "cc3m-rn50", "--config", path)
    assert config_of("--config", path).optimizer.beta2 == 0.98  # the default
    assert config_of(*both).optimizer.beta2 == 0.999  # the recipe
    assert config_of(*both).optimizer.weight_decay == 0.3  # the config
    assert config_of(*both, "--lr", "0.25").optimizer.lr == 0.25  # the flag
    assert config_of(*both).objective.settings["rho"] == 6.5
    assert config_of(*both, "--settings.rho", "3").objective.settings["rho"] == 3.0
    assert config_of("--data", "a.csv") == RunConfig(data=Data(("a.csv",)))  # own data: no recipe


def test_another_method_leaves_the_settings_of_the_old_one_behind(tmp_path):
    assert config_of("--method", "sogclr").objective == ObjectiveConfig("sogclr")
    assert config_of("--method", "neuclip").objective == config_of().objective
    assert config_of("--normalizer", "None").objective == config_of().objective
    path = write(tmp_path / "mine.yaml", objective={"method": "sogclr", "settings": {"gamma": 0.5}})
    layered = config_of("--recipe", "cc3m-rn50", "--config", path).objective
    assert layered == ObjectiveConfig("sogclr", settings={"gamma": 0.5})
    kept = config_of("--config", path, "--method", "sogclr", "--settings.temperature", "0.1").objective
    assert kept.settings == {"gamma": 0.5, "temperature": 0.1}


def test_a_length_in_one_unit_replaces_the_other(tmp_path):
    recipe = config_of("--recipe", "cc3m-rn50", "--epochs", "3", "--warmup-epochs", "0.5")
    assert (recipe.training.epochs, recipe.training.samples) == (3, None)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_epochs) == (None, 0.5)
    assert config_of("--warmup-steps", "10").schedule.warmup_epochs is None  # the emoji recipe has epochs
    path = write(tmp_path / "mine.yaml", training={"epochs": 4}, schedule={"warmup_epochs": 1})
    layered = config_of("--recipe", "cc3m-rn50", "--config", path)
    assert (layered.training.samples, layered.schedule.warmup_steps) == (None, None)


def test_a_setting_that_is_named_is_kept_even_where_it_is_the_default():
    """With pretrained weights an unnamed temperature is theirs."""
    assert config_of("--data", "a.csv", "--settings.temperature", "0.07").objective.settings == {"temperature": 0.07}


def test_flags_of_axes():
    constant = config_of("--temperature-rule", "constant", "--settings.temperature", "0.05").objective
    assert constant.build().temperature == type(METHODS["sogclr"].temperature)(0.05)
    assert config_of("--temperature_rule=constant").objective == config_of("--temperature-rule", "constant").objective
    average = config_of("--normalizer", "moving_average", "--settings.gamma", "0.3").objective.build()
    assert type(average.normalizer) is type(METHODS["sogclr"].normalizer) and average.normalizer.gamma == 0.3
    assert type(average.temperature) is type(METHODS["neuclip"].temperature)
    hinge = config_of("--method", "openclip", "--pairwise", "squared_hinge", "--settings.margin", "0.2").objective
    assert hinge.build().pairwise == type(METHODS["tuneclip"].pairwise)(0.2)


def test_flags_come_in_both_spellings():
    assert config_of("--batch_size=64").training.batch_size == config_of("--batch-size", "64").training.batch_size == 64
    assert config_of("--crop", "0.5", "0.9").data.crop == (0.5, 0.9)
    assert config_of("--data", "a.tar", "b.csv?weight=2").data.data == ("a.tar", "b.csv?weight=2")
    assert config_of("--no-tensorboard").run.tensorboard is False


def test_weights_of_a_tower_are_a_switch_or_a_file():
    pair = ("--image-tower", "resnet50", "--text-tower", "bert-base-uncased")
    assert config_of(*pair).model.image_weights is False
    assert config_of(*pair, "--image-weights").model.image_weights is True
    both = config_of(*pair, "--image-weights", "resnet50.pth", "--text-weights").model
    assert (both.image_weights, both.text_weights) == ("resnet50.pth", True)
