"""The pieces that pages are built of: sections, tables, ratio bars, places for charts, settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullbatch.config.messages import plain, without_password
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.report.collect import Record, RunData
from fullbatch.report.curves import Chart
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.pictures import Pictures
from fullbatch.report.wording import counted, metric_name, setting_text, task_name

_MOST_WARNINGS = 40
_STAR = node("span", "★", class_="star", title="the best", aria_label="the best")


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    body: Html
    lead: str = ""


@dataclass(frozen=True)
class Page:
    """runs       for page.js: a clock and a batch size each
    filters    what the curves can be narrowed to, as batch sizes
    shared     one legend for all curves
    """

    title: str
    header: Html
    sections: Sequence[Section]
    charts: Sequence[Chart] = ()
    runs: Sequence[Mapping[str, Any]] = ()
    pictures: Pictures = field(default_factory=lambda: Pictures(1))
    filters: Sequence[str] = ()
    shared: bool = False


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], class_: str = "", caption: str = "") -> Html:
    """Its first column names the rows; it scrolls by itself where it is too wide."""
    body = [
        node(
            "tr",
            node("th", cells[0], scope="row"),
            [cell if _is_cell(cell) else node("td", cell) for cell in cells[1:]],
        )
        for cells in rows
    ]
    return node(
        "div",
        node(
            "table",
            node("caption", caption) if caption else None,
            node("thead", node("tr", [node("th", name, scope="col") for name in head])),
            node("tbody", body),
            class_=class_ or None,
        ),
        class_="scroll",
        tabindex="0",
        role="group",
        aria_label=caption or "a table",
    )


def _is_cell(cell: Child) -> bool:
    return isinstance(cell, Html) and cell.startswith("<td")


def best(text: Child, is_best: bool) -> Html:
    return node("td", joined(text, " ", _STAR) if is_best else text, class_="best" if is_best else None)


def notice(*children: Child) -> Html:
    return node("p", *children, class_="notice")


def folded(title: str, *children: Child, unfolded: bool = False) -> Html:
    return node("details", node("summary", title), *children, open=unfolded)


def listing(items: Iterable[Child], class_: str | None = None) -> Html:
    return node("ul", [node("li", item) for item in items], class_=class_)


# ---------------------------------------------------------------------------------------------------------------------
# results


def named_task(task: str, metric: str) -> Html:
    kind, source = task_name(task)
    return joined(
        node("span", plain(source, 120), class_="source"),
        node(
            "span",
            f"{kind} · {plain(metric_name(metric), 60)}" if kind else plain(metric_name(metric), 60),
            class_="kind",
        ),
    )


def ratio_bar(share: float | None, greatest: float, mark: float | None = None) -> Html | None:
    """How far above chance, on a log scale from 1x to the greatest on the page; ``mark`` is the baseline's place."""
    if share is None:
        return None
    pieces = [node("rect", class_="track", width="100", height="10")]
    pieces.append(node("rect", class_="filled", width=f"{_place(share, greatest):.2f}", height="10"))
    if mark is not None:
        place = _place(mark, greatest)
        pieces.append(node("rect", class_="mark", x=f"{max(place - 0.6, 0.0):.2f}", width="1.2", height="10"))
    return node("svg", pieces, class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


def _place(share: float, greatest: float) -> float:
    return 0.0 if share <= 1.0 else min(100.0, 100.0 * math.log(share) / math.log(max(greatest, 2.0)))


# ---------------------------------------------------------------------------------------------------------------------
# curves


def chart_place(chart: Chart) -> Html:
    """page.js draws into it."""
    return node(
        "figure",
        node(
            "figcaption",
            node("h3", plain(chart.title, 120)),
            node("button", "log", type="button", class_="log", aria_pressed="true" if chart.log else "false"),
            node("p", chart.note, class_="note") if chart.note else None,
        ),
        node("div", class_="plot"),
        node("div", class_="legend"),
        class_="chart",
        data_chart=chart.key,
    )


def curves_section(charts: Sequence[Chart], filters: Sequence[str] = (), lead: str = "") -> Section | None:
    if not charts:
        return None
    controls = node(
        "div",
        _choice("x", (("step", "steps"), ("samples", "pairs seen"), ("time", "time")), "along"),
        node("button", "smooth", type="button", class_="smooth", aria_pressed="false"),
        _choice("filter", tuple((name, name) for name in filters), "batch size") if len(filters) > 1 else None,
        node("div", class_="legend shared"),
        class_="controls",
    )
    main = [chart_place(chart) for chart in charts if not chart.more]
    more = [chart_place(chart) for chart in charts if chart.more]
    body = joined(
        controls,
        node("div", main, class_="charts"),
        folded(counted(len(more), "more curve"), node("div", more, class_="charts")) if more else None,
        node("noscript", notice("The curves are drawn by the page's own script, which is switched off.")),
    )
    return Section("curves", "Curves", body, lead)


def _choice(name: str, options: Sequence[tuple[str, str]], label: str) -> Html:
    buttons = [
        node("button", text, type="button", data_value=value, aria_pressed="true" if place == 0 else "false")
        for place, (value, text) in enumerate(options)
    ]
    return node("div", node("span", label), buttons, class_="choice", data_choice=name, role="group", aria_label=label)


# ---------------------------------------------------------------------------------------------------------------------
# settings, environment, warnings


def settings_section(run: RunData) -> Section:
    default = to_dict(RunConfig())
    changed, everything = [], []
    for group, fields in run.settings.items():
        for name, value in fields.items():
            unchanged = group in default and default[group].get(name) == value
            shown = plain(setting_text(value))
            if not unchanged:
                changed.append((joined(node("span", f"{group} ", class_="quiet"), name), shown))
            mark = None if unchanged else node("span", " ● changed", class_="changed")
            everything.append((joined(node("span", f"{group} ", class_="quiet"), name, mark), shown))
    body = joined(
        table(("changed from the default", "value"), changed, "settings") if changed else notice("All defaults."),
        folded("the whole config", table(("setting", "value"), everything, "settings")),
        node("h3", "Environment"),
        environment_table(run.environment),
        node("h3", "Warnings"),
        warnings_of(run),
    )
    return Section("config", "Config and environment", body)


def environment_table(environment: Record) -> Html:
    if not environment:
        return notice("The run folder holds no environment.json.")
    rows: list[tuple[Child, Child]] = []
    for name, value in environment.items():
        if name == "command" and isinstance(value, list):
            rows.append(
                ("command", node("code", plain(shlex.join(without_password(str(part)) for part in value), 1000)))
            )
        elif isinstance(value, Mapping):
            said = ", ".join(f"{package} {version}" for package, version in value.items())
            rows.append((plain(name, 60), plain(said, 1000)))
        else:
            rows.append((plain(name, 60), plain(setting_text(value))))
    return table(("", ""), rows[:40], "settings plain")


def warnings_of(run: RunData) -> Html:
    if not run.warnings:
        return node("p", "None in log.txt.", class_="quiet")
    shown = listing((node("code", plain(line)) for line in run.warnings[:_MOST_WARNINGS]), "log-lines")
    left = len(run.warnings) - _MOST_WARNINGS
    return joined(shown, node("p", f"and {left:,} more in log.txt", class_="quiet") if left > 0 else None)


def gaps_of(gaps: Sequence[str]) -> Html | None:
    return joined(*(notice(plain(gap)) for gap in gaps)) if gaps else None
