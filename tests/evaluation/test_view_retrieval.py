"""Retrieval of the other view: clean among all images, corrupted among an image's own corruptions."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from fullbatch.config.tasks import parse_task
from fullbatch.evaluation import view_retrieval
from fullbatch.evaluation.corruptions import CORRUPTION_NAMES, CORRUPTIONS, corrupted
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.metric_names import CORRUPTED, VIEWS, metric_named
from fullbatch.evaluation.tasks import check_tasks, run_task, run_tasks
from tests.conftest import unit_rows
from tests.data.making import png
from tests.evaluation.making import small_embedder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    for seed in range(7):
        (tmp_path / "set" / f"{seed}.png").write_bytes(png((20, 16), seed))
        (tmp_path / "set" / f"{seed}.txt").write_text("a picture")
    return tmp_path / "set"


def embedder_of(function, **more) -> Embedder:
    """Of a model that is a function of its images."""

    class Encoder(torch.nn.Module):
        def forward(self, images, tokens):
            return torch.nn.functional.normalize(function(images.float()), dim=1), None

    return dataclasses.replace(small_embedder(), model=Encoder(), **more)


def test_hits_among_an_images_own_by_brute_force():
    first, second = unit_rows(5 * 19, 6, 0).view(5, 19, 6), unit_rows(5 * 19, 6, 1).view(5, 19, 6)
    second = (second + 1.2 * first) / (second + 1.2 * first).norm(dim=2, keepdim=True)
    found = view_retrieval.own_hits(first, second)
    for image in range(5):
        for kind in range(19):
            nearest = max(range(19), key=lambda other: float(first[image, kind] @ second[image, other]))
            assert found[image, kind] == float(nearest == kind)
    assert 0.0 < found.mean() < 1.0


def test_equally_near_rows_share_a_hit():
    same = torch.ones(2, 19, 3) / 3**0.5
    assert view_retrieval.own_hits(same, same).mean() == pytest.approx(1 / 19)
    broken = same.clone()
    broken[1, 4] = torch.nan
    hits = view_retrieval.own_hits(broken, same)
    assert hits[0].isfinite().all() and hits[1, 4].isnan()


def test_the_other_view_by_brute_force(folder):
    embedder = embedder_of(lambda images: images.flatten(1)[:, ::7] - 100.0, batch_size=4)
    tables = []

    def rows(batch):
        first, second = view_retrieval._MAKER(batch.images, view_retrieval.EVALUATION, batch.ids.numpy())
        return embedder.image_rows(first), embedder.image_rows(second)

    source = parse_task(f"views:{folder}").source
    tables = embedder.walk(source, rows).tables
    sims = (tables[0] @ tables[1].T).numpy()
    forth, back = sims.argmax(axis=1) == np.arange(7), sims.argmax(axis=0) == np.arange(7)
    result = run_task(f"views:{folder}", embedder)
    assert result.metrics["first_to_second_r1"] == pytest.approx(forth.mean())
    assert result.metrics["second_to_first_r1"] == pytest.approx(back.mean())
    assert result.value == pytest.approx(0.5 * (forth.mean() + back.mean()))
    assert result.chance == pytest.approx(1 / 7) and result.size == 7
    assert set(result.metrics) == set(VIEWS)


def test_batches_are_of_no_account(folder):
    def small(images):
        return images.flatten(1)[:, ::5] - 120.0

    for kind in ("views", "corrupted_views"):
        found = [run_task(f"{kind}:{folder}", embedder_of(small, batch_size=rows)).metrics for rows in (2, 7)]
        assert found[0] == pytest.approx(found[1])


def test_a_model_that_sees_nothing_is_at_chance(folder):
    blind = embedder_of(lambda images: torch.ones(len(images), 4))
    clean, hard = run_task(f"views:{folder}", blind), run_task(f"corrupted_views:{folder}", blind)
    assert clean.value == pytest.approx(clean.chance) and clean.chance == pytest.approx(1 / 7)
    assert hard.value == pytest.approx(hard.chance, abs=1e-6) and hard.chance == pytest.approx(1 / 19)
    assert set(hard.metrics) == set(CORRUPTED) and hard.size == 19
    assert hard.counts == {"images": 7, "left_out": 0}


@pytest.mark.parametrize("layout", ["cifar-c", "tiny-imagenet-c"])
def test_published_folders_are_measured_as_images_corrupted_here(tmp_path, layout):
    """Files of our own corruptions in their layout give what the images themselves give."""
    embedder = embedder_of(lambda images: images.flatten(1)[:, ::7] - 100.0, batch_size=4)
    size, count = embedder.image_size, 6
    squares = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    clean, published = tmp_path / "clean", tmp_path / "published"
    clean.mkdir()
    for image, pixels in enumerate(squares):
        Image.fromarray(pixels).save(clean / f"{image}.png")
        (clean / f"{image}.txt").write_text("a picture")
    for kind, name in enumerate(CORRUPTION_NAMES):
        images = corrupted(squares, list(range(count)), kind, view_retrieval.SEED)
        if layout == "cifar-c":
            published.mkdir(exist_ok=True)
            np.save(published / f"{name}.npy", np.concatenate([images, np.zeros_like(images).repeat(4, axis=0)]))
        else:
            (published / name / "1" / "n01443537").mkdir(parents=True)
            for image, pixels in enumerate(images):
                Image.fromarray(pixels).save(published / name / "1" / "n01443537" / f"test_{image}.png")
    task = f"corrupted_views:{published}"
    check_tasks([task])
    found, own = run_task(task, embedder), run_task(f"corrupted_views:{clean}", embedder)
    assert found.metrics == pytest.approx(own.metrics) and 0.0 < found.value < 1.0
    assert (found.chance, found.size, found.counts) == (own.chance, own.size, own.counts)


def test_only_what_is_corrupted_here_needs_scipy(tmp_path, folder, monkeypatch):
    for name in CORRUPTION_NAMES[:2]:
        np.save(tmp_path / f"{name}.npy", np.zeros((10, 8, 8, 3), np.uint8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tasks([f"views:{folder}", f"corrupted_views:{tmp_path}"])
    with pytest.raises(ValueError, match=r"needs the package scipy.*fullbatch\[corruptions\]"):
        check_tasks([f"corrupted_views:{folder}"])


def test_published_folders_that_are_not_whole_are_refused(tmp_path):
    np.save(tmp_path / "fog.npy", np.zeros((10, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="has one corruption"):
        check_tasks([f"corrupted_views:{tmp_path}"])
    np.save(tmp_path / "snow.npy", np.zeros((15, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="different numbers of images"):
        check_tasks([f"corrupted_views:{tmp_path}"])
    np.save(tmp_path / "snow.npy", np.zeros((11, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="must hold 5 severities"):
        check_tasks([f"corrupted_views:{tmp_path}"])


def test_both_kinds_measure_a_model_of_two_towers_too(folder):
    assert parse_task(f"corrupted_views:{folder}").kind == "corrupted_views"
    check_tasks([f"views:{folder}", f"corrupted_views:{folder}"])
    for kind in ("views", "corrupted_views"):
        once, again = (run_task(f"{kind}:{folder}", small_embedder()) for _ in range(2))
        assert once == again and 0.0 <= once.value <= 1.0
        assert metric_named(None, [f"{kind}:{folder}"]) == f"{kind}:{folder} mean_r1"


def test_corrupted_images_are_kept_and_a_broken_file_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    made = view_retrieval.corrupted_squares(images, [5, 6, 7], keep=True)
    assert made.shape == (19, 3, 16, 16, 3)
    assert all((made[kind] == corrupted(images, [5, 6, 7], kind, view_retrieval.SEED)).all() for kind in range(19))
    (file,) = tmp_path.glob("corrupted-*.npy")
    monkeypatch.setattr(view_retrieval, "corrupted", lambda *_: pytest.fail("they were kept"))
    assert (view_retrieval.corrupted_squares(images, [5, 6, 7], keep=True) == made).all()
    monkeypatch.setattr(view_retrieval, "corrupted", corrupted)
    file.write_bytes(b"broken")
    assert (view_retrieval.corrupted_squares(images, [5, 6, 7], keep=True) == made).all()
    assert (view_retrieval.corrupted_squares(images, [5, 6, 8], keep=False) != made).any()
    assert len(list(tmp_path.glob("*.npy"))) == 1, "what is not to be kept is not"
    assert len(CORRUPTIONS) == 19


def test_one_image_and_broken_models_are_refused(folder):
    for path in folder.iterdir():
        if not path.name.startswith("3."):
            path.unlink()
    with pytest.raises(ValueError, match="has one image"):
        run_task(f"views:{folder}", small_embedder())
    broken = embedder_of(lambda images: torch.full((len(images), 4), torch.nan))
    for kind in ("views", "corrupted_views"):
        with pytest.raises(ValueError, match="not finite"):
            run_task(f"{kind}:{folder}", broken)


def measured_on(rank, tasks, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLBATCH_CACHE", cache)
        return run_tasks(tasks, small_embedder()).as_dict()


def test_two_ranks_measure_what_one_does(two_ranks, folder, tmp_path):
    """With 7 images in batches of 4 one rank has fewer than the other, or none."""
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for seed in range(3):
            (tmp_path / "classes" / name / f"{seed}.png").write_bytes(png((20, 16), seed + 5 * (name == "dog")))
    classes = f"{tmp_path}/classes?captions=folder"
    tasks = (f"views:{folder}", f"corrupted_views:{folder}", f"knn:{classes}|{classes}", f"linear:{classes}|{classes}")
    alone = measured_on(0, tasks, str(tmp_path))
    assert len(alone["results"]) == 4
    for together in two_ranks.run(measured_on, tasks, str(tmp_path)):
        for ours, theirs in zip(together["results"], alone["results"], strict=True):
            numbers = [{k: v for k, v in one.items() if isinstance(v, float)} for one in (ours, theirs)]
            assert numbers[0] == pytest.approx(numbers[1])
            assert ours["counts"] == theirs["counts"]
