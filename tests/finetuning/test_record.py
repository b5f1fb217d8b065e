"""Which epoch is best, what counts as a fall, and when the base stays."""

import re
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbatch.finetuning.record import Epoch, Record, changes_between, deciding, score_of, values_of
from fullbatch.loading import replace_folder, settle

A, B = "retrieval:a mean_r1", "zero_shot:b accuracy"
BASE = {A: 0.50, B: 0.30}


def record(*tuned, metric="mean", tolerance=0.01):
    found = Record("model", metric, tolerance)
    for number, values in enumerate((BASE, *tuned)):
        epoch = found.epoch_of(10 * number, number, values)
        found = found.with_epoch(epoch, found.beats(epoch))
    return found


def test_the_mean_of_all_tasks_decides():
    found = record({A: 0.60, B: 0.31}, {A: 0.58, B: 0.35}, {A: 0.61, B: 0.31})
    assert found.best_step == 20 and found.verdict().outcome == "tuned"
    assert [change.change for change in found.changes] == pytest.approx([0.08, 0.05])


def test_or_one_that_is_chosen():
    assert record({A: 0.60, B: 0.31}, {A: 0.58, B: 0.35}, metric=A).best_step == 10


def test_a_metric_that_was_not_measured_is_refused_with_those_that_can_decide():
    """Of ranks less is better, and averages are no task."""
    found = {"task": "retrieval:a", "mean_r1": 0.5, "text_to_image_median_rank": 3.0}
    results = {"results": [found], "averages": [{"name": "VTAB", "found": 2, "of": 13, "value": 0.4}]}
    measured = SimpleNamespace(main_values={A: 0.5}, as_dict=lambda: results)
    with pytest.raises(ValueError, match=re.escape(f"'x accuracy' was not measured; take 'mean', or one of {A}.")):
        values_of(measured, "x accuracy")


def test_equal_scores_leave_the_earlier_epoch():
    assert record({A: 0.60, B: 0.30}, {A: 0.60, B: 0.30}).best_step == 10


def test_no_better_than_the_base_is_no_reason_to_change():
    ended = record(BASE).verdict()
    assert ended.outcome == "kept_base" and "no epoch beats the base" in ended.reasons[0]


def test_one_task_may_not_pay_for_the_others():
    ended = record({A: 0.80, B: 0.28}).verdict()
    assert ended.outcome == "kept_base"
    assert "zero_shot:b fell from 30.00% to 28.00% (accuracy)" in ended.reasons[0]


@pytest.mark.parametrize(("fall", "regressed"), [(0.01, False), (0.0101, True), (-0.1, False)])
def test_a_fall_of_just_the_tolerance_is_within_it(fall, regressed):
    (change,) = changes_between({A: 0.5}, {A: 0.5 - fall}, {}, 0.01)
    assert change.regressed == regressed


def test_a_mean_over_fewer_tasks_is_no_score():
    assert score_of({A: 0.9}, "mean", BASE) is None
    assert score_of({A: 0.9, B: float("nan")}, "mean", BASE) is None
    assert score_of({A: 0.9}, A, BASE) is None  # B may have fallen: nobody knows
    for metric in ("mean", A):
        found = record({A: 0.9}, metric=metric)
        assert found.best is None and found.verdict().outcome == "kept_base"


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6), st.integers(0, 60))
def test_going_over_steps_again_changes_nothing(values, step):
    """Killed anywhere and gone on from an earlier step, the record ends the same."""
    epochs = [{A: a, B: b} for a, b in values]
    whole = record(*epochs)
    found = whole.until(step)
    for number, again in enumerate((BASE, *epochs)):
        if 10 * number > step:
            epoch = found.epoch_of(10 * number, number, again)
            found = found.with_epoch(epoch, found.beats(epoch))
    assert found == whole


def test_weights_that_are_on_disk_keep_their_own_numbers():
    """On a machine that does not repeat itself the same step may score lower the second time."""
    found = record({A: 0.60, B: 0.31}, {A: 0.70, B: 0.40}).until(10)
    epoch = Epoch(20, 2, {A: 0.1, B: 0.1}, 0.1)
    assert not found.beats(epoch) and found.with_epoch(epoch, best=False).best.score == pytest.approx(0.55)


@pytest.mark.parametrize("metric", ["acuracy", "retrieval:c mean_r1", "mean "])
def test_a_metric_of_no_task_is_refused_at_once(metric):
    with pytest.raises(ValueError, match=r"none of the tasks gives it.*retrieval:a, zero_shot:b"):
        deciding(metric, ("retrieval:a", "zero_shot:b"))
    assert deciding("accuracy", ("retrieval:a", "zero_shot:b")) == "zero_shot:b accuracy"


def fill(text):
    def write(folder):
        folder.mkdir()
        (folder / "weights").write_text(text)

    return write


@pytest.mark.parametrize("moment", ["exporting", "writing", "first rename", "second rename", "done"])
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, moment):
    folder = tmp_path / "tuned"
    replace_folder(folder, fill("old"))
    with monkeypatch.context() as patch:
        renames = 0
        real = type(folder).rename

        def rename(path, target):
            nonlocal renames
            renames += 1
            if (moment, renames) in (("first rename", 1), ("second rename", 2)):
                raise KeyboardInterrupt
            return real(path, target)

        def write(new):
            if moment == "exporting":  # aside first, under a name of its own
                fill("new")(new.with_name(f".{new.name}.d26wh1b4"))
            else:
                fill("new")(new)
            if moment in ("exporting", "writing"):
                raise KeyboardInterrupt

        patch.setattr(type(folder), "rename", rename)
        with suppress(KeyboardInterrupt):
            replace_folder(folder, write)
    settle(folder)
    kept = "new" if moment in ("second rename", "done") else "old"
    assert (folder / "weights").read_text() == kept and [path.name for path in tmp_path.iterdir()] == ["tuned"]
