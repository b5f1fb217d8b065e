"""``fullbatch audit``: how wrong were the normalizers of a run?"""

from __future__ import annotations


def audit(arguments: list[str]) -> int:
    raise ValueError("not built yet")
