"""Every recipe is a run: its config, objective, towers, optimizer and schedule can be made, at the paper's sizes."""

import re

import pytest
import torch

from fullbatch.cli import main
from fullbatch.cli.train import Command, train_config
from fullbatch.config.methods import METHODS
from fullbatch.models.build import build_model
from fullbatch.objective.objective import Objective
from fullbatch.objective.parts import Context
from fullbatch.recipes import DEFAULT_RECIPE, RECIPES, first_line, recipe_text
from fullbatch.training.optimizer import make_optimizer, make_temperature_optimizer, phases
from tests.models.siglip import write_tokenizer

# NeuCLIP, Tables 1, 3 and 5: pairs, batch, samples seen, lr, lr of tau, weight decay, warm-up steps, rho, ms a step
NEUCLIP = {
    "cc3m-rn50": (2_723_840, 1024, 100e6, 1e-3, 1.25e-4, 0.1, 10_000, 6.5, 529.09),
    "cc12m-vit-b-32": (9_187_328, 2048, 300e6, 4e-4, 5e-5, 0.1, 10_000, 8.5, 897.79),
    "dfn14m-vit-b-32": (13_700_000, 4096, 320e6, 5e-4, 6.25e-5, 0.2, 500, 11.0, 897.79),
    "dfn192m-vit-b-16": (192_000_000, 5120, 1.3e9, 3.125e-4, 3.9e-5, 0.2, 500, 11.0, 944.41),
    "dfn1b-vit-b-16": (1_000_000_000, 5120, 3.0e9, 3.125e-4, 3.9e-5, 0.2, 500, 11.0, 944.41),
}
# TuneCLIP, Tables 16 and 18: hours with frozen weights, hours after
TUNECLIP = {"tuneclip": (4.27, 4.35), "tuneclip-siglip": (4.52, 4.75)}
VIEWS = {"simclr-cifar10": "simclr", "sogclr-cifar10": "sogclr_views"}
PAIRS = {
    "course-report": 100_000,
    "emoji": 2_841,
    **{name: row[0] for name, row in NEUCLIP.items()},
    **dict.fromkeys(TUNECLIP, 12_000_000),
    **dict.fromkeys(VIEWS, 50_000),
}


def config_of(name):
    config, resume = train_config(["--recipe", name])
    assert resume is None
    return config


def steps_of(name):
    config = config_of(name)
    per_epoch = PAIRS[name] // config.training.batch_size
    samples = config.training.samples
    total = config.training.epochs * per_epoch if samples is None else -(-samples // config.training.batch_size)
    return config.schedule, total, per_epoch


def test_the_recipes_are_these():
    assert set(RECIPES) == set(PAIRS)
    assert DEFAULT_RECIPE in RECIPES
    assert train_config([])[0] == config_of(DEFAULT_RECIPE)


@pytest.mark.parametrize(("cores", "workers"), [(2, 2), (64, 6)])
def test_a_recipe_starts_no_more_data_workers_than_there_are_cores(monkeypatch, cores, workers):
    monkeypatch.setattr("fullbatch.recipes.cores", lambda: cores)
    tuning = Command("finetune", recipe="tuneclip")
    assert train_config([], command=tuning)[0].data.workers == workers
    assert train_config(["--workers", "5"], command=tuning)[0].data.workers == 5, "but as many as the user wants"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_opens_with_what_one_asks_first(name):
    lines = recipe_text(name).splitlines()
    assert lines[0].startswith("# ") and lines[0].endswith(".") and len(lines[0]) <= 120
    head = "\n".join(line for line in lines if line.startswith("#"))
    assert re.search(rf"^# command    .*fullbatch {'finetune' if name in TUNECLIP else 'train'}", head, re.MULTILINE)
    if name != DEFAULT_RECIPE:
        assert re.search(rf"--recipe {name} [^#]*(\n# +)?--data ", head)
        for word in ("source", "hardware", "hours", "result"):
            assert re.search(rf"^# {word:<8}   \S", head, re.MULTILINE), word
        assert "not run by us" in head


@pytest.mark.parametrize("name", NEUCLIP)
def test_settings_are_the_papers(name):
    _, batch, samples, lr, temperature_lr, weight_decay, warmup, rho, _ = NEUCLIP[name]
    config = config_of(name)
    method = config.objective.build()
    assert config.objective.method == "neuclip"
    assert (method.normalizer.prototypes, method.normalizer.restart_every, method.normalizer.updates) == (4096, 500, 10)
    assert method.normalizer.prototype_lr is None  # ours, and the recipe says how to have the paper's
    assert method.temperature.rho == rho
    assert (config.training.batch_size, config.training.samples, config.training.precision) == (batch, samples, "bf16")
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.temperature_lr, optimizer.weight_decay) == (lr, temperature_lr, weight_decay)
    resnet = config.model.model == "RN50"
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == ((0.9, 0.999, 1e-8) if resnet else (0.9, 0.98, 1e-6))
    assert config.schedule.warmup_steps == warmup
    assert set(config.objective.settings) <= {"prototypes", "restart_every", "updates", "rho"}


