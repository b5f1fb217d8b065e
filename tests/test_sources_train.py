"""Three steps on every kind of source, by the command line, and a checkpoint at the end."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fullbatch.cli import main
from fullbatch.cli.train import train_config
from fullbatch.config.methods import METHODS
from tests.data.making import captioned, jpeg, picture, write_coco, write_csv, write_images, write_shard

COUNT = 12
MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 8, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 6, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same twelve pictures in every form."""
    folder = tmp_path_factory.mktemp("sources")
    patch = pytest.MonkeyPatch()
    patch.setenv("FULLBATCH_CACHE", str(folder / "cache"))
    (folder / "model.json").write_text(json.dumps(MODEL))
    names = write_images(folder, COUNT, (20, 20))
    captions = [f"picture {number}" for number in range(COUNT)]
    write_shard(folder / "shard.tar", captioned(COUNT, (20, 20)))
    write_shard(folder / "packed.tar.gz", captioned(COUNT, (20, 20)))
    write_csv(folder / "pairs.csv", zip(names, captions, strict=True))
    write_csv(folder / "pairs.tsv", zip(names, captions, captions, strict=True), ("img", "one", "two"), "\t")
    write_coco(folder / "coco.json", {name: [text, text + "!"] for name, text in zip(names, captions, strict=True)})
    for number, text in enumerate(captions):
        (folder / "images" / f"{number}.txt").write_text(text)
    for number in range(COUNT):
        kind = folder / "classes" / ("cats", "dogs")[number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        (kind / f"{number}.jpg").write_bytes(jpeg((20, 20), number))
    yield folder
    patch.undo()


def write_parquet(path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    images = [jpeg((20, 20), number) for number in range(COUNT)]
    table = pyarrow.table({"image": images, "caption": [f"picture {number}" for number in range(COUNT)]})
    parquet.write_table(table, path, row_group_size=5)


def write_saved(path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [picture((20, 20), number) for number in range(COUNT)]}
    rows["text"] = [f"picture {number}" for number in range(COUNT)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(path))


def train(place, name, *data, samples=12, batch=4):
    flags = f"--samples {samples} --batch-size {batch} --workers 0 --no-tensorboard --quiet --log-every 1 --name {name}"
    where = ["--model", f"{place}/model.json", "--runs", f"{place}/runs", "--method", "sogclr"]
    assert main(["train", *flags.split(), *where, "--data", *[word.format(place=place) for word in data]]) == 0
    run = place / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]  # the built-in set is evaluated too
    assert [line["step"] for line in lines] == list(range(1, samples // batch + 1))
    assert all(np.isfinite(line["loss"]) and line["bad_samples"] == 0 for line in lines)
    assert (run / "checkpoints" / f"step-{samples // batch:09d}" / "manifest.json").is_file()
    return lines


SOURCES = {
    "tar": "{place}/shard.tar",
    "tar-packed": "{place}/packed.tar.gz",
    "csv": "{place}/pairs.csv",
    "tsv-columns": "{place}/pairs.tsv?image=img&captions=one,two",
    "folder": "{place}/images",
    "classes": "{place}/classes",
    "coco": "{place}/coco.json",
    "builtin": "emoji?weight=0.01",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source(name, place):
    train(place, name, SOURCES[name])


def test_parquet(place):
    write_parquet(place / "pairs.parquet")
    train(place, "parquet", "{place}/pairs.parquet")


def test_hugging_face(place):
    write_saved(place / "saved")
    train(place, "huggingface", "{place}/saved?split=test")


def test_the_same_pictures_are_the_same_run(place):
    """tar and CSV hold the same bytes in the same order, so every loss is the same number."""
    one, two = train(place, "as-tar", SOURCES["tar"]), train(place, "as-csv", SOURCES["csv"])
    assert [line["loss"] for line in one] == [line["loss"] for line in two]


def test_two_sources_mixed_by_weight(place):
    """An epoch has 12 x 2 + 12 x 0.5 = 30 pairs."""
    lines = train(place, "mixed", "{place}/shard.tar?weight=2", "{place}/pairs.csv?weight=0.5", samples=90, batch=30)
    assert [line["epoch"] for line in lines] == [1.0, 2.0, 3.0]


def test_workers_change_nothing(place):
    alone = train(place, "no-workers", SOURCES["coco"])
    flags = ["--workers", "2"]
    assert main(["train", "--config", f"{place}/runs/no-workers/config.yaml", "--name", "workers", *flags]) == 0
    text = (place / "runs" / "workers" / "metrics.jsonl").read_text()
    assert [json.loads(line)["loss"] for line in text.splitlines()] == [line["loss"] for line in alone]


DOCS = (Path(__file__).parent.parent / "docs" / "reference" / "data.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^    fullbatch (train.*)$", DOCS, re.MULTILINE))
def test_the_commands_of_the_docs_are_understood(command):
    config, _ = train_config(shlex.split(command)[1:])
    assert all(source.path for source in config.data.sources)


def test_the_docs_name_the_methods_that_need_ids():
    named = re.findall(r"`(\w+\*?)`", DOCS.split("memory per sample (")[1].split(")")[0])
    needing = {name for name, method in METHODS.items() if method.needs_ids}
    assert needing == {m for m in METHODS for n in named if re.fullmatch(n.replace("*", r"\w*"), m)}


def test_a_sample_shown_twice_an_epoch_is_cropped_anew(place):
    from fullbatch.config.data import Data
    from fullbatch.data.images import TrainTransform
    from fullbatch.data.loader import TrainingBatches, open_pool

    pool, order = open_pool(Data((f"{place}/coco.json?weight=2",)))
    batches = TrainingBatches(pool, order, 24, TrainTransform(16, (0.2, 1.0)), lambda texts: texts)
    batch = batches[0]
    for sample in range(COUNT):
        one, other = batch.images[batch.ids == sample]
        assert not one.equal(other)
