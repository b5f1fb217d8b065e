"""What cannot work is said before the first run starts; and a folder keeps the plan it was begun with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import torch

from fullbatch.assembly import pick_device
from fullbatch.config.data import Data
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import to_dict
from fullbatch.data.loader import open_pool
from fullbatch.evaluation.tasks import check_captions_unneeded, check_tasks, tasks_of
from fullbatch.models.build import build_model
from fullbatch.selection.periods import Periods
from fullbatch.training.run_folder import Folder
from fullbatch.training.schedule import phases as check_schedule
from fullbatch.training.stages import Stages
from fullbatch.trials.comparison_plan import Job, Plan
from fullbatch.trials.phases import phases_of, tries_all_pairs
from fullbatch.trials.search_plan import PRUNED, SearchPlan
from fullbatch.trials.slots import CHOSEN, PhaseName
from fullbatch.trials.space import Dimension

log = logging.getLogger("fullbatch")


# ---------------------------------------------------------------------------------------------------------------------
# comparisons


def check_jobs(jobs: Sequence[Job]) -> dict[str, int]:
    """Are there data, tasks and a device for all of them, and are they long enough?  Each run's number of steps."""
    opened, steps = _Opened(), {}
    for job in jobs:
        epoch_size = opened.epoch_size(job.config)
        opened.check_tasks(job.config)
        pick_device(job.config)
        try:
            steps[job.name] = stages_of(job.config, epoch_size).total
        except ValueError as error:
            raise ValueError(f"The run {job.name}: {error}") from None
    return steps


@dataclass
class _Opened:
    """Configs are checked one by one; what many of them share is opened once."""

    epochs: dict[Data, int] = field(default_factory=dict)
    tasks: set[tuple[str, ...]] = field(default_factory=set)
    models: set[tuple[Model, int | None]] = field(default_factory=set)

    def epoch_size(self, config: RunConfig) -> int:
        if config.data not in self.epochs:
            self.epochs[config.data] = open_pool(config.data)[1].epoch_size
        return self.epochs[config.data]

    def check_tasks(self, config: RunConfig) -> None:
        tasks = tasks_of(config)
        if tasks not in self.tasks:
            check_tasks(tasks)
            self.tasks.add(tasks)

    def check_model(self, config: RunConfig) -> None:
        """Its shapes without its memory; weights are the first trial's to load, but for a file's, which may not fit."""
        model, size = replace(config.model, embed_dim=None), config.data.image_size
        if (model, size) in self.models:
            return
        pick_device(config)
        if config.model.pretrained is None:
            local = isinstance(config.model.image_weights, str)
            weights = config.model.image_weights if local else False
            with nullcontext() if local else torch.device("meta"):
                build_model(replace(config.model, image_weights=weights, text_weights=False), size)
        self.models.add((model, size))


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
    check_schedule(config.schedule, stages.training, stages.steps_per_epoch)
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


# ---------------------------------------------------------------------------------------------------------------------
# searches


@dataclass(frozen=True)
class CheckedSearch:
    """What is known of a search before it starts.

    steps         of a run of each phase, the longest
    evaluations   of such a run, the fewest
    """

    steps: Mapping[PhaseName, int]
    evaluations: Mapping[PhaseName, int]


def check_search(plan: SearchPlan) -> CheckedSearch:
    """Does every phase have data, tasks, a model, a device, metrics and enough steps, at every end of the space?"""
    phases = phases_of(plan)
    check_metrics(plan, phases)
    check_judges(plan, phases)
    warn_of_grid(plan)
    opened = _Opened()
    steps: dict[PhaseName, int] = {}
    evaluations: dict[PhaseName, int] = {}
    for phase in phases:
        for params in tried(plan, phase):
            try:
                config = plan.config(phase, params, None, "runs", "checked")
                epoch_size = opened.epoch_size(config)
                if config.model.view_tower is not None:
                    check_captions_unneeded(tasks_of(config))
                opened.check_tasks(config)
                opened.check_model(config)
                stages = stages_of(config, epoch_size)
            except ValueError as error:
                raise ValueError(f"{_words(phase, params)}: {error}") from None
            steps[phase] = max(stages.total, steps.get(phase, 0))
            evaluations[phase] = min(evaluations_of(config, stages), evaluations.get(phase, stages.total))
    check_pruning(plan, evaluations)
    return CheckedSearch(steps, evaluations)


# ---------------------------------------------------------------------------------------------------------------------
# the ends of the space


