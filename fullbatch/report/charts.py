"""Charts as data: series on axes.  page.js draws all of them; ``figure`` puts one on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from fullbatch.config.messages import plain
from fullbatch.report.markup import Html, node

COLORS = 7  # the page has as many; then they come again, dashed
DASHES = 4
BASELINE = -1  # a colour of its own
SHADES = 5  # colours "s0" to "s4", from the worst value to the best
Scale = Literal["step", "linear", "log", "doubling"]
Style = Literal["line", "path", "area", "errors", "points", "ticks", "bars"]
Look = Literal["full", "hollow", "cross", "ringed"]


@dataclass(frozen=True)
class Axis:
    """scale    "step" lets the reader choose steps, pairs seen or time; "doubling" is log2 with ticks at the data
    percent  values are shares
    words    names in place of numbers: 0 is the first.  On the y axis they are rows, and values lie along x
    reach    values that the axis includes at least
    """

    label: str = ""
    scale: Scale = "linear"
    percent: bool = False
    words: Sequence[str] = ()
    reach: Sequence[float] = ()


STEPS = Axis("step", "step")


@dataclass(frozen=True)
class Dot:
    """A point of its own, and what the pointer shows there."""

    x: float
    y: float
    tip: str
    look: Look = "full"


@dataclass(frozen=True)
class Series:
    """color      a place in the page's palette, or a shade by name
    low, high  a band around the values, error bars, or the spread of a tick in a row
    run        which of the page's runs, for its clock; -1: x is no step
    style      "path" is a line without dots; "ticks" and "bars" are for rows
    weight     "thin", "faint" or "thick" lines
    tips       what the pointer shows: a text for each point, or one for all of them
    looks      of single points; without them all are full
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int | str = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    run: int = -1
    style: Style = "line"
    weight: str = ""
    tips: Sequence[str] = ()
    looks: Sequence[Look] = ()

    @classmethod
    def of_dots(cls, label: str, dots: Sequence[Dot], color: int = 0) -> Series:
        x, y = [dot.x for dot in dots], [dot.y for dot in dots]
        tips, looks = [dot.tip for dot in dots], [dot.look for dot in dots]
        return cls(label, x, y, color, style="points", tips=tips, looks=looks)

    @classmethod
    def of_path(cls, label: str, places: Sequence[tuple[float, float]], color: int | str, **options: Any) -> Series:
        """A line through these places, without dots."""
        return cls(label, [x for x, _ in places], [y for _, y in places], color, style="path", **options)

    def as_dict(self) -> dict[str, Any]:
        values = {name: [float(f"{value:.5g}") for value in getattr(self, name)] for name in ("y", "low", "high")}
        return {**vars(self), **values, "x": list(self.x), "look": self._classes()}

    def _classes(self) -> str:
        """Of page.css: the colour, the dashes, the weight."""
        if isinstance(self.color, str):
            return f"{self.color} d0 {self.weight}"
        if self.color < 0:
            return f"cb d1 {self.weight}"
        return f"c{self.color % COLORS} d{self.color // COLORS % DASHES} {self.weight}"


@dataclass(frozen=True)
class Mark:
    """A level to compare with, across the whole chart."""

    label: str
    y: float


@dataclass(frozen=True)
class Label:
    """A text inside the chart, beside this place."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """key      unique on the page
    more     of less interest: folded away
    legend   whether series can be switched off by their labels
    height   pixels; ``width``: pixels at least, in a place that scrolls
    words    what is seen, for those who cannot see it; by default where each series begins and ends
    """

    key: str
    title: str
    note: str
    series: Sequence[Series]
    y: Axis = Axis()
    x: Axis = STEPS
    marks: Sequence[Mark] = ()
    labels: Sequence[Label] = ()
    more: bool = False
    legend: bool = True
    height: int = 216
    width: int = 0
    words: str = ""

    def as_dict(self, most: int) -> dict[str, Any]:
        """For page.js, with at most so many points a line."""
        nested = {name: [vars(item) for item in getattr(self, name)] for name in ("marks", "labels")}
        series = [thin(series, most).as_dict() for series in self.series]
        return {
            **vars(self),
            **nested,
            "x": vars(self.x),
            "y": vars(self.y),
            "words": plain(self.words),
            "series": series,
        }


def thin(series: Series, most: int) -> Series:
    """A line of at most so many points: means of neighbours, with a band from the least to the greatest of them."""
    count = len(series.x)
    if count <= most or series.style not in ("line", "path", "area"):
        return series
    spans = [slice(start, end) for start, end in pairwise(count * part // most for part in range(most + 1))]
    return replace(
        series,
        x=[series.x[span][-1] for span in spans],
        y=[sum(series.y[span]) / len(series.y[span]) for span in spans],
        low=[min((series.low or series.y)[span]) for span in spans],
        high=[max((series.high or series.y)[span]) for span in spans],
    )


def figure(chart: Chart, class_: str = "chart") -> Html:
    """The chart's place on the page; the data go with it."""
    switch = not chart.y.words and not chart.labels
    pressed = "true" if chart.y.scale == "log" else "false"
    made = node(
        "figure",
        node(
            "figcaption",
            node("h3", plain(chart.title, 120)),
            node("button", "log", type="button", class_="log", aria_pressed=pressed) if switch else None,
            node("p", chart.note, class_="note") if chart.note else None,
        ),
        node("div", class_="plot"),
        node("div", class_="legend"),
        class_=class_,
        data_chart=chart.key,
    )
    return Html(made, (chart,))


def figures(charts: Sequence[Chart], class_: str = "charts") -> Html:
    return node("div", [figure(chart) for chart in charts], class_=class_)
