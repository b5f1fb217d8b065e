"""A search from its plan to its answer, in a folder; docs/how-to/search.md says what each of its files is."""

from __future__ import annotations

import math
import shlex
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from typing_extensions import assert_never

from fullbatch.config.messages import reason_of
from fullbatch.config.tree import write_values
from fullbatch.data.durable import make_folder
from fullbatch.training.display import words_of
from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.training.run_folder import Folder, replace_text
from fullbatch.trials.checks import check_search
from fullbatch.trials.even import EvenSampler
from fullbatch.trials.phases import Ended, NoWinner, Running, Score, Slot, owed, slots_of
from fullbatch.trials.processes import OUTPUT, Pace, WorkerContext, WorkerPool, WorkersDie, last_line, print_to
from fullbatch.trials.progress import SearchDisplay, last_metrics
from fullbatch.trials.queue import Lease, SlotQueue
from fullbatch.trials.search_plan import PRUNED, Choices, Fine, PhaseName, Pruner, SearchPlan
from fullbatch.trials.search_summary import TRIALS, summarize, trial_name, write_files
from fullbatch.trials.storage import PLAN_FILE, StorageAway, keep_plan, kept_plan, naming, open_storage, remember
from fullbatch.trials.trial import CannotWork, Report, Trial

LOOK_EVERY = 2.0  # seconds between looks at the storage
POLL = 1.0  # seconds between looks for work while others finish a phase


def search(
    plan: SearchPlan,
    folder: Path,
    storage: str,
    pace: Pace,
    tell: Callable[[Mapping[str, Any]], None] = lambda summary: None,
) -> dict[str, Any]:
    """Begin, join or go on; the summary, as in search.json.  Where an error ends it, ``tell`` is given that before
    the error is raised."""
    until = pace.until()
    with naming(storage):
        opened = open_storage(storage, pace.lost_after)
        checked = check_search(plan)
        plan = keep_plan(opened, plan)
    make_folder(folder)
    remember(folder, storage)
    replace_text(folder / PLAN_FILE, write_values(plan.as_dict()))
    evaluations = dict(checked.evaluations)
    board = Board(PhaseQueues(opened, plan, evaluations), folder, pace, checked.steps)
    task = partial(
        work, storage=storage, name=plan.name, folder=folder, evaluations=evaluations, pace=pace, until=until
    )
    with how_to_go_on(folder, storage, pace.jobs):
        stopped: Interrupted | ValueError | None = None
        with board.display:
            board.display.known(board.look())  # what ended before is not news
            try:
                advice = f"Go on with: {resume_command(folder, pace.jobs)}"
                WorkerPool(pace.jobs, tick=board.tick, advice=advice, output=folder / OUTPUT).run(task)
            except (Interrupted, ValueError) as error:
                stopped = error
            summary = board.look(importance=True)
            board.display.show(summary)
        if isinstance(stopped, Interrupted):
            raise stopped
        if stopped is not None:
            tell(summary)
            if board.no_winner is None:
                raise stopped
            raise NoWinner(
                f"{str(board.no_winner).rstrip('.')}. What each of them said is in {folder / TRIALS}/*/{OUTPUT}. They "
                "are not tried again in this search: mend what is wrong, and begin anew with another --name."
            )
        return summary


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
        with naming(storage):
            yield
    except BrokenPipeError:  # nobody reads on
        raise
    except StorageAway as error:
        raise StorageAway(f"{error} {way}") from error
    except (CannotWork, WorkersDie) as error:
        raise type(error)(f"{str(error).rstrip('.')}. {way}") from error
    except OSError as error:
        raise OSError(f"{reason_of(error).rstrip('.')}. {way}") from error


# ---------------------------------------------------------------------------------------------------------------------
# one worker: it takes trials as long as there are any, phase by phase, whoever else does the same

MOST_RANDOM = 10  # trials before TPE has something to go by; in short searches a quarter of them


