"""Words in error messages: the nearest name, a list of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a guess where there is one, then a full stop."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def listed(words: Iterable[str]) -> str:
    return ", ".join(words)
