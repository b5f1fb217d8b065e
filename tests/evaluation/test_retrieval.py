"""Retrieval numbers against loops, with several captions, ties and equal captions."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fullbatch.evaluation import retrieval
from fullbatch.evaluation.retrieval import (
    Answers,
    Gallery,
    Ranks,
    chance_of_first,
    equal_captions,
    own_captions,
    ranks,
    recalls,
)
from tests.conftest import unit_rows

PAIRS = [[f"caption {i // 2}"] for i in range(30)]  # captions come in equal pairs
SEVERAL = [[f"{i} {j}" for j in range(i % 4 + 1)] for i in range(30)]


def right_by_loop(captions, by_text):
    """For every image and caption whether they belong together."""
    owner = [(image, caption) for image, of_image in enumerate(captions) for caption in of_image]
    return [
        [text in captions[image] if by_text else image == of for of, text in owner] for image in range(len(captions))
    ]


@pytest.mark.parametrize(("captions", "by_text"), [(PAIRS, True), (PAIRS, False), (SEVERAL, True), (SEVERAL, False)])
def test_recalls_against_a_loop(captions, by_text):
    answers = equal_captions(captions) if by_text else own_captions([len(of) for of in captions])
    right = torch.tensor(right_by_loop(captions, by_text))
    for pairs, table in (
        (answers.of_images(0, 30), right),
        (answers.of_captions(0, right.shape[1]), right.T),
        (answers.of_images(7, 9), right[7:9]),
        (answers.of_captions(3, 4), right.T[3:4]),
    ):
        assert sorted(zip(*map(torch.Tensor.tolist, pairs), strict=True)) == [
            tuple(p) for p in table.nonzero().tolist()
        ]
    image, text = unit_rows(30, 4, 1), unit_rows(right.shape[1], 4, 2)
    found = recalls(image, text, answers)
    for name, anchors, gallery, is_right in (
        ("image_to_text", image, text, right),
        ("text_to_image", text, image, right.T),
    ):
        places = []
        for i in range(len(anchors)):
            order = (gallery @ anchors[i]).argsort(descending=True).tolist()
            places.append(next(place for place, j in enumerate(order) if is_right[i, j]))
        for k in (1, 5, 10):
            assert found[f"{name}_r{k}"] == pytest.approx(sum(place < k for place in places) / len(places))
        middle = sorted(places)
        low, high = middle[(len(places) - 1) // 2], middle[len(places) // 2]
        assert found[f"{name}_median_rank"] == 1 + (low + high) / 2
    assert found["mean_r1"] == pytest.approx((found["image_to_text_r1"] + found["text_to_image_r1"]) / 2)
    assert chance_of_first(answers) == pytest.approx(right.double().mean().item())


def sparse_table(rows, things):
    ends = np.cumsum([0, *map(len, rows)])
    return csr_array((np.ones(ends[-1], np.int64), list(itertools.chain(*rows)), ends), (len(rows), things))


@pytest.mark.parametrize("seed", range(40))
def test_right_pairs_are_the_entries_of_a_sparse_product(seed):
    """In its order too: of an anchor's right rows the last first."""
    draw = random.Random(seed)
    images, things = draw.randint(1, 30), draw.choice((1, 3, 40))
    captions = [[f"{draw.randrange(things)}" for _ in range(draw.randint(0, 4))] for _ in range(images)] + [["0", "0"]]
    number = {text: number for number, text in enumerate(dict.fromkeys(itertools.chain(*captions)))}
    said = [sorted(number[text] for text in of_image) for of_image in captions]
    said_N = sparse_table(said, len(number))
    said_T = sparse_table([[number[text]] for text in itertools.chain(*captions)], len(number))
    answers, right_NT = equal_captions(captions), (said_N @ said_T.T).toarray() > 0
    for asked, table, other in ((answers.of_images, said_N, said_T), (answers.of_captions, said_T, said_N)):
        rows = table.shape[0]
        for start, stop in ((0, rows), (rows // 3, rows // 2 + 1), (rows // 2, rows // 2), (rows, rows)):
            product = (table[start:stop] @ other.T.tocsr()).nonzero()
            assert [numbers.tolist() for numbers in asked(start, stop)] == [numbers.tolist() for numbers in product]
    assert chance_of_first(answers) == pytest.approx(right_NT.mean())


def test_what_no_caption_says_is_right_for_none():
    answers = Answers.of([[7, 0], [], [3]], [0, 5, 0])
    assert [numbers.tolist() for numbers in answers.of_images(0, 3)] == [[0, 0], [2, 0]]
    assert [numbers.tolist() for numbers in answers.of_captions(0, 3)] == [[0, 2], [0, 0]]
    assert chance_of_first(answers) == 2 / 9


def test_chunks_change_nothing():
    image, text = unit_rows(30, 4, 1), unit_rows(75, 4, 2)
    answers = own_captions([2 + i % 2 for i in range(30)])
    for one, other in zip(
        vars(ranks(image, text, answers.of_images)).values(),
        vars(ranks(image, text, answers.of_images, chunk=7)).values(),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert recalls(image, text, answers) == recalls(image, text, answers, chunk=1)


def test_a_tie_counts_as_chance_would_have_it():
    rows = unit_rows(10, 4, 1)
    image = text = rows.repeat_interleave(2, dim=0)  # every picture twice, under two names
    assert recalls(image, text, own_captions([1] * 20))["mean_r1"] == pytest.approx(0.5)
    same = torch.ones(8, 3) / 3**0.5
    assert recalls(same, same, own_captions([1] * 8))["mean_r1"] == pytest.approx(1 / 8)
    found = Ranks(torch.tensor([0, 0, 3]), torch.tensor([0, 3, 0]), torch.tensor([1, 1, 1]))
    assert found.hits(1).tolist() == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("captions", [[["a"], ["a"], ["b"], ["c"]], [["a", "b", "c"], ["b"], ["d"]]])
def test_a_model_that_cannot_tell_anything_apart_is_at_chance(captions):
    answers = equal_captions(captions)
    same = [torch.ones(count, 3) / 3**0.5 for count in (len(captions), sum(map(len, captions)))]
    assert recalls(*same, answers)["mean_r1"] == pytest.approx(chance_of_first(answers))


def test_hits_against_all_orders():
    ahead, level, best, k = 1, 3, 2, 3
    orders = list(itertools.permutations([True] * best + [False] * level))
    share = sum(any(order[: k - ahead]) for order in orders) / len(orders)
    one = (torch.tensor([number]) for number in (ahead, level, best))
    assert Ranks(*one).hits(k).item() == pytest.approx(share)


def test_no_more_similarities_are_held_than_the_limit(monkeypatch):
    held = []
    multiply = Gallery.similarities

    def recorded(gallery, anchors):
        sim = multiply(gallery, anchors)
        held.append(sim.numel())
        return sim

    image, text, answers = unit_rows(200, 4, 1), unit_rows(300, 4, 2), own_captions([1 + i % 2 for i in range(200)])
    whole = recalls(image, text, answers)
    monkeypatch.setattr(Gallery, "similarities", recorded)
    monkeypatch.setattr(retrieval, "_ENTRIES", 1000)
    assert recalls(image, text, answers) == whole
    assert max(held) <= 1000 and sum(held) == 2 * 200 * 300
