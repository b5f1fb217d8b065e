"""``fullbatch compare``: methods x batch sizes x seeds on the same data, model and budget."""

from __future__ import annotations


def compare(arguments: list[str]) -> int:
    raise ValueError("not built yet")
