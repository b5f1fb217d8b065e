"""`fullbatch theory` from start to page."""

import json
import re
from dataclasses import replace

import pytest

from fullbatch.cli import main
from fullbatch.cli import theory as command
from fullbatch.report.page import fitting
from fullbatch.report.theory_page import theory_page
from fullbatch.theory.minimizers import AS_PUBLISHED, AS_WRITTEN
from fullbatch.theory.study import PARTS, Extent, numbers, quick, study, whole
from fullbatch.theory.toy import Start


@pytest.fixture(scope="module")
def done():
    readings = tuple(type(one)(5, one.epochs, one.free) for one in (AS_WRITTEN, AS_PUBLISHED))
    extent = Extent((4, 8), 2, 300, 100, (50, 50), readings, (Start(0.5, 0.1),), 20)
    said = []
    result = study(PARTS, extent, said.append)
    assert len(said) == 16 + 2 + 8 + 1
    return result


def test_numbers_are_json_and_complete(done):
    written = json.loads(json.dumps(numbers(done), allow_nan=False))
    assert set(written) == {"seeds", "batch_size", "near", "optimum", "unproven", "convergence", "toy", "angle"}
    assert len(written["optimum"]) == 2 * 2 * 4 and len(written["convergence"]) == 4 * (5 + 3)
    assert {row["batches"] for row in written["optimum"]} == {"full batch", "all batches", "a partition", "all but one"}
    assert len(written["toy"]["hitting_times"]) == 2
    assert all(len(row["distance"]) == 2 for row in written["convergence"])


def test_the_page_holds_every_figure_and_loads_nothing(done):
    page = fitting(theory_page(done))
    assert page.count('role="img"') == 4 + 2  # a row of heat maps a case
    assert page.count("<rect") == 5 * 2 * (16 + 64) + 2 * 2 * 64
    assert page.count("data-chart=") == 8 + 1 + 1
    assert not re.search(r'(src|href)="(?!#)', page)


def test_the_command_writes_both_and_says_what_came_out(tmp_path, capsys):
    assert main(["theory", "--part", "angle", "--output", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {command.NUMBERS, command.PAGE}
    assert set(json.loads((tmp_path / "out" / command.NUMBERS).read_text())) == {"seeds", "batch_size", "near", "angle"}
    assert "goes from 4.021 to 4.733" in capsys.readouterr().out


def test_lines_of_all_parts(done):
    text = "\n".join(command._lines(done))
    for said in (
        "N = 8, d = 4: cross-polytope, all but one (27)",
        "N = 8, d = 3",
        "OSGD of a partition",
        "steps to the square",
    ):
        assert said in text


def test_larger_batches(tmp_path):
    """Theorems 3 to 5 are for any B: all C(8, 4) batches of four reach the simplex, all but one do not."""
    extent = quick(2, batch_size=4)
    assert (extent.counts, extent.batch_size) == ((8,), 4)
    short = replace(extent, subset_steps=500, unproven_steps=(10, 10), readings=())
    done = study(("optimum", "convergence"), short, lambda text: None)
    written = numbers(done)
    assert written["batch_size"] == 4
    rows = {(row["d"], row["batches"]): row for row in written["optimum"]}
    assert rows[16, "all batches"]["number_of_batches"] == 70 and rows[16, "a partition"]["number_of_batches"] == 2
    assert min(rows[16, "all batches"]["reached_at"]) > 0 and min(rows[4, "all batches"]["reached_at"]) > 0
    assert max(rows[16, "all but one"]["reached_at"]) == -1 and max(rows[16, "a partition"]["reached_at"]) == -1
    assert "batches of 4 pairs" in fitting(theory_page(done))


def test_batches_of_two_are_what_was_always_run():
    assert quick(3).counts == (4, 8) and whole(3).counts == (4, 8, 16) and whole(3).batch_size == 2
    assert whole(3, batch_size=3).counts == (6, 12)


@pytest.mark.parametrize("size", ["1", "7"])
def test_a_batch_size_without_a_study_is_refused(capsys, tmp_path, size):
    assert main(["theory", "--batch-size", size, "--output", str(tmp_path)]) == 1
    assert f"--batch-size must lie between 2 and 6, got {size}" in capsys.readouterr().err


def test_a_mistake_is_one_message(capsys, tmp_path):
    assert main(["theory", "--seeds", "0", "--output", str(tmp_path)]) == 1
    assert "--seeds must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_quick(tmp_path):
    assert main(["theory", "--quick", "--seeds", "2", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / command.NUMBERS).read_text())
    assert all(min(row["reached_at"]) >= 0 for row in found["optimum"] if row["optimal"])
