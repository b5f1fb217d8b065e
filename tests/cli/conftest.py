"""A folder with small data, and a run in it."""

import json

import pytest

from fullbatch.cli import main
from tests.cli.making import MODEL, small
from tests.data.making import captioned, write_coco, write_csv, write_images, write_shard


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
