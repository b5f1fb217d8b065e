"""The command line: help, YAML, which setting wins, and what a user's mistake is answered with."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from fullbatch import __version__
from fullbatch.cli import main
from fullbatch.commands.train import train_config
from fullbatch.config.data import Data
from fullbatch.config.method import Scale
from fullbatch.config.methods import METHODS, NORMALIZERS, PAIRWISE, TEMPERATURES
from fullbatch.config.objective import Objective
from fullbatch.config.pairwise import CycleConsistency
from fullbatch.config.run import RunConfig
from fullbatch.config.training import RunFolder
from fullbatch.config.tree import from_dict, read_yaml, to_dict, write_yaml
from fullbatch.flags import field_help, naming_flags
from tests.data.making import captioned, write_coco, write_csv, write_images, write_shard

os.environ["HF_HUB_OFFLINE"] = "1"  # before any hub client is imported

MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SHORT = ["--samples", "32", "--batch-size", "8", "--workers", "0", "--no-tensorboard", "--quiet"]
SHORT += ["--settings.rho", "1.0"]  # below log(negatives)


def config_of(*arguments):
    return train_config(list(arguments))[0]


def answer(capsys, *arguments):
    """The exit status and what was printed, whether by us or by tyro."""
    capsys.readouterr()
    try:
        status = main(list(arguments))
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def plain(text):
    """Without tyro's boxes and line ends."""
    return " ".join(re.sub(r"[^\x00-\x7f]", " ", text).split())


# ---------------------------------------------------------------------------------------------------------------------
# help


def test_without_a_command_the_usage_is_shown(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        status, out, _ = answer(capsys, *arguments)
        assert status == 0 and out.startswith("usage: fullbatch COMMAND")
        assert {"train", "export", "recipes"} <= set(out.split())
    for flag in ("--version", "-V"):
        assert answer(capsys, flag)[:2] == (0, f"fullbatch {__version__}\n")


def test_help_shows_groups_and_defaults(capsys):
    status, out, _ = answer(capsys, "train", "--help")
    shown = plain(out)
    assert status == 0
    for group in ("objective", "settings", "data", "model", "training", "optimizer", "schedule", "evaluation", "run"):
        assert f"{group} options" in shown
    assert "pairs a step, over all ranks (default: 128)" in shown
    assert "--settings.prototypes INT" in shown
    assert "--recipe NAME, --config FILE.yaml, --resume RUN_FOLDER" in shown


def test_help_shows_the_settings_of_the_method_that_is_named(capsys):
    _, out, _ = answer(capsys, "train", "--method", "sogclr", "--help")
    assert "Settings of sogclr." in plain(out)
    assert "--settings.gamma FLOAT" in plain(out)
    assert "prototypes" not in plain(out).split("settings options")[1].split("data options")[0]
    _, out, _ = answer(capsys, "train", "--method", "sogclr", "--normalizer", "mlp", "--help")
    assert "--settings.prototype-lr FLOAT" in plain(out) and "--settings.gamma" not in plain(out)


def test_help_shows_the_recipes_values(capsys):
    _, out, _ = answer(capsys, "train", "--recipe", "cc3m-rn50", "--help")
    assert "pairs a step, over all ranks (default: 1024)" in plain(out)


# ---------------------------------------------------------------------------------------------------------------------
# YAML


@pytest.mark.parametrize("method", METHODS)
def test_yaml_out_is_yaml_in(method, tmp_path):
    config = RunConfig(objective=Objective(method))
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(config))
    assert from_dict(RunConfig, read_yaml(path)) == config
    assert config_of("--config", str(path)) == config


