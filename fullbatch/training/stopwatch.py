"""How long a run has trained: wall-clock without what only measures, continued when the run is resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Starts at ``seconds``, what the run had trained before."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._since = time.monotonic() - seconds

    def restart(self, seconds: float) -> None:
        self._since = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluations and audits do not count, so that equal times are equal times of training."""
        before = self.seconds
        try:
            yield
        finally:
            self.restart(before)
