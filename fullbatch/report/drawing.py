"""Plots as SVG written by hand: scales, axes, points, legends.  They need no script; details stand in titles.

Coordinates are the drawing's own; a figure is as wide as its place, so a unit is about a pixel.  Colours are classes of
page.css, because they differ by light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from fullbatch.config.messages import plain
from fullbatch.report.curves import COLORS
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import number

Look = Literal["full", "hollow", "cross"]
# Widths of letters at the size that plots use, 11 pixels, in families as wide as Verdana and DejaVu Sans; narrow
# letters count as in a monospaced one.  Which font a reader has is not known, and a label must fit with any of them.
_WIDTHS = {**dict.fromkeys("mMW@%", 11.0), **dict.fromkeys("w=+<>~#&", 9.3)}
_CAPITAL, _OTHER, _FOREIGN = 8.7, 7.1, 13.0


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` on coordinates from ``start`` to ``end``; values beyond lie on the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    share: bool = False

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        low, high, inside = (math.log(x) if self.log else x for x in (self.low, self.high, inside))
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 4) -> list[tuple[float, str]]:
        """Round values, and how they are written."""
        values = _log_ticks(self.low, self.high, about) if self.log else _even_ticks(self.low, self.high, about)
        step = min((b - a for a, b in pairwise(values)), default=abs(self.high) or 1.0)
        return [(value, self.written(value, step)) for value in values]

    def written(self, value: float, step: float) -> str:
        if abs(value) < 1e-9 * step:
            return "0%" if self.share else "0"
        if self.share:
            return f"{100.0 * value:.{_decimals(100.0 * step)}f}%"
        if self.log or abs(value) >= 1e5 or 0.0 < abs(value) < 1e-3:
            return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")
        return f"{value:,.{_decimals(step)}f}" if abs(value) < 1000 or step >= 1 else number(value)


def _decimals(step: float) -> int:
    return 0 if step >= 1.0 else min(15, math.ceil(-math.log10(step) - 1e-9))


def _even_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / max(about, 1)
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1.0, 2.0, 5.0, 10.0) if base * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    """Decades; where there are few, 1, 2 and 5 of each; where even these are few, round numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        inside = [float(f"{value:.12g}") for value in found if low * 0.999 <= value <= high * 1.001]
        if len(inside) >= 3:
            return inside[:: max(1, math.ceil(len(inside) / (about + 2)))]
    return _even_ticks(low, high, about)


def scale_of(
    values: Iterable[float], start: float, end: float, *, log: bool = False, share: bool = False, room: float = 0.05
) -> Scale:
    """A scale with some room at both ends; one value alone lies in the middle."""
    known = [value for value in values if math.isfinite(value) and (value > 0.0 or not log)]
    if not known:
        return Scale(0.1 if log else 0.0, 1.0, start, end, log, share)
    low, high = min(known), max(known)
    if log:
        factor = (high / low) ** room if high > low * (1 + 1e-9) else 2.0
        return Scale(low / factor, high * factor, start, end, True, share)
    spare = (high - low) * room if high - low > 1e-12 * max(abs(low), abs(high)) else abs(high) * 0.1 or 0.1
    return Scale(low - spare, high + spare, start, end, False, share)


# ---------------------------------------------------------------------------------------------------------------------
# elements


def drawn(width: float, height: float, words: str, *children: Child, natural: bool = False) -> Html:
    """``words`` say what is seen to those who cannot see it; ``natural``: in its own size, in a place that scrolls."""
    box = f"0 0 {width:.0f} {height:.0f}"
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}", "class_": "natural"} if natural else {}
    return node("svg", *children, viewBox=box, role="img", aria_label=plain(words), **size)