def test_yaml_keeps_what_looks_like_something_else(tmp_path):
    settings = {"rho": 1e-14, "prototype_lr": None, "reset_accumulator": True, "prototypes": 7}
    config = RunConfig(
        objective=Objective("neuclip", settings=settings),
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
        ("objective: {settings: 5}", "Objective.settings must map names to values, got 5."),
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


# ---------------------------------------------------------------------------------------------------------------------
# which one wins


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
    assert config_of("--method", "sogclr").objective == Objective("sogclr")
    assert config_of("--method", "neuclip").objective == config_of().objective
    assert config_of("--normalizer", "None").objective == config_of().objective
    path = write(tmp_path / "mine.yaml", objective={"method": "sogclr", "settings": {"gamma": 0.5}})
    layered = config_of("--recipe", "cc3m-rn50", "--config", path).objective
    assert layered == Objective("sogclr", settings={"gamma": 0.5})
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


# ---------------------------------------------------------------------------------------------------------------------
# mistakes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with small data, a model, a run, and things that are broken."""
    folder = tmp_path_factory.mktemp("place")
    patch = pytest.MonkeyPatch()
    patch.setenv("FULLBATCH_CACHE", str(folder / "cache"))
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "no_json.json").write_text("{")
    write_shard(folder / "shard.tar", captioned(24, (20, 20)))
    names = write_images(folder, 10, (20, 20))
    write_csv(folder / "pairs.csv", [(name, f"picture {i}") for i, name in enumerate(names)])
    write_csv(folder / "columns.csv", [(name, "x") for name in names], columns=("img_url", "words"))
    write_csv(folder / "empty.csv", [])
    write_csv(folder / "one.csv", [(names[0], "the only one")])
    write_csv(folder / "missing.csv", [(f"nowhere/{i}.jpg", "x") for i in range(20)])
    write_coco(folder / "coco.json", {})
    (folder / "notes.txt").write_text("hello")
    (folder / "bare").mkdir()
    (folder / "broken.yaml").write_text("optimizer: [")
    (folder / "weights.pt").write_bytes(b"no weights")
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def run_folder(place):
    assert main(["train", *small(place), "--name", "done"]) == 0
    return place / "runs" / "done"


def small(place):
    return [*SHORT, "--data", f"{place}/shard.tar", "--model", f"{place}/model.json", "--runs", f"{place}/runs"]


WORDS = {  # what is typed, and what the one message must say
    "trian": "There is no command 'trian'; did you mean 'train'?",
    "recipes emojy": "There is no recipe 'emojy'; did you mean 'emoji'?",
    "recipes a b": "usage: fullbatch recipes [NAME | search NAME]",
    "train --config {place}/absent.yaml": "There is no config file {place}/absent.yaml.",
    "train --config {place}/broken.yaml": "The config file {place}/broken.yaml cannot be read",
    "train --config {place}": "The config file {place} cannot be read: [Errno 21] Is a directory",
    "train --recipe emojy": "There is no recipe 'emojy'; did you mean 'emoji'?",
    "train --method neuclp": "Unknown method 'neuclp'; did you mean 'neuclip'?",
    "train --method clip": "Unknown method 'clip'; did you mean 'openclip'?",
    "train --normalizer moving": "--normalizer must be one of",
    "train --resume {place}/bare": "{place}/bare is not a run folder: there is no config.yaml in it.",
    "train --resume {place}/bare --recipe emoji": "leave --recipe and --config out",
    "export {place}/bare {place}/out": "{place}/bare is neither a run folder with a good checkpoint nor a checkpoint.",
    "export {place}/absent {place}/out": "{place}/absent is neither a run folder with a good checkpoint",
    "train --data a --data b": "--data is given 2 times; name all after one: --data A B.",
    "train --evaluate retrieval:a --evaluate retrieval:b": "--evaluate is given 2 times; name all after one",
}


@pytest.mark.parametrize("typed", WORDS)
def test_mistakes_before_anything_starts(typed, place, capsys):
    status, out, err = answer(capsys, *typed.format(place=place).split())
    assert (status, out) == (1, "")
    assert WORDS[typed].format(place=place) in err
    assert err.startswith("fullbatch: ") and err.count("\n") == 1


FLAGS = {
    "--bach-size 3": "--batch-size INT",
    "--settings.prototype 3": "--settings.prototypes INT",
    "--batch-size many": "'many'",
    "--precision fp64": "fp64",
    "--crop 0.5": "--crop",
    "--lr": "--lr",
    "--method": "--method",
}


