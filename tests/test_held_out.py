"""Data of one's own, and nothing said about what to measure on: a part is kept out of training and measured."""

import json

import pytest

from fullbatch.cli import main
from fullbatch.cli.train import holding_out, train_config
from fullbatch.config.data import Source
from fullbatch.data.sample import Samples
from fullbatch.data.sources import FEWEST, MOST_HELD_OUT, open_source, part_of
from tests.data.making import captioned, write_csv, write_images, write_shard
from tests.training.small import write_inputs

PICTURES = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    patch = pytest.MonkeyPatch()
    patch.setenv("FULLBATCH_CACHE", str(folder / "cache"))
    write_inputs(folder)
    names = write_images(folder, PICTURES, (20, 20))
    rows = [(name, f"{word} {place}") for word in ("picture", "image") for place, name in enumerate(names)]
    write_csv(folder / "pairs.csv", rows)  # a row a caption, two of each picture
    write_shard(folder / "many.tar", captioned(FEWEST, (8, 8)))
    yield folder
    patch.undo()


def small(place, *more):
    given = ["--model", str(place / "towers.json"), "--batch-size", "8", "--samples", "64", "--workers", "0"]
    return ["train", *given, "--method", "openclip", "--runs", str(place), "--no-tensorboard", "--quiet", *more]


def test_a_run_on_own_data_ends_with_numbers_chance_and_what_to_do_next(place, capsys):
    assert main(small(place, "--data", str(place / "pairs.csv"), "--name", "own")) == 0
    told = capsys.readouterr()
    (result,) = json.loads((place / "own" / "results.json").read_text())["results"]
    assert result["task"] == f"retrieval:{place}/pairs.csv?part=held_out"
    assert result["counts"]["images"] == 6 and result["chance"] > 0.0 and "chance" in told.out
    assert "6 of 60 pictures" in told.err and "--evaluate" in told.err
    for command in ("evaluate", "report", "export"):
        assert f"fullbatch {command} {place / 'own'}" in told.out
    assert main(["train", "--resume", str(place / "own"), "--samples", "96"]) == 0, "with the same parts"
    assert main(["evaluate", str(place / "own")]) == 0


def test_no_picture_is_in_both_parts(place):
    whole, train, held_out = (
        open_source(Source(str(place / "pairs.csv"), part=part)) for part in ("all", "train", "held_out")
    )
    assert (len(whole), len(train), len(held_out)) == (120, 108, 6)
    trained, kept = ({samples.read(i).image for i in range(len(samples))} for samples in (train, held_out))
    assert not trained & kept and len(trained) + len(kept) == PICTURES
    assert all(len(held_out.read(i).captions) == 2 for i in range(len(held_out)))
    assert len({whole.fingerprint, train.fingerprint, held_out.fingerprint}) == 3


class Numbers(Samples):
    name = fingerprint = "numbers"

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


@pytest.mark.parametrize(("count", "held_out"), [(FEWEST - 1, 0), (FEWEST, FEWEST // 10), (10**6, MOST_HELD_OUT)])
def test_how_much_is_held_out(count, held_out):
    assert len(part_of(Numbers(count), "held_out")) == held_out
    assert len(part_of(Numbers(count), "train")) == count - held_out


@pytest.mark.parametrize(
    "flags",
    [
        "--data {place}/many.tar --evaluate",  # nothing is to be measured
        "--data {place}/many.tar --evaluate retrieval:emoji",
        "--data {place}/many.tar --batch-size 48",  # what is left would be too little
        "--data {place}/shard.tar --batch-size 8",  # too few to measure on
        "--data {place}/many.tar?part=train --batch-size 8",  # parts are the user's own business
        "--data emoji",
    ],
)
def test_when_nothing_is_held_out(place, flags):
    config, _ = train_config(flags.format(place=place).split())
    assert holding_out(config) == config


def test_a_large_source_is_split_only_where_the_user_says_so(place, monkeypatch):
    config, _ = train_config(["--data", str(place / "many.tar"), "--batch-size", "8"])
    assert holding_out(config) != config
    monkeypatch.setattr("fullbatch.data.sources.LARGE", FEWEST - 1)
    assert holding_out(config) == config
