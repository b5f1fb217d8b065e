"""DataComp's suite from folders: each task's main metric by hand, gaps by name, averages that say over what."""

from dataclasses import replace

import datasets
import pytest
import torch
from torch.nn.functional import normalize

from fullbatch.data.images import EvalTransform
from fullbatch.evaluation.datacomp import ENTRIES, GROUPS, averages, prompt_of_cue
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.result import Average
from fullbatch.evaluation.tasks import run_task, run_tasks
from tests.data.making import encoded, picture, png, write_members
from tests.evaluation.making import (
    CLASSES,
    several_captions,
    small_embedder,
    small_model,
    write_benchmark,
    write_captioned,
)

LABELS = [0, 0, 0, 0, 1, 1, 3, 3, 5, 5]
GUESSED = [0, 0, 0, 1, 1, 4, 3, 0, 5, 5]  # of six classes
GROUPED = [0, 0, 0, 1, 1, 1, 5, 5, 2, 2]


class Scripted(Embedder):
    """The image of number i is embedded at class GUESSED[i], a step nearer than at the classes after it."""

    def images(self, source):
        images = super().images(source)
        rows = torch.tensor([[1.0 / (1 + (c - g) % 6) for c in range(6)] for g in GUESSED])[images.ids]
        return replace(images, tables=(normalize(rows, dim=1),))

    def captions(self, captions):
        number = [next(place for place, name in enumerate(CLASSES) if name in caption) for caption in captions]
        return torch.eye(6)[torch.tensor(number)]


def scripted():
    model = small_model()
    return Scripted(model, model.tokenize, model.image_size, torch.device("cpu"), batch_size=4)


