"""Processes that train beside each other, and the parent they belong to: how they start, hear of each other, and end.

A worker is in a process group of its own, so that Ctrl-C reaches it through the parent only and just once.  A worker
that loses its parent is told to save and end, as by a signal; no process stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

GRACE = 120.0  # seconds an orphan has to save and end
TICK = 0.5  # seconds between looks at the clock and at signals
OUTPUT = "output.txt"


# ---------------------------------------------------------------------------------------------------------------------
# the parent's side


@dataclass
class Member:
    """place   among its fellows, from 0: the GPU follows from it"""

    process: Any
    connection: Connection
    place: int

    def ended_how(self) -> str:
        code = self.process.exitcode
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"


def free_place(members: Sequence[Member]) -> int:
    taken = {member.place for member in members}
    return next(place for place in range(len(taken) + 1) if place not in taken)


def hire(work: Callable[..., None], arguments: tuple[Any, ...], place: int, jobs: int) -> Member:
    """A process that calls ``work(connection, *arguments)``, with its share of the threads, on the place's GPU."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    gpus = torch.cuda.device_count()
    gpu = place % gpus if gpus else None
    threads = max(1, torch.get_num_threads() // jobs)
    process = context.Process(
        target=_settled, args=(work, theirs, threads, gpu, arguments)
    )  # no daemon: it has children
    process.start()
    theirs.close()
    return Member(process, ours, place)


def signal_all(members: Sequence[Member], number: int) -> None:
    for member in members:
        if member.process.is_alive() and member.process.pid is not None:
            os.kill(member.process.pid, number)


def dismiss(members: Sequence[Member]) -> None:
    """At the end, and when the parent itself fails or is told to stop at once: to those at work it is, save and end."""
    for member in members:
        member.connection.close()
    for member in members:
        member.process.join(GRACE)
        if member.process.is_alive():
            member.process.kill()
            member.process.join()


# ---------------------------------------------------------------------------------------------------------------------
# the worker's side


def _settled(work: Callable[..., None], connection: Connection, threads: int, gpu: int | None, arguments: Any) -> None:
    os.setpgrp()
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["LOCAL_RANK"] = str(gpu)
    work(connection, *arguments)


def listen(connection: Connection, heard: Callable[[Any], None]) -> None:
    """Pass on what the parent says, in a thread; None is the last word.  When it is gone, too: save, end, and if that
    takes too long, end anyway."""
    threading.Thread(target=_listen, args=(connection, heard), daemon=True).start()


def _listen(connection: Connection, heard: Callable[[Any], None]) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            heard(None)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE)
            os._exit(1)
        heard(message)
        if message is None:
            return


def write_to(path: Path) -> None:
    """What this process says on the terminal goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def last_words(output: Path) -> str:
    """What a process that failed said at the end, to be put behind a sentence."""
    said = last_line(output)
    return f" ({said})" if said else ""


def last_line(output: Path) -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else ""
