"""The same embeddings give the numbers of clip-benchmark and of open_clip, exactly."""

import numpy as np
import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from sklearn.metrics import balanced_accuracy_score
from torch.utils.data import DataLoader

from fullbatch.data.images import EvalTransform
from fullbatch.evaluation.benchmark_folders import open_benchmark
from fullbatch.evaluation.measure import accuracies, class_embeddings, guesses, written_out
from fullbatch.evaluation.retrieval import own_captions, recalls
from fullbatch.evaluation.tasks import run_task
from tests.conftest import unit_rows
from tests.data.making import encoded
from tests.evaluation.making import (
    CLASSES,
    TEMPLATES,
    several_captions,
    small_embedder,
    small_model,
    write_benchmark,
    write_captioned,
)


@pytest.fixture(autouse=True)
def _plain_numbers(monkeypatch):
    """clip-benchmark turns arrays of one element into numbers by float(), which NumPy 2.4 no longer does."""
    monkeypatch.setattr(zeroshot_classification, "float", lambda array: np.asarray(array).item(), raising=False)


class Prepared:
    """Our transform for a PIL image, normalised as the model would."""

    def __call__(self, image):
        model = small_model()
        pixels = EvalTransform(model.image_size)(encoded(image), "image")
        return (pixels.float() - model.mean_C11) / model.std_C11


def peer_dataset(folder):
    return build_wds_dataset("small", Prepared(), data_dir=str(folder))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("captions", [1, 5])
def test_recall_of_the_same_embeddings(captions, seed):
    counts = [1 + (image * 7 + seed) % captions for image in range(60)]
    images, texts = unit_rows(60, 6, seed, torch.float32), unit_rows(sum(counts), 6, seed + 10, torch.float32)
    found = recalls(images, texts, own_captions(counts))
    scores = texts @ images.T
    owner = torch.arange(60).repeat_interleave(torch.tensor(counts))
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(scores)), owner] = True
    for k in (1, 5, 10):
        for name, table, right in (("text_to_image", scores, positive), ("image_to_text", scores.T, positive.T)):
            theirs = zeroshot_retrieval.batchify(zeroshot_retrieval.recall_at_k, table, right, 16, "cpu", k=k)
            assert np.float32(found[f"{name}_r{k}"]) == np.float32((theirs > 0).float().mean().item())


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_of_the_same_embeddings(seed):
    images, classes = unit_rows(200, 6, seed, torch.float32), unit_rows(11, 6, seed + 10, torch.float32)
    labels = torch.arange(200) % 9  # two classes have no image
    logits = 100.0 * images @ classes.T
    guessed = guesses(images, classes, labels)
    found = accuracies(guessed, labels, 11)
    assert [found["accuracy"], found["accuracy_top5"]] == zeroshot_classification.accuracy(logits, labels, topk=(1, 5))
    assert torch.equal(guessed.guess_N, logits.argmax(dim=1))
    assert found["mean_per_class"] == balanced_accuracy_score(labels, logits.argmax(dim=1))


def test_classes_are_embedded_as_open_clip_and_clip_benchmark_do():
    model, embedder = small_model(), small_embedder()
    ours = class_embeddings(embedder, CLASSES, TEMPLATES)
    arguments = model.backbone, model.tokenize, list(CLASSES)
    theirs = zeroshot_classification.zero_shot_classifier(*arguments, list(TEMPLATES), "cpu", amp=False)
    torch.testing.assert_close(ours, theirs.T, rtol=0, atol=2e-7)
    callables = open_clip.SIMPLE_IMAGENET_TEMPLATES
    theirs = open_clip.build_zero_shot_classifier(*arguments, callables, device="cpu")
    torch.testing.assert_close(
        class_embeddings(embedder, CLASSES, written_out(("simple",))), theirs.T, rtol=0, atol=2e-7
    )


def test_a_classification_folder_from_files_to_numbers(tmp_path):
    labels = [(number * 5) % 6 for number in range(23)]
    folder = write_benchmark(tmp_path / "small", labels)
    peer = peer_dataset(folder)
    ours = open_benchmark(folder)
    assert (list(ours.classes), list(ours.templates)) == (peer.classes, peer.templates)
    batches = DataLoader(peer.batched(8), batch_size=None)
    batches.dataset.classes = peer.classes
    model = small_model()
    theirs = zeroshot_classification.evaluate(
        model.backbone, batches, model.tokenize, peer.classes, peer.templates, "cpu", amp=False
    )
    found = run_task(f"wds:{folder}", small_embedder()).metrics
    assert found["accuracy"] == theirs["acc1"]
    assert found["accuracy_top5"] == theirs["acc5"]
    assert found["mean_per_class"] == theirs["mean_per_class_recall"]


def test_a_retrieval_folder_from_files_to_numbers(tmp_path):
    folder = write_captioned(tmp_path / "small", several_captions(23))
    batches = DataLoader(list(peer_dataset(folder)), batch_size=8, collate_fn=image_captions_collate_fn)
    model = small_model()
    theirs = zeroshot_retrieval.evaluate(
        model.backbone, batches, model.tokenize, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    found = run_task(f"wds:{folder}", small_embedder()).metrics
    for k in (1, 5, 10):
        assert np.float32(found[f"text_to_image_r{k}"]) == np.float32(theirs[f"image_retrieval_recall@{k}"])
        assert np.float32(found[f"image_to_text_r{k}"]) == np.float32(theirs[f"text_retrieval_recall@{k}"])
