"""Charts as data: series on axes.  page.js draws all of them; ``figure`` puts one on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Html, filled, node

COLORS = 7  # the page has as many; then they come again, dashed
DASHES = 4
BASELINE = -1  # a colour of its own
SHADES = 5  # colours "s0" to "s4", from the worst value to the best
Scale = Literal["step", "linear", "log", "doubling"]
Style = Literal["line", "path", "area", "errors", "points", "ticks", "bars"]
Look = Literal["full", "hollow", "cross", "ringed"]


@dataclass(frozen=True)
class Axis:
    label: str = ""
    scale: Scale = "linear"  # "step": the reader chooses steps, pairs seen or time; "doubling": log2, ticks at the data
    percent: bool = False  # values are shares
    words: Sequence[str] = ()  # in place of numbers: 0 is the first.  On the y axis they are rows, values lie along x
    reach: Sequence[float] = ()  # values that the axis includes at least


STEPS = Axis("step", "step")


class Dot(NamedTuple):
    """A point of its own, and what the pointer shows there."""

    x: float
    y: float
    tip: str
    look: Look = "full"


@dataclass(frozen=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int | str = 0  # a place in the page's palette, or a shade by name
    low: Sequence[float] = ()  # a band around the values, error bars, or the spread of a tick in a row
    high: Sequence[float] = ()
    run: int = -1  # which of the page's runs, for its clock; -1: x is no step
    style: Style = "line"  # "path" is a line without dots; "ticks" and "bars" are for rows
    weight: str = ""  # "thin", "faint" or "thick" lines
    tips: Sequence[str] = ()  # what the pointer shows: a text for each point, or one for all of them
    looks: Sequence[Look] = ()  # of single points; without them all are full

    @classmethod
    def of_dots(cls, label: str, dots: Sequence[Dot], color: int = 0) -> Series:
        x, y, tips, looks = zip(*dots, strict=True) if dots else ((), (), (), ())
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
    key: str  # unique on the page
    title: str
    note: str
    series: Sequence[Series]
    y: Axis = Axis()
    x: Axis = STEPS
    marks: Sequence[Mark] = ()
    labels: Sequence[Label] = ()
    more: bool = False  # of less interest: folded away
    legend: bool = True  # series can be switched off by their labels
    height: int = 216  # pixels
    width: int = 0  # pixels at least, in a place that scrolls
    words: str = ""  # what is seen, for those who cannot see it; by default where each series begins and ends

    def as_dict(self, most: int) -> dict[str, Any]:
        """For page.js, with at most so many points a line."""
        series = [thin(series, most).as_dict() for series in self.series]
        return {**asdict(replace(self, series=())), "words": plain(self.words), "series": series}


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
    pressed = "true" if chart.y.scale == "log" else "false"
    log = node("button", "log", type="button", class_="log", aria_pressed=pressed)
    title, switch = node("h3", plain(chart.title, 120)), None if chart.y.words or chart.labels else log
    caption = node("figcaption", title, switch, filled("p", chart.note, class_="note"))
    places = [node("div", class_=name) for name in ("plot", "legend")]
    return Html(node("figure", caption, places, class_=class_, data_chart=chart.key), (chart,))


def figures(charts: Sequence[Chart | None], class_: str = "charts") -> Html:
    return filled("div", [figure(chart) for chart in charts if chart is not None], class_=class_)
