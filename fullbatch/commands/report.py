"""``fullbatch report``: runs in, one page out."""

from __future__ import annotations


def report(arguments: list[str]) -> int:
    raise ValueError("not built yet")
