"""The page of `fullbatch theory`: heat maps, races, the toy of four points, the loss along one angle."""

# N: pairs

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fullbatch.report.blocks import Page, Section, best, chart_place, table
from fullbatch.report.curves import Chart, Line, Mark
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import NOTHING, TIMES
from fullbatch.theory import toy
from fullbatch.theory.angle import Turn
from fullbatch.theory.minimizers import NEAR
from fullbatch.theory.optimum import antipodes, optimum_of
from fullbatch.theory.study import Minimum, Open, Raced, Study, Walked, hitting_times, reading_name
from fullbatch.theory.toy import BEST_LOSS, DRIFT_RATIO, drift_ratio

_SIDE = 100  # of a heat map, in the drawing's own units
_GAP = 16
_PLACES = 5  # of heat maps in a row, so that all are of one size
_COLD, _WHITE, _WARM = (33, 88, 150), (250, 248, 243), (190, 82, 20)  # -1, 0, 1
_COLORS = {"SGD": 0, "OSGD": 1, "spectral": 2, "SGD with replacement": 5, "OSGD of a partition": 4}
_NAMES = {"ordered": "OSGD", "uniform": "SGD", "all_batches": "all batches", "full": "full batch"}


def theory_page(done: Study) -> Page:
    races, walks = _race_charts(done.races), _walk_charts(done.walks)
    angle = [_angle_chart(done.turn)] if done.turn is not None else []
    sections = [
        _optimum(done.minima) if done.minima else None,
        _unproven(done.unproven) if done.unproven else None,
        _convergence(done.races, races) if done.races else None,
        _toy(done.walks, walks) if done.walks else None,
        _angle(done.turn, angle) if done.turn is not None else None,
    ]
    return Page(
        title="Theory · fullbatch",
        header=joined(
            node("p", "fullbatch · theory", class_="eyebrow"),
            node("h1", "Which batches lead to the full batch's optimum"),
            node(
                "p",
                "Embeddings without encoders descend the contrastive loss of chosen batches: the synthetic study of "
                f"Cho et al. 2023, {done.extent.seeds} random starts each, batches of {done.extent.batch_size} pairs.",
                class_="lead",
            ),
        ),
        sections=[section for section in sections if section is not None],
        charts=[*races, *walks, *angle],
    )


# ---------------------------------------------------------------------------------------------------------------------
# heat maps


def heat_maps(maps: Sequence[tuple[str, str, Tensor]]) -> Html:
    """Matrices in a row, each with its name above and a remark below; blue is -1, white 0, brown 1."""
    width = _PLACES * (_SIDE + _GAP) - _GAP
    pieces = []
    for place, (name, remark, gram_NN) in enumerate(maps):
        left = place * (_SIDE + _GAP)
        pieces += [_text(left, 10, name), *_squares(gram_NN, left, 16), _text(left, _SIDE + 28, remark)]
    words = "; ".join(f"{name}: {remark}" for name, remark, _ in maps)
    return node("svg", pieces, viewBox=f"0 0 {width} {_SIDE + 34}", width="100%", role="img", aria_label=words)


def _squares(gram_NN: Tensor, left: int, top: int) -> list[Html]:
    side = _SIDE / len(gram_NN)
    return [
        node(
            "rect",
            node("title", f"{value:.4f}"),
            x=f"{left + column * side:.2f}",
            y=f"{top + row * side:.2f}",
            width=f"{side:.2f}",
            height=f"{side:.2f}",
            fill=_color(value),
        )
        for row, values in enumerate(gram_NN.tolist())
        for column, value in enumerate(values)
    ]


