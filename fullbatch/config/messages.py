"""Text in messages, logs, tables and pages: the nearest name, a list of names; and what others wrote, as one clean line
without passwords."""

from __future__ import annotations

import difflib
import logging
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

MAX_TEXT = 300  # characters of any text that others wrote: captions, names, log lines
MAX_MESSAGE = 4000  # of a message, which holds some of these
HIDDEN = "***"
_KEPT_FORMAT = "\u200c\u200d"  # joiners, which emoji and some scripts need; other format characters turn text around
_OPTION = re.compile(r"([?&][^=&\s]*(?:password|passwd|pwd|token|secret|key)=)[^&\s]*", re.IGNORECASE)


def clean(text: object, length: int = MAX_MESSAGE) -> str:
    """Without what a terminal acts on, a line break or a turn of the direction of writing; blanks stay as they are."""
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
    return _cut("".join(kept), length, len(raw) > 4 * length)


def plain(text: object, length: int = MAX_TEXT) -> str:
    """One line of somebody else's text, cleaned and cut, with single blanks."""
    raw = str(text)
    return _cut(" ".join(clean(raw[: 4 * length], 4 * length).split()), length, len(raw) > 4 * length)


def _cut(line: str, length: int, more: bool) -> str:
    return line[: length - 1].rstrip() + "…" if more or len(line) > length else line


def cell(value: Any) -> Any:
    """For a CSV file.  Spreadsheets run what begins like a formula, some also in wide signs; an apostrophe keeps it
    text.

    >>> cell("=1+1"), cell(-0.5), cell("a\\nb")
    ("'=1+1", -0.5, 'a b')
    """
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if unicodedata.normalize("NFKC", text[:1]).startswith(("=", "+", "-", "@")) else text


def without_password(url: str) -> str:
    """Hidden up to the last @: one in a password should be written %40, but not everybody does.

    >>> without_password("postgresql://me:secret@host/db"), without_password("sqlite:///a.db")
    ('postgresql://me:***@host/db', 'sqlite:///a.db')
    >>> without_password("postgresql://me:sec@ret/@host/db"), without_password("postgresql://me@host:5432/db")
    ('postgresql://me:***@host/db', 'postgresql://me@host:5432/db')
    >>> without_password("https://host:8080/x@v2/a.tar"), without_password("s3://b/a?access_token=x")
    ('https://host:8080/x@v2/a.tar', 's3://b/a?access_token=***')
    >>> without_password("postgresql://host/db?user=me&password=secret")
    'postgresql://host/db?user=me&password=***'
    """
    return _OPTION.sub(rf"\1{HIDDEN}", re.sub(r"(://[^/@:]*):(?!\d+/).*@", rf"\1:{HIDDEN}@", url, flags=re.DOTALL))


def message(text: object) -> str:
    """A message for the terminal or a log, in which a URL ends at a blank."""
    return clean(re.sub(r"\S+", lambda word: without_password(word[0]), str(text)))


def reason_of(error: Exception) -> str:
    """What went wrong, without the system's number for it.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.csv")), reason_of(ValueError("It is late."))
    ('a.csv: No such file or directory.', 'It is late.')
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    return str(error)


class MessageFormatter(logging.Formatter):
    """No name in a message can pretend to be another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = message(record.message)
        return super().formatMessage(record)


def nearest(word: object, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a guess where there is one, then a full stop."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def listed(words: Iterable[str]) -> str:
    return ", ".join(words)


_JOINTS = re.compile(r"(::|\|| \+ (?=[/~.]))")  # between sources that belong together, and the towers of a pair
_SOURCE = re.compile(r"((?:\w{2,}:(?!//))?)([^?]*)(.*)", re.DOTALL)  # a task, a path, its options
_ON_THIS_MACHINE = re.compile(r"file://|[/~\\]|[A-Za-z]:[/\\]|\.\.?[/\\]")


def local_name(text: str) -> str:
    """Where something lies on this machine is nobody else's business, and of no use to them: of such a path the last
    part stays.  Names on a hub, URLs and paths below the working folder stay whole, but for passwords.

    >>> local_name("/pictures/a b.csv?captions=title"), local_name("openai/clip-vit-base-patch32")
    ('a b.csv?captions=title', 'openai/clip-vit-base-patch32')
    >>> local_name("knn:/data/train|/data/test"), local_name("resnet18 + /models/bert"), local_name("../a/b.json")
    ('knn:train|test', 'resnet18 + bert', 'b.json')
    >>> local_name("https://host/a.tar"), local_name("file:///srv/a.tar"), local_name("C:/me/a.csv::~/b/")
    ('https://host/a.tar', 'a.tar', 'a.csv::b')
    """
    return "".join(_without_place(part) for part in _JOINTS.split(without_password(text)))


def _without_place(part: str) -> str:
    kind, path, options = _SOURCE.fullmatch(part).groups()  # type: ignore[union-attr]
    if _ON_THIS_MACHINE.match(path):
        path = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return f"{kind}{path}{re.sub(r'=[/~][^&]*/', '=', options)}"