@pytest.mark.parametrize("typed", FLAGS)
def test_mistakes_in_flags_are_answered_by_the_parser(typed, capsys):
    status, out, err = answer(capsys, "train", *typed.split())
    assert (status, out) == (2, "")
    assert FLAGS[typed] in plain(err)
    assert "Traceback" not in err


STARTS = {
    # data
    "--data {place}/nothing/*.tar": "Nothing matches '{place}/nothing/*.tar'; there is no folder '{place}/nothing'",
    "--data {place}/shard_{0..3}.tar": "There is no '{place}/shard_0.tar'",
    "--data {place}/columns.csv": "Its columns are 'img_url', 'words'; say which with PATH?image=COLUMN&captions=",
    "--data {place}/pairs.csv?captions=titel": "has no column 'titel'; did you mean 'title'?",
    "--data {place}/pairs.csv?caption=title": "has no option 'caption'; did you mean 'captions'?",
    "--data {place}/pairs.csv?weight=-1": "?weight must be a positive number, got -1.0",
    "--data {place}/pairs.csv?weight=x": "weight must be a positive number, got 'x'",
    "--data {place}/pairs.csv?kind=cvs": "?kind must be one of",
    "--data {place}/empty.csv": "{place}/empty.csv' holds no sample",
    "--data {place}/missing.csv": "could not be read",
    "--data {place}/coco.json": "has no image with a caption",
    "--data {place}/notes.txt": "Cannot tell from its name what '{place}/notes.txt' is",
    "--data {place}/bare": "The folder '{place}/bare' holds no images",
    "--data {place}/shard.tar::{place}/pairs.csv": "mixes csv and tar sources",
    "--data s3://bucket/a.tar": "is not local",
    "--data emoji?split=trian": "has no split 'trian'; did you mean 'train'?",
    "--batch-size 25": "--batch-size 25 is more than the 24 samples of an epoch; use at most 24, or more data.",
    "--data {place}/one.csv": "An epoch has one sample, and a batch needs two at least; name more --data.",
    "--data-share 0.05": "An epoch has one sample, and a batch needs two at least; take more than --data-share 0.05.",
    "--workers -1": "--workers must be a whole number of at least 0, got -1.",
    "--max-bad 2": "--max-bad must lie in [0, 1], got 2.0.",
    # model
    "--model ViT-B-23": "did you mean 'ViT-B-32'?",
    "--model {place}/absent.json": "{place}/absent.json cannot be read",
    "--model {place}/no_json.json": "{place}/no_json.json",
    "--model ViT-B-32 --pretrained openia": "did you mean 'openai'?",
    "--pretrained {place}/weights.pt": "{place}/weights.pt cannot be read as a checkpoint",
    "--embed-dim 64": "--embed-dim must be left out",
    "--image-tower resnet50": "--text-tower must be given too",
    "--unlocked-image-groups 1": "must be 0 without --lock-image",
    # training
    "--min-lr 1.0": "--min-lr must not exceed --lr, got 1.0 > 0.001.",
    "--warmup-steps 100": "a warm-up of 100 steps and a cool-down of 0 do not fit into a run of 4 steps",
    "--cooldown-steps 1": "--min-lr must be positive where there is a cool-down",
    "--batch-size 1": "--batch-size must be a whole number of at least 2, got 1.",
    "--samples 0": "--samples must be a whole number of at least 1, got 0.",
    "--ema 1.0": "--ema must lie in (0, 1), got 1.0.",
    "--graphs --micro-batch 4": "--graphs must be left out with --micro-batch, got True.",
    "--warmup-steps 1 --warmup-epochs 1": "--warmup-epochs must be None where --warmup-steps is given",
    "--recovery-batch 12": "--recovery-batch must be a multiple of --batch-size (8), got 12.",
    "--view-crop 0.5 1": "--view-crop and the other settings of views belong to a model with a --view-tower",
    "--settings.restart-every -1": "--settings.restart-every must be",
    "--lr -1": "--lr must be a positive number, got -1.0.",
    "--settings.temperature 0": "temperature must be a number in (0, 10], got 0.0",
    "--precision fp16 --device cpu": "--precision fp16 needs a GPU; on a CPU use fp32 or bf16.",
    # evaluation and the run folder
    "--evaluate retreival:{place}/pairs.csv": "name tasks as retrieval:SOURCE or zero_shot:SOURCE",
    "--evaluate zero_shot:{place}/absent.csv": "There is no '{place}/absent.csv'",
    "--templates nothing": "each with {{}} for the class name",
    "--name a/b": "--name must be a plain folder name",
    "--keep 0": "--keep must be a whole number of at least 1, got 0.",
}


