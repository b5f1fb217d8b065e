"""What pages are made of: HTML by construction, and its pieces: sections, headers, tables, ratio bars, settings.

What is not ``Html`` already is escaped on its way in, so no caption can become markup.  A piece of nothing is empty.
"""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullbatch.config.messages import MAX_TEXT, plain, without_password
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.report.collect import Fields, RunData
from fullbatch.report.wording import counted, metric_words, setting_text

if TYPE_CHECKING:
    from fullbatch.report.charts import Chart
    from fullbatch.report.embedded import Pictures

_EMPTY = frozenset(("img", "meta", "br", "input"))
_MOST_WARNINGS = 40


class Html(str):
    """Text that is HTML already, and the charts that have their places in it."""

    charts: tuple[Chart, ...]

    def __new__(cls, text: str, charts: tuple[Chart, ...] = ()) -> Html:
        made = super().__new__(cls, text)
        made.charts = charts
        return made


Child = str | int | None | Iterable[Any]


def node(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element.  ``class_`` and ``data_picture`` stand for class and data-picture; True is a bare attribute.

    >>> node("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(key if value is True else f'{key}="{html.escape(str(value), quote=True)}"')
    start = f"<{' '.join(written)}>"
    inside = joined(*children)
    return Html(start if name in _EMPTY else f"{start}{inside}</{name}>", inside.charts)


def filled(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element; nothing where it would hold nothing."""
    inside = joined(*children)
    return node(name, inside, **attributes) if inside else inside


def joined(*children: Child) -> Html:
    """Children one after the other; None is nothing, lists are opened."""
    pieces: list[str] = []
    charts: list[Chart] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int) and not isinstance(child, Html):
            pieces.append(html.escape(str(child), quote=True))
            continue
        inside = child if isinstance(child, Html) else joined(*child)
        pieces.append(inside)
        charts += inside.charts
    return Html("".join(pieces), tuple(charts))


def quoted(text: object, length: int = MAX_TEXT) -> Html:
    """A caption, set apart so that its direction of writing stays its own."""
    return node("bdi", plain(text, length), class_="said")


def embedded_json(value: Any) -> Html:
    """For a script element: ASCII only, and no character that could end it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---------------------------------------------------------------------------------------------------------------------
# pages and their pieces


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    body: Html
    lead: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    header: Html
    sections: Sequence[Section]  # those without a body are left out
    runs: Sequence[Mapping[str, Any]] = ()  # for page.js: a clock and a batch size each
    pictures: Pictures | None = None
    filters: Sequence[str] = ()  # what the curves can be narrowed to, as batch sizes
    shared: bool = False  # one legend for all curves of a section

    @property
    def charts(self) -> list[Chart]:
        return [chart for section in self.sections for chart in section.body.charts]


def page_header(kind: str, title: str, facts: Sequence[tuple[str, str]] = (), *more: Child) -> Html:
    """What the page is about: a large title, a row of facts that are known, whatever else comes first."""
    shown = [node("div", node("dt", name), node("dd", value)) for name, value in facts if value]
    return joined(
        node("p", f"fullbatch · {kind}", class_="eyebrow"),
        node("h1", title),
        filled("dl", shown, class_="facts"),
        *more,
    )


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], class_: str) -> Html:
    """Its first column names the rows; it scrolls by itself where it is too wide."""
    body = []
    for first, *others in rows:
        cells = [cell if isinstance(cell, Html) and cell.startswith("<td") else node("td", cell) for cell in others]
        body.append(node("tr", node("th", first, scope="row"), cells))
    names = node("thead", node("tr", [node("th", name, scope="col") for name in head]))
    whole = node("table", names, node("tbody", body), class_=class_) if body else None
    return filled("div", whole, class_="scroll", tabindex="0", role="group", aria_label="a table")


def best(text: Child, is_best: bool) -> Html:
    star = node("span", "★", class_="star", title="the best", aria_label="the best")
    return node("td", joined(text, " ", star), class_="best") if is_best else node("td", text)


def note(text: Child) -> Html:
    return node("p", text, class_="quiet")


def notice(*children: Child) -> Html:
    return node("p", *children, class_="notice")


def notices(reasons: Sequence[str]) -> Html:
    """What is missing, and why."""
    return joined(*(notice(plain(reason)) for reason in reasons))


def folded(title: str, *children: Child, unfolded: bool = False) -> Html:
    inside = joined(*children)
    return node("details", node("summary", title), inside, open=unfolded) if inside else inside


def first_shown(pieces: Sequence[Child], shown: int, thing: str, class_: str | None = None) -> Html:
    """So many pieces, then a fold with the others; ``class_`` is that of a frame around either."""
    first, rest = (node("div", part, class_=class_) if class_ else part for part in (pieces[:shown], pieces[shown:]))
    more = len(pieces) - shown
    return joined(first, folded(counted(more, f"more {thing}"), rest) if more > 0 else None)


def listing(items: Iterable[Child], class_: str | None = None) -> Html:
    return filled("ul", [node("li", item) for item in items], class_=class_)


def some_names(names: Sequence[str], most: int, thing: str = "") -> str:
    """The first names, and how many more there are."""
    shown, left = ", ".join(plain(name, 120) for name in names[:most]), len(names) - most
    if left <= 0:
        return shown
    return f"{shown} and {counted(left, f'other {thing}')}" if thing else f"{shown}, and {left} more"


def named_metric(key: str) -> Html:
    """A "TASK METRIC": where it is measured, and below what."""
    source, what = metric_words(key)
    return joined(node("span", plain(source, 120), class_="source"), node("span", plain(what, 80), class_="kind"))


def headline(key: str, value: str, against: Sequence[Child]) -> Html:
    """A large number of a "TASK METRIC", and what to compare it with."""
    source, what = metric_words(key)
    return joined(
        node("span", value, class_="big"),
        node("span", plain(what.replace(" · ", " "), 60), class_="what"),
        node("span", plain(source, 60), class_="source"),
        filled("span", against, class_="against"),
    )


def ratio_bar(share: float | None, greatest: float, mark: float | None = None) -> Html | None:
    """How far above chance, on a log scale from 1x to the greatest on the page; ``mark`` is the baseline's place."""
    if share is None:
        return None

    def place(value: float) -> float:
        return 0.0 if value <= 1.0 else min(100.0, 100.0 * math.log(value) / math.log(max(greatest, 2.0)))

    pieces = [node("rect", class_="track", width="100", height="10")]
    pieces.append(node("rect", class_="filled", width=f"{place(share):.2f}", height="10"))
    if mark is not None:
        pieces.append(node("rect", class_="mark", x=f"{max(place(mark) - 0.6, 0.0):.2f}", width="1.2", height="10"))
    return node("svg", pieces, class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


# ---------------------------------------------------------------------------------------------------------------------
# settings, environment, warnings


def setting_name(group: str, name: str, *more: Child) -> Html:
    return joined(node("span", f"{group} ", class_="quiet"), name, *more)


def settings_section(run: RunData) -> Section:
    default = to_dict(RunConfig())
    mark = node("span", " ● changed", class_="changed")
    changed, everything = [], []
    for group, fields in run.settings.items():
        for name, value in fields.items():
            shown, is_default = plain(setting_text(value)), default.get(group, {}).get(name, ...) == value
            everything.append((setting_name(group, name, None if is_default else mark), shown))
            if not is_default:
                changed.append((setting_name(group, name), shown))
    body = joined(
        table(("changed from the default", "value"), changed, "settings") or notice("All defaults."),
        folded("the whole config", table(("setting", "value"), everything, "settings")),
        node("h3", "Environment"),
        environment_table(run.environment),
        node("h3", "Warnings"),
        warnings_of(run),
    )
    return Section("config", "Config and environment", body)


def environment_table(environment: Fields) -> Html:
    if not environment:
        return notice("The run folder holds no environment.json.")
    rows: list[tuple[Child, Child]] = []
    for name, value in environment.items():
        text: Child = plain(setting_text(value))
        if name == "command" and isinstance(value, list):
            text = node("code", plain(shlex.join(without_password(str(part)) for part in value), 1000))
        elif isinstance(value, Mapping):
            text = plain(", ".join(f"{package} {version}" for package, version in value.items()), 1000)
        rows.append((plain(name, 60), text))
    return table(("", ""), rows[:40], "settings plain")


def warnings_of(run: RunData) -> Html:
    if not run.warnings:
        return note("None in log.txt.")
    shown = listing((node("code", plain(line)) for line in run.warnings[:_MOST_WARNINGS]), "log-lines")
    left = len(run.warnings) - _MOST_WARNINGS
    return joined(shown, note(f"and {left:,} more in log.txt") if left > 0 else None)