def _color(value: float) -> str:
    share, end = min(abs(value), 1.0), _WARM if value > 0 else _COLD
    mixed = (round(white + share * (full - white)) for white, full in zip(_WHITE, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: int, y: int, text: str) -> Html:
    return node("text", text, x=x, y=y, font_size="8", fill="currentColor")


def _arranged(gram_NN: Tensor) -> Tensor:
    """Antipodal partners side by side, so that a cross-polytope looks like one."""
    partner = antipodes(gram_NN.unsqueeze(0))[0].tolist()
    order = torch.tensor([each for one in range(len(partner)) if one < partner[one] for each in (one, partner[one])])
    return gram_NN[order][:, order]


# ---------------------------------------------------------------------------------------------------------------------
# sections


def _optimum(minima: Sequence[Minimum]) -> Section:
    rows: list[list[Child]] = []
    drawn: list[Html] = []
    for (count, width), group in groupby(minima, key=lambda one: (one.count, one.width)):
        ones = list(group)
        kind = "simplex" if count <= width + 1 else "cross-polytope"
        first = [one.descent.gram_RNN[0] for one in ones]
        arranged = first if kind == "simplex" else [_arranged(gram_NN) for gram_NN in first]
        target = optimum_of(count, width, arranged[0])
        assert target is not None, "only proved cases are drawn here"
        maps = [("the optimum", kind, target)]
        for one, gram_NN in zip(ones, arranged, strict=True):
            maps.append((one.batches, f"away by {float(one.descent.distance_R[0]):.1e}", gram_NN))
            far = one.descent.distance_R
            rows.append(
                [
                    f"N = {count}, d = {width}: {kind}",
                    f"{one.batches} ({one.number})",
                    f"{one.rate:g}",
                    _reached(one),
                    f"{float(far.min()):.2g} to {float(far.max()):.2g}",
                ]
            )
        drawn += [node("h3", f"N = {count}, d = {width}: {kind}"), heat_maps(maps)]
    head = ("", "batches", "rate", "reached after steps", "distance at the end")
    lead = (
        "Heat maps of u_i · v_j of the first start. By theorem the full batch and all mini-batches have the same "
        f"optimum, and a strict subset has another; reached means within {NEAR:g} in Frobenius norm, under the best "
        "matching of antipodes."
    )
    return Section("optimum", "What is reached", joined(*drawn, table(head, rows, "numbers")), lead)


def _reached(one: Minimum) -> str:
    reached = [step for step in one.descent.reached_R.tolist() if step >= 0]
    if not reached:
        return f"none of {len(one.descent.reached_R)} in {one.descent.steps:,}"
    missed = len(one.descent.reached_R) - len(reached)
    span = f"{min(reached):,} to {max(reached):,}"
    return f"{span}, {missed} never" if missed else span


def _unproven(found: Sequence[Open]) -> Section:
    pieces: list[Html] = []
    rows: list[list[Child]] = []
    for one in found:
        maps = [
            ("full batch", f"loss {one.found.full_losses[0]:.6f}", _arranged(one.found.full_NN)),
            ("all batches", f"loss {one.found.full_losses[1]:.6f}", _arranged(one.found.all_NN)),
        ]
        pieces += [node("h3", f"N = {one.count}, d = {one.width}"), heat_maps(maps)]
        rows.append(
            [
                f"N = {one.count}, d = {one.width}",
                f"{one.found.distance:.2g}",
                *(f"{loss:.6f}" for loss in (*one.found.full_losses, *one.found.all_losses)),
                *(f"{slope:.1e}" for slope in one.found.slopes),
            ]
        )
    head = (
        "",
        "distance",
        "full loss of full",
        "full loss of all",
        "mini loss of full",
        "mini loss of all",
        "full slope",
        "mini slope",
    )
    lead = (
        "Where nothing is proved: the best of all starts on the full batch (full) against the best on all mini-batches "
        "(all). Distance is under the best relabelling; slopes are the losses' gradients at the full-batch minimiser: "
        "where the full-batch loss is level and the mini-batch loss is not, the two have different minimisers."
    )
    return Section("unproven", "Where no optimum is known", joined(*pieces, table(head, rows, "numbers")), lead)


def _convergence(races: Sequence[Raced], charts: Sequence[Chart]) -> Section:
    pieces: list[Html] = []
    for reading, group in groupby(races, key=lambda one: one.reading):
        ones = list(group)
        names = list(dict.fromkeys(one.method for one in ones))
        rows: list[list[Child]] = []
        for (count, width), cases in groupby(ones, key=lambda one: (one.count, one.width)):
            by_name = {one.method: one.race.final_R for one in cases}
            means = {name: float(final.mean()) for name, final in by_name.items()}
            nearest = min(means, key=lambda name: means[name])
            cells = [best(_spread(by_name[name], by_name["SGD"]), name == nearest) for name in names]
            rows.append([f"N = {count}, d = {width}", *cells])
        shown = [chart for chart in charts if chart.key.startswith(_reading_key(ones[0]))]
        pieces += [
            node("h3", reading_name(reading)),
            table(("distance at the end", *names), rows, "numbers"),
            node("div", [chart_place(chart) for chart in shown], class_="charts"),
        ]
    lead = (
        "Distance to the optimum, mean over starts (in brackets: on how many nearer than SGD); lines are means, "
        "bands span the starts. SGD takes random batches, OSGD the one of largest loss of all, spectral an epoch of "
        "even clusters. The paper normalises after each step; the authors' code never does, and counts epochs."
    )
    return Section("convergence", "How fast, by which batches", joined(*pieces), lead)


def _spread(final: Tensor, sgd: Tensor) -> str:
    nearer = "" if final is sgd else f" ({int((final < sgd).sum())}/{len(final)})"
    return f"{float(final.mean()):.3g}{nearer}"


def _reading_key(one: Raced) -> str:
    return "race-free" if one.reading.free else "race-normalised"


def _race_charts(races: Sequence[Raced]) -> list[Chart]:
    charts = []
    for (_, count, width), group in groupby(races, key=lambda one: (one.reading, one.count, one.width)):
        ones = list(group)
        lines = [
            Line(
                one.method,
                _COLORS[one.method],
                -1,
                one.race.at,
                one.race.distance_TR.mean(1).tolist(),
                one.race.distance_TR.amin(1).tolist(),
                one.race.distance_TR.amax(1).tolist(),
            )
            for one in ones
        ]
        key = f"{_reading_key(ones[0])}-{count}-{width}"
        charts.append(Chart(key, f"N = {count}, d = {width}", "", lines, x="update", shape="area", log=True))
    return charts


def _toy(walks: Sequence[Walked], charts: Sequence[Chart]) -> Section:
    rows: list[list[Child]] = []
    for one in walks:
        for row in hitting_times(one):
            rows.append(
                [
                    f"rate {row['rate']:g}, epsilon {row['epsilon']:.3g}, rho {row['rho']:g}",
                    *(_time(row[method], row["most"]) for method in _NAMES),
                    *(_share(row[method], row["ordered"]) for method in _NAMES if method != "ordered"),
                ]
            )
    others = [name for method, name in _NAMES.items() if method != "ordered"]
    head = ("", *_NAMES.values(), *(f"{name} / OSGD" for name in others))
    said = (
        f"The first drifts differ by 3(e² + 1)/(e² - 1) = {DRIFT_RATIO:.6f}; computed at epsilon = 1e-5: "
        f"{drift_ratio(1e-5):.6f}."
    )
    body = joined(
        node("p", said),
        table(head, rows, "numbers"),
        node("div", [chart_place(chart) for chart in charts], class_="charts"),
    )
    lead = (
        "Two close pairs of points that must become a square: steps until every expected angle is within rho of 45°. "
        "The ratio of first drifts is exact; the ratio of hitting times depends on rate, epsilon and rho."
    )
    return Section("toy", "Four points", body, lead)


def _time(steps: int | None, most: int) -> str:
    return f"not in {most:,}" if steps is None else f"{steps:,}"


def _share(steps: int | None, ordered: int | None) -> str:
    return NOTHING if steps is None or not ordered else f"{steps / ordered:.2f}{TIMES}"


def _walk_charts(walks: Sequence[Walked]) -> list[Chart]:
    charts = []
    for place, one in enumerate(walks):
        lines = [
            Line(_NAMES[method], number, -1, range(len(path.loss_T)), path.loss_T)
            for number, (method, path) in enumerate(one.paths.items())
        ]
        title = f"rate {one.start.rate:g}, epsilon {one.start.epsilon:.3g}"
        marks = [Mark("the square", BEST_LOSS)]
        charts.append(Chart(f"toy-{place}", title, "full-batch loss", lines, x="update", shape="area", marks=marks))
    return charts


def _angle_chart(turned: Turn) -> Chart:
    degrees = [round(value / toy.GOAL * 45.0, 3) for value in turned.angle]
    lines = [Line("full batch", 0, -1, degrees, turned.full), Line("all mini-batches", 1, -1, degrees, turned.mini)]
    return Chart("angle", "N = 10, d = 2", "loss while u₁ turns", lines, x="degrees", shape="area")


def _angle(turned: Turn | None, charts: Sequence[Chart]) -> Section:
    assert turned is not None, "there is a chart"
    least, greatest = turned.ratios
    said = (
        f"Both are least at {abs(turned.best_angles[0]):.3f} and {abs(turned.best_angles[1]):.3f} rad; their "
        f"ratio goes from {least:.3f} to {greatest:.3f}, so one is no multiple of the other."
    )
    body = joined(node("p", said), node("div", [chart_place(chart) for chart in charts], class_="charts"))
    return Section(
        "angle", "Along one angle", body, "Ten pairs at the optimum in the plane, of which u₁ alone is turned."
    )
