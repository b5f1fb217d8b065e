"""Pairs are those a plain double loop finds; reasons and table say what a user needs."""

import csv
import math
import random

import pytest
import torch
from scipy.cluster.hierarchy import DisjointSet
from torch.nn.functional import normalize

from fullbatch.config.data import Source
from fullbatch.data.loader import SamplePool
from fullbatch.data.sources import open_source
from fullbatch.report.charts import Series, thin
from fullbatch.report.embedded import (
    Embedded,
    RunModel,
    fits_the_other,
    looks_alike,
    nearest_other,
)
from fullbatch.report.suspects import (
    Memory,
    _Chains,
    copies,
    extreme_temperatures,
    find_suspects,
    read_memory,
    words_of,
    write_suspects,
)


@pytest.fixture(scope="module")
def embedded_rows():
    torch.manual_seed(0)
    image, text = (normalize(torch.randn(37, 6), dim=-1) for _ in range(2))
    return image, text, torch.arange(37) // 2


@pytest.mark.parametrize("chunk", [5, 37, 100])
def test_fits_the_other_is_the_double_loop(embedded_rows, chunk):
    image, text, groups = embedded_rows
    s = image @ text.T
    every = []
    for i in range(37):
        for j in range(i + 1, 37):
            if groups[i] != groups[j]:
                every.append((min(s[i, j], s[j, i]) - max(s[i, i], s[j, j]), i, j))
    expected = sorted(every, reverse=True)[:20]
    found = fits_the_other(image, text, groups, 20, chunk)
    assert [(i, j) for i, j, _ in found] == [(i, j) for _, i, j in expected]
    assert [score for *_, score in found] == pytest.approx([float(score) for score, *_ in expected], abs=1e-6)


@pytest.mark.parametrize("chunk", [4, 100])
def test_pictures_that_look_alike(chunk):
    torch.manual_seed(0)
    tiny = torch.rand(11, 48)
    tiny[7] = tiny[2] + 0.01
    tiny[9] = tiny[4]
    found = looks_alike(tiny, 5, within=0.02, chunk=chunk)
    assert [pair[:2] for pair in found] == [(4, 9), (2, 7)]
    assert found[1][2] == pytest.approx(-0.01, abs=1e-4)


def test_nearest_other_is_of_another_caption(embedded_rows):
    image, text, groups = embedded_rows
    for row, (other, score) in enumerate(nearest_other(image, text, groups, list(range(37)))):
        others = [float(image[row] @ text[j]) for j in range(37) if groups[j] != groups[row]]
        assert score == pytest.approx(max(others), abs=1e-6)
        assert groups[other] != groups[row]
    assert nearest_other(image[:1], text[:1], groups[:1], [0])[0][0] is None


def test_thinning_keeps_the_mean_and_the_extremes():
    line = Series("loss", x=list(range(1, 1001)), y=[math.sin(k) for k in range(1000)])
    short = thin(line, 50)
    assert len(short.x) == len(short.y) == len(short.low) == len(short.high) == 50
    assert short.x[-1] == 1000
    assert sum(short.y) / 50 == pytest.approx(sum(line.y) / 1000)
    assert min(short.low) == min(line.y) and max(short.high) == max(line.y)
    assert thin(short, 50) is short


@pytest.fixture(scope="module")
def found(runs):
    model = RunModel.load(runs[1])
    return find_suspects(runs[1], model, model.training(1000))


def test_what_was_planted_is_found(found):
    pairs = {kind: [(s.first, s.other) for s in suspects] for kind, suspects in found.by_kind.items()}
    assert pairs["duplicate"] == [(25, 30)]
    assert pairs["same_picture"] == [(35, 36)]
    assert pairs["same_caption"] == [(20, 25)]
    assert "byte for byte" in found.by_kind["same_picture"][0].reason
    assert found.by_kind["crowded"][0].score == max(suspect.score for suspect in found.by_kind["crowded"])
    assert found.gaps == []


def copies_of_one_picture(found, captions, pictures=None):
    """Suspects of these captions: pictures with equal letters are copies byte for byte, by default all of them."""
    embedded = Embedded(
        pool=found.embedded.pool,
        ids=list(range(len(captions))),
        image_ND=normalize(torch.randn(len(captions), 6, generator=torch.Generator().manual_seed(0)), dim=1),
        text_ND=normalize(torch.randn(len(captions), 6, generator=torch.Generator().manual_seed(1)), dim=1),
        tiny_NP=torch.tensor([[ord(letter) / 100.0] * 48 for letter in pictures or "a" * len(captions)]),
        captions=captions,
    )
    letters = [letter.encode() for letter in pictures or "a" * len(captions)]
    embedded.__dict__["origins"] = [(f"s{row}", letter) for row, letter in enumerate(letters)]
    return {
        kind: [(suspect.first, suspect.other, suspect.reason) for suspect in suspects]
        for kind, suspects in copies(embedded).items()
        if suspects
    }


