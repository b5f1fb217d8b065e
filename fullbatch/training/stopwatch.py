"""How long a run has trained: wall-clock without what only measures, continued when the run is resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CPU = torch.device("cpu")


class Stopwatch:
    """Starts at ``seconds``, what the run had trained before, for work on ``device``."""

    def __init__(self, seconds: float = 0.0, device: torch.device = _CPU) -> None:
        self._since = time.monotonic() - seconds
        self._device = device

    def restart(self, seconds: float) -> None:
        self._since = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluations and audits do not count, so that equal times are equal times of training.

        Each side waits for its own: steps that a GPU still has to do count, and what was measured does not.
        """
        self._finish()
        before = self.seconds
        try:
            yield
            self._finish()
        finally:
            self.restart(before)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