BY_HAND = {
    "imagenet1k": 7 / 10,
    "vtab/pets": (3 / 4 + 1 / 2 + 1 / 2 + 1) / 4,
    "wilds/iwildcam": (6 / 8 + 2 / 4 + 2 / 3 + 1) / 4,
    "wilds/camelyon17": 7 / 10,
    "wilds/fmow": 1 / 3,  # groups: 3 of 3, 1 of 3, 1 of 2, 2 of 2
    "fairness/geode": 1 / 3,
    # the right class is beyond the fifth only where it is the one before the guess: image 3 guesses 1, and is a 0
    "fairness/dollar_street": 2 / 3,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    for key in BY_HAND:
        entry = next(entry for entry in ENTRIES if entry.key == key)
        write_benchmark(root / entry.expected, LABELS, GROUPED)
    return root


def test_the_main_metric_of_each_task_by_hand(suite):
    measured = run_tasks((f"datacomp:{suite}",), scripted())
    assert {result.task.removeprefix("datacomp:"): result.value for result in measured.results} == {
        key: pytest.approx(value, abs=1e-12) for key, value in BY_HAND.items()
    }
    assert len(measured.gaps) == 31 and {gap.kind for gap in measured.gaps} == {"missing"}
    fmow = next(result for result in measured.results if result.task == "datacomp:wilds/fmow")
    assert fmow.metrics["worst_group_without_other"] == pytest.approx(1 / 3)
    assert fmow.notes == ("10 images, where DataComp has 22,108",)
    by_name = {average.name: str(average) for average in measured.averages}
    assert by_name["ImageNet"] == "70.0 (1 task)"
    assert by_name["ImageNet and variants"] == "70.0 (1 of 7 tasks)"
    assert by_name["ImageNet dist. shifts"] == "none of 6 tasks"
    assert by_name["Fairness"] == "50.0 (2 tasks)"
    assert by_name["DataComp average"] == f"{100 * sum(BY_HAND.values()) / 7:.1f} (7 of 38 tasks)"
    said = measured.as_dict()
    assert {"task": "datacomp:sun397", "kind": "missing", "reason": f"there is no wds_sun397_test in {suite}"} in said[
        "gaps"
    ]
    assert measured.main_values["datacomp:wilds/iwildcam f1_macro"] == pytest.approx(BY_HAND["wilds/iwildcam"])


def test_chance(suite):
    by_task = {result.task: result.chance for result in run_tasks((f"datacomp:{suite}",), scripted()).results}
    assert by_task["datacomp:imagenet1k"] == by_task["datacomp:fairness/geode"] == 1 / 6
    assert by_task["datacomp:fairness/dollar_street"] == 5 / 6
    expected = sum(2 * p / 6 / (p + 1 / 6) for p in (0.4, 0.2, 0.2, 0.2)) / 4
    assert by_task["datacomp:wilds/iwildcam"] == pytest.approx(expected)


def test_a_broken_task_is_named_and_the_others_go_on(tmp_path):
    write_benchmark(tmp_path / "wds_mnist_test", LABELS)
    write_benchmark(tmp_path / "wds_geode_test", LABELS)  # no groups
    write_benchmark(tmp_path / "wds_cars_test", LABELS)
    (tmp_path / "wds_cars_test/test/1.tar").unlink()
    write_members(write_benchmark(tmp_path / "wds_stl10_test", LABELS, shards=1) / "test/0.tar", [("a.cls", b"1")])
    measured = run_tasks((f"datacomp:{tmp_path}",), small_embedder())
    assert [result.task for result in measured.results] == ["datacomp:mnist"]
    failed = {gap.task: gap.reason for gap in measured.gaps if gap.kind == "failed"}
    assert set(failed) == {"datacomp:fairness/geode", "datacomp:cars", "datacomp:stl10"}
    assert "no .npy members" in failed["datacomp:fairness/geode"]
    assert "lacks 1 of the 2 shards" in failed["datacomp:cars"]
    assert "No sample of wds_stl10_test can be evaluated" in failed["datacomp:stl10"]
    assert next(a for a in measured.averages if a.name == "DataComp average").found == 1


def test_the_list_and_the_groups():
    keys = [entry.key for entry in ENTRIES]
    assert len(set(keys)) == 38
    assert {name: len(members) for name, members in GROUPS.items()} == {
        "ImageNet": 1,
        "ImageNet dist. shifts": 6,
        "VTAB": 13,
        "Retrieval with WinoGAViL": 3,
        "DataComp average": 38,
        "ImageNet and variants": 7,
        "Retrieval": 2,
        "Fairness": 2,
    }
    assert all(set(members) <= set(keys) for members in GROUPS.values())
    assert ENTRIES[keys.index("vtab/dtd")].expected == "wds_vtab-dtd_test"
    assert ENTRIES[keys.index("fairness/geode")].expected == "wds_geode_test"
    every = averages(dict.fromkeys(keys, 0.5))
    assert all(average.value == 0.5 and average.found == average.of for average in every)
    assert str(Average("VTAB", 0.213, 3, 7)) == "21.3 (3 of 7 tasks)"


@pytest.mark.parametrize("layout", ["wds", "saved", "hf_cache"])
def test_retrieval_in_every_layout(tmp_path, layout):
    captions = several_captions(9)
    write_captioned(tmp_path / "set", captions)
    expected = run_task(f"wds:{tmp_path}/set", small_embedder()).metrics
    name = "mscoco_2014_5k_test_image_text_retrieval"
    if layout == "wds":
        write_captioned(tmp_path / f"wds_{name}_test", captions, said=False)
    else:
        images = [{"bytes": png((20, 16), n), "path": None} for n in range(9)]
        features = datasets.Features(
            {"image": datasets.Image(), "caption": datasets.Sequence(datasets.Value("string"))}
        )
        rows = datasets.Dataset.from_dict({"image": images, "caption": captions}, features=features)
        folder = tmp_path / name if layout == "saved" else tmp_path / f"hf_cache/nlphuji___{name}"
        rows.save_to_disk(str(folder if layout == "saved" else folder / "TEST/1.1.0/0123abc"))
        if layout == "hf_cache":
            arrow = next(folder.rglob("*.arrow"))
            arrow.rename(arrow.with_name(f"{name}-test.arrow"))
    (result,) = run_tasks((f"datacomp:{tmp_path}",), small_embedder()).results
    assert result.task == f"datacomp:retrieval/{name}" and result.main == "mean_r1"
    assert result.metrics == expected


def wino_rows(questions):
    rows = {"cue": [], "candidates": [], "associations": [], "candidate_images": []}
    for number, (candidates, right) in enumerate(questions):
        names = [f"q{number} candidate {place}" for place in range(candidates)]
        rows["cue"].append(f"cue {number}")
        rows["candidates"].append(names)
        rows["associations"].append([names[place] for place in right])
        rows["candidate_images"].append(
            [encoded(picture((20, 16), 20 * number + place)) for place in range(candidates)]
        )
    return rows


def test_winogavil_against_a_loop(tmp_path):
    questions = [(5, [0, 3]), (10, [1, 2]), (12, [0, 5, 7]), (10, [9])]
    rows = wino_rows(questions)
    images = [[{"bytes": image, "path": None} for image in of_row] for of_row in rows["candidate_images"]]
    features = datasets.Features(
        {
            "cue": datasets.Value("string"),
            "candidates": datasets.Sequence(datasets.Value("string")),
            "associations": datasets.Sequence(datasets.Value("string")),
            "candidate_images": datasets.Sequence(datasets.Image()),
        }
    )
    datasets.Dataset.from_dict({**rows, "candidate_images": images}, features=features).save_to_disk(
        str(tmp_path / "winogavil")
    )
    embedder = small_embedder()
    (result,) = run_tasks((f"datacomp:{tmp_path}",), embedder).results
    model, scores = small_model(), []
    for (candidates, right), cue, encoded_images in zip(questions, rows["cue"], rows["candidate_images"], strict=True):
        pixels = torch.stack([EvalTransform(model.image_size)(image, "") for image in encoded_images])
        with torch.no_grad():
            sim = model.encode_image(pixels) @ model.encode_text(model.tokenize([prompt_of_cue(cue)]))[0]
        taken = set(sim.argsort(descending=True)[: len(right)].tolist())
        scores.append((candidates, len(taken & set(right)) / len(taken | set(right))))
    many = [score for candidates, score in scores if candidates >= 10]
    assert result.value == pytest.approx(sum(many) / 3)
    assert result.metrics["jaccard"] == pytest.approx(sum(score for _, score in scores) / 4)
    assert result.metrics["jaccard_5_6"] == pytest.approx(scores[0][1])
    assert result.counts["questions"] == 4 and result.notes == ("4 questions, where DataComp has 3,563",)
    assert prompt_of_cue("Apple") == "An apple" and prompt_of_cue("bear") == "A bear"
