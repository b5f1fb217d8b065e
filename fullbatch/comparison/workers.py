"""Runs side by side: a few processes, each of which trains one run after another, so that it imports torch once.

The parent only hands out runs and watches.  A worker that loses its parent saves its run and ends; a worker that dies
is replaced, and its run tried once more from its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from fullbatch.comparison.execute import Outcome, execute
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, to_dict
from fullbatch.training.interruption import Interrupted, Interruption

GRACE = 120.0  # seconds an orphan has to save and end
TICK = 0.5  # seconds between looks at the clock and at signals
TRIES = 2  # of a run whose process dies
OUTPUT = "output.txt"


@dataclass(frozen=True)
class Job:
    name: str
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.run.runs) / self.config.run.name


class Watch(Protocol):
    """Who looks on."""

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, outcome: Outcome) -> None: ...

    def tick(self) -> None: ...


# ---------------------------------------------------------------------------------------------------------------------
# the parent


@dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None


@dataclass
class Crew:
    """jobs       how many runs at a time
    may_start  whether another run may still be started; asked before each
    """

    jobs: int
    watch: Watch
    may_start: Callable[[], bool] = lambda: True
    _workers: list[_Worker] = field(default_factory=list)
    _tries: dict[str, int] = field(default_factory=dict)
    _stopping: bool = False

    def work_off(self, jobs: Sequence[Job]) -> None:
        """All of them in this order; after a signal those under way are saved, and Interrupted is raised."""
        pending = deque(jobs)
        with Interruption() as interruption:
            try:
                while True:
                    if interruption.signal is not None and not self._stopping:
                        self._stopping = True
                        self._signal(signal.SIGTERM)
                    if self._stopping or not self.may_start():
                        pending.clear()
                    self._hand_out(pending)
                    if not any(worker.job for worker in self._workers):
                        break
                    self._listen(pending)
                    self.watch.tick()
            finally:
                self._dismiss()
        if interruption.signal is not None:
            raise Interrupted(interruption.signal, "")

    def _hand_out(self, pending: deque[Job]) -> None:
        while pending:
            idle = [worker for worker in self._workers if worker.job is None]
            if not idle and len(self._workers) >= self.jobs:
                return
            worker = idle[0] if idle else self._hire()
            job = pending.popleft()
            worker.job = job
            self._tries[job.name] = self._tries.get(job.name, 0) + 1
            self.watch.started(job)
            with suppress(OSError):  # if it died, _listen will find out
                worker.connection.send((to_dict(job.config), str(job.folder / OUTPUT)))

    def _hire(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        gpus = torch.cuda.device_count()
        gpu = len(self._workers) % gpus if gpus else None
        threads = max(1, torch.get_num_threads() // self.jobs)
        process = context.Process(target=_work, args=(theirs, threads, gpu))  # not a daemon: it has data workers
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        return worker

    def _listen(self, pending: deque[Job]) -> None:
        ready = wait([worker.connection for worker in self._workers if worker.job], timeout=TICK)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            job = worker.job
            assert job is not None
            try:
                said = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, job, pending)
                continue
            worker.job = None
            self.watch.ended(job, said)

    def _bury(self, worker: _Worker, job: Job, pending: deque[Job]) -> None:
        """The process died; a signal of ours, the user's, the memory's keeper, a crash in a kernel."""
        worker.process.join(GRACE)
        self._workers.remove(worker)
        code = worker.process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        outcome = Outcome("open")
        said = _last_words(job.folder / OUTPUT) if (code or 0) > 0 else ""
        why = f"its process ended {how}{said}"
        if not self._stopping and self._tries[job.name] < TRIES:
            pending.appendleft(job)
            outcome = Outcome("open", f"{why}; it is tried again")
        elif not self._stopping:
            outcome = Outcome("failed", f"{why}, {TRIES} times", again=True)
            outcome.write(job.folder)
        self.watch.ended(job, outcome)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, number)

    def _dismiss(self) -> None:
        """At the end, and when this process itself fails or is told to stop at once: no process stays behind."""
        for worker in self._workers:
            with suppress(OSError):
                if worker.job is None:
                    worker.connection.send(None)
            worker.connection.close()  # to one under way: save and end
        for worker in self._workers:
            worker.process.join(GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


# ---------------------------------------------------------------------------------------------------------------------
# a worker


def _work(connection: Connection, threads: int, gpu: int | None) -> None:
    """Run what comes, until there is no more.  In a group of its own, so that Ctrl-C reaches it through the parent only
    and just once."""
    os.setpgrp()
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["LOCAL_RANK"] = str(gpu)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(connection, told), daemon=True).start()
    while (message := told.get()) is not None:
        values, output = message
        _write_to(Path(output))
        try:
            said = execute(from_dict(RunConfig, values))
        except Interrupted as stopped:
            print(f"fullbatch: {stopped}", flush=True)
            said = Outcome("open")
        try:
            connection.send(said)
        except OSError:
            return


def _hear(connection: Connection, told: queue.SimpleQueue[Any]) -> None:
    """Pass on what the parent says.  When it is gone: save, end, and if that takes too long, end anyway."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            told.put(None)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE)
            os._exit(1)
        told.put(message)
        if message is None:
            return


def _write_to(path: Path) -> None:
    """What a run says on the terminal goes to its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _last_words(output: Path) -> str:
    """What a process that failed said at the end."""
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f" ({said[-1][:300]})" if said else ""