def tried(plan: SearchPlan, phase: PhaseName) -> Iterator[dict[str, Any]]:
    """Params at the ends of every dimension, alone and two by two, for every candidate; and the baselines.

    A field's own rule shows at an end, a rule between two fields at a pair of ends.
    """
    seen = set()
    for method, optimizer in plan.candidates:
        chosen = {"method": method, "optimizer": optimizer}
        yield chosen
        dimensions = _reaching(plan, phase, method, optimizer)
        if (method, *dimensions) in seen:
            continue
        seen.add((method, *dimensions))
        for name, dimension in dimensions.items():
            yield from ({**chosen, name: value} for value in dimension.ends)
        for (one, ends), (other, other_ends) in combinations(dimensions.items(), 2):
            for value, another in product(_outer(ends), _outer(other_ends)):
                yield {**chosen, one: value, other: another}
    if phase == "finals":
        assert plan.finals is not None
        yield from ({"method": method} for method in plan.finals.baselines)


def _reaching(plan: SearchPlan, phase: PhaseName, method: str, optimizer: str) -> dict[str, Dimension]:
    """Dimensions whose values a trial of the phase may have: what was chosen before comes along."""
    found: dict[str, Dimension] = {}
    for name in phases_of(plan):
        found |= plan.dimensions(name, method, optimizer)
        if name == phase:
            break
    kept = plan.carried(phase, {"method": method, "optimizer": optimizer, **found})
    return {key: dimension for key, dimension in found.items() if key in kept}


def _outer(dimension: Dimension) -> Sequence[Any]:
    return dimension.ends[0], dimension.ends[-1]


def _words(phase: PhaseName, params: Mapping[str, Any]) -> str:
    settings = "".join(f", {name} = {value}" for name, value in params.items() if name not in CHOSEN)
    who = f"{params['method']} with {params['optimizer']}" if "optimizer" in params else f"baseline {params['method']}"
    return f"The phase {phase!r}, {who}{settings}"


# ---------------------------------------------------------------------------------------------------------------------
# what is measured, and when


def check_metrics(plan: SearchPlan, phases: Sequence[PhaseName]) -> None:
    """Every phase gives every metric."""
    for phase in phases:
        try:
            plan.measures_in(phase)
        except ValueError as error:
            raise ValueError(f"The phase {phase!r}: {error}") from None


def warn_of_grid(plan: SearchPlan) -> None:
    pairs = len(list(plan.candidates))
    if tries_all_pairs(plan) and pairs > 1:
        words = (
            "the phase 'choices' is a grid: it tries each of %d pairs once, and leaves nothing to the sampler; for a "
        )
        words += "Bayesian one name a dimension in choices.over, such as lr, or ask for fewer trials"
        log.warning(words, pairs)


def check_judges(plan: SearchPlan, phases: Sequence[PhaseName]) -> None:
    """What a trial is judged by is the plan's to say."""
    for phase in phases:
        settings = plan.config(phase, {"method": plan.methods[0]}, None, "", "").evaluation
        for name, instead in (("keep_best", "`metrics` and `take`"), ("patience", "`patience`")):
            if getattr(settings, name) is not None:
                raise ValueError(f"The phase {phase!r}: {name} must be left out of a trial; the plan has {instead}.")


def evaluations_of(config: RunConfig, stages: Stages) -> int:
    """How often a run is measured, its end included."""
    settings: Evaluation = config.evaluation
    if not tasks_of(config):
        return 0
    if settings.evaluations is not None:
        return min(settings.evaluations, stages.training)
    every = settings.evaluate_every * stages.steps_per_epoch
    return -(-stages.training // every) if every else 1


def check_pruning(plan: SearchPlan, evaluations: Mapping[PhaseName, int]) -> None:
    """What ends a trial early needs a number to go by, before the trial's end."""
    how = "set `evaluations` (how many in a run) or `evaluate_every` under `base` or in a phase's changes"
    if plan.pruner != "none":
        if len(plan.metrics) > 1:
            raise ValueError(
                f"SearchPlan.pruner must be 'none' with several metrics, got {plan.pruner!r}: no one number says who "
                "is behind."
            )
        most = max(evaluations[phase] for phase in PRUNED if phase in evaluations)
        if most <= plan.pruner_start:
            raise ValueError(
                f"pruner {plan.pruner!r} acts after {plan.pruner_start} evaluation(s) and before a run's last one, but "
                f"runs have at most {most}; {how}, or take `pruner: none`."
            )
    if plan.patience is not None:
        most = max(evaluations.values())
        if most <= plan.patience + 1:
            raise ValueError(
                f"patience {plan.patience} can end no run early, since runs have at most {most} evaluation(s); {how}, "
                "or leave patience out."
            )