def sampler_of(plan: SearchPlan, phase: PhaseName, slot: Slot) -> BaseSampler:
    """Seeded by the slot: what it draws depends on what has ended and not on who draws it.

    Parameters are drawn together, those that go together in groups (a method's own settings with the method); trials
    under way count as bad ones, so that workers do not all try the same.
    """
    seed = zlib.crc32(f"{plan.seed} {phase} {slot.number}".encode())
    part = plan.phases[phase]
    if not isinstance(part, Choices | Fine):
        return RandomSampler(seed)  # nothing is left to it
    if isinstance(part, Choices) and part.sampler == "even":
        return EvenSampler(plan.seed, slot.number, len(list(plan.candidates)), part.trials)
    random = min(MOST_RANDOM, max(2, part.trials // 4))
    return TPESampler(n_startup_trials=random, multivariate=True, group=True, constant_liar=True, seed=seed)


def pruner_of(plan: SearchPlan, phase: PhaseName, evaluations: int) -> BasePruner:
    """``evaluations``: of a whole run of the phase."""
    first, factor = plan.pruner_start, plan.pruner_factor
    pruner: Pruner = plan.pruner if phase in PRUNED else "none"
    match pruner:
        case "none":
            return NopPruner()
        case "asha":
            return SuccessiveHalvingPruner(first, factor)
        case "hyperband":
            return HyperbandPruner(first, max(evaluations, first), factor)
        case "median":
            return MedianPruner(n_startup_trials=4, n_warmup_steps=first - 1)
        case _:
            assert_never(pruner)


# Trains the trial of a lease with these params and tells of its evaluations; asked of the last: is it to be given up?
Train = Callable[[PhaseName, Lease, Mapping[str, Any], Report, Callable[[], bool]], Score]


@dataclass(frozen=True)
class PhaseQueues:
    """The phases of a search in its storage."""

    storage: BaseStorage
    plan: SearchPlan
    evaluations: Mapping[PhaseName, int]  # of a whole run of each phase
    folder: Path | None = None  # of the search on this machine, for what its trials printed; None: not known

    def queue(self, phase: PhaseName, before: Mapping[PhaseName, Sequence[Ended]]) -> SlotQueue:
        def printed(slot: Slot) -> str:
            trial = trial_name(phase, slot.number)
            return "" if self.folder is None else last_line(self.folder / TRIALS / trial / OUTPUT)

        return SlotQueue(
            self.storage,
            f"{self.plan.name}/{phase}",
            ["maximize" if more else "minimize" for more in self.plan.maximise],
            slots_of(phase, self.plan, before),
            pruner=pruner_of(self.plan, phase, self.evaluations[phase]),
            last_line=printed,
        )


def work_off(
    queues: PhaseQueues, train: Train, stopping: Callable[[], bool] = lambda: False, until: float = math.inf
) -> None:
    """To the end of the last phase, or until it is told to stop; the trial under way is then saved and released.  After
    ``until``, by this machine's monotonic clock, no trial is begun."""
    ended: dict[PhaseName, Sequence[Ended]] = {}
    for phase in queues.plan.phases:
        queue = queues.queue(phase, ended)
        while not queue.complete:
            if stopping() or time.monotonic() > until:
                return
            lease = queue.take(partial(sampler_of, queues.plan, phase))
            if lease is None:
                time.sleep(POLL)
            else:
                _train_leased(queues.plan, phase, queue, lease, train, stopping)
        ended[phase] = queue.ended()


def _train_leased(
    plan: SearchPlan, phase: PhaseName, queue: SlotQueue, lease: Lease, train: Train, stopping: Callable[[], bool]
) -> None:
    """What it raises beside these ends the process, and so the trial counts as one whose process died."""
    try:
        params = lease.begin(lambda trial: plan.suggest(phase, trial, lease.slot.params))
        if params is None:
            return
        score = _known(queue, lease, params)
        if score is None:
            score = train(phase, lease, params, lease.report, lambda: lease.lost or stopping())
    except Abandoned:
        lease.release()
        return
    except StorageAway:  # nor can the lease be given back; the others will see it
        raise
    except (Interrupted, CannotWork, OSError):
        lease.release()
        raise
    lease.end(score)


def _known(queue: SlotQueue, lease: Lease, params: Mapping[str, Any]) -> Score | None:
    """The same settings and the same seed once more would give the same numbers: a sampler may draw so."""
    for other in queue.ended():
        if other.params == params and other.slot.seed == lease.slot.seed and other.status != "failed":
            number = other.slot.number
            remark = f"the same settings as slot {number}, not trained again"
            return Score(other.status, other.values, error=remark, evaluations=other.evaluations, same_as=number)
    return None


@dataclass(frozen=True)
class InFolder:
    """Trains a trial as a run in a folder of the search's.  What a worker's process prints meanwhile stands there too,
    also why it dies; else in the search's."""

    plan: SearchPlan
    folder: Path
    worker: WorkerContext | None = None  # None: it prints where it always does

    def __call__(
        self, phase: PhaseName, lease: Lease, params: Mapping[str, Any], report: Report, given_up: Callable[[], bool]
    ) -> Score:
        plan, runs, name = self.plan, self.folder / TRIALS, trial_name(phase, lease.slot.number)
        if self.worker is not None:
            self.worker.say(name)
            print_to(runs / name / OUTPUT)
        try:
            try:
                config = plan.config(phase, params, lease.slot.seed, str(runs), name)
            except ValueError as error:  # two settings that do not go together
                return Score("failed", error=str(error))
            measures = plan.measures_in(phase)
            return Trial(config, measures, report, plan.patience, plan.take, lambda: lease.lost, given_up).run()
        except (Abandoned, Interrupted):
            raise
        except Exception:
            traceback.print_exc()
            raise
        finally:
            if self.worker is not None:
                print_to(self.folder / OUTPUT)


def work(
    worker: WorkerContext,
    storage: str,
    name: str,
    folder: Path,
    evaluations: Mapping[PhaseName, int],
    pace: Pace,
    until: float = math.inf,
) -> None:
    """A worker's process; what it is not told is in the storage."""
    with how_to_go_on(folder, storage, pace.jobs):
        opened = open_storage(storage, pace.lost_after)
        plan = kept_plan(opened, name)
        train = InFolder(plan, folder, worker)
        work_off(PhaseQueues(opened, plan, evaluations, folder), train, lambda: worker.stopping, until)


@dataclass
class Board:
    """Reads the storage now and then, shows what has changed, and keeps the files up to date."""

    queues: PhaseQueues
    folder: Path
    pace: Pace
    steps: Mapping[PhaseName, int] = field(default_factory=dict)  # of a phase's longest trial
    no_winner: NoWinner | None = None  # why the phases end early
    _opened: dict[PhaseName, SlotQueue] = field(default_factory=dict)
    _count: int = -1  # trials ended, at the last look
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self.display = SearchDisplay(self.pace.quiet)

    def tick(self) -> None:
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self.display.show(self.look(), self._steps)

    def _steps(self, phase: PhaseName, slot: int) -> str:
        """How far a trial under way is; empty where it has not begun, or on another machine."""
        line = last_metrics(Folder(self.folder / TRIALS / trial_name(phase, slot)).metrics)
        total = f" of up to {self.steps[phase]:,}" if phase in self.steps else ""
        return "" if line is None else f"step {line['step']:,}{total}, {words_of(line)}"

    def look(self, importance: bool = False) -> dict[str, Any]:
        """The summary.  A phase whose turn has not come has no slots yet."""
        plan = self.queues.plan
        ended: dict[PhaseName, Sequence[Ended]] = {}
        running: dict[PhaseName, Sequence[Running]] = {}
        for phase in plan.phases:
            if phase not in self._opened:
                try:
                    self._opened[phase] = self.queues.queue(phase, ended)
                except NoWinner as error:
                    self.no_winner = error
                    break
            ended[phase], running[phase] = self._opened[phase].progress()
            if len(ended[phase]) < len(self._opened[phase].slots):
                break
        count = sum(map(len, ended.values()))
        due = {**owed(plan), **{phase: len(queue.slots) for phase, queue in self._opened.items()}}
        summary = summarize(plan, ended, running, due, importance=importance, jobs=self.pace.jobs)
        if importance or count != self._count:
            write_files(plan, summary, self.folder)
        self._count, self._looked = count, time.monotonic()
        return summary
