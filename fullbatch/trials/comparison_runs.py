"""The runs of a comparison: each is trained by one process, from wherever it stands to its end.  A failure is a result.

Workers take the first run that is open and that no other process works on: a lock in its folder, which dies with its
process, says so.  So several commands, also on several machines with a shared disk, may work on one comparison.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, to_dict
from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.training.run_folder import Folder, alone_in, can_be_locked, replace_text
from fullbatch.training_run import train
from fullbatch.trials.comparison_plan import Job
from fullbatch.trials.processes import OUTPUT, Member, WorkerContext, WorkerPool, in_brackets, last_line, print_to
from fullbatch.trials.trial import forget_earlier_runs, out_of_memory

if TYPE_CHECKING:
    from fullbatch.trials.progress import RunsDisplay

Status = Literal["done", "failed", "open"]
OUTCOME = "outcome.json"
TRIES = 2  # of a run whose process dies
LOOK_EVERY = 1.0  # seconds between looks for a run that others have left


@dataclass(frozen=True)
class Outcome:
    """How a run ended; outcome.json in its folder."""

    status: Status
    error: str = ""  # of a failed one
    again: bool = False  # whether another try may end otherwise: a full disk, a killed process
    memory_gib: float | None = None  # the most main memory its process held, data workers not counted

    def write(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / OUTCOME, json.dumps(asdict(self), indent=1))


def outcome_of(run: Path) -> Outcome:
    """What is known of a run from its folder; "open" if it has not ended."""
    try:
        return Outcome(**json.loads((run / OUTCOME).read_text()))
    except (OSError, ValueError, TypeError):
        return Outcome("open")


# ---------------------------------------------------------------------------------------------------------------------
# the parent


def train_runs(jobs: Sequence[Job], side_by_side: int, watch: RunsDisplay, until: float | None = None) -> None:
    """All that are open, in this order; after a signal those under way are saved, and Interrupted is raised.

    until   the time, by this machine's monotonic clock, after which no run is begun; None: there is none
    """
    is_open = [job for job in jobs if outcome_of(job.folder).status == "open"]
    if not is_open or (until is not None and time.monotonic() > until):
        return
    by_name, under_way, deaths = {job.name: job for job in jobs}, set[str](), Counter[str]()

    def hear(message: tuple[str, Outcome | None]) -> None:
        name, outcome = message
        if outcome is None:
            under_way.add(name)
            watch.started(by_name[name])
        elif name in under_way:  # else another process has just ended it
            under_way.remove(name)
            watch.ended(by_name[name], outcome)

    def died(member: Member) -> None:
        """Of a signal of the user's, of too little memory, of a crash in a kernel."""
        name, _ = member.message or ("", None)
        if name not in under_way:
            return  # it died between two runs
        under_way.remove(name)
        job = by_name[name]
        deaths[name] += 1
        words = in_brackets(last_line(job.folder / OUTPUT)) if (member.process.exitcode or 0) > 0 else ""
        why = f"its process ended {member.ending}{words}"
        outcome = Outcome("open", f"{why}; it is tried again")
        if deaths[name] >= TRIES:
            outcome = Outcome("failed", f"{why}, {TRIES} times", again=True)
            with suppress(Abandoned), alone_in(job.folder, lambda: True):  # unless another command trains it
                outcome.write(job.folder)
        watch.ended(job, outcome)

    pool = WorkerPool(side_by_side, len(is_open), hear, died, watch.tick)
    pool.run(_work, _Terms({job.name: to_dict(job.config) for job in is_open}, side_by_side, until))


# ---------------------------------------------------------------------------------------------------------------------
# a worker


@dataclass(frozen=True)
class _Terms:
    configs: Mapping[str, dict[str, Any]]
    side_by_side: int
    until: float | None


def _work(worker: WorkerContext, terms: _Terms) -> None:
    """Until all runs have ended: another process that works on one may be about to stop, or to die."""
    jobs = [Job(name, from_dict(RunConfig, values)) for name, values in terms.configs.items()]
    if not can_be_locked(jobs[0].folder.parent):  # then each worker has runs of its own
        jobs = jobs[worker.place :: terms.side_by_side]
    while not worker.stopping and (terms.until is None or time.monotonic() < terms.until):
        if any(_tried(worker, job) for job in jobs):
            continue
        if all(outcome_of(job.folder).status != "open" for job in jobs):
            return
        time.sleep(LOOK_EVERY)


def _tried(worker: WorkerContext, job: Job) -> bool:
    """Whether it was for this process to train."""

    def begin() -> None:
        worker.say((job.name, None))
        print_to(job.folder / OUTPUT)

    if outcome_of(job.folder).status != "open":
        return False
    try:
        outcome = execute(job.config, lambda: True, begin)
    except Abandoned:  # another process is at work in it
        return False
    except Interrupted:
        worker.say((job.name, Outcome("open")))
        raise
    worker.say((job.name, outcome))
    return True


def execute(
    config: RunConfig, busy: Callable[[], bool] = lambda: False, begin: Callable[[], None] = lambda: None
) -> Outcome:
    """Train to the end, going on where the folder stands; Interrupted goes through to the caller.

    busy    asked while another process is at work in the folder; if it says so, ``Abandoned`` is raised
    begin   called before the training, if there is something to train
    """
    folder = Folder.of(config)
    with alone_in(folder.path, busy):
        known = outcome_of(folder.path)
        if known.status != "open":
            return known
        begin()
        forget_earlier_runs()
        try:
            train(config, folder.begun)
            outcome = Outcome("done", memory_gib=_most_memory())
        except Interrupted:
            raise
        except torch.OutOfMemoryError as error:
            outcome = Outcome("failed", out_of_memory(error), memory_gib=_most_memory())
        except OSError as error:
            outcome = Outcome("failed", str(error), again=True)
        except ValueError as error:
            outcome = Outcome("failed", str(error), memory_gib=_most_memory())
        outcome.write(folder.path)
        return outcome


def _most_memory() -> float:
    """GiB.  Without Linux's resettable mark it is the most of all runs of this process so far."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
