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
Shape = Literal["doubling", "even", "area"]
COLORS = 7  # the page has as many; then they come again, dashed
DASHES = 4
BASELINE = -1  # a colour of its own
SEEN = ", which the run trains on"


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
class Mark:
    """A level to compare with, across the whole chart."""

    label: str
    y: float


@dataclass(frozen=True)
class Chart:
    """x        "step", with steps, samples and time to choose from, or what the axis says
    shape    where x is no step: points on a log2 axis, points on an even one, or filled curves on an even one
    marks    levels across it
    top      what the y axis reaches at least, so that charts side by side have the same one
    """

    key: str
    title: str
    note: str
    lines: Sequence[Line]
    format: Format = "number"
    log: bool = False
    x: str = "step"
    more: bool = False
    shape: Shape = "doubling"
    marks: Sequence[Mark] = ()
    top: float | None = None

    def thinned(self, most: int) -> Chart:
        return replace(self, lines=[thin(line, most) for line in self.lines])

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "format": self.format,
            "log": self.log,
            "x": self.x,
            "shape": self.shape,
            "top": self.top,
            "marks": [{"label": mark.label, "y": float(f"{mark.y:.5g}")} for mark in self.marks],
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
    ("step", "stage", "epoch", "samples", "seconds", "tau_min", "tau_max", "kind") + tuple(name for name, *_ in _MAIN)
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
    """One run: its tasks in one chart; a fine-tuning has a chart a task, elsewhere.  Several: a chart a task.

    A metric is called "TASK METRIC"; what else stands in such a line (step, kind, seconds) has no blank.
    """
    keys = list(dict.fromkeys(key for run in runs for line in run.evaluations for key in line if " " in key))
    if len(runs) == 1:
        if runs[0].finetune:
            return []
        seen = [trained_on(runs[0], key) for key in keys]
        lines = [
            Line(short_name(key) + SEEN * ours, number % (COLORS * DASHES), 0, *_points(runs[0].evaluations, key))
            for number, (key, ours) in enumerate(zip(keys, seen, strict=True))
        ]
        note = "on data the run does not train on" if not any(seen) else "on the data named"
        return [Chart("evaluation", "Evaluation", note, lines, "percent")]
    charts = []
    for number, key in enumerate(keys):
        format_: Format = "percent" if is_share(key) else "number"
        lines = [
            Line(labels[which], colors[which], which, *_points(run.evaluations, key)) for which, run in enumerate(runs)
        ]
        title, note = metric_words(key)
        shown = [line for line in lines if line.x]
        note += SEEN * any(trained_on(run, key) for run in runs)
        charts.append(Chart(f"evaluation-{number}", title or note, note, shown, format_))
    return charts


def trained_on(run: RunData, key: str) -> bool:
    """Whether a "TASK METRIC" is measured on what the run trains on: beside other tasks it shows memory from skill."""
    source = key.rpartition(" ")[0].partition(":")[2]
    return bool(source) and source in map(str, run.setting("data", "data") or ())


def short_name(key: str) -> str:
    source, what = metric_words(key)
    return f"{source}, {what}" if source else what


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
