"""What a benchmark folder may lack, and what is said then."""

import math

import pytest
import torch

from fullbatch.evaluation.benchmark_folders import Classified, ShardSamples, open_benchmark
from fullbatch.evaluation.tasks import check_tasks, run_task
from tests.data.making import png, write_members
from tests.evaluation.making import (
    CLASSES,
    number_array,
    several_captions,
    small_embedder,
    write_benchmark,
    write_captioned,
)

LABELS = [0, 1, 2, 3, 4, 5, 0, 1]


def test_what_is_in_a_folder(tmp_path):
    found = open_benchmark(write_benchmark(tmp_path / "a", LABELS, groups=[3, 3, 1, 1, 0, 0, 0, 0]))
    assert isinstance(found, Classified) and found.classes == CLASSES
    assert found.labels_N.tolist() == LABELS
    assert torch.equal(found.groups_NM[:, 0], torch.tensor([3, 3, 1, 1, 0, 0, 0, 0]))
    assert [found.samples.read(number).captions[0] for number in range(8)] == [CLASSES[label] for label in LABELS]
    assert open_benchmark(write_benchmark(tmp_path / "b", LABELS)).groups_NM is None
    captions = several_captions(5)
    found = open_benchmark(write_captioned(tmp_path / "c", captions))
    assert isinstance(found, ShardSamples)
    assert [list(found.read(number).captions) for number in range(5)] == captions
    assert isinstance(open_benchmark(write_captioned(tmp_path / "d", captions, said=False), "retrieval"), ShardSamples)


BROKEN = {
    "nothing": "There is no folder",
    "no nshards": "There is no .*nshards.txt",
    "bad nshards": "must hold the number of shards, got 'many'",
    "no shard": r"lacks 1 of the 2 shards that nshards.txt counts \(1.tar\)",
    "no classes": "There is no .*classnames.txt",
    "empty classes": "classnames.txt is empty",
    "a hole in the classes": "line 2 is empty",
    "one class": "names one class .'cat'.: any model would be right",
    "too few classes": r"1.tar:s0004: the .cls member holds '4', expected a class number of at most 2",
    "no place for the class": "'a photo' has no {c}",
    "no samples": "hold no sample",
    "several labels": "says 'multilabel'; this program knows 'retrieval' and 'classification'",
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_broken_folder_says_what_is_wrong(tmp_path, wrong):
    folder = tmp_path / "set"
    if wrong != "nothing":
        write_benchmark(folder, LABELS if wrong != "no samples" else [])
    match wrong:
        case "no nshards":
            (folder / "test/nshards.txt").unlink()
        case "bad nshards":
            (folder / "test/nshards.txt").write_text("many")
        case "no shard":
            (folder / "test/1.tar").unlink()
        case "no classes":
            (folder / "classnames.txt").unlink()
        case "empty classes":
            (folder / "classnames.txt").write_text("\n")
        case "a hole in the classes":
            (folder / "classnames.txt").write_text("cat\n\ndog\n")
        case "one class":
            (folder / "classnames.txt").write_text("cat\n")
        case "too few classes":
            (folder / "classnames.txt").write_text("cat\ndog\nhouse\n")
            write_members(folder / "test/0.tar", [("s.cls", b"0"), ("s.png", png())])
        case "no place for the class":
            (folder / "zeroshot_classification_templates.txt").write_text("a photo")
        case "several labels":
            (folder / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(ValueError, match=BROKEN[wrong]):
        check_tasks((f"wds:{folder}",))


def test_captions_without_an_image_are_left_out_and_counted(tmp_path):
    folder = write_captioned(tmp_path / "set", several_captions(6), shards=1)
    members = [(f"s{n}.png", png((20, 16), n)) for n in range(5)] + [
        (f"s{n}.txt", f"text {n}".encode()) for n in range(6)
    ]
    write_members(folder / "test/0.tar", [*members, ("broken.png", b"no image"), ("broken.txt", b"text")])
    result = run_task(f"wds:{folder}", small_embedder())
    assert result.counts == {"images": 5, "captions": 5, "left_out": 2}
    assert "2 samples could not be read and are left out (first: set/0.tar:s5: no image member" in result.notes[0]


def test_an_image_without_a_class_or_group_is_an_error(tmp_path):
    folder = write_benchmark(tmp_path / "set", LABELS, shards=1)
    write_members(folder / "test/0.tar", [("a.png", png()), ("a.cls", b"0"), ("b.png", png())])
    with pytest.raises(ValueError, match=r"0.tar:b: the .cls member is missing"):
        open_benchmark(folder)
    rows = [("a.png", png()), ("a.cls", b"0"), ("a.npy", number_array([1])), ("b.png", png()), ("b.cls", b"1")]
    write_members(folder / "test/0.tar", [*rows, ("b.npy", number_array([1, 2]))])
    with pytest.raises(ValueError, match="have different shapes"):
        open_benchmark(folder)
    write_members(folder / "test/0.tar", [*rows, ("b.npy", b"nothing")])
    with pytest.raises(ValueError, match=r"b: the .npy member cannot be read"):
        open_benchmark(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.2, 7.0], r"holds \[0.2 7. \] \(float64\), expected whole numbers"),
        ([math.nan], r"holds \[nan\] \(float64\)"),
        ([1e300], r"\(float64\), expected whole numbers"),
        (["north"], r"holds \['north'\] \(<U5\)"),
    ],
)
def test_groups_are_whole_numbers(tmp_path, values, said):
    folder = write_benchmark(tmp_path / "set", LABELS, shards=1)
    rows = [("a.png", png()), ("a.cls", b"0"), ("b.png", png()), ("b.cls", b"1")]
    write_members(folder / "test/0.tar", [*rows, ("a.npy", number_array(values)), ("b.npy", number_array(values))])
    with pytest.raises(ValueError, match=f"0.tar:a: the .npy member .*{said}"):
        open_benchmark(folder)
    whole = [("a.npy", number_array([1.0, 2.0])), ("b.npy", number_array([3, -2]))]  # nothing is lost of these
    write_members(folder / "test/0.tar", [*rows, *whole])
    assert open_benchmark(folder).groups_NM.tolist() == [[1, 2], [3, -2]]


def test_all_captions_alike_is_an_error(tmp_path):
    folder = write_captioned(tmp_path / "set", [["one"]], shards=1)
    with pytest.raises(ValueError, match="any model would be right"):
        run_task(f"wds:{folder}", small_embedder())