@pytest.mark.parametrize("name", NEUCLIP)
def test_hours_are_steps_times_the_papers_milliseconds(name):
    said = re.search(r"# hours      ([\d,]+) steps x ([\d.]+) ms \(Table 5\) = ([\d.]+) h", recipe_text(name))
    steps, milliseconds, hours = (float(number.replace(",", "")) for number in said.groups())
    _, total, _ = steps_of(name)
    assert (steps, milliseconds) == (total, NEUCLIP[name][-1])
    assert hours == pytest.approx(steps * milliseconds / 3.6e6, abs=0.05)


@pytest.mark.parametrize("name", TUNECLIP)
def test_tuneclip_is_the_papers(name):
    config = config_of(name)
    assert config.objective.build() == METHODS["tuneclip"]
    assert "temperature" not in config.objective.settings  # it is the checkpoint's
    margin = {"margin": 0.1} if name == "tuneclip-siglip" else {}  # else by the checkpoint's temperature
    assert config.objective.settings == {**margin, "gamma": 0.9, "gamma_epochs": 4}
    training, optimizer, recovery = config.training, config.optimizer, config.recovery
    assert (training.batch_size, training.epochs, training.precision) == (2048, 5, "bf16")
    assert (recovery.recovery_epochs, recovery.recovery_batch, recovery.carry) == (5, None, "all")
    assert (optimizer.optimizer, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-5, 0.02)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.98)
    assert (config.schedule.schedule, config.schedule.min_lr) == ("cosine", 0.0)
    assert config.evaluation.evaluate_start and config.evaluation.evaluate_every == 1
    assert config.model.pretrained is None  # the user's to name


@pytest.mark.parametrize("name", VIEWS)
def test_two_views_are_the_papers(name):
    """Cho et al. 2023, appendix D.3; temperature, gamma, projection and crop are its code's."""
    config = config_of(name)
    assert config.objective.build() == METHODS[VIEWS[name]]
    assert (config.training.batch_size, config.training.epochs, config.schedule.warmup_epochs) == (32, 100, 10)
    optimizer = config.optimizer
    assert (optimizer.optimizer, optimizer.momentum, optimizer.weight_decay) == ("lars", 0.9, 1e-6)
    assert optimizer.lr == pytest.approx(0.075 * 32**0.5)
    assert (config.model.view_tower, config.model.projection) == ("resnet18", (2048, 128))
    assert config.views.view_crop == (0.08, 1.0)


def test_frozen_steps_displace_the_recipes_epochs():
    config, _ = train_config(["--recipe", "tuneclip", "--recovery-steps", "7"])
    assert (config.recovery.recovery_epochs, config.recovery.recovery_steps) == (None, 7)


