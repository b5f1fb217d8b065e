"""HTML by construction: what is not ``Html`` already is escaped on its way in, so no caption can become markup."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable
from typing import Any

MAX_TEXT = 300  # characters of any text that others wrote: captions, names, log lines
_KEPT_FORMAT = "\u200c\u200d"  # joiners, which emoji and some scripts need; other format characters turn text around
_EMPTY = frozenset(("img", "meta", "br", "input"))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


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
    return Html(start if name in _EMPTY else f"{start}{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Children one after the other; None is nothing, lists are opened."""
    pieces = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            pieces.append(str(child))
        elif isinstance(child, str | int):
            pieces.append(html.escape(str(child), quote=True))
        else:
            pieces.append(joined(*child))
    return Html("".join(pieces))


def plain(text: object, length: int = MAX_TEXT) -> str:
    """One line of somebody else's text: cut, without control characters and those that reverse what follows."""
    raw = str(text)
    kept = []
    for letter in raw[: 4 * length]:
        kind = unicodedata.category(letter)
        if kind in ("Cc", "Zl", "Zp"):
            kept.append(" ")
        elif kind == "Cs":
            kept.append("\ufffd")  # half a character, which UTF-8 cannot hold
        elif kind != "Cf" or letter in _KEPT_FORMAT:
            kept.append(letter)
    line = " ".join("".join(kept).split())
    cut = len(line) > length or len(raw) > 4 * length
    return line[: length - 1].rstrip() + "…" if cut else line


def quoted(text: object, length: int = MAX_TEXT) -> Html:
    """A caption: set apart, so that its direction of writing stays its own."""
    return node("bdi", plain(text, length), class_="said")


def embedded_json(value: Any) -> Html:
    """For a script element: ASCII only, and no character that could end it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
