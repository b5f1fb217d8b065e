"""The page of `fullbatch theory`: heat maps, races, the toy of four points, the loss along one angle."""

# N: pairs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fullbatch.report.blocks import Page, Section, best, page_header, present, table
from fullbatch.report.charts import Axis, Chart, Mark, Series, figures
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import NOTHING, TIMES
from fullbatch.theory.embeddings import antipodes, optimum_of
from fullbatch.theory.minimizers import NEAR, Descent, Race, Unproven
from fullbatch.theory.study import Minimum, Raced, Study, ToyWalks, hitting_times, reading_name
from fullbatch.theory.toy import BEST_LOSS, DRIFT_RATIO, GOAL, Turn, drift_ratio

_SIDE = 100  # of a heat map, in the drawing's own units
_GAP = 16
_PLACES = 5  # of heat maps in a row, so that all are of one size
_COLD, _WHITE, _WARM = (33, 88, 150), (250, 248, 243), (190, 82, 20)  # -1, 0, 1
_COLORS = {"SGD": 0, "OSGD": 1, "spectral": 2, "SGD with replacement": 5, "OSGD of a partition": 4}
_UPDATES = Axis("update")
_NAMES = {"ordered": "OSGD", "uniform": "SGD", "all_batches": "all batches", "full": "full batch"}


