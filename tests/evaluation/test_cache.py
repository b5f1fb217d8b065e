"""Embeddings are kept for what they depend on, and for nothing else; a broken file is as none."""

import copy
import dataclasses

import pytest
import torch

from fullbatch.config.data import Source
from fullbatch.evaluation.embed import EmbeddingCache, fingerprint_of_model
from fullbatch.evaluation.tasks import run_task
from tests.data.making import png, write_members
from tests.evaluation.making import small_embedder, small_model, write_benchmark


@pytest.fixture
def pictures(tmp_path):
    for number in range(6):
        (tmp_path / "set" / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / f"class {number % 2}" / f"{number}.png").write_bytes(png((20, 16), number))
    return tmp_path / "set"


def cached(folder, *settings):
    return small_embedder(cache=EmbeddingCache.of(str(folder), small_model(), *settings))


def refusing(embedder):
    """It cannot embed: what it answers, it had."""

    def refuse(*inputs):
        raise AssertionError("embedded again")

    return dataclasses.replace(embedder, model=type("Refusing", (torch.nn.Module,), {"forward": refuse})())


def test_the_second_time_nothing_is_embedded(pictures, tmp_path):
    task = f"zero_shot:{pictures}?captions=folder"
    plain = run_task(task, small_embedder())
    first = run_task(task, cached(tmp_path / "cache", "fp32"))
    again = run_task(task, refusing(cached(tmp_path / "cache", "fp32")))
    assert plain == first == again
    with pytest.raises(AssertionError, match="embedded again"):
        run_task(task, refusing(cached(tmp_path / "cache", "bf16")))
    with pytest.raises(AssertionError, match="embedded again"):  # other prompts, the same images
        run_task(task, refusing(cached(tmp_path / "cache", "fp32")), ("a new {}",))
    assert EmbeddingCache.of("none", small_model()) is None


@pytest.mark.parametrize("change", ["another picture under the old name", "a new picture", "another file time"])
def test_another_source_is_another_name(pictures, tmp_path, change):
    source = Source(str(pictures), kind="folder", captions=("folder",))
    cached(tmp_path / "cache").images(source)
    cached_again = refusing(cached(tmp_path / "cache"))
    assert len(cached_again.images(source).ids) == 6
    one = pictures / "class 0" / "0.png"
    match change:
        case "another picture under the old name":
            one.write_bytes(png((20, 16), 99))
        case "a new picture":
            (pictures / "class 0" / "8.png").write_bytes(png((20, 16), 8))
        case "another file time":
            one.touch()
    with pytest.raises(AssertionError, match="embedded again"):
        cached_again.images(source)


def test_a_broken_file_is_as_none(pictures, tmp_path):
    source = Source(str(pictures), kind="folder", captions=("folder",))
    expected = cached(tmp_path / "cache").images(source)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"nonsense" * 100):
        file.write_bytes(broken)
        found = cached(tmp_path / "cache").images(source)
        assert torch.equal(found.image_ND, expected.image_ND) and found.captions == expected.captions
        assert file.read_bytes() == whole
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [file.name]


def test_bad_samples_are_remembered(tmp_path):
    folder = write_benchmark(tmp_path / "set", [0, 1, 2, 3])
    write_members(folder / "test/1.tar", [("a.png", b"broken"), ("a.cls", b"1"), ("b.png", png()), ("b.cls", b"2")])
    first = run_task(f"wds:{folder}", cached(tmp_path / "cache"))
    again = run_task(f"wds:{folder}", refusing(cached(tmp_path / "cache")))
    assert first == again and first.counts["left_out"] == 1


def test_the_fingerprint_of_a_model_is_that_of_its_weights():
    model = copy.deepcopy(small_model())
    assert fingerprint_of_model(model) == fingerprint_of_model(small_model())
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1.0
    assert fingerprint_of_model(model) != fingerprint_of_model(small_model())


def test_a_cache_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the folder cannot be made"):
        EmbeddingCache.of(str(tmp_path / "file" / "cache"), small_model())
