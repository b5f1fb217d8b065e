"""What runs logged, as charts: loss, temperature, evaluations, normalizer errors, and losses of selected batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fullbatch.report.blocks import Html, Section, first_shown, joined, node
from fullbatch.report.charts import COLORS, Axis, Chart, Series, figure, figures
from fullbatch.report.collect import AUDITED, PROBED, Fields, RunData, fields_of, numbers_of
from fullbatch.report.wording import is_number, is_share, metric_name, metric_words

SEEN = ", which the run trains on"
_MOST_PERIODS = 4  # of batch losses shown, evenly spread; the last is one of them

# key, title, what it tells
_MAIN: tuple[tuple[str, str, str], ...] = (
    ("loss", "Loss", "the method's own; losses of different methods are not comparable"),
    ("tau", "Temperature τ", "the band spans the samples where each has its own"),
    ("lr", "Learning rate", ""),
    ("gradient_norm", "Gradient norm", "before clipping"),
    ("samples_per_second", "Throughput", "pairs per second"),
    ("positive_similarity", "Similarity of true pairs", "mean cosine of a picture and its caption"),
)
_NO_CURVES = {"step", "stage", "epoch", "samples", "seconds", "tau_min", "tau_max", "kind", *(key for key, *_ in _MAIN)}
_LOG = Axis(scale="log")


def run_charts(runs: Sequence[RunData], labels: Sequence[str], colors: Sequence[int]) -> list[Chart]:
    """The curves of one run, or of several over each other; ``more`` marks those of less interest."""
    looks = zip(labels, colors, strict=True)
    empty = [Series(label, (), (), color, run=place) for place, (label, color) in enumerate(looks)]
    charts = []
    others = sorted({key for run in runs for line in run.training for key in line} - _NO_CURVES)
    for key, title, note in (*_MAIN, *((key, metric_name(key).capitalize(), "") for key in others)):
        series = _filled(empty, [run.training for run in runs], key)
        if key == "tau":
            series = [_banded(curve, runs[curve.run].training) for curve in series]
        y, more = _LOG if key == "gradient_norm" else Axis(), key in others
        if not more or any(len(set(curve.y)) > 1 for curve in series):
            charts.append(Chart(key, title, note, series, y, more=more))
    charts[len(_MAIN) : len(_MAIN)] = [*_normalizer_errors(runs, empty), *_evaluations(runs, empty)]
    return [chart for chart in charts if any(len(series.x) > 1 for series in chart.series)]


def _filled(empty: Sequence[Series], lines_of_series: Sequence[Sequence[Fields]], key: str) -> list[Series]:
    """Steps, and what the lines say under this key; a series without any is left out."""
    made = []
    for series, lines in zip(empty, lines_of_series, strict=True):
        known = [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]
        made += [replace(series, x=[step for step, _ in known], y=[value for _, value in known])] if known else []
    return made


def _banded(tau: Series, lines: Sequence[Fields]) -> Series:
    low, high = ([line[name] for line in lines if is_number(line.get(name))] for name in ("tau_min", "tau_max"))
    spans = len(low) == len(high) == len(tau.x) and any(b - a > 1e-6 for a, b in zip(low, high, strict=True))
    return replace(tau, low=low, high=high) if spans else tau


def _normalizer_errors(runs: Sequence[RunData], empty: Sequence[Series]) -> list[Chart]:
    """Several runs: a chart for the probes, one for the audits, for the two do not compare.

    One run: both in one chart, audits dashed, and the method's error beside that of the batch's own estimate.
    """

    def chart(key: str, sources: Sequence[str], series: Sequence[Series]) -> Chart:
        note = f"mean squared error of the log-normalizers against exact ones ({' and '.join(sources)})"
        return Chart(key, "Normalizer error", note, series, _LOG)

    probes, audits = [run.probes for run in runs], [run.audits for run in runs]
    if len(runs) != 1:
        return [
            chart("normalizer_error", [PROBED], _filled(empty, probes, "normalizer_error")),
            chart("normalizer_audit", [AUDITED], _filled(empty, audits, "normalizer_error")),
        ]
    series, names = list[Series](), {"the method's estimate": "normalizer_error", "the batch's own": "batch_error"}
    for dashes, (source, lines) in enumerate(((PROBED, probes), (AUDITED, audits))):
        for color, (name, key) in enumerate(names.items()):
            series += _filled([Series(f"{name}, {source}", (), (), dashes * COLORS + color, run=0)], lines, key)
    sources = [source for source, lines in ((PROBED, probes), (AUDITED, audits)) if lines[0]]
    return [chart("normalizer_error", sources, series)]


def _evaluations(runs: Sequence[RunData], empty: Sequence[Series]) -> list[Chart]:
    """One run: its tasks in one chart; a fine-tuning has a chart a task, elsewhere.  Several: a chart a task.

    A metric is called "TASK METRIC"; what else stands in such a line (step, kind, seconds) has no blank.
    """
    keys = list(dict.fromkeys(key for run in runs for line in run.evaluations for key in line if " " in key))
    lines = [run.evaluations for run in runs]
    seen = {key: any(trained_on(run, key) for run in runs) for key in keys}
    if len(runs) != 1:
        charts = []
        for place, key in enumerate(keys):
            title, note = metric_words(key)
            note += SEEN * seen[key]
            series = _filled(empty, lines, key)
            charts.append(Chart(f"evaluation-{place}", title or note, note, series, metric_axis(key)))
        return charts
    if runs[0].finetune:
        return []
    series = []
    for color, key in enumerate(keys):
        series += _filled([Series(short_name(key) + SEEN * seen[key], (), (), color, run=0)], lines, key)
    note = "on the data named" if any(seen.values()) else "on data the run does not train on"
    return [Chart("evaluation", "Evaluation", note, series, Axis(percent=True))]


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


def batch_losses_section(run: RunData) -> Section:
    """How hard the selected batches were beside uniform ones, as in Figures 3 and 5 of Cho et al. 2023.

    From RUN/batches/losses.jsonl, a line a plan; and how hard spectral ones would have been, whatever the run was
    trained on, from `fullbatch audit --batch-losses`.
    """
    audited = [{**fields_of(audit, "batch_losses"), "step": audit["step"]} for audit in run.audits]
    charts: list[Chart] = []
    for lines, name, label in ((run.batch_losses, "period", "selected"), (audited, "step", "spectral")):
        made = [chart for line in lines if (chart := _batch_losses(line, name, label)) is not None]
        count = min(len(made), _MOST_PERIODS)
        charts += [made[round(place * (len(made) - 1) / max(count - 1, 1))] for place in range(count)]
    lead = (
        f"Losses of the {run.setting('selection', 'batches')} batches of some periods, and of as many uniform batches "
        "of the same samples, both by the embeddings that the plan was made from."
        if run.batch_losses
        else "Losses of an epoch's spectral batches, which the run was not trained on, and of its uniform ones, by "
        "the embeddings of a checkpoint."
    )
    lead += " Harder batches lie to the right."
    return Section("batch-losses", "How hard the batches were", figures(charts), lead)


def _batch_losses(line: Fields, name: str, label: str) -> Chart | None:
    """None for a line that is not whole."""
    edges, counts, uniform = (numbers_of(line, key) for key in ("edges", "counts", "uniform_counts"))
    if not len(edges) - 1 == len(counts) == len(uniform) > 0 or not is_number(line.get(name)):
        return None
    middles = [0.5 * (left + right) for left, right in pairwise(edges)]
    series = [
        area(words, color, middles, [count / max(1, sum(bins)) for count in bins])
        for color, (words, bins) in enumerate(((label, counts), ("uniform", uniform)))
    ]
    key, title = f"batch-losses-{name}-{int(line[name])}", f"{name} {int(line[name])}"
    return Chart(key, title, "share of the batches in each bin", series, Axis(percent=True), Axis("loss of a batch"))


def area(label: str, color: int, x: Sequence[float], y: Sequence[float]) -> Series:
    """A curve that is filled down to 0."""
    return Series(label, x, y, color, [0.0] * len(y), y, style="area")


def for_script(run: RunData, filter: object = None) -> dict[str, Any]:
    """What page.js knows of a run; the curves can be narrowed to runs of one ``filter``, by default the batch size."""
    name = str(run.batch_size if filter is None else filter)
    return {"batch": run.batch_size, "clock": clock_of(run), "filter": name, "recovery": run.recovery_steps}


def clock_of(run: RunData, most: int = 100) -> list[list[float]]:
    """Steps, seconds and pairs seen, from which page.js reads the time and the pairs of any step; the recovery's end is
    always among them."""
    last, stride = len(run.clock) - 1, max(1, math.ceil(len(run.clock) / most))
    kept = [
        (step, round(seconds, 3), pairs)
        for at, (step, seconds, pairs) in enumerate(run.clock)
        if at % stride == 0 or at == last or step == run.recovery_steps
    ]
    return [list(column) for column in zip((0, 0.0, 0), *kept, strict=True)]


def curves_section(charts: Sequence[Chart], filters: Sequence[str] = (), lead: str = "") -> Section:
    if not charts:
        return Section("curves", "Curves", Html(""))
    controls = node(
        "div",
        _choice("x", (("step", "steps"), ("samples", "pairs seen"), ("time", "time")), "along"),
        node("button", "smooth", type="button", class_="smooth", aria_pressed="false"),
        _choice("filter", tuple((name, name) for name in filters), "batch size") if len(filters) > 1 else None,
        node("div", class_="legend shared"),
        class_="controls",
    )
    ordered = sorted(charts, key=lambda chart: chart.more)
    main = sum(not chart.more for chart in charts)
    body = first_shown([figure(chart) for chart in ordered], main, "curve", "charts")
    return Section("curves", "Curves", joined(controls, body), lead)


def _choice(name: str, options: Sequence[tuple[str, str]], label: str) -> Html:
    buttons = [
        node("button", text, type="button", data_value=value, aria_pressed="true" if place == 0 else "false")
        for place, (value, text) in enumerate(options)
    ]
    return node("div", node("span", label), buttons, class_="choice", data_choice=name, role="group", aria_label=label)
