"""Some packages are extras of this one: who needs one is told so in a line, before an import fails."""

from __future__ import annotations

import importlib.util


def require_extra(package: str, extra: str, wish: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{wish} needs the package {package}; install it with: pip install 'fullbatch[{extra}]'.")
