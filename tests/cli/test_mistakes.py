"""What a user's mistake is answered with."""

import importlib.util
import shutil

import pytest
import torch

from fullbatch.cli.flags import naming_flags
from tests.cli.making import SHORT, answer, plain, small

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
    "export {place}/bare {place}/out": "{place}/bare is neither a run folder, nor a checkpoint, nor what `fullb",
    "export {place}/absent {place}/out": "There is no run folder, checkpoint or exported model at '{place}/absent'.",
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
    "--data ftp://host/a.tar": "ftp:// is no store that can be read; there are s3, gs, hf, http, https",
    "--data https://me:pass@host/a.tar": "The URL 'https://...@host/a.tar' in a source names a user or a password",
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
    "--graphs --compile": "--compile and --graphs cannot be used together yet",
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


SPECTRAL, CORRUPTIONS = (f"pip install 'fullbatch[{extra}]'." for extra in ("spectral", "corruptions"))
EXTRAS = {  # before anything is read: what they name is not there
    "train --batches spectral --data {place}/absent.tar": ("--batches spectral needs the package sklearn", SPECTRAL),
    "finetune --data {place}/absent.tar --batches spectral": ("--batches spectral needs the package", SPECTRAL),
    "compare --data {place}/absent.tar --batches spectral": ("--batches spectral needs the package", SPECTRAL),
    "audit {place}/absent --batch-losses": ("--batch-losses needs the package sklearn", SPECTRAL),
    "theory --part convergence --output {place}/theory": ("'convergence', a race with spectral batches,", SPECTRAL),
    "train --evaluate corrupted_views:{place}/absent": ("corrupted_views:{place}/absent' needs", CORRUPTIONS),
}


@pytest.mark.parametrize("typed", EXTRAS)
def test_an_extra_that_is_not_installed_is_named(typed, place, capsys, monkeypatch):
    hidden, find = "scipy" if "corrupted" in typed else "sklearn", importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == hidden else find(name))
    status, out, err = answer(capsys, *typed.format(place=place).split())
    assert (status, out) == (1, "")
    wish, advice = EXTRAS[typed]
    assert wish.format(place=place) in err and err.endswith(f"{advice}\n") and err.count("\n") == 1


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


def test_out_of_memory_is_answered_with_micro_batches(capsys, monkeypatch, place):
    def no_room(config, resume):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("fullbatch.training_run.train", no_room)
    status, _, err = answer(capsys, "train", *small(place), "--name", "large")
    assert status == 1 and "--micro-batch" in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["train", "search"])
def test_a_file_is_not_taken_for_a_setting(command):
    name = command.capitalize()
    for text in (f"'t/{name}.csv' has no column.", f"({name}.yaml: micro_batch is odd)"):
        assert naming_flags(text, command) == text
    assert naming_flags("Search.jobs must be 1.", "search") == "--jobs must be 1."
