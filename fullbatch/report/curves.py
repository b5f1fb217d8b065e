"""What runs logged, as charts: loss, temperature, evaluations, normalizer errors, and losses of selected batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fullbatch.report.blocks import Section
from fullbatch.report.charts import COLORS, DASHES, Axis, Chart, Series, figures
from fullbatch.report.collect import AUDITED, PROBED, Fields, RunData
from fullbatch.report.wording import is_number, is_share, metric_name, metric_words

SEEN = ", which the run trains on"
_MOST_PERIODS = 4  # of batch losses shown, evenly spread; the last is one of them

# key, title, what it tells, whether its axis starts as a log
_MAIN: tuple[tuple[str, str, str, bool], ...] = (
    ("loss", "Loss", "the method's own; losses of different methods are not comparable", False),
    ("tau", "Temperature τ", "the band spans the samples where each has its own", False),
    ("lr", "Learning rate", "", False),
    ("gradient_norm", "Gradient norm", "before clipping", True),
    ("samples_per_second", "Throughput", "pairs per second", False),
    ("positive_similarity", "Similarity of true pairs", "mean cosine of a picture and its caption", False),
)
_IGNORED = frozenset(
    ("step", "stage", "epoch", "samples", "seconds", "tau_min", "tau_max", "kind") + tuple(name for name, *_ in _MAIN)
)
_LOG = Axis(scale="log")


def run_charts(runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int]) -> list[Chart]:
    """The curves of one run, or of several over each other; ``more`` marks those of less interest."""
    looks = zip(labels, colors, strict=True)
    empty = [Series(label, (), (), color, run=place) for place, (label, color) in enumerate(looks)]
    charts = [_logged(runs, empty, *named) for named in _MAIN]
    charts += _normalizer_errors(runs, empty)
    charts += _evaluations(runs, empty)
    others = sorted({key for run in runs for line in run.training for key in line} - _IGNORED)
    for key in others:
        chart = _logged(runs, empty, key, metric_name(key).capitalize(), "", False)
        if any(len(set(series.y)) > 1 for series in chart.series):
            charts.append(replace(chart, more=True))
    return [chart for chart in charts if any(len(series.x) > 1 for series in chart.series)]


def _filled(series: Series, lines: Iterable[Fields], key: str) -> Series:
    known = [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]
    return replace(series, x=[step for step, _ in known], y=[value for _, value in known])


def _drawn(series: Iterable[Series]) -> list[Series]:
    return [one_run for one_run in series if one_run.x]


def _logged(runs: Sequence[RunData], empty: Sequence[Series], key: str, title: str, note: str, log: bool) -> Chart:
    series = []
    for run, nothing in zip(runs, empty, strict=True):
        curve = _filled(nothing, run.training, key)
        if key == "tau":
            low, high = (_filled(nothing, run.training, name).y for name in ("tau_min", "tau_max"))
            if len(low) == len(high) == len(curve.x) and any(b - a > 1e-6 for a, b in zip(low, high, strict=True)):
                curve = replace(curve, low=low, high=high)
        series.append(curve)
    return Chart(key, title, note, _drawn(series), _LOG if log else Axis())


def _normalizer_errors(runs: Sequence[RunData], empty: Sequence[Series]) -> list[Chart]:
    """Several runs: a chart for the probes, one for the audits, for the two do not compare.

    One run: both in one chart, audits dashed, and the method's error beside that of the batch's own estimate.
    """
    kinds = (
        ("normalizer_error", PROBED, [run.probes for run in runs]),
        ("normalizer_audit", AUDITED, [run.audits for run in runs]),
    )
    if len(runs) != 1:
        return [
            _errors_chart(key, source, [_filled(*pair, "normalizer_error") for pair in zip(empty, lines, strict=True)])
            for key, source, lines in kinds
        ]
    series = [
        _filled(Series(f"{name}, {source}", (), (), dashes * COLORS + color, run=0), lines, key)
        for dashes, (_, source, (lines,)) in enumerate(kinds)
        for color, (name, key) in enumerate(
            (("the method's estimate", "normalizer_error"), ("the batch's own", "batch_error"))
        )
    ]
    sources = [source for _, source, (lines,) in kinds if lines]
    return [_errors_chart("normalizer_error", " and ".join(sources), series)]


def _errors_chart(key: str, sources: str, series: Sequence[Series]) -> Chart:
    note = f"mean squared error of the log-normalizers against exact ones ({sources})"
    return Chart(key, "Normalizer error", note, _drawn(series), _LOG)


def _evaluations(runs: Sequence[RunData], empty: Sequence[Series]) -> list[Chart]:
    """One run: its tasks in one chart; a fine-tuning has a chart a task, elsewhere.  Several: a chart a task.

    A metric is called "TASK METRIC"; what else stands in such a line (step, kind, seconds) has no blank.
    """
    keys = list(dict.fromkeys(key for run in runs for line in run.evaluations for key in line if " " in key))
    if len(runs) == 1:
        if runs[0].finetune:
            return []
        seen = {key: trained_on(runs[0], key) for key in keys}
        looks = [(short_name(key) + SEEN * ours, at % (COLORS * DASHES)) for at, (key, ours) in enumerate(seen.items())]
        lines = [Series(label, (), (), color, run=0) for label, color in looks]
        series = [_filled(line, runs[0].evaluations, key) for line, key in zip(lines, keys, strict=True)]
        note = "on data the run does not train on" if not any(seen.values()) else "on the data named"
        return [Chart("evaluation", "Evaluation", note, series, Axis(percent=True))]
    charts = []
    for place, key in enumerate(keys):
        title, note = metric_words(key)
        series = [_filled(nothing, run.evaluations, key) for run, nothing in zip(runs, empty, strict=True)]
        note += SEEN * any(trained_on(run, key) for run in runs)
        charts.append(Chart(f"evaluation-{place}", title or note, note, _drawn(series), metric_axis(key)))
    return charts


def metric_axis(metric: str) -> Axis:
    return Axis(percent=is_share(metric))


def trained_on(run: RunData, key: str) -> bool:
    """Whether a "TASK METRIC" is measured on what the run trains on: beside other tasks it shows memory from skill."""
    source = key.rpartition(" ")[0].partition(":")[2]
    return bool(source) and source in map(str, run.setting("data", "data") or ())


def short_name(key: str) -> str:
    source, what = metric_words(key)
    return f"{source}, {what}" if source else what


# ---------------------------------------------------------------------------------------------------------------------
# how hard the batches were


def batch_losses_section(run: RunData) -> Section | None:
    """How hard the selected batches were beside uniform ones, as in Figures 3 and 5 of Cho et al. 2023.

    From RUN/batches/losses.jsonl, a line a plan; and how hard spectral ones would have been, whatever the run was
    trained on, from `fullbatch audit --batch-losses`.
    """
    audited = [
        {**audit["batch_losses"], "step": audit["step"]}
        for audit in run.audits
        if isinstance(audit.get("batch_losses"), dict)
    ]
    charts = [
        _batch_losses(line, name, label)
        for lines, name, label in ((run.batch_losses, "period", "selected"), (audited, "step", "spectral"))
        for line in spread_out([line for line in lines if _is_whole(line, name)], _MOST_PERIODS)
    ]
    if not charts:
        return None
    lead = (
        f"Losses of the {run.setting('selection', 'batches')} batches of some periods, and of as many uniform batches "
        "of the same samples, both by the embeddings that the plan was made from."
        if run.batch_losses
        else "Losses of an epoch's spectral batches, which the run was not trained on, and of its uniform ones, by "
        "the embeddings of a checkpoint."
    )
    lead += " Harder batches lie to the right."
    return Section("batch-losses", "How hard the batches were", figures(charts), lead)


def spread_out(lines: Sequence[Fields], most: int) -> list[Fields]:
    """
    >>> spread_out([{"period": n} for n in range(10)], 4)
    [{'period': 0}, {'period': 3}, {'period': 6}, {'period': 9}]
    """
    if len(lines) <= most:
        return list(lines)
    return [lines[round(place * (len(lines) - 1) / (most - 1))] for place in range(most)]


def _is_whole(line: Fields, name: str) -> bool:
    columns = [line.get(column) for column in ("edges", "counts", "uniform_counts")]
    lists = [values for values in columns if isinstance(values, list) and all(map(is_number, values))]
    if len(lists) < len(columns):
        return False
    edges, counts, uniform = map(len, lists)
    return edges - 1 == counts == uniform > 0 and is_number(line.get(name))


def _batch_losses(line: Fields, name: str, label: str) -> Chart:
    middles = [0.5 * (left + right) for left, right in pairwise(line["edges"])]

    def shares(label: str, color: int, counts: str) -> Series:
        total = max(1, sum(line[counts]))
        return area(label, color, middles, [count / total for count in line[counts]])

    return Chart(
        f"batch-losses-{name}-{int(line[name])}",
        f"{name} {int(line[name])}",
        "share of the batches in each bin",
        [shares(label, 0, "counts"), shares("uniform", 1, "uniform_counts")],
        Axis(percent=True),
        Axis("loss of a batch"),
    )


def area(label: str, color: int, x: Sequence[float], y: Sequence[float]) -> Series:
    """A curve that is filled down to 0."""
    return Series(label, x, y, color, [0.0] * len(y), y, style="area")


# ---------------------------------------------------------------------------------------------------------------------
# the clock


def for_script(run: RunData, filter: object = None) -> dict[str, Any]:
    """What page.js knows of a run; the curves can be narrowed to runs of one ``filter``, by default the batch size."""
    name = str(run.batch_size if filter is None else filter)
    return {"batch": run.batch_size, "clock": clock_of(run), "filter": name, "recovery": run.recovery_steps}


def clock_of(run: RunData, most: int = 100) -> tuple[list[int], list[float], list[int]]:
    """Steps, seconds and pairs seen, from which page.js reads the time and the pairs of any step.

    The last step of the recovery is always among them, for its steps may see more pairs than others.
    """
    clock = run.clock()
    stride = max(1, math.ceil(len(clock) / most))
    ends = [at for at, (step, _) in enumerate(clock) if step == run.recovery_steps]
    kept = sorted({0, *range(0, len(clock), stride), *ends, len(clock) - 1}) if clock else []
    pairs = [
        line["samples"] if is_number(line.get("samples")) else line["step"] * run.batch_size for line in run.training
    ]
    return (
        [0, *(clock[at][0] for at in kept)],
        [0.0, *(round(clock[at][1], 3) for at in kept)],
        [0, *(int(pairs[at]) for at in kept)],
    )
