"""Neighbours and linear probes on tables small enough to count by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fullbatch.config.model import Model
from fullbatch.config.tasks import parse_task
from fullbatch.distributed import towers
from fullbatch.evaluation.measure import (
    FEW,
    NEIGHBOURS,
    TEMPERATURE,
    Labelled,
    fit,
    linear_probe,
    neighbour_votes,
)
from fullbatch.evaluation.measure import neighbours as neighbour_result
from fullbatch.evaluation.tasks import check_tasks, run_task, run_tasks
from fullbatch.models.build import build_model
from tests.data.making import png
from tests.evaluation.making import small_embedder

CLASSES = ("a", "b", "c")


def clusters(count: int, seed: int, spread: float = 1.0) -> Labelled:
    """Three clouds whose middles are the same for all seeds."""
    middles = np.random.default_rng(0).normal(size=(3, 8))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    features = middles[labels] + spread * rng.normal(size=(count, 8))
    return Labelled(torch.tensor(features, dtype=torch.float32), torch.tensor(labels), CLASSES, ())


def brute_votes(train: Labelled, row: np.ndarray) -> tuple[int, int]:
    gallery = train.features_NF.double().numpy()
    cosine = gallery @ row / np.linalg.norm(gallery, axis=1) / np.linalg.norm(row)
    order = np.argsort(-cosine)
    weighted, counted = np.zeros(3), np.zeros(3)
    for place in order[:NEIGHBOURS]:
        weighted[train.labels_N[place]] += np.exp(cosine[place] / TEMPERATURE)
    for place in order[:FEW]:
        counted[train.labels_N[place]] += 1
    return int(weighted.argmax()), int(counted.argmax())


@pytest.mark.parametrize("count", [10, 60, 400])
def test_votes_by_brute_force(count):
    """With fewer images than neighbours all of them vote."""
    train, test = clusters(count, 1), clusters(40, 2)
    found = torch.stack(neighbour_votes(train, test.features_NF)).T.tolist()
    assert [tuple(row) for row in found] == [brute_votes(train, row) for row in test.features_NF.double().numpy()]


def test_the_numbers_of_a_result():
    train, test = clusters(300, 1), clusters(200, 2)
    result = neighbour_result("knn:x|y", train, test)
    votes, votes_20 = neighbour_votes(train, test.features_NF)
    assert result.metrics["accuracy"] == result.value == float((votes == test.labels_N).double().mean())
    assert result.metrics["accuracy_20"] == float((votes_20 == test.labels_N).double().mean())
    assert result.chance == pytest.approx(1 / 3) and result.counts["training_images"] == 300
    assert result.value > 0.6
    linear = linear_probe("linear:x|y", train, test)
    assert linear.value > 0.6 and "penalty" in linear.notes[0]
    assert linear == linear_probe("linear:x|y", train, test), "nothing is random"


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_the_probe_is_logistic_regression(penalty):
    train = clusters(200, 1)
    fitted = fit(train.features_NF, train.labels_N, 3, penalty)
    features = train.features_NF.double().numpy()
    standard = (features - features.mean(axis=0)) / features.std(axis=0)
    theirs = LogisticRegression(C=1.0 / (penalty * 200), tol=1e-8, max_iter=10_000).fit(standard, train.labels_N)
    # the biases are free up to a constant
    assert np.allclose(fitted.weight_CF.numpy(), theirs.coef_, atol=2e-3)
    bias = fitted.bias_C.double().numpy()
    assert np.allclose(bias - bias.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=2e-3)
    assert fitted.guesses(train.features_NF).tolist() == theirs.predict(standard).tolist()


def test_features_that_never_vary_do_no_harm():
    train = clusters(60, 1)
    flat = torch.cat([train.features_NF, torch.full((60, 1), 5.0)], dim=1)
    fitted = fit(flat, train.labels_N, 3, 1e-3)
    assert fitted.weight_CF.isfinite().all() and fitted.weight_CF[:, -1].abs().max() < 1e-3


@pytest.fixture
def two_sets(tmp_path):
    """Class folders: four pictures of two classes to learn from, two to judge."""
    for part, seeds in (("train", (0, 1)), ("test", (2,))):
        for name, first in (("cat", 0), ("dog", 10)):
            (tmp_path / part / name).mkdir(parents=True)
            for seed in seeds:
                (tmp_path / part / name / f"{seed}.png").write_bytes(png((20, 16), first + seed))
    return f"{tmp_path}/train?captions=folder|{tmp_path}/test?captions=folder", tmp_path


def test_tasks_from_files_to_numbers(two_sets):
    where, _ = two_sets
    assert [parse_task(f"{kind}:{where}").kind for kind in ("knn", "linear")] == ["knn", "linear"]
    check_tasks([f"knn:{where}", f"linear:{where}"])
    measured = run_tasks([f"knn:{where}", f"linear:{where}"], small_embedder())
    for result in measured.results:
        assert result.counts == {"images": 2, "training_images": 4, "classes": 2, "left_out": 0}
        assert result.value in (0.0, 0.5, 1.0) and result.chance == 0.5


def test_a_model_with_features_is_probed_by_them(two_sets):
    where, _ = two_sets

    class Encoder(torch.nn.Module):
        """Its features are the class (the pictures' own number), its embeddings nothing."""

        def forward(self, images, tokens):
            return torch.ones(len(images), 3), None

        def features(self, images):
            return images.float().flatten(1)[:, :16]

    embedder = dataclasses.replace(small_embedder(), model=Encoder())
    blind = dataclasses.replace(small_embedder(), model=torch.nn.Module())
    blind.model.forward = Encoder().forward  # type: ignore[method-assign]
    seen, unseen = run_task(f"linear:{where}", embedder), run_task(f"linear:{where}", blind)
    assert unseen.value == 0.5, "features that are all alike say nothing"
    assert seen.metrics != {} and seen.counts == unseen.counts


def test_what_cannot_be_probed(two_sets):
    where, folder = two_sets
    train, test = where.split("|")
    with pytest.raises(ValueError, match="must name two sources"):
        parse_task(f"knn:{train}")
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        parse_task(f"linaer:{where}")
    (folder / "one" / "cat").mkdir(parents=True)
    (folder / "one" / "cat" / "0.png").write_bytes(png((20, 16), 3))
    with pytest.raises(ValueError, match="one class"):
        run_task(f"knn:{folder}/one?captions=folder|{test}", small_embedder())
    (folder / "test" / "cow").mkdir()
    (folder / "test" / "cow" / "0.png").write_bytes(png((20, 16), 3))
    with pytest.raises(ValueError, match="no training image is of the class 'cow'"):
        run_task(f"linear:{where}", small_embedder())


def features_whole_and_sharded(rank):
    torch.manual_seed(0)
    model = build_model(Model(view_tower="test_resnet", view_stem="small", projection=(16, 8))).eval()
    images = torch.arange(2 * 3 * 32 * 32).remainder(251).view(2, 3, 32, 32).to(torch.uint8)
    with torch.no_grad():
        whole = model.features(images)
        wrapped = towers.sharded(model, torch.device("cpu"))
        embedder = dataclasses.replace(small_embedder(), model=wrapped)
        return whole, embedder.feature_rows(images)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 on a CPU needs torch 2.7")
def test_towers_that_are_spread_over_ranks_have_the_same_features(two_ranks):
    for whole, sharded in two_ranks.run(features_whole_and_sharded):
        assert torch.equal(whole, sharded)
