"""Which number a comparison looks at, and how it is shown."""

import pytest

from fullbatch.evaluation import metric_names
from fullbatch.evaluation.metric_names import Counted, count_classes, metric_named
from fullbatch.trials.comparison import _short, guessing_of
from fullbatch.trials.statistics import Guessing
from tests.data.making import png


def pictures(folder, *classes, count=3):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for one in range(count):
            (folder / name / f"{one}.png").write_bytes(png(seed=10 * number + one))
    return f"zero_shot:{folder}?captions=folder"


def test_a_rank_is_not_a_share():
    assert _short(1.0, "retrieval:x text_to_image_median_rank") == "1.0"
    assert _short(1.0, "retrieval:x mean_r1") == "100.00%"
    assert _short(None, "retrieval:x mean_r1") == "no"


def test_top_5_needs_five_classes(tmp_path):
    few, five = pictures(tmp_path / "few", *"abcd"), pictures(tmp_path / "five", *"abcde")
    assert metric_named("accuracy", [few]) == f"{few} accuracy"
    assert metric_named("accuracy_top5", [few, five]) == f"{five} accuracy_top5", "of the first task that has it"
    for asked in ("accuracy_top5", f"{few} accuracy_top5"):
        with pytest.raises(ValueError, match=r"few\?captions=folder has fewer than 5 classes, where it is not taken"):
            metric_named(asked, [few])


def test_imagenets_folders_are_counted_too(tmp_path):
    pictures(tmp_path / "few", "n01440764", "n01443537")
    with pytest.raises(ValueError, match="has fewer than 5 classes"):
        metric_named("accuracy_top5", [f"imagenet:{tmp_path / 'few'}"])


def test_where_a_part_of_the_samples_does_not_tell_it_is_said(tmp_path, monkeypatch, caplog):
    task = pictures(tmp_path / "few", "a", "b", "c", count=8)
    assert count_classes(task, 5) == Counted(3, whole=True)
    assert count_classes(task, 2) == Counted(2, whole=False), "enough"
    monkeypatch.setattr(metric_names, "MOST_READ", 10)
    assert count_classes(task, 5) == Counted(3, whole=False)
    assert metric_named("accuracy_top5", [task]) == f"{task} accuracy_top5"
    assert "a part of its samples has 3 classes only" in caplog.text


def test_what_guessing_gives_is_known_of_first_answers():
    retrieved = {"task": "retrieval:x", "main": "mean_r1", "chance": 0.01, "counts": {"images": 100}}
    classified = {"task": "zero_shot:x", "main": "accuracy", "chance": 0.2, "counts": {"images": 50}}
    results = {"results": [retrieved, classified]}
    for name in ("mean_r1", "image_to_text_r1", "text_to_image_r1"):
        assert guessing_of(results, f"retrieval:x {name}") == Guessing(0.01, 100)
    for name in ("accuracy", "mean_per_class"):
        assert guessing_of(results, f"zero_shot:x {name}") == Guessing(0.2, 50)
    for unknown in ("retrieval:x text_to_image_r5", "zero_shot:x f1_macro", "datacomp VTAB", "retrieval:y mean_r1"):
        assert guessing_of(results, unknown) is None
