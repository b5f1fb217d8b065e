"""A study in one file: every operation a line, appended under a lock that dies with its holder.

Optuna's own file backend locks by a link that a killed process leaves behind, and takes it away by force after a
while; and a line that was cut off (a killed process, a full disk) makes the file unreadable once the next is appended.
Here the system holds the lock, and a line that was cut off is closed and passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

_threads: dict[str, threading.Lock] = {}  # a file's lock of the system is the whole process's; this one is a thread's
_threads_guard = threading.Lock()


class JournalFile(BaseJournalBackend):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._read = 0  # lines that count
        self._offset = 0  # where the next begins
        with self._alone(), path.open("ab"):
            pass  # it can be locked and written to

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Only whole lines: one without its end is being written, or never will be."""
        if log_number_from < self._read:
            self._read = self._offset = 0
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._offset += len(line) + 1
            if (log := _decoded(line)) is None:
                continue
            self._read += 1
            if self._read > log_number_from:
                yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        with self._alone(), self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                text = text if file.read(1) == b"\n" else b"\n" + text
            file.seek(0, os.SEEK_END)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _threads_guard:
            thread = _threads.setdefault(os.path.realpath(self._lock_path), threading.Lock())
        with thread, self._lock_path.open("ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # closing the file lets go
            yield


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        log = json.loads(line)
    except ValueError:
        return None
    return log if isinstance(log, dict) and "op_code" in log else None
