"""The page of `fullbatch theory`: heat maps, races, the toy of four points, the loss along one angle."""

# N: pairs

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fullbatch.report.blocks import Html, Page, Section, joined, node, page_header, table
from fullbatch.report.charts import Axis, Chart, Mark, Series, figures
from fullbatch.theory.embeddings import antipodes, optimum_of
from fullbatch.theory.minimizers import NEAR, Descent, Race, Unproven
from fullbatch.theory.study import Rows, Study, ToyWalks, optimum_rows, race_rows, toy_rows, unproven_rows
from fullbatch.theory.toy import BEST_LOSS, DRIFT_RATIO, GOAL, METHODS, Turn, drift_ratio

_SIDE = 100  # of a heat map, in the drawing's own units
_GAP = 16
_PLACES = 5  # of heat maps in a row, so that all are of one size
_COLD, _WHITE, _WARM = (33, 88, 150), (250, 248, 243), (190, 82, 20)  # -1, 0, 1
_COLORS = {"SGD": 0, "OSGD": 1, "spectral": 2, "SGD with replacement": 5, "OSGD of a partition": 4}
_UPDATES = Axis("update")


def theory_page(done: Study) -> Page:
    lead = (
        "Embeddings without encoders descend the contrastive loss of chosen batches: the synthetic study of "
        f"Cho et al. 2023, {done.extent.seeds} random starts each, batches of {done.extent.batch_size} pairs."
    )
    title = "Which batches lead to the full batch's optimum"
    parts: list[tuple[Any, Callable[[Any], Section]]] = [
        (done.minima, _optimum),
        (done.unproven, _unproven),
        (done.races, _convergence),
        (done.walks, _toy),
        (done.turn, _angle),
    ]
    return Page(
        title="Theory · fullbatch",
        header=page_header("theory", title, (), node("p", lead, class_="lead")),
        sections=[section(part) for part, section in parts if part],
    )


def _numbers(rows: Rows) -> Html:
    return table(rows[0], rows[1:], "numbers")


def heat_maps(maps: Sequence[tuple[str, str, Tensor]]) -> Html:
    """Matrices in a row, each with its name above and a remark below; blue is -1, white 0, brown 1."""
    pieces = []
    for place, (name, remark, gram_NN) in enumerate(maps):
        left, side = place * (_SIDE + _GAP), _SIDE / len(gram_NN)
        for y, text in ((10, name), (_SIDE + 28, remark)):
            pieces.append(node("text", text, x=left, y=y, font_size="8", fill="currentColor"))
        for row, values in enumerate(gram_NN.tolist()):
            for column, value in enumerate(values):
                corner = {"x": f"{left + column * side:.2f}", "y": f"{16 + row * side:.2f}"}
                size = {"width": f"{side:.2f}", "height": f"{side:.2f}"}
                pieces.append(node("rect", node("title", f"{value:.4f}"), **corner, **size, fill=_color(value)))
    words = "; ".join(f"{name}: {remark}" for name, remark, _ in maps)
    box = f"0 0 {_PLACES * (_SIDE + _GAP) - _GAP} {_SIDE + 34}"
    return node("svg", pieces, viewBox=box, width="100%", role="img", aria_label=words)


