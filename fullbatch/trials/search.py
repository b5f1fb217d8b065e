"""A search from its plan to its answer.

searches/NAME/
  search.yaml     the plan
  study.journal   the storage, where --study names no other
  storage.txt     else: which one
  trials/         an ordinary run folder each, with trial.json (its evaluations, how it ended) and output.txt
  search.json     everything in numbers; rewritten whenever a trial ends
  search.csv      the ranked table
  best.yaml       the winner's config
  report.html     the page
  output.txt      what the workers said between trials
"""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError

from fullbatch.config.shown import without_password
from fullbatch.config.tree import write_values
from fullbatch.training.display import words_of
from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.training.run_folder import Folder, replace_text
from fullbatch.trials.comparison_progress import last_line
from fullbatch.trials.crew import Crew, Desk, WorkersDie
from fullbatch.trials.folder import PLAN, remember
from fullbatch.trials.ledger import LOST_AFTER, Ledger, Running
from fullbatch.trials.phases import NoWinner, owed, phases_of
from fullbatch.trials.processes import OUTPUT, write_to
from fullbatch.trials.search_checks import check_search
from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.search_progress import SearchDisplay
from fullbatch.trials.search_summary import TRIALS, summarize, trial_name, write_files
from fullbatch.trials.slots import Ended, PhaseName
from fullbatch.trials.storage import StorageAway, open_storage
from fullbatch.trials.study import keep_plan, kept_plan
from fullbatch.trials.trial import CannotWork
from fullbatch.trials.worker import InFolder, Phases, Worker

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


def search(
    plan: SearchPlan,
    folder: Path,
    storage: str,
    pace: Pace,
    tell: Callable[[Mapping[str, Any]], None] = lambda summary: None,
) -> dict[str, Any]:
    """Begin, join or go on; the summary, as in search.json.

    tell   is given the summary where an error ends the search, before it is raised
    """
    began = time.monotonic()
    opened = open_storage(storage)
    checked = check_search(plan)
    plan = keep_plan(opened, plan)
    folder.mkdir(parents=True, exist_ok=True)
    remember(folder, storage)
    replace_text(folder / PLAN, write_values(plan.as_dict()))
    until = None if pace.stop_after is None else began + 60.0 * pace.stop_after
    terms = Terms(storage, plan.name, folder, dict(checked.evaluations), pace.lost_after, until, pace.jobs)
    board = Board(Phases(opened, plan, checked.evaluations, pace.lost_after), folder, pace, checked.steps)
    with how_to_go_on(folder, storage, pace.jobs):
        stopped: Interrupted | ValueError | None = None
        with board.display:
            board.begin()
            try:
                Crew(pace.jobs, tick=board.tick, output=folder / OUTPUT).work(work, terms)
            except (Interrupted, ValueError) as error:
                stopped = error
            summary = board.end()
        if isinstance(stopped, Interrupted):
            raise Interrupted(stopped.exit_code - 128, f"Go on with: {resume_command(folder, pace.jobs)}") from None
        if stopped is not None:
            tell(summary)
            raise stopped if board.no_winner is None else _without_winner(board.no_winner, folder)
        return summary


def _without_winner(error: NoWinner, folder: Path) -> NoWinner:
    return NoWinner(
        f"{str(error).rstrip('.')}. What each of them said is in {folder / TRIALS}/*/{OUTPUT}. They are not tried "
        "again in this search: mend what is wrong, and begin anew with another --name."
    )


def resume_command(folder: Path, jobs: int) -> str:
    """
    >>> resume_command(Path("searches/a b"), 4)
    "fullbatch search --resume 'searches/a b' --jobs 4"
    """
    return f"fullbatch search --resume {shlex.quote(str(folder))}{f' --jobs {jobs}' if jobs > 1 else ''}"


@contextmanager
def how_to_go_on(folder: Path, storage: str, jobs: int = 1) -> Iterator[None]:
    """What stops a search though nothing is wrong with its plan: the message ends with the way on."""
    way = f"Once that is mended, go on with: {resume_command(folder, jobs)}"
    try:
        yield
    except BrokenPipeError:  # nobody reads on
        raise
    except (StorageAway, StorageInternalError) as error:
        raise StorageAway(f"{without_password(storage)}: {error} {way}") from error
    except (CannotWork, WorkersDie) as error:
        raise type(error)(f"{str(error).rstrip('.')}. {way}") from error
    except OSError as error:
        raise OSError(f"{error}. {way}") from error


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
    jobs: int = 1


def work(desk: Desk, terms: Terms) -> None:
    with how_to_go_on(terms.folder, terms.storage, terms.jobs):
        opened = open_storage(terms.storage)
        plan = kept_plan(opened, terms.name)
        phases = Phases(opened, plan, terms.evaluations, terms.lost_after, terms.folder)
        train = InFolder(plan, terms.folder, partial(_in_its_file, desk, terms.folder))
        Worker(phases, train, lambda: desk.stopping, terms.until).work()


@contextmanager
def _in_its_file(desk: Desk, search: Path, trial: Path) -> Iterator[None]:
    """What is said in a trial stands in the trial's folder, also why its process dies; else in the search's."""
    desk.say(trial.name)
    write_to(trial / OUTPUT)
    try:
        yield
    except (Abandoned, Interrupted):
        raise
    except Exception:
        traceback.print_exc()
        raise
    finally:
        write_to(search / OUTPUT)


# ---------------------------------------------------------------------------------------------------------------------
# the parent's view


@dataclass
class Board:
    """Reads the storage now and then, shows what has changed, and keeps the files up to date."""

    phases: Phases
    folder: Path
    pace: Pace
    steps: Mapping[PhaseName, int] = field(default_factory=dict)  # of a phase's longest trial
    summary: dict[str, Any] | None = None
    no_winner: NoWinner | None = None  # why the phases end early
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
            self.display.show(self._look(), self._steps)

    def end(self) -> dict[str, Any]:
        summary = self._look(importance=True)
        self.display.show(summary)
        return summary

    def _steps(self, phase: PhaseName, slot: int) -> str:
        """How far a trial under way is; empty where it has not begun, or on another machine."""
        line = last_line(Folder(self.folder / TRIALS / trial_name(phase, slot)).metrics)
        total = f" of up to {self.steps[phase]:,}" if phase in self.steps else ""
        return "" if line is None else f"step {line['step']:,}{total}, {words_of(line)}"

    def _look(self, importance: bool = False) -> dict[str, Any]:
        """A phase whose turn has not come has no slots yet."""
        plan = self.phases.plan
        ended: dict[PhaseName, Sequence[Ended]] = {}
        running: dict[PhaseName, Sequence[Running]] = {}
        for phase in phases_of(plan):
            if phase not in self._ledgers:
                try:
                    self._ledgers[phase] = self.phases.ledger(phase, ended)
                except NoWinner as error:
                    self.no_winner = error
                    break
            ledger = self._ledgers[phase]
            ended[phase], running[phase] = ledger.ended(), ledger.running()
            if len(ended[phase]) < len(ledger.slots):
                break
        count = sum(map(len, ended.values()))
        known = {phase: len(ledger.slots) for phase, ledger in self._ledgers.items()}
        due = {**owed(plan), **known}
        self.summary = summarize(
            plan, ended, running, due, importance=importance, before=self.summary, jobs=self.pace.jobs
        )
        if importance or count != self._count:
            write_files(plan, self.summary, self.folder)
        self._count, self._looked = count, time.monotonic()
        return self.summary