@pytest.mark.parametrize("typed", STARTS)
def test_mistakes_in_what_a_run_needs(typed, place, capsys):
    flags = [word.replace("{place}", str(place)) for word in typed.split()]
    data = [] if flags[0] == "--data" else ["--data", f"{place}/shard.tar"]
    given = [*SHORT, "--model", f"{place}/model.json", "--runs", f"{place}/tried", *data]
    status, out, err = answer(capsys, "train", *given, *flags)  # of a flag given twice the last one counts
    said = [line for line in err.splitlines() if line.startswith("fullbatch: ")]
    assert (status, out, len(said)) == (1, "", 1), err
    assert STARTS[typed].replace("{place}", str(place)).replace("{{}}", "{}") in said[0]
    assert "Traceback" not in err
    shutil.rmtree(place / "tried", ignore_errors=True)


def test_a_gpu_that_is_not_there(place, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, _, err = answer(capsys, "train", *small(place), "--device", "cuda")
    assert status == 1 and "--device cuda: PyTorch sees no GPU here" in err


def test_a_text_tower_without_hub_or_folder(place, capsys):
    pair = ["--image-tower", "test_vit", "--text-tower", "no-such-bert"]
    data = ["--data", f"{place}/shard.tar", "--runs", f"{place}/tried"]
    status, _, err = answer(capsys, "train", *SHORT, *data, *pair)
    assert status == 1 and "The config of --text-tower 'no-such-bert' could not be loaded" in err
    assert "give a local folder, or connect to the hub" in err


# ---------------------------------------------------------------------------------------------------------------------
# a run, and going on with it


def test_a_run_leaves_what_its_docstring_says(run_folder):
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "log.txt", "checkpoints/step-000000004"):
        assert (run_folder / name).exists(), name
    assert config_of("--config", f"{run_folder}/config.yaml").training.samples == 32
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and lines[-1]["samples"] == 32


def test_a_run_folder_is_not_overwritten(place, run_folder, capsys):
    status, _, err = answer(capsys, "train", *small(place), "--name", "done")
    assert status == 1
    assert f"The run folder {run_folder} exists already: go on with `--resume {run_folder}`" in err


