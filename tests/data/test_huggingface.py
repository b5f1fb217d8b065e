import pickle
import shutil

import pytest

from fullbatch.config.data import Source
from fullbatch.data.sources import open_source
from fullbatch.data.table_files import HuggingFaceSet
from tests.data.making import jpeg, picture, read_all, write_images

datasets = pytest.importorskip("datasets")


@pytest.fixture
def saved(tmp_path):
    rows = {"image": [picture(seed=i) for i in range(3)], "captions": [["a", "b"], ["c"], []]}
    features = datasets.Features({"image": datasets.Image(), "captions": datasets.Sequence(datasets.Value("string"))})
    train = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": train, "validation": train.select([1])}).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_images_come_as_they_were_saved(saved, tmp_path):
    samples = open_source(Source(str(saved)))
    good, bad = read_all(pickle.loads(pickle.dumps(samples)))
    assert good[0].image.startswith(b"\x89PNG") and good[0].captions == ("a", "b") and good[1].name == "set:row 1"
    assert "empty" in bad[2].reason and len(good) == 2
    assert open_source(Source(str(saved), split="validation")).read(0).captions == ("c",)
    shutil.move(saved, tmp_path / "moved")
    assert open_source(Source(str(tmp_path / "moved"))).fingerprint == samples.fingerprint


def test_paths_and_one_split(tmp_path):
    names = write_images(tmp_path, 2)
    datasets.Dataset.from_dict({"path": [*names, "../x.jpg"], "text": ["x", "y", "z"]}).save_to_disk(tmp_path / "one")
    good, bad = read_all(HuggingFaceSet(str(tmp_path / "one"), root=str(tmp_path)))
    assert good[1].image == jpeg(seed=1) and good[1].captions == ("y",) and "leads out" in bad[2].reason


def test_errors(saved, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no split 'validate'; did you mean 'validation'\? .*PATH\?split=NAME"):
        HuggingFaceSet(str(saved), split="validate")
    with pytest.raises(ValueError, match=r"no column 'jpg'. Its columns are 'image', 'captions'"):
        HuggingFaceSet(str(saved), image="jpg")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a data set that save_to_disk wrote"):
        HuggingFaceSet(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install .fullbatch\[huggingface\]"):
        HuggingFaceSet(str(saved))
