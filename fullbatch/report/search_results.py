"""More figures of a search: learning curves, finalists with their spread, and the front of two metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbatch.report.drawing import (
    Scale,
    drawn,
    figure,
    fitted,
    line,
    path,
    point,
    room_for,
    scale_of,
    text,
    x_axis,
    y_axis,
)
from fullbatch.report.markup import Child, Html, node
from fullbatch.report.search_figures import WHOLE, WIDTH, Measure, Trial
from fullbatch.report.wording import TIMES, counted


def curves(trials: Sequence[Trial], measure: Measure) -> Html | None:
    """The value at each evaluation; of pruned trials the end is marked."""
    shown = [one for one in trials if len(one.evaluations) > 1 or (one.evaluations and one.status == "pruned")]
    if not shown:
        return None
    top, bottom, right = 10.0, 200.0, WIDTH - 14.0
    steps = [step for one in shown for step, _ in one.evaluations]
    upright = scale_of([value for one in shown for _, value in one.evaluations], bottom, top, share=measure.share)
    left = room_for([said for _, said in upright.ticks()])
    across = scale_of(steps, left, right)
    pieces: list[Child] = [y_axis(upright, left, right), x_axis(across, bottom, bottom, "evaluation")]
    best = min((one for one in shown if one.rank is not None), key=lambda one: one.rank or 0, default=None)
    for one in sorted(shown, key=lambda one: (one is best, one.status in WHOLE)):
        way = [(across.at(step), upright.at(value)) for step, value in one.evaluations]
        kind = "top" if one is best else f"{'whole' if one.status in WHOLE else 'cut'}{' many' * (len(shown) > 60)}"
        pieces.append(path(way, f"curve {kind}", one.tip))
        if one.status == "pruned":
            pieces.append(point(*way[-1], 1, one.tip, "cross", 3.0))
    pruned = sum(one.status == "pruned" for one in shown)
    words = f"{measure.short} over {counted(len(shown), 'trial')}' evaluations, {pruned} of them pruned"
    svg = drawn(WIDTH, bottom + 38, words, *pieces)
    note = f"the thick line is the best trial{f'; {TIMES} is where a trial was pruned' if pruned else ''}"
    return figure("Learning curves", note, svg)


@dataclass(frozen=True)
class Row:
    """A finalist in one metric; ``detail`` is what its label stands for."""

    label: str
    detail: str
    baseline: bool
    seeds: Sequence[int]
    values: Sequence[float]
    mean: float
    sd: float | None
    tip: str


def finalists(rows: Sequence[Row], measure: Measure) -> Html | None:
    """A row a finalist: seeds as points, the mean as a bar, one standard deviation as a band."""
    if not rows:
        return None
    reach = [value for row in rows for value in row.values]
    reach += [row.mean + sign * (row.sd or 0.0) for row in rows for sign in (-1, 1)]
    high, left = 34.0, room_for([said for row in rows for said in (row.label, row.detail)], 165.0)
    bottom = 8.0 + high * len(rows)
    scale = scale_of(reach, left, WIDTH - 14.0, share=measure.share)
    pieces: list[Child] = [x_axis(scale, 8.0, bottom)]
    for place, row in enumerate(rows):
        y = 8.0 + high * (place + 0.5)
        color = 6 if row.baseline else 0
        tip = f"{row.label}\n{row.tip}"
        pieces.append(text(left - 8, y - 2, fitted(row.label, left), "end", "name", tip))
        pieces.append(text(left - 8, y + 11, fitted(row.detail, left), "end", None, tip))
        said = f"{row.label}: {measure.said(row.mean)}" + ("" if row.sd is None else f" ± {measure.said(row.sd)}")
        if row.sd is not None:
            start, end = sorted((scale.at(row.mean - row.sd), scale.at(row.mean + row.sd)))
            box = {"x": f"{start:.1f}", "y": f"{y - 6:.1f}", "width": f"{max(end - start, 1.0):.1f}", "height": "12"}
            pieces.append(node("rect", node("title", said), class_=f"spread c{color}", **box))
        pieces.append(
            node("g", node("title", said), line(scale.at(row.mean), y - 9, scale.at(row.mean), y + 9, "mean"))
        )
        for seed, value in zip(row.seeds, row.values, strict=True):
            pieces.append(
                point(scale.at(value), y, color, f"{row.label}, seed {seed}: {measure.said(value)}", "full", 3.2)
            )
    words = "; ".join(f"{row.label} {measure.said(row.mean)}" for row in rows)
    svg = drawn(WIDTH, bottom + 24, f"finalists by {measure.short}: {words}", *pieces)
    note = "points are seeds, bars means, bands one standard deviation; baselines are grey"
    return figure(measure.short if len(measure.short) < 80 else "Finalists", note, svg, class_="chart broad bounded")


def front(trials: Sequence[Trial], best: Sequence[tuple[float, float]], measures: Sequence[Measure]) -> Html | None:
    """Two metrics against each other, with the line of those that none beats in both."""
    shown = [one for one in trials if one.status in WHOLE and len(one.values) == 2 and None not in one.values]
    points = [(float(one.values[0] or 0.0), float(one.values[1] or 0.0)) for one in shown]
    reach = [*points, *best]
    if len(measures) != 2 or not reach:
        return None
    top, bottom, right = 10.0, 230.0, WIDTH - 14.0
    upright = scale_of([y for _, y in reach], bottom, top, share=measures[1].share)
    left = room_for([said for _, said in upright.ticks()])
    across: Scale = scale_of([x for x, _ in reach], left, right, share=measures[0].share)
    pieces: list[Child] = [
        y_axis(upright, left, right),
        x_axis(across, top, bottom, fitted(measures[0].short, right - left)),
    ]
    corner = sorted(best)
    way: list[tuple[float, float]] = []
    for x, y in corner:  # a stair: between two of the front lies nothing that is as good as either
        if way:
            step = (across.at(x), way[-1][1]) if not measures[0].up else (way[-1][0], upright.at(y))
            way.append(step)
        way.append((across.at(x), upright.at(y)))
    if way:
        pieces.append(path(way, "best-so-far"))
    for one, (x, y) in zip(shown, points, strict=True):
        pieces.append(point(across.at(x), upright.at(y), 0 if (x, y) in corner else 6, one.tip, "full", 3.6))
    for x, y in corner:
        pieces.append(node("circle", cx=f"{across.at(x):.1f}", cy=f"{upright.at(y):.1f}", r="6.5", class_="ring"))
    words = f"{measures[1].short} against {measures[0].short}, {len(corner)} on the front"
    svg = drawn(WIDTH, bottom + 38, words, *pieces)
    note = f"upright: {measures[1].short}; rings are not beaten in both"
    return figure("Two metrics", note, svg, class_="chart bounded small")