def test_captions_are_equal_but_for_case_and_punctuation(found):
    captions = ["A red apple.", "keycap: #", "red apple, a", "keycap: *", "a red apple", "Red Apple"]
    told = {pair[:2]: pair[2] for pair in copies_of_one_picture(found, captions, "abcdef")["same_caption"]}
    assert set(told) == {(0, 2), (2, 4)}  # a chain, not every pair
    assert told[0, 2].startswith("the same words in the caption, 3 times in the sample; ")
    assert words_of("!!!") == ("!!!",)


def test_three_copies_are_two_pairs_of_equal_captions(found):
    said = "the same picture, byte for byte; the same caption, 3 times in the sample"
    assert copies_of_one_picture(found, ["a cat"] * 3) == {"duplicate": [(0, 1, said), (1, 2, said)]}


def test_copies_are_told_by_their_captions_not_by_their_places(found):
    told = copies_of_one_picture(found, ["a cat", "a dog", "A cat.", "a cat"], "aaax")
    assert [pair[:2] for pair in told["duplicate"]] == [(0, 2)]
    assert told["duplicate"][0][2].endswith("; the same words in the caption, 3 times in the sample")
    assert [pair[:2] for pair in told["same_picture"]] == [(1, 2)]  # and not (0, 1): 0 is 2 once more
    assert told["same_picture"][0][2].endswith("; the captions differ")
    assert [pair[:2] for pair in told["same_caption"]] == [(2, 3)]  # nor (0, 3)


def test_tables_of_the_run_are_read_by_id(runs, found):
    embedded = found.embedded
    memory = read_memory(runs[1], embedded)
    assert memory.log_u_N.shape == memory.tau_N.shape == (40,)
    model = RunModel.load(runs[1])
    some = model.training(10)
    assert len(some.ids) == 10 and len(some.pool) == 40
    assert torch.equal(read_memory(runs[1], some).log_u_N, memory.log_u_N[torch.tensor(some.ids)])
    # in float32, a row of a smaller batch may differ in the last bit
    assert torch.allclose(some.image_ND, embedded.image_ND[torch.tensor(some.ids)], atol=1e-5)


def test_extreme_temperatures():
    tau = torch.tensor([0.03, math.nan, 0.01, 0.05, 0.02, 0.04])
    found = extreme_temperatures(Memory(tau_N=tau))
    assert [suspect.first for suspect in found] == [3, 5, 2, 4]
    assert found[0].reason == "among the largest: τ = 0.0500, the median is 0.0300"
    assert extreme_temperatures(Memory(tau_N=torch.full((5,), 0.01))) == []
    assert extreme_temperatures(Memory()) == []


def test_tables_mean_nothing_for_other_data(runs, found, tmp_path):
    from tests.data.making import captioned, write_shard

    other = SamplePool([open_source(Source(str(write_shard(tmp_path / "other.tar", captioned(40)))))])
    memory = read_memory(runs[1], type(found.embedded)(**{**vars_of(found.embedded), "pool": other}))
    assert memory.log_u_N is None and "changed" in memory.gap
    assert read_memory(runs[0], found.embedded).log_u_N is None  # openclip keeps nothing per sample


def vars_of(embedded):
    return {name: getattr(embedded, name) for name in embedded.__dataclass_fields__}


def test_the_table_is_safe_to_open(found, tmp_path):
    write_suspects(tmp_path / "suspects.csv", found)
    with (tmp_path / "suspects.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} >= {"duplicate", "same_picture", "same_caption", "crowded"}
    first = rows[0]
    assert (first["id"], first["other_id"]) == ("25", "30")
    assert first["name"].endswith("hostile.tar:000000025")
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for key, cell in row.items() if key != "score")


def test_chains_join_what_disjoint_sets_merge():
    draw = random.Random(0)
    for rows in (1, 2, 50):
        chains, sets = _Chains(rows), DisjointSet(range(rows))
        for _ in range(3 * rows):
            pair = draw.randrange(rows), draw.randrange(rows)
            assert chains.join(*pair) == sets.merge(*pair)
