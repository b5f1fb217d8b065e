"""The workers of a search on one machine: processes that claim trials by themselves; a parent looks after them.

The parent hands nothing out: the ledger does.  It replaces a worker that died (its trial is found by the others),
passes signals on, and hears what the workers say.  How they start and end is as in a comparison.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fullbatch.training.interruption import Interrupted, Interruption
from fullbatch.trials.processes import (
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

DEATHS = 3  # a place; so many in a row, without a word in between, and no other worker is sent


@dataclass
class Desk:
    """What a worker has of its crew.

    place      its number, from 0
    stopping   it was told to stop: no trial is begun any more.  In a run the signal does the same
    """

    place: int
    _connection: Connection
    _interruption: Interruption

    @property
    def stopping(self) -> bool:
        return self._interruption.signal is not None

    def say(self, message: object) -> None:
        """To the parent's ``hear``.  If it is gone, the listener knows."""
        with suppress(OSError):
            self._connection.send(_Said(message))


Work = Callable[[Desk, Any], None]


@dataclass(frozen=True)
class _Said:
    message: object


@dataclass(frozen=True)
class _Wrong:
    """A mistake of the user's that only a worker could find, or something that is not there for it."""

    message: str


class WorkersDie(ValueError):
    """One after another, of a mistake of ours or of the machine's."""


@dataclass
class Crew:
    """jobs     workers at a time
    hear     is told what they say
    tick     is called about twice a second
    output   where they write what they say on the terminal, until ``write_to`` names a file of a trial
    """

    jobs: int
    hear: Callable[[Any], None] = lambda message: None
    tick: Callable[[], None] = lambda: None
    output: Path | None = None
    _members: list[Member] = field(default_factory=list)
    _silent_deaths: int = 0

    def work(self, work: Work, arguments: Any) -> None:
        """``work(desk, arguments)`` in each of them, until all have returned; both must be such as can be pickled.

        After a signal those under way are saved, and Interrupted is raised.  A ValueError or OSError in a worker is
        raised here, as a ValueError; a worker that ends otherwise before its work has, by a signal of its own or by an
        error, is replaced as long as one of them has something to say.
        """
        stopping = False
        with Interruption() as interruption:
            try:
                self._hire(work, arguments, self.jobs)
                while self._members:
                    if interruption.signal is not None and not stopping:
                        stopping = True
                        signal_all(self._members, signal.SIGTERM)
                    dead = self._listen(interruption)
                    if interruption.signal is None:
                        self._hire(work, arguments, dead)
                    self.tick()
            except KeyboardInterrupt:  # the second: at once, without saving
                signal_all(self._members, signal.SIGKILL)
                raise
            finally:
                dismiss(self._members)
                self._members.clear()
        if interruption.signal is not None:
            raise Interrupted(interruption.signal, "")

    def _hire(self, work: Work, arguments: Any, number: int) -> None:
        for _ in range(number):
            place = free_place(self._members)
            self._members.append(hire(_work, (place, self.output, work, arguments), place, self.jobs))

    def _listen(self, interruption: Interruption) -> int:
        """How many have died, and should be replaced."""
        dead = 0
        ready = wait([member.connection for member in self._members], timeout=TICK)
        for member in [member for member in self._members if member.connection in ready]:
            try:
                match member.connection.recv():
                    case _Said(message):
                        self._silent_deaths = 0
                        self.hear(message)
                    case _Wrong(message):
                        raise ValueError(message)
            except (EOFError, OSError):
                dead += self._see_off(member, interruption)
        return dead

    def _see_off(self, member: Member, interruption: Interruption) -> bool:
        """Whether another is to take its place: not of one that has ended in peace."""
        member.process.join()
        member.connection.close()
        self._members.remove(member)
        if interruption.signal is not None or member.process.exitcode == 0:
            return False
        self._silent_deaths += 1
        if self._silent_deaths >= DEATHS * self.jobs:
            said = last_words(self.output) if self.output is not None else ""
            where = f" What they said is in {self.output}." if self.output is not None else ""
            raise WorkersDie(f"The workers die one after another, the last {member.ended_how()}{said}.{where}")
        return True


def _work(connection: Connection, place: int, output: Path | None, work: Work, arguments: Any) -> None:
    if output is not None:
        write_to(output)
    with Interruption() as interruption:
        listen(connection, lambda message: None)
        try:
            work(Desk(place, connection, interruption), arguments)
        except Interrupted as stopped:
            print(f"fullbatch: {stopped}", flush=True)
            sys.exit(stopped.exit_code)
        except (ValueError, OSError) as error:
            traceback.print_exc()
            with suppress(OSError):  # the parent is gone
                connection.send(_Wrong(str(error)))
            sys.exit(1)
        if interruption.signal is not None:  # there may be more to do
            sys.exit(128 + interruption.signal)
