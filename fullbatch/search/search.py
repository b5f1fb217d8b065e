"""A search from its plan to its answer.

searches/NAME/
  search.yaml     the plan
  study.journal   the storage, where no other is named; else storage.txt: which one
  trials/         an ordinary run folder each, with trial.json (its evaluations, how it ended) and output.txt
  search.json     everything in numbers; rewritten whenever a trial ends
  search.csv      the ranked table
  best.yaml       the winner's config
  report.html     the page
  output.txt      what the workers said between trials
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullbatch.comparison.processes import write_to
from fullbatch.config.tree import write_values
from fullbatch.search.checks import check_search
from fullbatch.search.crew import Crew, Desk
from fullbatch.search.ledger import LOST_AFTER, Ledger, Running
from fullbatch.search.phases import owed, phases_of
from fullbatch.search.plan import SearchPlan
from fullbatch.search.progress import SearchDisplay
from fullbatch.search.slots import Ended, PhaseName
from fullbatch.search.storage import open_storage
from fullbatch.search.study import keep_plan, kept_plan
from fullbatch.search.summary import summarize, write_files
from fullbatch.search.worker import InFolder, Phases, Worker
from fullbatch.training.interruption import Interrupted
from fullbatch.training.run_folder import replace_text

PLAN, JOURNAL, STORAGE, OUTPUT = "search.yaml", "study.journal", "storage.txt", "output.txt"
HIDDEN = ":***"
LOOK_EVERY = 2.0  # seconds between looks at the storage


@dataclass(frozen=True)
class Pace:
    """jobs         trials side by side on this machine
    quiet        lines in place of bars
    stop_after   minutes after which no further trial is begun here; None: all
    lost_after   seconds without a sign of life after which a worker on another machine counts as dead
    """

    jobs: int = 1
    quiet: bool = False
    stop_after: float | None = None
    lost_after: float = LOST_AFTER


def search(plan: SearchPlan, folder: Path, storage: str, pace: Pace) -> dict[str, Any]:
    """Begin, join or go on; the summary, as in search.json."""
    began = time.monotonic()
    opened = open_storage(storage)
    checked = check_search(plan)
    keep_plan(opened, plan)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / PLAN, write_values(plan.as_dict()))
    replace_text(folder / STORAGE, without_password(storage) + "\n")
    until = None if pace.stop_after is None else began + 60.0 * pace.stop_after
    terms = Terms(storage, plan.name, folder, dict(checked.evaluations), pace.lost_after, until)
    board = Board(Phases(opened, plan, checked.evaluations, pace.lost_after), folder, pace)
    with board.display:
        board.begin()
        try:
            Crew(pace.jobs, tick=board.tick, output=folder / OUTPUT).work(work, terms)
        except Interrupted as stopped:
            board.end()
            raise Interrupted(stopped.exit_code - 128, f"Go on with: fullbatch search --resume {folder}") from None
        return board.end()


def storage_of(folder: Path, given: str | None) -> str:
    """The one that was asked for, else the one that the folder was begun with, else its own journal."""
    if given is not None:
        return given
    if not (folder / STORAGE).is_file():
        return str(folder / JOURNAL)
    before = (folder / STORAGE).read_text(encoding="utf-8").strip()
    if HIDDEN in before:
        raise ValueError(f"{folder} goes on with the storage {before}; give it again, with its password: --study URL.")
    return before


def without_password(storage: str) -> str:
    """
    >>> without_password("postgresql://me:secret@host/db"), without_password("sqlite:///a.db")
    ('postgresql://me:***@host/db', 'sqlite:///a.db')
    """
    return re.sub(r"(://[^/@:]*):[^/@]*@", rf"\1{HIDDEN}@", storage)


# ---------------------------------------------------------------------------------------------------------------------
# a worker's process


@dataclass(frozen=True)
class Terms:
    """What a worker is sent off with; the rest is in the storage."""

    storage: str
    name: str
    folder: Path
    evaluations: Mapping[PhaseName, int]
    lost_after: float
    until: float | None


def work(desk: Desk, terms: Terms) -> None:
    opened = open_storage(terms.storage)
    plan = kept_plan(opened, terms.name)

    def begun(trial: Path) -> None:
        desk.say(trial.name)
        write_to(trial / OUTPUT)

    phases = Phases(opened, plan, terms.evaluations, terms.lost_after)
    Worker(phases, InFolder(plan, terms.folder, begun), lambda: desk.stopping, terms.until).work()


# ---------------------------------------------------------------------------------------------------------------------
# the parent's view


@dataclass
class Board:
    """Reads the storage now and then, shows what has changed, and keeps the files up to date."""

    phases: Phases
    folder: Path
    pace: Pace
    summary: dict[str, Any] | None = None
    _ledgers: dict[PhaseName, Ledger] = field(default_factory=dict)
    _count: int = -1  # trials ended, at the last look
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self.display = SearchDisplay(self.pace.quiet)

    def begin(self) -> None:
        """What ended before is not news."""
        self.display.known(self._look())

    def tick(self) -> None:
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self.display.show(self._look(), self.pace.jobs)

    def end(self) -> dict[str, Any]:
        summary = self._look(importance=True)
        self.display.show(summary, self.pace.jobs)
        return summary

    def _look(self, importance: bool = False) -> dict[str, Any]:
        """A phase whose turn has not come has no slots yet."""
        plan = self.phases.plan
        ended: dict[PhaseName, Sequence[Ended]] = {}
        running: dict[PhaseName, Sequence[Running]] = {}
        for phase in phases_of(plan):
            if phase not in self._ledgers:
                self._ledgers[phase] = self.phases.ledger(phase, ended)
            ledger = self._ledgers[phase]
            ended[phase], running[phase] = ledger.ended(), ledger.running()
            if len(ended[phase]) < len(ledger.slots):
                break
        count = sum(map(len, ended.values()))
        known = {phase: len(ledger.slots) for phase, ledger in self._ledgers.items()}
        due = {**owed(plan), **known}
        self.summary = summarize(plan, ended, running, due, importance=importance, before=self.summary)
        if importance or count != self._count:
            write_files(plan, self.summary, self.folder)
        self._count, self._looked = count, time.monotonic()
        return self.summary
