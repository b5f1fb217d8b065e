"""Charts of a search: by choice, over trials, importance, learning curves, slices, parallel coordinates, finalists,
and the front of two metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Html, joined, node
from fullbatch.report.charts import BASELINE, SHADES, Axis, Chart, Dot, Label, Look, Series, figure, figures
from fullbatch.report.collect import Fields, fields_of
from fullbatch.report.wording import NOTHING, TIMES, counted, is_number, number, setting_text

WHOLE = ("done", "stopped")  # statuses whose value is that of a training to its end
_MOST_WORDS = 12  # values of a setting that is drawn as words
_FORESTS = {"fanova": "fANOVA", "mdi": "mean decrease in impurity"}
_LOOKS: Mapping[str, tuple[Look, str]] = {
    "pruned": ("hollow", "a hollow point is a pruned trial, with the value of a shorter training"),
    "diverged": ("cross", f"{TIMES} is one that diverged"),
}
_GREY = 6  # of the page's colours


@dataclass(frozen=True)
class SearchMetric:
    name: str
    short: str
    up: bool
    share: bool

    def text(self, value: object) -> str:
        if not is_number(value):
            return NOTHING
        return f"{100.0 * value:.2f}%" if self.share else number(value)

    def axis(self, label: str = "") -> Axis:
        return Axis(label, percent=self.share)


@dataclass(frozen=True, eq=False)
class EndedTrial:
    slot: int
    rank: int | None
    label: str
    status: str
    params: Mapping[str, Any]
    values: tuple[float | None, ...]  # of the metrics
    evaluations: tuple[tuple[float, float], ...]
    tip: str  # all of it in words

    @property
    def value(self) -> float | None:
        """Of the first metric."""
        return self.values[0] if self.values else None

    @property
    def whole_value(self) -> float | None:
        """Of a training to its end."""
        return self.value if self.status in WHOLE else None

    def dot(self, x: float, y: float, look: Look | None = None) -> Dot:
        return Dot(x, y, self.tip, look or _LOOKS.get(self.status, ("full", ""))[0])


class _Drawn:
    """Trials with a place in a chart, and their values; those that diverged lie on the edge of the worst."""

    def __init__(self, trials: Sequence[EndedTrial], metric: SearchMetric) -> None:
        shown = [trial for trial in trials if trial.value is not None or trial.status == "diverged"]
        known = [trial.value for trial in shown if trial.value is not None and trial.status != "diverged"] or [0.0]
        room = 0.06 * (max(known) - min(known))
        edge = min(known) - room if metric.up else max(known) + room
        self.trials = {
            trial: edge if trial.status == "diverged" or trial.value is None else trial.value for trial in shown
        }
        ranked = [trial for trial in shown if trial.rank is not None]
        self.best = min(ranked, key=lambda trial: trial.rank or 0, default=None)

    def note(self, text: str) -> str:
        """With what the looks of points mean."""
        statuses = {trial.status for trial in self.trials}
        return "; ".join([text, *(words for status, (_, words) in _LOOKS.items() if status in statuses)])

    def kinds(self, setting: str) -> list[str]:
        return sorted({str(trial.params[setting]) for trial in self.trials if setting in trial.params})

    def series(self, setting: str, dot: Callable[[EndedTrial, float, float], Dot]) -> list[Series]:
        """A series a value of the setting; ``dot`` places a trial, given its value and how far aside its series is."""
        kinds = self.kinds(setting) or ["trials"]
        dots: dict[str, list[Dot]] = {kind: [] for kind in kinds}
        for trial, value in self.trials.items():
            kind = str(trial.params.get(setting, kinds[0]))
            dots[kind].append(dot(trial, value, (kinds.index(kind) + 0.5) / len(kinds) - 0.5))
        return [Series.of_dots(kind, dots[kind], at) for at, kind in enumerate(kinds)]


# ---------------------------------------------------------------------------------------------------------------------
# by choice, over trials, importance, learning curves


def by_choice(key: str, trials: Sequence[EndedTrial], along: str, colored: str, metric: SearchMetric) -> Chart | None:
    """A row a value of ``along``, best mean first, its points coloured by ``colored``; a bar marks the mean."""
    drawn = _Drawn([trial for trial in trials if along in trial.params], metric)
    rows = drawn.kinds(along)
    if len(rows) < 2:
        return None
    wholes = [(str(trial.params[along]), trial.whole_value) for trial in drawn.trials if trial.whole_value is not None]
    means = {name: statistics.fmean(value for of, value in wholes if of == name) for name, _ in wholes}
    rows.sort(key=lambda name: (name not in means, means.get(name, 0.0) * (-1 if metric.up else 1)))

    def dot(trial: EndedTrial, value: float, aside: float) -> Dot:
        return trial.dot(value, rows.index(str(trial.params[along])) + 0.7 * aside)

    series = drawn.series(colored, dot)
    ticks = Series("mean", list(means.values()), [rows.index(name) for name in means], style="ticks", color="ink")
    note = drawn.note(f"{f'coloured by {colored}; ' if len(series) > 1 else ''}a bar marks the mean of whole trials")
    words = "; ".join(f"{name} {metric.text(means.get(name))}" for name in rows)
    words, height = f"{metric.short} by {along}, means: {words}", 46 + len(rows) * max(24, 7 * len(series) + 8)
    name, y, x = f"{key}-by-{along}", Axis(words=rows), metric.axis(metric.short)
    return Chart(name, f"By {along}", note, [ticks, *series], y, x, height=height, words=words)


def progression(key: str, trials: Sequence[EndedTrial], metric: SearchMetric, colored: str) -> Chart | None:
    """The value of each trial, and the best so far."""
    drawn = _Drawn(sorted(trials, key=lambda trial: trial.slot), metric)
    if not drawn.trials:
        return None
    stair: list[tuple[float, float]] = []
    for trial in drawn.trials:
        value = trial.whole_value
        if value is not None and (not stair or (value > stair[-1][1] if metric.up else value < stair[-1][1])):
            stair += [(trial.slot, stair[-1][1])] if stair else []
            stair.append((trial.slot, value))
    best = stair[-1][1] if stair else None
    line = [Series.of_path("best so far", [*stair, (trial.slot + 0.5, best)], "ink")] if best is not None else []
    dots = drawn.series(colored, lambda trial, value, _: trial.dot(trial.slot, value))
    words = f"{metric.short} of {counted(len(drawn.trials), 'trial')}, best {metric.text(best)}"
    note = drawn.note("the line is the best so far")
    return Chart(f"{key}-progression", "Progression", note, [*line, *dots], metric.axis(), Axis("trial"), words=words)


def importance(key: str, shares: Mapping[str, Any]) -> Chart | None:
    names = [str(name) for name, share in fields_of(shares, "fanova").items() if is_number(share)]
    if not names:
        return None
    series = []
    for color, (forest, title) in enumerate(_FORESTS.items()):
        known = {name: share for name, share in fields_of(shares, forest).items() if is_number(share)}
        values = [min(max(float(known.get(name, 0.0)), 0.0), 1.0) for name in names]
        places = [row + (-0.19, 0.19)[color] for row in range(len(names))]
        series.append(Series(title, values, places, color, style="bars"))
    out = [plain(name, 60) for name in shares.get("left_out") or ()]
    note = f"share of the variation among what was tried, over {counted(int(shares.get('trials') or 0), 'whole trial')}"
    pruned = int(shares.get("pruned") or 0)
    note += f"; {pruned} pruned {'one is' if pruned == 1 else 'ones are'} left out" if pruned else ""
    note += f"; without {', '.join(out)}, which not all trials have" if out else ""
    words = "; ".join(f"{name} {share:.0%}" for name, share in zip(names, series[0].x, strict=True))
    y, x = Axis(words=names), Axis(percent=True, reach=[0.0, max(*series[0].x, *series[1].x) + 0.12])
    height, words = 32 + 36 * len(names), f"importance by fANOVA: {words}"
    return Chart(f"{key}-importance", "Importance", note, series, y, x, height=height, words=words)


def learning_curves(key: str, trials: Sequence[EndedTrial], metric: SearchMetric) -> Chart | None:
    """The value at each evaluation; of pruned trials the end is marked."""
    shown = [
        trial for trial in trials if len(trial.evaluations) > 1 or (trial.evaluations and trial.status == "pruned")
    ]
    if not shown:
        return None
    best, many = _Drawn(shown, metric).best, "faint" if len(shown) > 60 else "thin"
    series = []
    for trial in sorted(shown, key=lambda trial: (trial is best, trial.status in WHOLE)):
        color = 1 if trial is best else 0 if trial.status in WHOLE else BASELINE
        weight = "thick" if trial is best else many
        series.append(Series.of_path(trial.label, trial.evaluations, color, weight=weight, tips=[trial.tip]))
    cut = [trial.dot(*trial.evaluations[-1], "cross") for trial in shown if trial.status == "pruned"]
    series += [Series.of_dots("pruned", cut, 1)] if cut else []
    words = f"{metric.short} over {counted(len(shown), 'trial')}' evaluations, {len(cut)} of them pruned"
    note = f"the thick line is the best trial{f'; {TIMES} is where a trial was pruned' if cut else ''}"
    x, y = Axis("evaluation"), metric.axis()
    return Chart(f"{key}-curves", "Learning curves", note, series, y, x, legend=False, words=words)


# ---------------------------------------------------------------------------------------------------------------------
# settings


def setting_axes(trials: Collection[EndedTrial], log_scaled: Collection[str]) -> dict[str, Axis]:
    """Settings with more than one value among the trials: along a scale, or as words in places of their own."""
    axes = {}
    for name in dict.fromkeys(name for trial in trials for name in trial.params):
        values = [trial.params[name] for trial in trials if name in trial.params]
        texts = {setting_text(value) for value in values}
        numbers = [float(value) for value in values if is_number(value)]
        few = len(texts) <= 3 and all(len(text) <= 6 for text in texts)  # choices, most likely
        if len(texts) < 2:
            continue
        if len(numbers) == len(values) and not few:
            log = name in log_scaled and min(numbers) > 0.0
            axes[name] = Axis(scale="log" if log else "linear", reach=[min(numbers), max(numbers)])
        elif len(numbers) == len(values):
            axes[name] = Axis(words=[setting_text(value) for value in sorted(set(values))])
        elif len(texts) <= _MOST_WORDS:
            axes[name] = Axis(words=sorted(texts))
    return axes


def slices(key: str, trials: Sequence[EndedTrial], log_scaled: Collection[str], metric: SearchMetric) -> Html | None:
    """A small chart a setting, all on the same upright scale; the best trial is ringed."""
    drawn = _Drawn(trials, metric)
    best, values = drawn.best, list(drawn.trials.values())
    y = replace(metric.axis(), reach=[min(values), max(values)] if values else [])
    charts: list[Chart] = []
    for name, axis in setting_axes(drawn.trials, log_scaled).items():
        dots = [
            trial.dot(_along(axis, trial, name), value, "ringed" if trial is best else None)
            for trial, value in sorted(drawn.trials.items(), key=lambda item: item[0] is best)
            if name in trial.params
        ]
        title = f"{plain(name, 60)}{' (log)' if axis.scale == 'log' else ''}"
        series, words = [Series.of_dots("trials", dots)], f"{metric.short} by {name}"
        charts.append(Chart(f"{key}-slice-{len(charts)}", title, "", series, y, axis, height=152, words=words))
    if not charts:
        return None
    note = f"{plain(metric.short, 80)} by each setting, whatever the others were; the ring is the best trial"
    return joined(node("h3", "Slices"), node("p", note, class_="note"), figures(charts, "slices"))


def _along(axis: Axis, trial: EndedTrial, name: str) -> float:
    """Trials of one word would lie on each other; they stand beside each other, each always in the same place."""
    if not axis.words:
        return float(trial.params[name])
    return axis.words.index(setting_text(trial.params[name])) + (trial.slot * 0.618 % 1.0 - 0.5) * 0.45


def parallel(key: str, trials: Sequence[EndedTrial], log_scaled: Collection[str], metric: SearchMetric) -> Html | None:
    """A line a trial through its settings to its value, coloured by the value; best ones on top."""
    whole = [trial for trial in trials if trial.whole_value is not None]
    order = sorted(whole, key=lambda trial: (trial.value or 0.0) * (1 if metric.up else -1))
    axes = setting_axes(order, log_scaled)
    if len(axes) < 3 or len(order) < 2:  # two settings are seen better in the other charts
        return None
    names, values = [plain(name, 60) for name in axes], [trial.value or 0.0 for trial in order]
    last = replace(metric.axis(), reach=[min(values), max(values)])
    series = []
    for place, (trial, value) in enumerate(zip(order, values, strict=True)):
        stops = [(at, axis, trial.params[name]) for at, (name, axis) in enumerate(axes.items()) if name in trial.params]
        way = [(float(at), _height(axis, stop)) for at, axis, stop in (*stops, (len(axes), last, value))]
        shade, weight = round(place / (len(order) - 1) * (SHADES - 1)), "thick" if place == len(order) - 1 else "thin"
        series.append(Series.of_path(trial.label, way, f"s{shade}", weight=weight, tips=[trial.tip]))
    note = "whole trials only, from pale for the worst to strong for the best, which is the thick line"
    words = f"parallel coordinates of {counted(len(order), 'trial')} over {', '.join(names)}"
    labels = [label for at, axis in enumerate([*axes.values(), last]) for label in _axis_labels(at, axis)]
    y, x, width = Axis(reach=[0.0, 1.0]), Axis(words=[*names, metric.short]), 100 * (len(axes) + 2)
    chart = Chart(f"{key}-parallel", "Parallel coordinates", note, series, y, x, labels=labels, legend=False)
    return figure(replace(chart, height=300, width=width, words=words), "chart broad")


def _height(axis: Axis, value: Any) -> float:
    """Where a value lies on an axis of the parallel coordinates, from 0 to 1."""
    if axis.words:
        return (axis.words.index(setting_text(value)) + 0.5) / len(axis.words)
    low, high, at = (math.log(x) if axis.scale == "log" else x for x in (*axis.reach, float(value)))
    return (at - low) / (high - low) if high > low else 0.5


def _axis_labels(at: int, axis: Axis) -> list[Label]:
    if axis.words:
        return [Label(at, _height(axis, word), plain(word, 14)) for word in axis.words]
    low, high = axis.reach
    middle = math.sqrt(low * high) if axis.scale == "log" else (low + high) / 2
    scale, unit = (100.0, "%") if axis.percent else (1.0, "")
    return [Label(at, _height(axis, value), f"{scale * value:.3g}{unit}") for value in (low, middle, high)]


# ---------------------------------------------------------------------------------------------------------------------
# finalists, and the front of two metrics


def finalists(number: int, rows: Sequence[Fields], tips: Sequence[str], metric: SearchMetric) -> Html | None:
    """By the metric of this number, a row a finalist: seeds as points, the mean as a bar, one standard deviation as a
    band.  One that the file does not have whole is left out."""
    series, names, means = list[Series](), list[str](), list[str]()
    for row, tip in zip(rows, tips, strict=True):
        values = [seed[number] for seed in row.get("values") or () if isinstance(seed, list) and len(seed) > number]
        seeds, params, baseline = row.get("seeds") or [], fields_of(row, "params"), row.get("kind") == "baseline"
        if not values or len(seeds) != len(values) or not all(map(is_number, values)):
            continue
        label, place, color = plain(row.get("label"), 80), len(names), _GREY if baseline else 0
        chosen = [plain(params[name], 40) for name in ("optimizer", "method") if name in params]
        detail = "baseline" if baseline else " + ".join(chosen)
        names.append(f"{label}: {detail}" if detail else label)
        mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        means.append(f"{label} {metric.text(mean)}")
        text = f"{label}: {metric.text(mean)}{f' ± {metric.text(sd)}' if len(values) > 1 else ''}\n{tip}"
        series.append(Series(label, [mean], [place], color, [mean - sd], [mean + sd], style="ticks", tips=[text]))
        of_seeds = zip(seeds, values, strict=True)
        dots = [Dot(value, place, f"{label}, seed {seed}: {metric.text(value)}") for seed, value in of_seeds]
        series.append(Series.of_dots(label, dots, color))
    if not series:
        return None
    key, title = f"metric-{number}-finalists", metric.short if len(metric.short) < 80 else "Finalists"
    note = "points are seeds, bars means, bands one standard deviation; baselines are grey"
    words, height = f"finalists by {metric.short}: {'; '.join(means)}", 32 + 34 * len(names)
    y, x = Axis(words=names), metric.axis()
    chart = Chart(key, title, note, series, y, x, legend=False, height=height, words=words)
    return figure(chart, "chart broad bounded")


def front(trials: Sequence[EndedTrial], best: list[list[float]], metrics: Sequence[SearchMetric]) -> Html | None:
    """Two metrics against each other, with the line of those that none beats in both."""
    if len(metrics) != 2:
        return None
    corners, stair = sorted((row[0], row[1]) for row in best if len(row) == 2), list[tuple[float, float]]()
    for x, y in corners:  # between two of the front lies nothing that is as good as either
        if stair:
            stair.append((stair[-1][0], y) if metrics[0].up else (x, stair[-1][1]))
        stair.append((x, y))
    dots: dict[bool, list[Dot]] = {False: [], True: []}  # on the front
    for trial in trials:
        first, second = trial.values if len(trial.values) == 2 else (None, None)
        if trial.status in WHOLE and first is not None and second is not None:
            unbeaten = (first, second) in corners
            dots[unbeaten].append(trial.dot(first, second, "ringed" if unbeaten else "full"))
    series = [
        Series.of_path("front", stair, "ink"),
        Series.of_dots("others", dots[False], _GREY),
        Series.of_dots("on the front", dots[True]),
    ]
    across, up = metrics
    note = f"upright: {up.short}; rings are not beaten in both"
    words = f"{up.short} against {across.short}, {len(corners)} on the front"
    shown, axes = [drawn for drawn in series if drawn.x], (up.axis(), across.axis(across.short))
    chart = Chart("front-chart", "Two metrics", note, shown, *axes, height=266, words=words)
    return figure(chart, "chart bounded small")