@pytest.mark.parametrize("name", TUNECLIP)
def test_tuneclips_steps_and_hours(name):
    said = re.search(
        r"# hours      ([\d.]+) on them, ([\d.]+) with frozen weights and ([\d.]+) after .*: ([\d,]+) steps",
        recipe_text(name),
    )
    whole, frozen, after, steps = (float(number.replace(",", "")) for number in said.groups())
    assert (frozen, after) == TUNECLIP[name] and whole == pytest.approx(frozen + after)
    _, tuning, per_epoch = steps_of(name)
    assert steps == tuning + config_of(name).recovery.recovery_epochs * per_epoch


def test_the_published_rule_can_be_had_as_the_recipes_say():
    config, _ = train_config(
        ["--recipe", "cc3m-rn50", "--settings.prototype-lr", "1.0", "--settings.reset-accumulator", "1.0"]
        + ["--settings.restart-from", "batch"]
    )
    assert config.objective.build().normalizer == type(METHODS["neuclip"].normalizer).as_published()


@pytest.mark.parametrize("name", RECIPES)
def test_the_schedule_fits_the_samples_seen(name):
    schedule, total, per_epoch = steps_of(name)
    warmup, descent, cooldown = phases(schedule, total, per_epoch)
    assert warmup + descent + cooldown == total
    assert warmup == 0 if name in TUNECLIP else 0 < warmup < 0.2 * total


@pytest.mark.parametrize("name", RECIPES)
def test_its_parts_can_be_made(name, tmp_path):
    tokenizers = {"course-report": "ViT-B-32", "tuneclip-siglip": str(tmp_path)}  # in place of those on the hub
    if name == "tuneclip-siglip":
        write_tokenizer(tmp_path)
    config, _ = train_config(["--recipe", name, *(["--tokenizer", tokenizers[name]] if name in tokenizers else [])])
    with torch.device("meta"):  # the shapes without the memory
        model = build_model(config.model, config.data.image_size)
    widths = {"RN50": 1024, "ViT-B-32": 512, "ViT-B-16": 512, "ViT-B-16-SigLIP": 768, "tiny": 128}
    width = 128 if config.model.view_tower else widths[config.model.model]
    assert model.width == (256 if config.model.is_pair else width)
    assert make_optimizer(model, config.optimizer, "cpu").param_groups[0]["lr"] == config.optimizer.lr
    context = Context(width=model.width, num_samples=min(PAIRS[name], 100_000))
    made = make_temperature_optimizer(Objective(config.objective.build(), context), config.optimizer)
    learned = config.objective.method == "neuclip"
    assert (made is not None) == learned


@pytest.mark.parametrize("name", ["cc3m-rn50", "course-report"])
def test_its_towers_embed(name):
    """With weights: one model of open_clip, one pair of timm and Hugging Face."""
    config, _ = train_config(["--recipe", name, *(["--tokenizer", "ViT-B-32"] if name == "course-report" else [])])
    model = build_model(config.model, config.data.image_size).eval()
    images = torch.zeros(2, 3, model.image_size, model.image_size, dtype=torch.uint8)
    with torch.no_grad():
        image, text = model(images, model.tokenize(["a cat", "a dog"]))
    assert image.shape == text.shape == (2, model.width)


# ---------------------------------------------------------------------------------------------------------------------
# fullbatch recipes


def test_they_are_listed(capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for name in RECIPES:
        assert re.search(rf"^{re.escape(name)} +{re.escape(first_line(recipe_text(name)))}$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_one_is_printed_as_it_is(name, capsys):
    assert main(["recipes", name]) == 0
    assert capsys.readouterr().out == recipe_text(name)


@pytest.mark.parametrize("arguments", [["recipes", "cc3m-rn5"], ["train", "--recipe", "cc3m-rn5"]])
def test_an_unknown_name_is_answered_with_the_nearest(arguments, capsys):
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "no recipe 'cc3m-rn5'; did you mean 'cc3m-rn50'?" in said
    assert said.count("\n") == 1
