"""HTML by construction: what is not ``Html`` already is escaped on its way in, so no caption can become markup."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from fullbatch.config.messages import MAX_TEXT, plain

_EMPTY = frozenset(("img", "meta", "br", "input"))


class Html(str):
    """Text that is HTML already, and the charts that have their places in it."""

    charts: tuple[Any, ...]

    def __new__(cls, text: str, charts: tuple[Any, ...] = ()) -> Html:
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
    charts: list[Any] = []
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
