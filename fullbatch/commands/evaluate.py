"""``fullbatch evaluate``: a model in, numbers out."""

from __future__ import annotations


def evaluate(arguments: list[str]) -> int:
    raise ValueError("not built yet")