def _color(value: float) -> str:
    share, end = min(abs(value), 1.0), _WARM if value > 0 else _COLD
    mixed = (round(white + share * (full - white)) for white, full in zip(_WHITE, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _arranged(gram_NN: Tensor) -> Tensor:
    """Antipodal partners side by side, so that a cross-polytope looks like one."""
    partner = antipodes(gram_NN.unsqueeze(0))[0].tolist()
    order = torch.tensor([row for first, other in enumerate(partner) if first < other for row in (first, other)])
    return gram_NN[order][:, order]


def _optimum(minima: Sequence[Descent]) -> Section:
    drawn: list[Html] = []
    for case, group in groupby(minima, key=lambda minimum: minimum.case):
        maps: list[tuple[str, str, Tensor]] = []
        for minimum in group:
            gram_NN, far = minimum.gram_RNN[0], float(minimum.distance_R[0])
            arranged_NN = gram_NN if case.endswith("simplex") else _arranged(gram_NN)
            if not maps:
                target_NN = optimum_of(minimum.count, minimum.width, arranged_NN)
                assert target_NN is not None, "only proved cases are drawn here"
                maps.append(("the optimum", case.rpartition(" ")[2], target_NN))
            maps.append((minimum.batches, f"away by {far:.1e}", arranged_NN))
        drawn += [node("h3", case), heat_maps(maps)]
    lead = (
        "Heat maps of u_i · v_j of the first start. By theorem the full batch and all mini-batches have the same "
        f"optimum, and a strict subset has another; reached means within {NEAR:g} in Frobenius norm, under the best "
        "matching of antipodes."
    )
    return Section("optimum", "What is reached", joined(*drawn, _numbers(optimum_rows(minima))), lead)


def _unproven(cases: Sequence[Unproven]) -> Section:
    pieces: list[Html] = []
    names = {"full": "full batch", "all": "all batches"}
    for case in cases:
        maps = [
            (names[key], f"loss {case.full_batch_loss[f'of_{key}']:.6f}", _arranged(gram_NN))
            for key, gram_NN in case.heat_maps.items()
        ]
        pieces += [node("h3", f"N = {case.count}, d = {case.width}"), heat_maps(maps)]
    lead = (
        "Where nothing is proved: the best of all starts on the full batch (full) against the best on all mini-batches "
        "(all). Distance is under the best relabelling; slopes are the losses' gradients at the full-batch minimiser: "
        "where the full-batch loss is level and the mini-batch loss is not, the two have different minimisers."
    )
    body = joined(*pieces, _numbers(unproven_rows(cases)))
    return Section("unproven", "Where no optimum is known", body, lead)


def _convergence(races: Sequence[Race]) -> Section:
    pieces: list[Html] = []
    for reading, of_reading in groupby(races, key=lambda race: race.reading):
        raced, charts = list(of_reading), []
        for (count, width), case in groupby(raced, key=lambda race: (race.count, race.width)):
            series = []
            for race in case:
                away_TR = race.distance_TR
                mean, low, high = (of(1).tolist() for of in (away_TR.mean, away_TR.amin, away_TR.amax))
                series.append(Series(race.method, race.at, mean, _COLORS[race.method], low, high, style="area"))
            key = f"race-{'free' if reading.free else 'normalised'}-{count}-{width}"
            charts.append(Chart(key, f"N = {count}, d = {width}", "", series, Axis(scale="log"), _UPDATES))
        pieces += [node("h3", str(reading)), _numbers(race_rows(raced)), figures(charts)]
    lead = (
        "Distance to the optimum, mean over starts (in brackets: on how many nearer than SGD; ★ is the nearest); lines "
        "are means, bands span the starts. SGD takes random batches, OSGD the one of largest loss of all, spectral an "
        "epoch of even clusters. The paper normalises after each step; the authors' code never does, and counts epochs."
    )
    return Section("convergence", "How fast, by which batches", joined(*pieces), lead)


def _toy(walks: Sequence[ToyWalks]) -> Section:
    charts = []
    for place, walked in enumerate(walks):
        series = [
            Series(METHODS[method], range(len(path.loss_T)), path.loss_T, color, style="path")
            for color, (method, path) in enumerate(walked.paths.items())
        ]
        title = f"rate {walked.start.rate:g}, epsilon {walked.start.epsilon:.3g}"
        marks = [Mark("the square", BEST_LOSS)]
        charts.append(Chart(f"toy-{place}", title, "full-batch loss", series, Axis(), _UPDATES, marks))
    drifts = (
        f"The first drifts differ by 3(e² + 1)/(e² - 1) = {DRIFT_RATIO:.6f}; computed at epsilon = 1e-5: "
        f"{drift_ratio(1e-5):.6f}."
    )
    lead = (
        "Two close pairs of points that must become a square: steps until every expected angle is within rho of 45°. "
        "The ratio of first drifts is exact; the ratio of hitting times depends on rate, epsilon and rho."
    )
    return Section("toy", "Four points", joined(node("p", drifts), _numbers(toy_rows(walks)), figures(charts)), lead)


def _angle(turned: Turn) -> Section:
    degrees = [round(value / GOAL * 45.0, 3) for value in turned.angle]
    losses = (("full batch", turned.full), ("all mini-batches", turned.mini))
    series = [Series(label, degrees, loss, color, style="path") for color, (label, loss) in enumerate(losses)]
    chart = Chart("angle", "N = 10, d = 2", "loss while u₁ turns", series, Axis(), Axis("degrees"))
    ratio, best = turned.ratio, turned.best_angle
    text = (
        f"Both are least at {abs(best['full']):.3f} and {abs(best['mini']):.3f} rad; their ratio goes from "
        f"{ratio['least']:.3f} to {ratio['greatest']:.3f}, so one is no multiple of the other."
    )
    lead = "Ten pairs at the optimum in the plane, of which u₁ alone is turned."
    return Section("angle", "Along one angle", joined(node("p", text), figures([chart])), lead)
