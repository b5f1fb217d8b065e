"""Things that may have to be fetched from a model hub, and one sentence where they cannot be."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fetched(what: str, advice: str) -> Iterator[None]:
    """Whatever a hub client raises becomes one ValueError: what was wanted, why not, what to do."""
    try:
        yield
    except Exception as error:  # hub clients raise errors of many families
        stop = "" if advice.endswith("?") else "."
        raise ValueError(f"{what} could not be loaded ({first_line(error)}); {advice}{stop}") from None


def require_transformers(wish: str) -> None:
    """transformers is an extra of this package; say so before an import fails."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{wish} needs the package transformers; install it with: pip install 'fullbatch[text]'.")


def require_peft(wish: str) -> None:
    """peft is an extra too."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{wish} needs the package peft; install it with: pip install 'fullbatch[lora]'.")


def first_line(error: BaseException, limit: int = 160) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].split(". ")[0].strip().rstrip(".:;")
    return line if len(line) <= limit else line[: limit - 3] + "..."