def test_a_run_goes_on(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    status, out, _ = answer(capsys, "train", "--resume", str(copy), "--samples", "48")
    assert status == 0 and f"run folder: {copy}" in out
    assert (copy / "checkpoints" / "step-000000006").is_dir()
    assert from_dict(RunConfig, read_yaml(copy / "config.yaml")).training.samples == 48


def test_other_settings_than_the_checkpoints(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    before = (copy / "config.yaml").read_text()
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--method", "sogclr")
    assert status == 1 and "--resume cannot change --method (it was 'neuclip', now 'sogclr')" in err
    assert (copy / "config.yaml").read_text() == before
    assert answer(capsys, "train", "--resume", str(copy), "--samples", "40")[0] == 0


def test_a_run_that_could_not_start_leaves_its_name_free(place, capsys):
    assert answer(capsys, "train", *small(place), "--name", "again", "--batch-size", "25")[0] == 1
    assert not (place / "runs" / "again").exists()
    assert answer(capsys, "train", *small(place), "--name", "again")[0] == 0


def test_every_checkpoint_is_damaged(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    (copy / "checkpoints" / "step-000000004" / "model.pt").write_bytes(b"x")
    status, _, err = answer(capsys, "train", "--resume", str(copy))
    assert status == 1
    assert f"fullbatch: Every checkpoint in {copy}/checkpoints is damaged; start a new run." in err
    status, _, err = answer(capsys, "export", str(copy), str(tmp_path / "out"))
    assert status == 1 and f"{copy} is neither a run folder with a good checkpoint nor a checkpoint." in err


def test_export(run_folder, tmp_path, capsys):
    status, out, _ = answer(capsys, "export", str(run_folder), str(tmp_path / "out"))
    assert (status, out) == (0, f"{tmp_path / 'out'}\n")
    assert (tmp_path / "out" / "open_clip_config.json").is_file()
    status, _, err = answer(capsys, "export", str(run_folder), str(tmp_path / "out.pt"))
    assert status == 1 and "open_clip knows no config by which to load out.pt" in err
    status, _, err = answer(capsys, "export", str(run_folder), str(tmp_path / "x"), "--format", "onnx")
    assert status == 2 and "onnx" in plain(err)
    status, _, err = answer(capsys, "export", str(run_folder))
    assert status == 2 and "the file or folder to write (required)" in plain(err)


def test_settings_reach_the_run(run_folder):
    config = from_dict(RunConfig, read_yaml(run_folder / "config.yaml"))
    assert to_dict(config)["objective"]["settings"] == {"rho": 1.0}


@pytest.mark.parametrize(
    ("command", "words"),
    [("search", "go on with `fullbatch search --resume FOLDER`"), ("compare", "compare --resume"), ("report", "")],
)
def test_stopped_at_once(command, words, capsys, monkeypatch):
    def stopped(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"fullbatch.commands.{command}"), command, stopped)
    assert main([command]) == 130
    told = capsys.readouterr().err
    assert told.startswith("fullbatch: stopped at once.") and words in told and "first step" not in told


def test_out_of_memory_is_answered_with_micro_batches(capsys, monkeypatch, place):
    def no_room(config, resume):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("fullbatch.training_run.train", no_room)
    status, _, err = answer(capsys, "train", *small(place), "--name", "large")
    assert status == 1 and "--micro-batch" in err and "Traceback" not in err


@pytest.mark.slow
def test_under_torchrun(place):
    """Two ranks as a user starts them; one of them speaks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "fullbatch", "train", *small(place), "--name", "ranks",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run folder:") == 1
    assert "on 2 ranks" in done.stderr
    wrong = subprocess.run([*command, "--batch-size", "5"], capture_output=True, text=True, timeout=300, check=False)
    assert wrong.returncode != 0
    assert "cannot be shared evenly by 2 ranks" in wrong.stderr


def test_every_flag_is_explained():
    for kind in (*PAIRWISE.values(), *NORMALIZERS.values(), *TEMPERATURES.values(), CycleConsistency, Scale):
        assert set(field_help(kind)) == {field.name for field in dataclasses.fields(kind)}, kind
    config = RunConfig()
    for group in dataclasses.fields(config):
        kind = type(getattr(config, group.name))
        assert set(field_help(kind)) == {field.name for field in dataclasses.fields(kind)}, kind


def test_going_on_with_a_run_that_is_further_already(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    before = (copy / "config.yaml").read_text()
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--samples", "8")
    assert status == 1 and "already, beyond the 1 that --epochs or --samples ask for" in err
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--name", "other")
    assert status == 1 and "leave --name and --runs out" in err
    assert (copy / "config.yaml").read_text() == before


def test_a_key_in_the_wrong_place_is_sent_home(tmp_path, capsys):
    (tmp_path / "flat.yaml").write_text("batch_size: 16\n")
    status, _, err = answer(capsys, "train", "--config", str(tmp_path / "flat.yaml"))
    assert status == 1 and "it belongs under 'training'" in err
    with pytest.raises(ValueError, match=r"write settings=\{'gamma': ...\}"):
        RunConfig.of(method="sogclr", gamma=0.3)


@pytest.mark.parametrize("command", ["train", "search"])
def test_a_file_is_not_taken_for_a_setting(command):
    name = command.capitalize()
    for text in (f"'t/{name}.csv' has no column.", f"({name}.yaml: micro_batch is odd)"):
        assert naming_flags(text, command) == text
    assert naming_flags("Search.jobs must be 1.", "search") == "--jobs must be 1."
