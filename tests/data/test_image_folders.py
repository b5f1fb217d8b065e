import json
import os
import pickle

import pytest

from fullbatch.config.data import Source
from fullbatch.data.sample import CocoCaptions, ImageFolder
from fullbatch.data.sources import open_source
from tests.data.making import jpeg, png, read_all, write_coco, write_images


def test_folder_names_and_sidecars_are_captions(tmp_path):
    for name, raw in {
        "golden_retriever/2.jpg": jpeg(seed=2),
        "golden_retriever/10.PNG": png(),
        "sea-lion/a.b.jpg": jpeg(),
        "sea-lion/a.b.txt": b"first line\r\n\n  second line \n",
        "sea-lion/bad.jpg": jpeg(),
        "sea-lion/bad.txt": b"\xff",
        "loose.jpg": jpeg(),
        ".hidden/x.jpg": jpeg(),
        "sea-lion/._a.jpg": b"",
        "notes.md": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    os.symlink(tmp_path, tmp_path / "sea-lion" / "loop")
    (tmp_path / "x").mkdir()
    os.symlink(tmp_path / "sea-lion", tmp_path / "x" / "seen already")
    folder = ImageFolder(str(tmp_path))
    good, bad = read_all(pickle.loads(pickle.dumps(folder)))
    assert [sample.captions for sample in good.values()] == [
        ("a photo of a golden retriever",),
        ("a photo of a golden retriever",),
        ("first line", "second line"),
    ]
    assert [s.name for s in good.values()][:2] == [f"{tmp_path.name}/golden_retriever/{n}" for n in ("10.PNG", "2.jpg")]
    assert ["loose.txt" in bad[2].reason, "UTF-8" in bad[4].reason] == [True, True]


def test_a_circle_of_links_ends(tmp_path):
    write_images(tmp_path, 1)
    os.symlink(tmp_path, tmp_path / "images" / "loop")
    os.symlink(tmp_path / "missing.jpg", tmp_path / "images" / "broken.jpg")
    good, bad = read_all(ImageFolder(str(tmp_path)))
    assert len(good) == 1 and "No such file" in bad[1].reason


def test_the_fingerprint_is_of_relative_paths(tmp_path):
    for place in ("a", "b"):
        write_images(tmp_path / place, 2)
    a, b = (ImageFolder(str(tmp_path / place)) for place in "ab")
    assert a.fingerprint == b.fingerprint
    write_images(tmp_path / "b", 3)
    assert ImageFolder(str(tmp_path / "b")).fingerprint != a.fingerprint


def test_a_folder_without_images(tmp_path):
    with pytest.raises(ValueError, match=r"holds no images \(.jpg"):
        ImageFolder(str(tmp_path))


def test_coco(tmp_path):
    names = write_images(tmp_path / "train", 3)
    path = write_coco(
        tmp_path / "captions.json",
        {names[2]: ["b", " c "], names[1]: [], names[0]: ["a"], "missing.jpg": ["d"], "../captions.json": ["e"]},
    )
    coco = CocoCaptions(str(path), root=str(tmp_path / "train"))
    good, bad = read_all(pickle.loads(pickle.dumps(coco)))
    assert [(s.image, s.captions) for s in good.values()] == [(jpeg(seed=2), ("b", "c")), (jpeg(), ("a",))]
    assert ["No such file" in bad[2].reason, "leads out" in bad[3].reason] == [True, True]
    assert "No such file" in str(read_all(CocoCaptions(str(path)))[1][0])  # below the folder of the file


def test_coco_with_strange_entries(tmp_path):
    path = tmp_path / "c.json"
    images = [{"id": 1}, {"id": [2]}, 7, {"id": "3", "file_name": "x\0.jpg"}, {"file_name": "y"}]
    annotations = [
        {"image_id": 1, "caption": "a"},
        {"image_id": {}},
        None,
        {"image_id": "3", "caption": 5},
        {"caption": "b"},
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    good, bad = read_all(CocoCaptions(str(path)))
    assert not good and len(bad) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable JSON file"),
        ("[]", "has no image with a caption"),
        ('[{"picture": "a.jpg", "caption": "a"}]', "has no image with a caption"),
        ("7", "not a COCO captions file"),
        ('{"images": [], "annotations": {}}', "not a COCO captions file"),
        ('{"images": [], "annotations": []}', "has no image with a caption"),
    ],
)
def test_coco_errors(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=f"c.json' .*{message}"):
        CocoCaptions(str(tmp_path / "c.json"))


def test_bare_folder_names_for_zero_shot(tmp_path):
    write_images(tmp_path / "sea_lion", 2)
    (tmp_path / "sea_lion" / "images").rename(tmp_path / "otter")
    (tmp_path / "otter" / "0.txt").write_text("a sentence")
    found = open_source(Source(f"{tmp_path}", captions=("folder",)))
    assert [found.read(index).captions for index in range(2)] == [("otter",), ("otter",)]
    with pytest.raises(ValueError, match="takes no captions option, only captions=folder"):
        open_source(Source(f"{tmp_path}", captions=("class",)))


def small_coco(folder, name, count=3):
    """COCO's own layout: captions in one folder, images in another beside it."""
    names = write_images(folder / "val2017", count)
    (folder / "annotations").mkdir(exist_ok=True)
    return write_coco(folder / "annotations" / name, {name: [f"thing {name}"] for name in names})


def test_cocos_own_layout_needs_no_root(tmp_path):
    path = small_coco(tmp_path, "captions_val2017.json")
    (tmp_path / "train2017").mkdir()
    good, bad = read_all(open_source(Source(str(path))))
    assert len(good) == 3 and not bad
    beside = path.rename(tmp_path / "captions_val2017.json")
    assert len(read_all(open_source(Source(str(beside))))[0]) == 3
    unnamed = beside.rename(tmp_path / "captions.json")
    assert not read_all(open_source(Source(str(unnamed))))[0], "no folder is guessed that the name does not give"


def test_a_list_of_images_with_captions(tmp_path):
    """Pictures lie below a folder that the file's name gives; rows of one picture are brought together."""
    names = write_images(tmp_path / "coco" / "val2014", 3)
    rows = [
        {"image": f"val2014/{names[0]}", "caption": ["a", "b"], "image_id": "x"},
        {"image": f"val2014/{names[1]}", "caption": "c"},
        {"image": f"val2014/{names[1]}", "caption": "d"},
        {"image": str(tmp_path / "coco" / "val2014" / names[2]), "caption": "e"},
        {"image": "val2014/gone.jpg", "caption": "f"},
    ]
    (tmp_path / "lists").mkdir()
    path = tmp_path / "lists" / "coco_val_new.json"
    path.write_text(json.dumps(rows))
    good, bad = read_all(open_source(Source(str(path))))
    assert [sample.captions for sample in good.values()] == [("a", "b"), ("c", "d"), ("e",)]
    assert "No such file" in bad[3].reason
    rooted = open_source(Source(str(path), root=str(tmp_path / "coco")))
    assert rooted.fingerprint == open_source(Source(str(path))).fingerprint, "wherever the pictures lie"
