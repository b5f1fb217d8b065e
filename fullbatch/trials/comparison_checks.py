"""What cannot work is said before the first run starts; and a folder keeps the plan it was begun with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullbatch.assembly import pick_device
from fullbatch.config.data import Data
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.data.loader import open_pool
from fullbatch.data.periods import Periods
from fullbatch.evaluation.tasks import check_tasks, tasks_of
from fullbatch.training.run_folder import Folder
from fullbatch.training.schedule import phases
from fullbatch.training.stages import Stages
from fullbatch.trials.comparison_plan import Plan
from fullbatch.trials.workers import Job


def check_jobs(jobs: Sequence[Job]) -> dict[str, int]:
    """Are there data, tasks and a device for all of them, and are they long enough?  Each run's number of steps."""
    epochs: dict[Data, int] = {}
    steps = {}
    checked: set[tuple[str, ...]] = set()
    for job in jobs:
        data, tasks = job.config.data, tasks_of(job.config)
        if data not in epochs:
            epochs[data] = open_pool(data)[1].epoch_size
        if tasks not in checked:
            check_tasks(tasks)
            checked.add(tasks)
        pick_device(job.config)
        try:
            steps[job.name] = stages_of(job.config, epochs[data]).total
        except ValueError as error:
            raise ValueError(f"The run {job.name}: {error}") from None
    return steps


def stages_of(config: RunConfig, epoch_size: int) -> Stages:
    """The run's steps; ValueError where the data are too few for a batch, or the steps for their schedule."""
    training = config.training
    if training.batch_size > epoch_size:
        raise ValueError(
            f"a batch of {training.batch_size} is more than the {epoch_size} samples of an epoch; "
            f"use at most {epoch_size}, or more data."
        )
    periods = Periods(config.selection, epoch_size // training.batch_size)
    stages = Stages.of(config, periods.trained_batches)
    phases(config.schedule, stages.training, stages.steps_per_epoch)
    return stages


def check_measured(jobs: Sequence[Job], tasks: Sequence[str]) -> None:
    """Numbers are compared only where all have them."""
    for job in jobs:
        missing = [task for task in tasks if task not in tasks_of(job.config)]
        if missing:
            raise ValueError(
                f"The run {job.name} does not measure {missing[0]}, which others do; give all the same `evaluate`."
            )


def check_same_time(before: Plan, now: Plan, folder: str) -> None:
    """Runs of equal time and runs of equal samples do not belong into one table."""
    if before.equal_time != now.equal_time:
        raise ValueError(
            f"{folder} holds a comparison with another budget: equal_time was {before.equal_time!r} and is now "
            f"{now.equal_time!r}. {_otherwise(folder)}"
        )


def check_begun(jobs: Sequence[Job]) -> None:
    """A run that was begun counts only as what it was begun as; asked when the samples of every run are known."""
    for job in jobs:
        there = Folder(job.folder)
        change = first_difference(to_dict(there.read_config()), to_dict(job.config)) if there.config.is_file() else ""
        if change:
            raise ValueError(
                f"{there.config} is of another run than this plan's: {change}. Take another --name, or remove "
                f"{there.path}, and it is trained anew."
            )


def check_same_plan(before: Sequence[Job], now: Sequence[Job], folder: str) -> None:
    """A comparison may grow (more methods, batch sizes, seeds); a run that is there may not change or vanish."""
    wanted = {job.name: job.config for job in now}
    for job in before:
        if job.name not in wanted:
            raise ValueError(
                f"{folder} holds a comparison with the run {job.name}, which this plan has not. {_otherwise(folder)}"
            )
        change = first_difference(to_dict(job.config), to_dict(wanted[job.name]))
        if change:
            raise ValueError(
                f"{folder} holds a comparison with another plan: in the run {job.name} {change}. {_otherwise(folder)}"
            )


def _otherwise(folder: str) -> str:
    return f"Take another --name, or go on as it was with `fullbatch compare --resume {folder}`."


# What may differ between two goes at the same comparison: it does not touch what a run learns.
_FREE = (
    "run.runs", "run.quiet", "run.keep", "run.save_every", "run.save_minutes", "run.tensorboard", "run.wandb",
    "data.workers",
)  # fmt: skip


def first_difference(before: Any, now: Any, where: str = "") -> str:
    """Between two configs as dictionaries, in words; "" where they are the same run."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            found = first_difference(before.get(key), now.get(key), f"{where}.{key}".strip("."))
            if found:
                return found
        return ""
    return f"{where} was {before!r} and is now {now!r}" if before != now and where not in _FREE else ""
