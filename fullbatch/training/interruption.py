"""SIGTERM and SIGINT ask a run to save and stop; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """A context in which the first signal only sets ``signal``.  One within another keeps the signal to itself if that
    is why it was left; else what it was in had ended by itself, and the signal is for the one around it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.signal is not None and not (kind is not None and issubclass(kind, Interrupted)):
            around = getattr(self._before[self.signal], "__self__", None)
            if isinstance(around, Interruption):
                around._receive(self.signal, None)


class Abandoned(Exception):
    """The run is no longer this process's to train; nothing more is written to its folder."""


class Interrupted(Exception):
    """The run was asked to stop and has saved; ``exit_code`` is what a shell expects after that signal."""

    def __init__(self, number: int | None, advice: str) -> None:
        number = number or signal.SIGTERM  # another rank was told
        super().__init__(f"Stopped by {signal.Signals(number).name}. {advice}")
        self.exit_code = 128 + number
