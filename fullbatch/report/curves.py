"""What the runs logged, as charts for page.js: names, numbers and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from fullbatch.report.collect import AUDITED, PROBED, Record, RunData
from fullbatch.report.wording import is_number, is_share, metric_name, metric_words

Format = Literal["number", "percent"]
COLORS = 7  # the page has as many; then they come again, dashed
DASHES = 4
BASELINE = -1  # a colour of its own


@dataclass(frozen=True)
class Line:
    """run      which of the page's runs, for its clock; -1: x is no step
    low, high   a band around the values, or error bars
    """

    label: str
    color: int
    run: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """x        "step", with steps, samples and time to choose from, or what the axis says, on a log2 scale"""

    key: str
    title: str
    note: str
    lines: Sequence[Line]
    format: Format = "number"
    log: bool = False
    x: str = "step"
    more: bool = False

    def thinned(self, most: int) -> Chart:
        return replace(self, lines=[thin(line, most) for line in self.lines])

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "format": self.format,
            "log": self.log,
            "x": self.x,
            "lines": [_line_dict(line) for line in self.lines],
        }


def _line_dict(line: Line) -> dict[str, Any]:
    written: dict[str, Any] = {"label": line.label, "color": line.color, "run": line.run}
    for name in ("x", "y", "low", "high"):
        written[name] = [float(f"{value:.5g}") if name != "x" else value for value in getattr(line, name)]
    return written


def thin(line: Line, most: int) -> Line:
    """At most so many points: means of neighbours, with a band from the least to the greatest of them."""
    count = len(line.x)
    if count <= most:
        return line
    edges = [count * part // most for part in range(most + 1)]
    spans = [slice(start, end) for start, end in pairwise(edges)]
    return Line(
        line.label,
        line.color,
        line.run,
        x=[line.x[span][-1] for span in spans],
        y=[sum(line.y[span]) / len(line.y[span]) for span in spans],
        low=[min((line.low or line.y)[span]) for span in spans],
        high=[max((line.high or line.y)[span]) for span in spans],
    )


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
    ("step", "epoch", "samples", "seconds", "tau_min", "tau_max", "kind") + tuple(name for name, *_ in _MAIN)
)


def charts_of(runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int]) -> list[Chart]:
    """The curves of one run, or of several over each other; ``more`` marks those of less interest."""
    charts = [_logged(runs, labels, colors, *named) for named in _MAIN]
    charts += _normalizer_errors(runs, labels, colors)
    charts += _evaluations(runs, labels, colors)
    others = sorted({key for run in runs for line in run.training for key in line} - _IGNORED)
    for key in others:
        chart = _logged(runs, labels, colors, key, metric_name(key).capitalize(), "", False)
        if any(len(set(line.y)) > 1 for line in chart.lines):
            charts.append(replace(chart, more=True))
    return [chart for chart in charts if any(len(line.x) > 1 for line in chart.lines)]


def _points(lines: Iterable[Record], key: str) -> tuple[list[float], list[float]]:
    found = [(line["step"], line[key]) for line in lines if is_number(line.get(key))]
    return [step for step, _ in found], [float(value) for _, value in found]


def _logged(
    runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int], key: str, title: str, note: str, log: bool
) -> Chart:
    lines = []
    for number, run in enumerate(runs):
        x, y = _points(run.training, key)
        line = Line(labels[number], colors[number], number, x, y)
        if key == "tau":
            low, high = _points(run.training, "tau_min")[1], _points(run.training, "tau_max")[1]
            if len(low) == len(high) == len(x) and any(b - a > 1e-6 for a, b in zip(low, high, strict=True)):
                line = replace(line, low=low, high=high)
        lines.append(line)
    return Chart(key, title, note, [line for line in lines if line.x], log=log)


def _normalizer_errors(runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int]) -> list[Chart]:
    """Several runs: a chart for the probes, one for the audits, for the two do not compare.

    One run: both in one chart, audits dashed, and the method's error beside that of the batch's own estimate.
    """
    series = (
        ("normalizer_error", PROBED, [run.probes for run in runs]),
        ("normalizer_audit", AUDITED, [run.audits for run in runs]),
    )
    if len(runs) != 1:
        charts = []
        for key, source, of_runs in series:
            lines = [
                Line(labels[number], colors[number], number, *_points(found, "normalizer_error"))
                for number, found in enumerate(of_runs)
            ]
            charts.append(_errors_chart(key, source, lines))
        return charts
    lines = []
    for dashes, (_, source, (found,)) in enumerate(series):
        color = dashes * COLORS
        lines.append(Line(f"the method's estimate, {source}", color, 0, *_points(found, "normalizer_error")))
        lines.append(Line(f"the batch's own, {source}", color + 1, 0, *_points(found, "batch_error")))
    sources = [source for _, source, (found,) in series if found]
    return [_errors_chart("normalizer_error", " and ".join(sources), lines)]


def _errors_chart(key: str, sources: str, lines: Sequence[Line]) -> Chart:
    note = f"mean squared error of the log-normalizers against exact ones ({sources})"
    return Chart(key, "Normalizer error", note, [line for line in lines if line.x], log=True)


def _evaluations(runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int]) -> list[Chart]:
    """One run: its tasks in one chart.  Several: a chart a task."""
    keys = list(dict.fromkeys(key for run in runs for line in run.evaluations for key in line if " " in key))
    if len(runs) == 1:
        lines = [
            Line(_short(key), number % (COLORS * DASHES), 0, *_points(runs[0].evaluations, key))
            for number, key in enumerate(keys)
        ]
        return [Chart("evaluation", "Evaluation", "on data the run does not train on", lines, "percent")]
    charts = []
    for number, key in enumerate(keys):
        format_: Format = "percent" if is_share(key) else "number"
        lines = [
            Line(labels[which], colors[which], which, *_points(run.evaluations, key)) for which, run in enumerate(runs)
        ]
        title, note = metric_words(key)
        shown = [line for line in lines if line.x]
        charts.append(Chart(f"evaluation-{number}", title or note, note, shown, format_))
    return charts


def _short(key: str) -> str:
    source, what = metric_words(key)
    return f"{source}, {what}" if source else what


def clock_of(run: RunData, most: int = 100) -> tuple[list[int], list[float]]:
    """Steps and seconds, from which page.js reads the time of any step."""
    clock = run.clock()
    stride = max(1, math.ceil(len(clock) / most))
    kept = sorted({0, *range(0, len(clock), stride), len(clock) - 1}) if clock else []
    return [0, *(clock[at][0] for at in kept)], [0.0, *(round(clock[at][1], 3) for at in kept)]
