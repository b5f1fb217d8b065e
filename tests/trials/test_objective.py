"""What a search is after: names of metrics, their means, and what they are worth."""

import pytest

from fullbatch.evaluation.metric_names import Metric, parse_metrics, worst_of

TASKS = ("retrieval:emoji?split=new_style", "zero_shot:emoji?split=new_style&captions=a,b")
IR, TR = (f"{TASKS[0]} {name}" for name in ("text_to_image_r1", "image_to_text_r1"))
ACC, RANK = f"{TASKS[1]} accuracy", f"{TASKS[0]} text_to_image_median_rank"
RESULTS = {
    "results": [
        {"task": TASKS[0], "main": "mean_r1", "chance": 0.9, "size": 7, "text_to_image_r1": 0.2,
         "image_to_text_r1": 0.4, "text_to_image_median_rank": 3.0, "examples": [], "counts": {}},
        {"task": TASKS[1], "main": "accuracy", "chance": 0.9, "size": 7, "accuracy": 0.9},
    ],
    "gaps": [{"task": "wds:x", "kind": "failed", "reason": "Its folder is empty."}],
    "averages": [{"name": "VTAB", "found": 3, "of": 13, "value": 0.5}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts", "value", "short"),
    [
        ("accuracy", (ACC,), 0.9, "accuracy"),
        (IR, (IR,), 0.2, "text_to_image_r1"),
        (
            "mean(text_to_image_r1, image_to_text_r1, accuracy)",
            (IR, TR, ACC),
            0.5,
            "mean(text_to_image_r1, image_to_text_r1, accuracy)",
        ),
        (" mean( text_to_image_r1,image_to_text_r1 ) ", (IR, TR), 0.3, "mean(text_to_image_r1, image_to_text_r1)"),
        (f"mean({ACC}, {IR})", (ACC, IR), 0.55, "mean(accuracy, text_to_image_r1)"),
        ("mean(accuracy)", (ACC,), 0.9, "accuracy"),
    ],
)
def test_shares(text, parts, value, short):
    metric = Metric.parse(text, TASKS)
    assert metric.parts == parts and metric.short == short and metric.name == text.strip()
    assert metric.of(RESULTS, 12.0) == pytest.approx(value)
    assert metric.maximise and metric.is_share and worst_of([metric]) == (0.0,)


def test_ranks_and_seconds_are_to_be_small():
    rank, seconds = Metric.parse("text_to_image_median_rank", TASKS), Metric.parse("seconds", TASKS)
    assert (rank.of(RESULTS, 12.0), seconds.of(RESULTS, 12.0)) == (3.0, 12.0)
    for metric in (rank, seconds):
        assert not metric.maximise and not metric.is_share and worst_of([metric]) is None
    assert seconds.short == "seconds"


def test_what_a_run_that_ran_away_is_worth():
    share, other, seconds = (Metric.parse(name, TASKS) for name in ("accuracy", "mean_r1", "seconds"))
    assert worst_of([share, other]) == (0.0, 0.0)
    assert worst_of([share, seconds]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acuracy", r"metrics 'acuracy': none of the tasks gives it.*did you mean.*accuracy"),
        ("mean(accuracy, r1)", r"metrics 'r1': none of the tasks gives it"),
        ("mean()", "has an empty name in it"),
        ("mean(accuracy, )", "has an empty name in it"),
        ("mean(accuracy, seconds)", "mixes seconds with what is measured"),
        ("mean(accuracy, text_to_image_median_rank)", "mixes ranks, where less is better"),
        ("", "must be a name such as accuracy"),
        (3, "must be a name such as accuracy"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ValueError, match=message):
        Metric.parse(text, TASKS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "must be a list of at least one metric"),
        ("accuracy", "must be a list of at least one metric"),
        (["accuracy", ACC], "is there twice"),
    ],
)
def test_mistaken_lists(texts, message):
    with pytest.raises(ValueError, match=message):
        parse_metrics(texts, TASKS)


def test_without_tasks_there_are_only_seconds():
    assert [metric.name for metric in parse_metrics(["seconds"], ())] == ["seconds"]
    with pytest.raises(ValueError, match="needs something to measure"):
        parse_metrics(["accuracy"], ())


def test_a_number_that_is_missing_says_why():
    with pytest.raises(ValueError, match=r"gave no wds:x accuracy: Its folder is empty\."):
        Metric("accuracy", ("wds:x accuracy",)).of(RESULTS, 0.0)
    with pytest.raises(ValueError, match=r"gave no wds:y accuracy: it is not among the numbers\."):
        Metric("accuracy", ("wds:y accuracy",)).of(RESULTS, 0.0)
    broken = {"results": [{"task": TASKS[1], "accuracy": float("nan")}]}
    with pytest.raises(ValueError, match="gave no"):
        Metric("accuracy", (ACC,)).of(broken, 0.0)
    assert Metric("VTAB", ("datacomp VTAB_(3_of_13_tasks)",)).of(RESULTS, 0.0) == 0.5
