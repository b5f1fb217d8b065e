"""Runs side by side: a few processes, each of which trains one run after another, so that it imports torch once.

The parent only hands out runs and watches.  A worker that loses its parent saves its run and ends; a worker that dies
is replaced, and its run tried once more from its last checkpoint.
"""

from __future__ import annotations

import queue
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, to_dict
from fullbatch.training.interruption import Interrupted, Interruption
from fullbatch.trials.execute import Outcome, execute
from fullbatch.trials.processes import (
    GRACE,
    OUTPUT,
    TICK,
    Member,
    dismiss,
    free_place,
    hire,
    last_words,
    listen,
    signal_all,
    write_to,
)

TRIES = 2  # of a run whose process dies


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
    member: Member
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
                        signal_all([worker.member for worker in self._workers], signal.SIGTERM)
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
                worker.member.connection.send((to_dict(job.config), str(job.folder / OUTPUT)))

    def _hire(self) -> _Worker:
        place = free_place([worker.member for worker in self._workers])
        worker = _Worker(hire(_work, (), place, self.jobs))
        self._workers.append(worker)
        return worker

    def _listen(self, pending: deque[Job]) -> None:
        ready = wait([worker.member.connection for worker in self._workers if worker.job], timeout=TICK)
        for worker in [worker for worker in self._workers if worker.member.connection in ready]:
            job = worker.job
            assert job is not None
            try:
                said = worker.member.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, job, pending)
                continue
            worker.job = None
            self.watch.ended(job, said)

    def _bury(self, worker: _Worker, job: Job, pending: deque[Job]) -> None:
        """The process died; a signal of ours, the user's, the memory's keeper, a crash in a kernel."""
        worker.member.process.join(GRACE)
        self._workers.remove(worker)
        outcome = Outcome("open")
        said = last_words(job.folder / OUTPUT) if (worker.member.process.exitcode or 0) > 0 else ""
        why = f"its process ended {worker.member.ended_how()}{said}"
        if not self._stopping and self._tries[job.name] < TRIES:
            pending.appendleft(job)
            outcome = Outcome("open", f"{why}; it is tried again")
        elif not self._stopping:
            outcome = Outcome("failed", f"{why}, {TRIES} times", again=True)
            outcome.write(job.folder)
        self.watch.ended(job, outcome)

    def _dismiss(self) -> None:
        for worker in self._workers:
            with suppress(OSError):
                if worker.job is None:
                    worker.member.connection.send(None)
        dismiss([worker.member for worker in self._workers])
        self._workers.clear()


# ---------------------------------------------------------------------------------------------------------------------
# a worker


def _work(connection: Connection) -> None:
    """Run what comes, until there is no more."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listen(connection, told.put)
    while (message := told.get()) is not None:
        values, output = message
        write_to(Path(output))
        try:
            said = execute(from_dict(RunConfig, values))
        except Interrupted as stopped:
            print(f"fullbatch: {stopped}", flush=True)
            said = Outcome("open")
        try:
            connection.send(said)
        except OSError:
            return
