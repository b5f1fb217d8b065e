"""Worker processes on this machine and the parent that looks after them.

Workers pull their work by themselves.  The parent replaces one that dies, passes signals on, and hears what they say.
A worker is in a process group of its own, so that Ctrl-C reaches it through the parent only and just once.  A worker
that loses its parent is told to save and end, as by a signal; no process stays behind.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fullbatch.config.messages import reason_of
from fullbatch.data.durable import make_folder
from fullbatch.training.interruption import Interrupted, Interruption

GRACE = 120.0  # seconds an orphan has to save and end
TICK = 0.5  # seconds between looks at the clock and at signals
MOST_SILENT_DEATHS = 3  # for each worker; so many in a row, without a message in between, and none is replaced
OUTPUT = "output.txt"


@dataclass(frozen=True)
class Pace:
    jobs: int = 1  # runs side by side on this machine
    quiet: bool = False  # lines in place of bars
    stop_after: float | None = None  # minutes after which no further run is begun here; None: all
    retry_failed: bool = False  # whether runs of a comparison that failed by themselves are tried again
    lost_after: float = 180.0  # seconds without a sign of life after which a search's worker elsewhere counts as dead

    def until(self) -> float:
        """When that is, by this machine's monotonic clock."""
        return math.inf if self.stop_after is None else time.monotonic() + 60.0 * self.stop_after


class WorkersDie(ValueError):
    """One after another, of a mistake of ours or of the machine's."""


@dataclass
class Member:
    """A worker as its parent has it."""

    process: Any
    connection: Connection
    place: int  # among its fellows, from 0: the GPU follows from it
    message: Any = None  # the last that it sent

    @property
    def ending(self) -> str:
        code = self.process.exitcode
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"


@dataclass
class WorkerPool:
    jobs: int  # workers at a time, each with its share of the threads
    at_most: int | None = None  # fewer are started if there is less to do; None: all
    hear: Callable[[Any], None] = lambda message: None  # is told each message of a worker
    died: Callable[[Member], None] = lambda member: None  # is told of a worker that died early, and is replaced
    tick: Callable[[], None] = lambda: None  # is called about twice a second
    advice: str = ""  # how to go on after a signal
    output: Path | None = None  # where workers write what they print, until ``print_to`` names another file
    _members: list[Member] = field(default_factory=list)
    _silent_deaths: int = 0

    def run(self, work: Work) -> None:
        """``work(worker)`` in each of them, until all have returned; it must be such as can be pickled.

        After a signal those under way are saved, and Interrupted is raised.  A ValueError or OSError in a worker is
        raised here, as a ValueError; a worker that ends otherwise before its work has, by a signal of its own or by an
        error, is replaced as long as workers send messages.
        """
        stopping = False
        with Interruption() as interruption:
            try:
                for _ in range(self.jobs if self.at_most is None else min(self.jobs, self.at_most)):
                    self._start(work)
                while self._members:
                    if interruption.signal is not None and not stopping:
                        stopping = True
                        self._signal_all(signal.SIGTERM)
                    ready = wait([member.connection for member in self._members], timeout=TICK)
                    for member in [member for member in self._members if member.connection in ready]:
                        if not self._receive(member) and self._has_died(member, interruption):
                            self._start(work)
                    self.tick()
            except KeyboardInterrupt:  # the second: at once, without saving
                self._signal_all(signal.SIGKILL)
                raise
            finally:
                self._end_all()
        if interruption.signal is not None:
            raise Interrupted(interruption.signal, self.advice)

    def _start(self, work: Work) -> None:
        taken = {member.place for member in self._members}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        gpus, threads = torch.cuda.device_count(), max(1, torch.get_num_threads() // self.jobs)
        given = (place % gpus if gpus else None, threads, theirs, place, self.output, work)
        process = context.Process(target=_main, args=given)  # no daemon: it has children
        process.start()
        theirs.close()
        self._members.append(Member(process, ours, place))

    def _receive(self, member: Member) -> bool:
        """False: it has ended."""
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, ValueError):  # a mistake of the user's, that only a worker could see
            raise message
        self._silent_deaths, member.message = 0, message
        self.hear(message)
        return True

    def _has_died(self, member: Member, interruption: Interruption) -> bool:
        """Whether it ended before its work did, and another is to take its place."""
        member.process.join()
        member.connection.close()
        self._members.remove(member)
        if interruption.signal is not None or member.process.exitcode == 0:
            return False
        self._silent_deaths += 1
        if self._silent_deaths >= MOST_SILENT_DEATHS * self.jobs:
            words = in_brackets(last_line(self.output)) if self.output is not None else ""
            where = f" What they said is in {self.output}." if self.output is not None else ""
            raise WorkersDie(f"The workers die one after another, the last {member.ending}{words}.{where}")
        self.died(member)
        return True

    def _signal_all(self, number: int) -> None:
        for member in self._members:
            if member.process.is_alive() and member.process.pid is not None:
                os.kill(member.process.pid, number)

    def _end_all(self) -> None:
        """At the end, and when the parent itself fails or is told to stop at once: those at work save and end."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.process.join(GRACE)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
        self._members.clear()


@dataclass
class WorkerContext:
    """What a worker's function is given."""

    place: int  # its number, from 0
    _connection: Connection
    _interruption: Interruption

    @property
    def stopping(self) -> bool:
        """It was told to stop: nothing is begun any more.  In a run the signal does the same."""
        return self._interruption.signal is not None

    def say(self, message: object) -> None:
        """To the parent's ``hear``.  If it is gone, the listener knows."""
        with suppress(OSError):
            self._connection.send(message)


