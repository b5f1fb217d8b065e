"""The nearest are the nearest: as float64 over all rows says, in whatever precision the rows are read first."""

import pytest
import torch
from torch.nn.functional import normalize

from fullbatch.config.model import Model
from fullbatch.encoder import Encoder
from fullbatch.find import nearest as nearest_module
from fullbatch.find.nearest import ExactSearch, combined, query_of, terms_of
from fullbatch.models.build import build_model
from tests.conftest import unit_rows
from tests.find.making import picture, write_pictures

COPIES = ("fp32", "bf16")


def plain(rows_RD, row_of_P, query_D, most, among=None):
    """By hand: all scores in float64, sorted, the first of equals first."""
    places = list(range(len(row_of_P))) if among is None else among.tolist()
    scores = (rows_RD.double() @ query_D.double())[row_of_P].tolist()
    order = sorted(places, key=lambda place: (-scores[place], place))[:most]
    return order, [scores[place] for place in order]


def assert_plain(search, query_D, most, among=None):
    found = search.nearest(query_D, most, among)
    places, scores = plain(search.rows_RD, search.row_of_P, query_D, most, among)
    assert found.places == places
    assert found.scores == pytest.approx(scores, abs=1e-12)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize(("count", "width"), [(1, 3), (10, 1), (500, 12), (3000, 64), (2000, 513)])
def test_it_equals_a_sort_of_all_scores(count, width, copy, monkeypatch):
    monkeypatch.setattr(nearest_module, "_CHUNK", 700)
    rows, queries = unit_rows(count, width, 0, torch.float32), unit_rows(3, width, 1, torch.float32)
    search = ExactSearch(rows, torch.arange(count), copy)
    for query in queries:
        for most in (1, 7, count, count + 5):
            assert_plain(search, query, most)


@pytest.mark.parametrize("copy", COPIES)
def test_scores_that_a_lower_precision_cannot_tell_apart(copy):
    """All rows within a hundredth of a rounding of bf16, or of float32, of each other; and many that are equal."""
    for spread in (1e-4, 1e-7):
        middle, noise = unit_rows(1, 48, 0), unit_rows(400, 48, 1)
        rows = normalize(middle + spread * noise, dim=1).float()
        rows = torch.cat([rows, rows[:50]])
        search = ExactSearch(rows, torch.arange(len(rows)), copy)
        for query in (middle[0].float(), unit_rows(1, 48, 2, torch.float32)[0]):
            for most in (1, 10, 100):
                assert_plain(search, query, most)


@pytest.mark.parametrize("copy", COPIES)
def test_dead_rows_copies_and_parts_of_the_list(copy):
    rows, query = unit_rows(60, 16, 0, torch.float32), unit_rows(1, 16, 1, torch.float32)[0]
    row_of = torch.tensor([5, 7, 5, 59, 20, 21, 22, 5, 40])  # others belong to nothing any more
    search = ExactSearch(rows, row_of, copy)
    for among in (None, torch.tensor([0, 2, 3]), torch.tensor([8]), torch.empty(0, dtype=torch.int64)):
        for most in (1, 3, 100):
            assert_plain(search, query, most, among)


@pytest.mark.parametrize("copy", COPIES)
def test_of_nothing_there_is_nothing(copy):
    search = ExactSearch(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), copy)
    assert search.nearest(torch.ones(8) / 8**0.5, 5).places == []


@pytest.mark.parametrize("copy", COPIES)
def test_what_is_read_first_is_as_near_as_it_says(copy):
    rows, query = unit_rows(5000, 96, 3, torch.float32), unit_rows(1, 96, 4, torch.float32)[0]
    search = ExactSearch(rows, torch.arange(5000), copy)
    rough, exact = search._rough(query).double(), rows.double() @ query.double()
    assert bool(((rough - exact).abs() <= search.error + search.relative * rough.abs()).all())
    assert search.error < (1e-5 if copy == "fp32" else 5e-3), "else nearly all rows would be candidates"


def test_words_are_added_and_subtracted():
    assert terms_of("a t-shirt") == [(1.0, "a t-shirt")]
    assert terms_of("  king -  man + woman ") == [(1.0, "king"), (-1.0, "man"), (1.0, "woman")]
    assert terms_of("-5 degrees - snow") == [(1.0, "-5 degrees"), (-1.0, "snow")]
    assert terms_of("") == terms_of("  ") == []
    for words in ("a -", "a + - b", "+", "- "):
        with pytest.raises(ValueError, match=r"says nothing after a [+-]\."):
            terms_of(words)


def test_a_sum_is_a_unit_vector_unless_it_cancels():
    one, other = unit_rows(2, 8, 0, torch.float32)
    expected = (one - other).double() / (one - other).double().norm()
    torch.testing.assert_close(combined([(1.0, one), (-1.0, other)]).double(), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="cancel each other"):
        combined([(1.0, one), (-1.0, one)])


@pytest.fixture(scope="module")
def finder(indexed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 20)
    return indexed(folder, tmp_path_factory.mktemp("place") / "index")


def test_a_folder_answers_words_and_pictures(finder, encoder):
    rows = encoder.encode_image([finder.index.folder / entry.path for entry in finder.pictures])
    words = encoder.encode_text(["a cat", "a dog"])
    cases = {
        "a cat": ([], words[0]),
        "a cat - a dog": ([], words[0] - words[1]),
        "": ([(1.0, finder.row(4))], rows[4]),
        "+ a dog": ([(1.0, finder.row(4)), (-1.0, finder.row(7))], words[1] + rows[4] - rows[7]),
    }
    for text, (likes, sum_D) in cases.items():
        hits = finder.find(finder.query(text, likes), 5)
        scores = rows @ normalize(sum_D, dim=0)
        assert [hit.score for hit in hits] == pytest.approx(scores.topk(5).values.tolist(), abs=1e-5)
        assert [hit.entry for hit in hits] == [finder.pictures[hit.number] for hit in hits]
    assert finder.find(finder.query("", [(1.0, finder.row(4))]), 1)[0].number == 4


def test_a_folder_within_and_no_query(finder):
    assert finder.folders == {"below": 6}
    every, some = (finder.find(None, 100, within) for within in ("", "below"))
    assert [hit.entry for hit in every] == finder.pictures and {hit.score for hit in every} == {None}
    assert [hit.number for hit in some] == [n for n, entry in enumerate(finder.pictures) if "below/" in entry.path]
    nearest = finder.find(finder.query("a cat"), 100, "below")
    assert {hit.number for hit in nearest} == {hit.number for hit in some}
    assert finder.find(finder.query("a cat"), 100, "bel") == []
    assert finder.places("zz").tolist() == finder.places("").tolist() == []


def test_a_model_of_two_views_is_asked_by_pictures():
    model = build_model(Model(view_tower="test_resnet", view_stem="small", projection=(16, 8))).eval()
    encoder = Encoder(model, None, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="reads no words; use --like PICTURE"):
        query_of(encoder, "a cat")
    like_D = encoder.encode_image(picture(1))
    torch.testing.assert_close(query_of(encoder, "", [(1.0, like_D)]), like_D)