def theory_page(done: Study) -> Page:
    lead = (
        "Embeddings without encoders descend the contrastive loss of chosen batches: the synthetic study of "
        f"Cho et al. 2023, {done.extent.seeds} random starts each, batches of {done.extent.batch_size} pairs."
    )
    title = "Which batches lead to the full batch's optimum"
    return Page(
        title="Theory · fullbatch",
        header=page_header("theory", title, (), node("p", lead, class_="lead")),
        sections=present(
            _optimum(done.minima) if done.minima else None,
            _unproven(done.unproven) if done.unproven else None,
            _convergence(done.races) if done.races else None,
            _toy(done.walks) if done.walks else None,
            _angle(done.turn) if done.turn is not None else None,
        ),
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
    order = torch.tensor([row for first, other in enumerate(partner) if first < other for row in (first, other)])
    return gram_NN[order][:, order]


# ---------------------------------------------------------------------------------------------------------------------
# sections


def _optimum(minima: Sequence[Minimum]) -> Section:
    rows: list[list[Child]] = []
    drawn: list[Html] = []
    for (count, width), group in groupby(minima, key=lambda minimum: (minimum.count, minimum.width)):
        case = list(group)
        kind = "simplex" if count <= width + 1 else "cross-polytope"
        first = [minimum.descent.gram_RNN[0] for minimum in case]
        arranged = first if kind == "simplex" else [_arranged(gram_NN) for gram_NN in first]
        target = optimum_of(count, width, arranged[0])
        assert target is not None, "only proved cases are drawn here"
        maps = [("the optimum", kind, target)]
        label = f"N = {count}, d = {width}: {kind}"
        for minimum, gram_NN in zip(case, arranged, strict=True):
            far = minimum.descent.distance_R
            maps.append((minimum.batches, f"away by {float(far[0]):.1e}", gram_NN))
            batches, distances = f"{minimum.batches} ({minimum.number})", f"{far.min():.2g} to {far.max():.2g}"
            rows.append([label, batches, f"{minimum.rate:g}", _reached(minimum.descent), distances])
        drawn += [node("h3", label), heat_maps(maps)]
    head = ("", "batches", "rate", "reached after steps", "distance at the end")
    lead = (
        "Heat maps of u_i · v_j of the first start. By theorem the full batch and all mini-batches have the same "
        f"optimum, and a strict subset has another; reached means within {NEAR:g} in Frobenius norm, under the best "
        "matching of antipodes."
    )
    return Section("optimum", "What is reached", joined(*drawn, table(head, rows, "numbers")), lead)


def _reached(descent: Descent) -> str:
    reached = [step for step in descent.reached_R.tolist() if step >= 0]
    if not reached:
        return f"none of {len(descent.reached_R)} in {descent.steps:,}"
    missed = len(descent.reached_R) - len(reached)
    span = f"{min(reached):,} to {max(reached):,}"
    return f"{span}, {missed} never" if missed else span


def _unproven(cases: Sequence[Unproven]) -> Section:
    pieces: list[Html] = []
    rows: list[list[Child]] = []
    for case in cases:
        label = f"N = {case.count}, d = {case.width}"
        maps = [
            ("full batch", f"loss {case.full_losses[0]:.6f}", _arranged(case.full_NN)),
            ("all batches", f"loss {case.full_losses[1]:.6f}", _arranged(case.all_NN)),
        ]
        pieces += [node("h3", label), heat_maps(maps)]
        losses = [f"{loss:.6f}" for loss in (*case.full_losses, *case.all_losses)]
        rows.append([label, f"{case.distance:.2g}", *losses, *(f"{slope:.1e}" for slope in case.slopes)])
    losses = ["full loss of full", "full loss of all", "mini loss of full", "mini loss of all"]
    head = ("", "distance", *losses, "full slope", "mini slope")
    lead = (
        "Where nothing is proved: the best of all starts on the full batch (full) against the best on all mini-batches "
        "(all). Distance is under the best relabelling; slopes are the losses' gradients at the full-batch minimiser: "
        "where the full-batch loss is level and the mini-batch loss is not, the two have different minimisers."
    )
    return Section("unproven", "Where no optimum is known", joined(*pieces, table(head, rows, "numbers")), lead)


def _convergence(races: Sequence[Raced]) -> Section:
    pieces: list[Html] = []
    for reading, of_reading in groupby(races, key=lambda raced: raced.reading):
        rows: list[list[Child]] = []
        charts: list[Chart] = []
        names: list[str] = []
        for (count, width), case in groupby(of_reading, key=lambda raced: (raced.count, raced.width)):
            by_name = {raced.method: raced.race for raced in case}
            names = list(by_name)
            nearest = min(names, key=lambda name: float(by_name[name].final_R.mean()))
            cells = [best(_spread(name, by_name), name == nearest) for name in names]
            rows.append([f"N = {count}, d = {width}", *cells])
            key = f"race-{'free' if reading.free else 'normalised'}-{count}-{width}"
            series = [_race_series(name, race) for name, race in by_name.items()]
            charts.append(Chart(key, f"N = {count}, d = {width}", "", series, Axis(scale="log"), _UPDATES))
        pieces += [
            node("h3", reading_name(reading)),
            table(("distance at the end", *names), rows, "numbers"),
            figures(charts),
        ]
    lead = (
        "Distance to the optimum, mean over starts (in brackets: on how many nearer than SGD); lines are means, "
        "bands span the starts. SGD takes random batches, OSGD the one of largest loss of all, spectral an epoch of "
        "even clusters. The paper normalises after each step; the authors' code never does, and counts epochs."
    )
    return Section("convergence", "How fast, by which batches", joined(*pieces), lead)


def _spread(method: str, races: Mapping[str, Race]) -> str:
    final_R = races[method].final_R
    nearer = "" if method == "SGD" else f" ({int((final_R < races['SGD'].final_R).sum())}/{len(final_R)})"
    return f"{float(final_R.mean()):.3g}{nearer}"


def _race_series(method: str, race: Race) -> Series:
    mean, low, high = (
        values_T.tolist() for values_T in (race.distance_TR.mean(1), race.distance_TR.amin(1), race.distance_TR.amax(1))
    )
    return Series(method, race.at, mean, _COLORS[method], low, high, style="area")


def _toy(walks: Sequence[ToyWalks]) -> Section:
    rows: list[list[Child]] = []
    charts = []
    for place, walked in enumerate(walks):
        for row in hitting_times(walked):
            times = [f"not in {row['most']:,}" if row[method] is None else f"{row[method]:,}" for method in _NAMES]
            shares = [_share(row[method], row["ordered"]) for method in _NAMES if method != "ordered"]
            label = f"rate {row['rate']:g}, epsilon {row['epsilon']:.3g}, rho {row['rho']:g}"
            rows.append([label, *times, *shares])
        series = [
            Series(_NAMES[method], range(len(path.loss_T)), path.loss_T, color, style="path")
            for color, (method, path) in enumerate(walked.paths.items())
        ]
        title = f"rate {walked.start.rate:g}, epsilon {walked.start.epsilon:.3g}"
        marks = [Mark("the square", BEST_LOSS)]
        charts.append(Chart(f"toy-{place}", title, "full-batch loss", series, Axis(), _UPDATES, marks))
    head = ("", *_NAMES.values(), *(f"{name} / OSGD" for method, name in _NAMES.items() if method != "ordered"))
    drifts = (
        f"The first drifts differ by 3(e² + 1)/(e² - 1) = {DRIFT_RATIO:.6f}; computed at epsilon = 1e-5: "
        f"{drift_ratio(1e-5):.6f}."
    )
    lead = (
        "Two close pairs of points that must become a square: steps until every expected angle is within rho of 45°. "
        "The ratio of first drifts is exact; the ratio of hitting times depends on rate, epsilon and rho."
    )
    body = joined(node("p", drifts), table(head, rows, "numbers"), figures(charts))
    return Section("toy", "Four points", body, lead)


def _share(steps: int | None, ordered: int | None) -> str:
    return NOTHING if steps is None or not ordered else f"{steps / ordered:.2f}{TIMES}"


def _angle(turned: Turn) -> Section:
    degrees = [round(value / GOAL * 45.0, 3) for value in turned.angle]
    losses = (("full batch", turned.full), ("all mini-batches", turned.mini))
    series = [Series(label, degrees, loss, color, style="path") for color, (label, loss) in enumerate(losses)]
    chart = Chart("angle", "N = 10, d = 2", "loss while u₁ turns", series, Axis(), Axis("degrees"))
    least, greatest = turned.ratios
    text = (
        f"Both are least at {abs(turned.best_angles[0]):.3f} and {abs(turned.best_angles[1]):.3f} rad; their "
        f"ratio goes from {least:.3f} to {greatest:.3f}, so one is no multiple of the other."
    )
    lead = "Ten pairs at the optimum in the plane, of which u₁ alone is turned."
    return Section("angle", "Along one angle", joined(node("p", text), figures([chart])), lead)
