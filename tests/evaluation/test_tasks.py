"""Tasks by name: from a source to numbers, prompts, ImageNet folders, and what stops them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fullbatch.config.tasks import EvaluationTask, parse_task
from fullbatch.config.training import Evaluation
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.measure import imagenet_names, imagenet_numbers, prompted, written_out
from fullbatch.evaluation.tasks import check_tasks, run_task, run_tasks
from tests.data.making import png, write_coco, write_csv
from tests.evaluation.making import small_embedder, small_model


@pytest.fixture
def pictures(tmp_path):
    """Class folders, with ImageNet's ids for names: tench, goldfish, great white shark."""
    for number, name in enumerate(("n01440764", "n01443537", "n01484850")):
        (tmp_path / "val" / name).mkdir(parents=True)
        for one in range(3):
            (tmp_path / "val" / name / f"{one}.png").write_bytes(png((20, 16), 3 * number + one))
    return tmp_path / "val"


def test_the_grammar():
    source = parse_task("zero_shot:a.csv?captions=title").source
    assert parse_task("retrieval:a.csv?captions=title") == EvaluationTask("retrieval", source)
    assert parse_task("imagenet:val").kind == "imagenet" and parse_task("imagenet:val").folder == Path("val")
    assert parse_task("datacomp:eval").kind == "datacomp"
    for wrong, answer in {
        "retreival:a.csv": "did you mean 'retrieval'?",
        "retrieval": "One must name tasks as",
        "wds:": "wds:FOLDER",
        "zero_shot:a.csv?weigth=2": "has no option 'weigth'",
    }.items():
        with pytest.raises(ValueError, match=answer.replace("?", r"\?")):
            Evaluation(evaluate=(wrong,))
    with pytest.raises(ValueError, match=r"each with {} for the class name"):
        Evaluation(templates=("a photo",))
    Evaluation(templates=("openai", "{}"))


def test_prompts():
    assert prompted("a {c} of {}", "cat") == "a cat of cat"
    assert written_out(("{}",)) == ("{}",)
    assert len(written_out(("openai", "{}"))) == 81 and "a bad photo of a {}." in written_out(("openai",))
    assert len(written_out(("simple",))) == 7
    assert imagenet_numbers()["n01440764"] == imagenet_numbers()["0"] == imagenet_numbers()["000"] == 0
    assert imagenet_numbers()["n15075141"] == 999 and imagenet_names()[999] == "toilet paper"


def test_several_captions_of_a_source_all_count(tmp_path):
    captions = {f"{n}.png": [f"thing {n}", f"thing {n} again", "a thing"][: n % 3 + 1] for n in range(7)}
    for n, name in enumerate(captions):
        (tmp_path / name).write_bytes(png((20, 16), n))
    result = run_task(f"retrieval:{write_coco(tmp_path / 'coco.json', captions)}", small_embedder())
    assert result.counts == {"images": 7, "captions": 13, "left_out": 0} and result.size == 13
    # of 91 pairs 13 are right, and "a thing", which two images say, twice more
    assert result.chance == pytest.approx(15 / 91)
    assert len(result.examples) == 7 and result.examples[2]["caption"] == "thing 2"
    assert all(1 <= example["rank"] <= 13 and len(example["nearest"]) == 3 for example in result.examples)


def test_images_keep_their_order_and_equal_captions_are_embedded_alike(tmp_path):
    rows = []
    for n in range(5):
        (tmp_path / f"{n}.png").write_bytes(png((20, 16), n))
        rows.append((f"{n}.png", f"thing {n}"))
    embedder, source = small_embedder(), parse_task(f"retrieval:{write_csv(tmp_path / 'a.csv', rows)}").source
    captions = [of_image[0] for of_image in embedder.images(source).captions]
    assert captions == [caption for _, caption in rows]
    twice = embedder.captions([*captions, *captions[::-1]])
    assert torch.equal(twice[:5], twice[5:].flip(0))


def test_an_imagenet_folder(pictures):
    result = run_task(f"imagenet:{pictures}", small_embedder())
    assert result.counts == {"images": 9, "classes": 3, "left_out": 0}
    assert result.notes == ("3 of the 1,000 classes have a folder; the others are no candidates",)
    named = [imagenet_names()[n] for n in (0, 1, 388)]
    assert named[:2] == ["tench", "goldfish"]
    by_name = run_task(f"zero_shot:{pictures}?captions=folder", small_embedder(), ("{}",))
    assert by_name.counts["classes"] == 3
    (pictures / "n01440764").rename(pictures / "fish")
    with pytest.raises(ValueError, match="has a folder 'fish', which is neither a WordNet id"):
        run_task(f"imagenet:{pictures}", small_embedder())


def test_one_class_is_an_error(pictures):
    for number in (1, 2):
        name = ("n01443537", "n01484850")[number - 1]
        (pictures / name).rename(pictures.parent / name)
    with pytest.raises(ValueError, match=r"has one class .'n01440764'.: any model would be right"):
        run_task(f"zero_shot:{pictures}?captions=folder", small_embedder())


def test_missing_and_empty_sources_are_said_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="There is no"):
        check_tasks((f"retrieval:{tmp_path}/absent.csv",))
    with pytest.raises(ValueError, match="holds no images"):
        check_tasks((f"imagenet:{tmp_path}",))
    with pytest.raises(ValueError, match="There is no folder"):
        check_tasks((f"datacomp:{tmp_path}/absent",))
    with pytest.raises(ValueError, match=r"None of DataComp's 38 tasks lies in .*: no wds_imagenet1k_test"):
        check_tasks((f"datacomp:{tmp_path}",))


class Broken(nn.Module):
    """Every other image has an embedding of NaN."""

    def forward(self, images, tokens):
        image, text = small_model()(images, tokens)
        if image is not None:
            image[::2] = np.nan
        return image, text


def test_embeddings_that_are_not_finite_are_an_error_not_a_number(pictures):
    model = small_model()
    embedder = Embedder(Broken(), model.tokenize, model.image_size, torch.device("cpu"))
    task = f"zero_shot:{pictures}?captions=folder"
    with pytest.raises(ValueError, match=r"not finite for 5 of 9 images of .*val"):
        run_task(task, embedder)
    measured = run_tasks((task,), embedder, go_on=True)
    assert measured.results == () and "not finite" in measured.gaps[0].reason


def test_every_task_is_opened_before_anything_runs(tmp_path, pictures):
    """What would end a training that is measured: pictures that are not there, one class, folders of other names."""
    gone = write_coco(tmp_path / "captions_val2017.json", {"0.jpg": ["a"], "1.jpg": ["b"]})
    with pytest.raises(
        ValueError, match=r"captions_val2017.json': none of 2 samples can be read .*No such file.*root="
    ):
        check_tasks((f"retrieval:{gone}",))
    check_tasks((f"imagenet:{pictures}", f"zero_shot:{pictures}?captions=folder", f"views:{pictures}"))
    (pictures / "n01440764").rename(pictures / "fish")
    with pytest.raises(ValueError, match="has a folder 'fish', which is neither a WordNet id"):
        check_tasks((f"imagenet:{pictures}",))
    one = write_csv(tmp_path / "one.csv", [(f"val/fish/{n}.png", "a fish") for n in range(3)])
    for kind, words in {"zero_shot": "one class", "retrieval": "the same caption for every image"}.items():
        with pytest.raises(ValueError, match=f"has {words}.*: any model would be right"):
            check_tasks((f"{kind}:{one}",))
    with pytest.raises(ValueError, match="has one class"):
        check_tasks((f"knn:{one}|{one}",))