Work = Callable[[WorkerContext], None]


def _main(gpu: int | None, threads: int, *given: Any) -> None:
    os.setpgrp()
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["LOCAL_RANK"] = str(gpu)
    _run_worker(*given)


def _run_worker(connection: Connection, place: int, output: Path | None, work: Work) -> None:
    if output is not None:
        print_to(output)
    with Interruption() as interruption:
        threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
        try:
            work(WorkerContext(place, connection, interruption))
        except Interrupted as stopped:
            print(f"fullbatch: {stopped}", flush=True)
            sys.exit(stopped.exit_code)
        except (ValueError, OSError) as error:
            if output is not None:  # its log; a terminal gets the sentence, from the parent
                traceback.print_exc()
            try:
                connection.send(ValueError(reason_of(error)))
            except OSError:  # the parent is gone
                print(f"fullbatch: {reason_of(error)}", file=sys.stderr, flush=True)
            sys.exit(1)
        if interruption.signal is not None:  # there may be more to do
            sys.exit(128 + interruption.signal)


def _end_with_parent(connection: Connection) -> None:
    """When the parent is gone: save, end, and if that takes too long, end anyway."""
    with suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def print_to(path: Path) -> None:
    """What this process prints goes to a file."""
    make_folder(path.parent)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def last_line(output: Path) -> str:
    """What a process printed at the end."""
    text = ""
    with suppress(OSError):
        text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1][:300] if lines else ""


def in_brackets(text: str) -> str:
    """To be put behind a sentence."""
    return f" ({text})" if text else ""


# ---------------------------------------------------------------------------------------------------------------------
# a process, named so that another one can tell whether it still lives


@dataclass(frozen=True)
class ProcessIdentity:
    """A process number alone says little: numbers are used again, and mean another process on another machine, in
    another container, after a restart.  With these the answer "it is gone" is certain.
    """

    place: str  # the running machine and the namespace in which ``pid`` counts; "": not known
    pid: int
    began: str  # when it began, in the system's own words; "": not known
    name: str  # for people

    @classmethod
    def read(cls, values: object) -> ProcessIdentity | None:
        """None: nobody that could be asked for."""
        if not isinstance(values, Mapping) or set(values) != {field.name for field in fields(cls)}:
            return None
        return cls(**values)


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(_place(), pid, _began(pid) or "", f"{socket.gethostname()}:{pid}")


def is_gone(identity: ProcessIdentity) -> bool:
    """True only if it is certain; a process that is stopped, or that another user runs, is there."""
    if not identity.place or not identity.began or identity.place != _place():
        return False
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is there, and another user's
    began = _began(identity.pid)
    return began is not None and began != identity.began


@lru_cache(maxsize=1)
def _place() -> str:
    """Linux tells it in /proc; elsewhere (macOS) sysctl and ps do."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [
            os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if Path(f"/proc/self/ns/{kind}").exists()
        ]
    except OSError:
        return _output_of("sysctl", "-n", "kern.bootsessionuuid")
    return " ".join([boot, *spaces])


def _began(pid: int) -> str | None:
    """Of a process that has ended, but that its parent has not asked about yet: "ended".  None: cannot be told."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _output_of("ps", "-o", "lstart=", "-p", str(pid)) or None
    state, *rest = line.rpartition(")")[2].split()  # the name before it may hold anything
    return "ended" if state in "ZX" else rest[18]


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
