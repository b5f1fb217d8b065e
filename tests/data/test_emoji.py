"""What the embedded emoji data set promises, read with tarfile alone."""

import io
import json
import tarfile
from pathlib import Path

import pytest

import fullbatch

Image = pytest.importorskip("PIL.Image")

FOLDER = Path(fullbatch.__file__).parent / "data" / "emoji"
SPLITS = ("train", "new_style", "new_concept")
HELD_OUT = ("new_style", "new_concept")
FIELDS = {"caption", "captions", "name", "keywords", "group", "subgroup", "style", "hexcode"}


@pytest.fixture(scope="module")
def splits():
    """split -> key -> (what the JSON says, the encoded picture)"""

    def read(split):
        samples = {}
        with tarfile.open(FOLDER / f"{split}.tar.xz") as archive:
            for member in archive:
                key, ending = member.name.split(".")
                samples.setdefault(key, {})[ending] = archive.extractfile(member).read()
        assert all(set(sample) == {"json", "webp"} for sample in samples.values())
        return {key: (json.loads(sample["json"]), sample["webp"]) for key, sample in samples.items()}

    return {split: read(split) for split in SPLITS}


def values(samples, field):
    return [about[field] for about, _ in samples.values()]


def test_it_is_small_enough_to_ship():
    assert sorted(path.name for path in FOLDER.glob("*.xz")) == sorted(f"{split}.tar.xz" for split in SPLITS)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


@pytest.mark.parametrize("split", SPLITS)
def test_members_are_as_img2dataset_writes_them_and_do_not_depend_on_who_built_them(split):
    with tarfile.open(FOLDER / f"{split}.tar.xz") as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names, key=lambda name: name.replace(".", " ").split())
    assert {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members} == {
        (0, 0, 0, "", "")
    }


@pytest.mark.parametrize("split", SPLITS)
def test_every_sample_is_complete(splits, split):
    for key, (about, encoded) in splits[split].items():
        assert set(about) == FIELDS, key
        assert key == f"{about['style']}-{about['hexcode']}"
        assert about["group"] and about["subgroup"] and about["keywords"], key
        assert about["caption"] == about["name"] == about["captions"][0], key
        assert 2 <= len(about["captions"]) == len(set(about["captions"])) <= 4, key
        assert all(text == text.strip() != "" for text in about["captions"]), key
        with Image.open(io.BytesIO(encoded)) as picture:
            picture.load()
            assert (picture.size, picture.mode) == ((64, 64), "RGB"), key


def test_one_vendor_is_never_trained_on(splits):
    assert set(values(splits["train"], "style")) == {"noto", "fluent"}
    assert set(values(splits["new_style"], "style")) == {"twemoji"}
    assert set(values(splits["new_style"], "hexcode")) <= set(values(splits["train"], "hexcode"))


def test_new_concepts_are_never_trained_on(splits):
    for field in ("name", "hexcode"):
        assert not set(values(splits["new_concept"], field)) & set(values(splits["train"], field))
    share = len(splits["new_concept"]) / (len(splits["new_concept"]) + len(set(values(splits["train"], "name"))))
    assert 0.10 < share < 0.14


def test_gender_variants_fall_on_one_side(splits):
    seen, unseen = (set(values(splits[split], "name")) for split in ("train", "new_concept"))
    for name in seen | unseen:
        if name.startswith("man "):
            variants = {name, "wo" + name, "person" + name[3:], name[4:]} & (seen | unseen)
            assert variants <= seen or variants <= unseen, variants


@pytest.mark.parametrize("split", HELD_OUT)
def test_held_out_galleries_have_one_right_answer(splits, split):
    assert len(set(values(splits[split], "name"))) == len(splits[split])
    assert len({encoded for _, encoded in splits[split].values()}) == len(splits[split])


@pytest.mark.parametrize("split", HELD_OUT)
def test_training_has_the_groups_and_subgroups_of_held_out_splits(splits, split):
    assert set(values(splits[split], "group")) == set(values(splits["train"], "group"))
    assert set(values(splits[split], "subgroup")) <= set(values(splits["train"], "subgroup"))


def test_sources_are_named():
    text = (FOLDER / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for words in ("Google", "Microsoft", "Twitter", "Miles Johnson", "Unicode", "creativecommons.org/licenses/by/4.0"):
        assert words in text
