"""Processes that read ahead.  They end with the one that started them, and the death of one is a sentence.  Torch's
loader leaves three gaps.  It raises a worker's death wherever the process happens to be by then: in the middle of a
save, or of closing down.  A worker that is killed may take a lock along, for which closing down waits for ever.  And at
the end of the process a worker gets one SIGTERM, which ours ignore."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

_PATIENCE = 5.0  # seconds for workers to end by themselves
_KEPT = 31 << 20  # bytes; see _start

Item = TypeVar("Item")


class WorkerDied(OSError):
    """A data worker was killed, in most cases for want of memory."""


def read_ahead(
    items: Dataset[Item], ranges: Iterable[range], workers: int, device: torch.device | None = None
) -> Generator[Item, None, None]:
    """The items of these numbers, in this order, made by ``workers`` processes; 0: by this one.  All ranges are read by
    the same processes.  A range is asked for when the one before it has been read, and nothing is read ahead of it.
    With a ``device`` each item is moved there."""
    pin = device is not None and device.type == "cuda"
    numbers = _Numbers()
    ahead: dict[str, Any] = {"prefetch_factor": 2, "worker_init_fn": _start, "persistent_workers": True}
    loader: DataLoader[Item] = DataLoader(
        items, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=pin, **(ahead if workers else {})
    )
    processes = _WorkerProcesses()
    end = object()
    try:
        for numbers.here in ranges:
            reader = processes.waited_for(partial(iter, loader))
            processes.watch(reader)
            while (item := processes.waited_for(partial(next, reader, end))) is not end:
                yield item if device is None else item.to(device)
    finally:
        processes.end()


class _Numbers(Sampler[int]):
    """Which items a loader makes; set anew for each of its passes."""

    here = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.here)


def _start(worker: int) -> None:
    """One thread each.  Signals to the whole group of processes reach workers too, but it is the training process that
    decides what follows: a worker ignores Ctrl-C, and its first SIGTERM.  What it raises travels with its items; the
    hook has only the complaints of the thread that hands tensors over, when the other side is gone."""
    torch.set_num_threads(1)
    # a block that is freed (up to 32 MiB) teaches glibc to keep what is smaller: else the kernel gives and takes the
    # pages of every image, which at large batches costs an eighth of the time
    torch.empty(_KEPT, dtype=torch.uint8)
    sys.excepthook = lambda kind, error, trace: None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


class _WorkerProcesses:
    """The worker processes of one loader."""

    def __init__(self) -> None:
        self._reader: Any = None
        self._workers: list[Any] = []
        self._before = signal.getsignal(signal.SIGCHLD)

    def watch(self, reader: Any) -> None:
        """A loader's iterator; with persistent workers it is the same one in every pass."""
        if reader is not self._reader:
            self._reader, self._workers = reader, list(getattr(reader, "_workers", ()))
            _child_signals.hold_back(self._before)
            if self._workers:
                atexit.register(self._kill)  # after torch's own, so that it comes before

    def waited_for(self, give: Callable[[], Any]) -> Any:
        """What ``give`` gives; a death is told here and nowhere else."""
        try:
            with _child_signals.raised():
                self._check()
                return give()
        except (ValueError, OSError, RuntimeError, EOFError) as error:
            until = time.monotonic() + (0.0 if isinstance(error, ValueError) else 1.0)
            while time.monotonic() < until and all(worker.is_alive() for worker in self._workers):
                time.sleep(0.01)  # a connection breaks a moment before its worker is dead
            self._check()
            if str(error).startswith("DataLoader worker"):  # one of another loader
                raise _died("killed") from None
            raise _as_it_was(error) from None

    def _check(self) -> None:
        codes = [worker.exitcode for worker in self._workers if worker.exitcode is not None]
        if codes:
            how = ", ".join(
                f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}" for code in codes
            )
            raise _died(how)

    def end(self) -> None:
        """Ask, wait, kill.  Asking may itself wait for ever (see above), so a thread does it that nobody waits for."""
        if not self._workers:  # or this process is at its end, and starts no thread any more
            return
        atexit.unregister(self._kill)
        asking = threading.Thread(target=getattr(self._reader, "_shutdown_workers", lambda: None), daemon=True)
        whole = all(worker.is_alive() for worker in self._workers)
        asking.start()
        asking.join(_PATIENCE if whole else 0.0)
        self._kill()
        asking.join(_PATIENCE / 5)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(_PATIENCE)
        self._workers = []


def _died(how: str) -> WorkerDied:
    return WorkerDied(f"A data worker died ({how}): the memory may have been full. Try fewer --workers.")


def _as_it_was(error: Exception) -> Exception:
    """What a worker raised comes with its traceback as text around it."""
    text = str(error).strip()
    if not (text.startswith("Caught ") and isinstance(error, (ValueError, OSError))):
        return error
    last = text.splitlines()[-1]
    return (OSError if isinstance(error, OSError) else ValueError)(last.partition(": ")[2] or last)


class _ChildSignals:
    """Stands before torch's handler of dying children, and lets it raise only while an item is waited for."""

    def __init__(self) -> None:
        self._theirs: Any = None
        self._before: Any = None
        self._waiting = False

    def hold_back(self, before: Any) -> None:
        """``before`` is the handler that was there before torch's."""
        theirs = signal.getsignal(signal.SIGCHLD)
        ours = theirs == self._receive
        if ours or not callable(theirs) or threading.current_thread() is not threading.main_thread():
            return
        self._theirs, self._before = theirs, before if before is not theirs else None
        signal.signal(signal.SIGCHLD, self._receive)

    @contextmanager
    def raised(self) -> Iterator[None]:
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        handler = self._theirs if self._waiting else self._before
        if callable(handler):
            handler(number, frame)


_child_signals = _ChildSignals()