def figure(title: str, note: str, *body: Child, class_: str = "chart") -> Html:
    said = node("p", note, class_="note") if note else None
    return node(
        "figure", node("figcaption", node("h3", title), said), node("div", *body, class_="drawn"), class_=class_
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return node("line", class_=class_, **{name: f"{value:.1f}" for name, value in places.items()})


def text(x: float, y: float, said: str, anchor: str = "start", class_: str | None = None, title: str = "") -> Html:
    tip = node("title", title) if title else None
    return node("text", tip, said, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str, title: str = "") -> Html:
    way = "".join(f"{'L' if place else 'M'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    return node("path", node("title", title) if title else None, d=way, class_=class_)


def color_class(place: int) -> str:
    return f"c{place % COLORS}"


def point(x: float, y: float, place: int, title: str = "", look: Look = "full", size: float = 4.0) -> Html:
    """Of the ``place``-th kind: colours, and where they come again another shape."""
    tip = node("title", title) if title else None
    class_ = f"{look} {color_class(place)}"
    if look == "cross":
        return node("path", tip, d=_cross(x, y, size), class_=class_)
    shape = (place // COLORS) % 4
    if shape == 0:
        return node("circle", tip, cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{size:g}", class_=class_)
    return node("path", tip, d=_outline(shape, x, y, size), class_=class_)


def _cross(x: float, y: float, size: float) -> str:
    return f"M{x - size:.1f} {y - size:.1f}l{2 * size:g} {2 * size:g}m0 {-2 * size:g}l{-2 * size:g} {2 * size:g}"


def _outline(shape: int, x: float, y: float, size: float) -> str:
    if shape == 1:
        return f"M{x - size:.1f} {y - size:.1f}h{2 * size:g}v{2 * size:g}h{-2 * size:g}Z"
    if shape == 2:
        return f"M{x:.1f} {y - 1.2 * size:.1f}l{1.2 * size:g} {2.1 * size:g}h{-2.4 * size:g}Z"
    half = f"{1.3 * size:g}"
    return f"M{x:.1f} {y - 1.3 * size:.1f}l{half} {half}l-{half} {half}l-{half} -{half}Z"


def legend(names: Sequence[str], extra: Sequence[tuple[Look, str]] = ()) -> Html | None:
    """What the colours mean, and the looks of points that are not simply done."""
    kinds = [(place, "full", name) for place, name in enumerate(names)] if len(names) > 1 else []
    items = [*kinds, *((0, look, name) for look, name in extra)]
    if not items:
        return None
    found = []
    for place, look, name in items:
        mark = point(6, 6, place, look=look)  # type: ignore[arg-type]
        class_ = "key quiet-mark" if (look != "full") else "key"
        found.append(
            node("li", node("svg", mark, viewBox="0 0 12 12", aria_hidden="true"), plain(name, 60), class_=class_)
        )
    return node("ul", found, class_="keys")


def x_axis(scale: Scale, top: float, bottom: float, name: str = "", about: int = 4) -> Html:
    pieces = [line(scale.start, bottom, scale.end, bottom, "axis")]
    for value, said in scale.ticks(about):
        x = scale.at(value)
        pieces += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, said, "middle")]
    if name:
        pieces.append(text((scale.start + scale.end) / 2, bottom + 31, name, "middle"))
    return joined(*pieces)


def y_axis(scale: Scale, left: float, right: float, about: int = 4) -> Html:
    """Its values stand left of ``left``."""
    pieces = []
    for value, said in scale.ticks(about):
        y = scale.at(value)
        pieces += [line(left, y, right, y, "grid"), text(left - 6, y + 3.5, said, "end")]
    return joined(*pieces)


def width_of(label: str) -> float:
    """The room a label takes in a wide font."""
    return sum(_width(letter) for letter in label)


def _width(letter: str) -> float:
    if not letter.isascii():
        return _OTHER if letter in "…·±αβγερτ" else _FOREIGN
    return _WIDTHS.get(letter, _CAPITAL if letter.isupper() else _OTHER)


def room_for(labels: Iterable[str], most: float = 150.0, least: float = 34.0) -> float:
    """How wide a column of labels must be."""
    return min(most, max(least, 10.0 + max(map(width_of, labels), default=0.0)))


def fitted(label: str, width: float) -> str:
    """As much of a label as the width holds."""
    room = width - 8.0
    whole = plain(label)
    if width_of(whole) <= room:
        return whole
    widths = accumulate(_width(letter) for letter in whole)
    held = sum(reached <= room - _OTHER for reached in widths)  # and the sign that it was cut
    return plain(whole, max(4, held + 1))
