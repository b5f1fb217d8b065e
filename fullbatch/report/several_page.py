"""The page of several runs: curves over each other, results side by side, and what differs between their configs."""

from __future__ import annotations

from collections.abc import Sequence

from fullbatch.config.messages import plain
from fullbatch.report.blocks import (
    Page,
    Section,
    best,
    curves_section,
    environment_table,
    folded,
    gaps_of,
    named_task,
    notice,
    table,
    warnings_of,
)
from fullbatch.report.collect import RunData
from fullbatch.report.costs import cost_section
from fullbatch.report.curves import COLORS, DASHES, charts_of, for_script
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.similarity_view import similarities_section, similarity_charts
from fullbatch.report.views import views_of_runs
from fullbatch.report.wording import NOTHING, duration, is_number, lower_is_better, percent, setting_text, value_text


def several_page(runs: Sequence[RunData], baseline: RunData | None, pictures: bool, samples: int | None) -> Page:
    """Without ``pictures`` no model is loaded, so there are no similarities either."""
    if baseline is not None and all(baseline.path.resolve() != run.path.resolve() for run in runs):
        runs = [*runs, baseline]
    labels = distinct_names(runs)
    colors = [number % (COLORS * DASHES) for number in range(len(runs))]
    curves = charts_of(runs, labels, colors)
    views, gaps = views_of_runs(runs, labels, samples) if pictures else ([], [])
    drawn = similarity_charts(views)
    sections = [
        Section("runs", "Runs", _runs_table(runs, labels)),
        _results(runs, labels, baseline),
        curves_section(curves),
        similarities_section(views, drawn, gaps),
        cost_section(runs, labels),
        _settings(runs, labels),
        Section("environment", "Environment and warnings", _environments(runs, labels)),
    ]
    return Page(
        title=f"{len(runs)} runs · fullbatch",
        header=_header(runs, labels),
        sections=[section for section in sections if section is not None],
        charts=[*curves, *drawn],
        runs=[for_script(run) for run in runs],
        shared=True,
    )


def distinct_names(runs: Sequence[RunData]) -> list[str]:
    """Folder names, with the folder above where two are equal."""
    names = [run.name for run in runs]
    return [
        plain(run.name if names.count(run.name) == 1 else f"{run.path.resolve().parent.name}/{run.name}", 80)
        for run in runs
    ]


def _header(runs: Sequence[RunData], labels: Sequence[str]) -> Html:
    methods = ", ".join(dict.fromkeys(run.method for run in runs))
    gaps = [f"{label}: {gap}" for run, label in zip(runs, labels, strict=True) for gap in run.gaps]
    return joined(
        node("p", f"fullbatch · {len(runs)} runs", class_="eyebrow"),
        node("h1", plain(", ".join(labels), 160)),
        node(
            "p",
            f"Methods: {plain(methods)}. Pictures and suspects are on each run's own page: fullbatch report RUN.",
            class_="lead",
        ),
        gaps_of(gaps[:12]),
    )


def _runs_table(runs: Sequence[RunData], labels: Sequence[str]) -> Html:
    rows: list[list[Child]] = []
    for run, label in zip(runs, labels, strict=True):
        clock = run.clock()
        error = run.last_normalizer_error()
        rows.append(
            [
                label,
                run.method,
                f"{run.batch_size:,}",
                f"{run.steps:,}",
                f"{run.pairs_seen:,}",
                duration(clock[-1][1]) if clock else NOTHING,
                value_text(run.last.get("tau"), "loss"),
                NOTHING if error is None else str(error),
            ]
        )
    head = ("run", "method", "batch size", "steps", "pairs seen", "time", "τ at the end", "normalizer error")
    return table(head, rows, "numbers")


def _results(runs: Sequence[RunData], labels: Sequence[str], baseline: RunData | None) -> Section:
    tables = [{(str(r["task"]), str(r.get("main", ""))): r for r in run.results} for run in runs]
    keys = list(dict.fromkeys(key for each in tables for key in each))
    if not keys:
        return Section("results", "Results", notice("None of the runs has results yet."))
    rows: list[list[Child]] = []
    for task, metric in keys:
        values = [each.get((task, metric), {}).get(metric) for each in tables]
        known = [float(value) for value in values if value is not None and is_number(value)]
        top = (min if lower_is_better(metric) else max)(known) if known else None
        chances = [each[task, metric].get("chance") for each in tables if (task, metric) in each]
        chance = next((value for value in chances if is_number(value)), None)
        row: list[Child] = [named_task(task, metric)]
        row += [best(value_text(value, metric), len(set(known)) > 1 and value == top) for value in values]
        row.append(node("td", NOTHING if chance is None else percent(float(chance)), class_="quiet"))
        rows.append(row)
    marked = [
        joined(label, node("span", " baseline", class_="quiet")) if _is(run, baseline) else label
        for run, label in zip(runs, labels, strict=True)
    ]
    lead = "★ marks the best of a row; between single runs, differences of a point are often noise."
    return Section("results", "Results", table(("task", *marked, "chance"), rows, "numbers"), lead)


def _is(run: RunData, other: RunData | None) -> bool:
    return other is not None and run.path.resolve() == other.path.resolve()


def _settings(runs: Sequence[RunData], labels: Sequence[str]) -> Section:
    rows: list[list[Child]] = []
    names = dict.fromkeys((group, name) for run in runs for group, fields in run.settings.items() for name in fields)
    for group, name in names:
        if (group, name) == ("run", "name"):
            continue
        values = [setting_text(run.settings.get(group, {}).get(name)) for run in runs]
        if len(set(values)) > 1:
            rows.append([joined(node("span", f"{group} ", class_="quiet"), name), *(plain(value) for value in values)])
    body = table(("setting", *labels), rows, "settings") if rows else notice("The configs are equal.")
    return Section("config", "What differs between the configs", body)


def _environments(runs: Sequence[RunData], labels: Sequence[str]) -> Html:
    return joined(
        [
            folded(label, environment_table(run.environment), node("h4", "Warnings"), warnings_of(run))
            for run, label in zip(runs, labels, strict=True)
        ][:40]
    )
