"""Retrieval and zero-shot numbers against loops, with ties and equal captions."""

import pytest
import torch

from fullbatch.evaluation.retrieval import hit_share, ranks, recalls
from fullbatch.evaluation.zero_shot import accuracies
from tests.conftest import unit_rows


def test_recalls_against_a_loop():
    image, text = unit_rows(30, 4, 1), unit_rows(30, 4, 2)
    groups = torch.arange(30) // 2  # captions come in equal pairs
    found = recalls(image, text, groups)
    for name, anchors, gallery in (("image_to_text", image, text), ("text_to_image", text, image)):
        hits = dict.fromkeys((1, 5, 10), 0)
        for i in range(30):
            order = (gallery @ anchors[i]).argsort(descending=True).tolist()
            others_before = 0
            for j in order:
                if groups[j] == groups[i]:
                    break
                others_before += 1
            for k in hits:
                hits[k] += others_before < k
        for k, count in hits.items():
            assert found[f"{name}_r{k}"] == pytest.approx(count / 30)


def test_chunks_change_nothing():
    image, text = unit_rows(30, 4, 1), unit_rows(30, 4, 2)
    for a, b in zip(ranks(image, text, torch.arange(30)), ranks(image, text, torch.arange(30), chunk=7), strict=True):
        assert torch.equal(a, b)


def test_a_tie_counts_as_chance_would_have_it():
    rows = unit_rows(10, 4, 1)
    image = text = rows.repeat_interleave(2, dim=0)  # every picture twice, under two names
    assert recalls(image, text, torch.arange(20))["mean_r1"] == pytest.approx(0.5)
    same = torch.ones(8, 3) / 3**0.5
    assert recalls(same, same, torch.arange(8))["mean_r1"] == pytest.approx(1 / 8)
    assert hit_share(torch.tensor([0, 0, 3]), torch.tensor([0, 3, 0]), 1).tolist() == [1.0, 0.25, 0.0]


def test_accuracies_against_a_loop():
    images, classes = unit_rows(40, 5, 3), unit_rows(7, 5, 4)
    labels = torch.arange(40) % 7
    order = (images @ classes.T).argsort(dim=1, descending=True)
    found = accuracies(images, classes, labels)
    right = [int(order[i, 0]) == int(labels[i]) for i in range(40)]
    assert found["accuracy"] == pytest.approx(sum(right) / 40)
    assert found["accuracy_top5"] == pytest.approx(sum(int(labels[i]) in order[i, :5].tolist() for i in range(40)) / 40)
    hits = torch.tensor(right).double()
    by_class = torch.stack([hits[labels == c].mean() for c in range(7)])
    assert found["mean_per_class"] == pytest.approx(by_class.mean().item())
