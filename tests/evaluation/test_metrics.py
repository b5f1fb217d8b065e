"""Each metric on a handful of samples, computed by hand, and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, jaccard_score

from fullbatch.evaluation.datacomp import jaccard, jaccard_of_guessing
from fullbatch.evaluation.measure import (
    accuracies,
    guesses,
    macro_f1,
    macro_f1_of_guessing,
    mean_per_class,
    share,
    worst_group,
)
from tests.conftest import unit_rows

LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 3, 3])
GUESSED = torch.tensor([0, 0, 0, 1, 1, 2, 3, 0])
HIT = LABELS == GUESSED


def test_accuracy():
    assert share(HIT) == 5 / 8


def test_mean_per_class():
    assert mean_per_class(HIT, LABELS) == pytest.approx((3 / 4 + 1 / 2 + 1 / 2) / 3, abs=1e-15)
    assert mean_per_class(HIT, LABELS) == balanced_accuracy_score(LABELS, GUESSED)


def test_worst_group():
    groups = torch.tensor([4, 4, 4, 4, 4, 9, 9, 9])  # 4 of 5 right in group 4, 1 of 3 in group 9
    assert worst_group(HIT, groups) == pytest.approx(1 / 3)
    assert worst_group(HIT, torch.tensor([0, 0, 0, 5, 0, 0, 0, 0])) == 0.0  # one image alone is a group


def test_macro_f1():
    # class 0: 3 right, 4 members, 4 guesses; class 1: 1, 2, 2; class 3: 1, 2, 1; class 2 has no member
    assert macro_f1(GUESSED, LABELS) == pytest.approx((6 / 8 + 2 / 4 + 2 / 3) / 3, abs=1e-15)
    assert macro_f1(GUESSED, LABELS) == pytest.approx(f1_score(LABELS, GUESSED, average="macro", labels=[0, 1, 3]))
    # guessing evenly among 4: precision 1/2, 1/4, 1/4 and recall 1/4
    expected = sum(2 * p * 0.25 / (p + 0.25) for p in (0.5, 0.25, 0.25)) / 3
    assert macro_f1_of_guessing(LABELS, 4) == pytest.approx(expected)


def test_jaccard():
    right = [True, False, True, False, False]
    assert jaccard([0.9, 0.8, 0.7, 0.1, 0.0], right) == 1 / 3  # takes 0 and 1: one in common, three together
    assert jaccard([0.9, 0.1, 0.7, 0.1, 0.0], right) == 1.0
    assert jaccard([0.0, 0.9, 0.1, 0.8, 0.0], right) == 0.0
    assert jaccard([0.5] * 5, right) == 1 / 3  # of equally similar ones the first
    assert jaccard([0.9, 0.8, 0.7, 0.1, 0.0], right) == pytest.approx(jaccard_score(right, [1, 1, 0, 0, 0]))
    # 2 of 5: both right in 1 of 10 choices, one right in 6 of 10
    assert jaccard_of_guessing(5, 2) == pytest.approx(0.1 * 1.0 + 0.6 / 3)


def test_accuracies_against_a_loop():
    images, classes = unit_rows(40, 5, 3), unit_rows(7, 5, 4)
    labels = torch.arange(40) % 7
    order = (images @ classes.T).argsort(dim=1, descending=True)
    guessed = guesses(images, classes, labels)
    assert torch.equal(guessed.guess_N, order[:, 0])
    found = accuracies(guessed, labels, 7)
    right = [int(order[i, 0]) == int(labels[i]) for i in range(40)]
    assert found["accuracy"] == sum(right) / 40
    assert found["accuracy_top5"] == sum(int(labels[i]) in order[i, :5].tolist() for i in range(40)) / 40
    hits = torch.tensor(right).double()
    by_class = torch.stack([hits[labels == c].mean() for c in range(7)])
    assert found["mean_per_class"] == pytest.approx(by_class.mean().item())


def test_of_equally_near_classes_the_first_is_taken():
    images, classes = unit_rows(6, 4, 3), unit_rows(3, 4, 4)
    twice = torch.cat([classes, classes])  # two names for one thing
    labels = torch.tensor([0, 3, 1, 4, 2, 5])
    one, other = guesses(images, classes, labels % 3), guesses(images, twice, labels)
    assert torch.equal(other.guess_N, one.guess_N)
    assert torch.equal(other.hit_N, one.hit_N & (labels < 3))
    assert "accuracy_top5" not in accuracies(one, labels % 3, 3)
