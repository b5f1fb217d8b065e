"""What cannot work is said before the first run starts; and a folder keeps the plan it was begun with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from fullbatch.assembly import check_packages, pick_device
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.data.loader import open_pool
from fullbatch.evaluation.tasks import check_captions_unneeded, check_tasks, tasks_of
from fullbatch.models.build import build_model
from fullbatch.selection.periods import Periods
from fullbatch.training.optimizer import phases as check_schedule
from fullbatch.training.run_folder import Folder, with_choices_of
from fullbatch.training.stages import Stages
from fullbatch.trials.comparison_plan import Plan
from fullbatch.trials.phases import tries_all_pairs
from fullbatch.trials.search_plan import CHOSEN, PRUNED, PhaseName, SearchPlan
from fullbatch.trials.space import Dimension

log = logging.getLogger("fullbatch")


@contextmanager
def _about(subject: str) -> Iterator[None]:
    """An error begins with what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from None


class _Opened:
    """Configs are checked one by one; what many of them share is opened once."""

    def __init__(self) -> None:
        self._epoch_size = cache(lambda data: open_pool(data)[1].epoch_size)
        self._check_tasks = cache(check_tasks)
        self._check_model = cache(_check_model)

    def stages(self, config: RunConfig, with_model: bool = False) -> Stages:
        """The run's steps; ValueError where there are no data, tasks, device or model for it, or too few of them."""
        check_packages(config)
        epoch_size = self._epoch_size(config.data)
        if with_model and config.model.view_tower is not None:
            check_captions_unneeded(tasks_of(config))
        self._check_tasks(tasks_of(config))
        pick_device(config)
        if with_model:
            self._check_model(replace(config.model, embed_dim=None), config.data.image_size)
        batch_size = config.training.batch_size
        if batch_size > epoch_size:
            raise ValueError(
                f"a batch of {batch_size} is more than the {epoch_size} samples of an epoch; use at most {epoch_size}, "
                "or more data."
            )
        stages = Stages.of(config, Periods(config.selection, epoch_size // batch_size).trained_batches)
        check_schedule(config.schedule, stages.training, stages.steps_per_epoch)
        return stages


def _check_model(model: Model, image_size: int | None) -> None:
    """Its shapes without its memory; weights are the first trial's to load, but for a file's, which may not fit."""
    if model.pretrained is None:
        local = isinstance(model.image_weights, str)
        weights = model.image_weights if local else False
        with nullcontext() if local else torch.device("meta"):
            build_model(replace(model, image_weights=weights, text_weights=False), image_size)


def check_runs(configs: Sequence[RunConfig]) -> dict[str, int]:
    """Are there data, tasks and a device for all of them, and are they long enough?  Each run's number of steps.
    Numbers are compared, so all measure what the first does."""
    opened, steps = _Opened(), {}
    for config in configs:
        name = config.run.name
        with _about(f"The run {name}"):
            steps[name] = opened.stages(config).total
        if missing := [task for task in tasks_of(configs[0]) if task not in tasks_of(config)]:
            raise ValueError(
                f"The run {name} does not measure {missing[0]}, which others do; give all the same `evaluate`."
            )
    return steps


def check_begun(configs: Sequence[RunConfig]) -> None:
    """A run that was begun counts only as what it was begun as; asked when the samples of every run are known."""
    for config in configs:
        there = Folder.of(config)
        before = there.read_config() if there.begun else config
        if change := first_difference(to_dict(before), to_dict(with_choices_of(before, config))):
            raise ValueError(
                f"{there.config} is of another run than this plan's: {change}. Take another --name, or remove "
                f"{there.path}, and it is trained anew."
            )


def check_same_plan(before: Plan, now: Plan, folder: Path) -> None:
    """A comparison may grow (more methods, batch sizes, seeds); a run that is there may not change or vanish, and runs
    of equal time and runs of equal samples do not belong into one table."""
    held = ""
    if before.equal_time != now.equal_time:
        held = f"another budget: equal_time was {before.equal_time!r} and is now {now.equal_time!r}"
    wanted = {config.run.name: config for config in now.configs(folder)}
    for config in before.configs(folder):
        name = config.run.name
        if name not in wanted:
            held = held or f"the run {name}, which this plan has not"
        elif change := first_difference(to_dict(config), to_dict(wanted[name])):
            held = held or f"another plan: in the run {name} {change}"
    if held:
        raise ValueError(
            f"{folder} holds a comparison with {held}. Take another --name, or go on as it was with `fullbatch compare "
            f"--resume {folder}`."
        )


# What may differ between two goes at the same comparison: it does not touch what a run learns.
_FREE = (
    "run.runs", "run.quiet", "run.keep", "run.save_every", "run.save_minutes", "run.tensorboard", "run.wandb",
    "data.workers",
)  # fmt: skip


def first_difference(before: Any, now: Any, where: str = "") -> str:
    """Between two configs as dictionaries, in words; "" where they are the same run."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys((*before, *now))
        changes = (first_difference(before.get(key), now.get(key), f"{where}.{key}".strip(".")) for key in keys)
        return next(filter(None, changes), "")
    return f"{where} was {before!r} and is now {now!r}" if before != now and where not in _FREE else ""


@dataclass(frozen=True)
class CheckedSearch:
    """What is known of a search before it starts."""

    steps: Mapping[PhaseName, int]  # of a run of each phase, the longest
    evaluations: Mapping[PhaseName, int]  # of such a run, the fewest


def check_search(plan: SearchPlan) -> CheckedSearch:
    """Does every phase have data, tasks, a model, a device, metrics and enough steps, at every end of the space?"""
    opened = _Opened()
    steps: dict[PhaseName, int] = {}
    evaluations: dict[PhaseName, int] = {}
    for phase in plan.phases:
        with _about(f"The phase {phase!r}"):
            plan.measures_in(phase)
            _check_judges(plan, phase)
    _warn_of_grid(plan)
    for phase in plan.phases:
        for params in tried(plan, phase):
            with _about(_words(phase, params)):
                config = plan.config(phase, params, None, "runs", "checked")
                stages = opened.stages(config, with_model=True)
            steps[phase] = max(stages.total, steps.get(phase, 0))
            evaluations[phase] = min(_evaluations_of(config, stages), evaluations.get(phase, stages.total))
    _check_pruning(plan, evaluations)
    return CheckedSearch(steps, evaluations)


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
        for (first, of_first), (second, of_second) in combinations(dimensions.items(), 2):
            for value, other in product((of_first.ends[0], of_first.ends[-1]), (of_second.ends[0], of_second.ends[-1])):
                yield {**chosen, first: value, second: other}
    if phase == "finals":
        assert plan.finals is not None
        yield from ({"method": method} for method in plan.finals.baselines)


def _reaching(plan: SearchPlan, phase: PhaseName, method: str, optimizer: str) -> dict[str, Dimension]:
    """Dimensions whose values a trial of the phase may have: what was chosen before comes along."""
    phases = list(plan.phases)
    dimensions: dict[str, Dimension] = {}
    for name in phases[: phases.index(phase) + 1]:
        dimensions |= plan.dimensions(name, method, optimizer)
    kept = plan.carried(phase, {"method": method, "optimizer": optimizer, **dimensions})
    return {key: dimension for key, dimension in dimensions.items() if key in kept}


def _words(phase: PhaseName, params: Mapping[str, Any]) -> str:
    settings = "".join(f", {name} = {value}" for name, value in params.items() if name not in CHOSEN)
    who = f"{params['method']} with {params['optimizer']}" if "optimizer" in params else f"baseline {params['method']}"
    return f"The phase {phase!r}, {who}{settings}"


def _warn_of_grid(plan: SearchPlan) -> None:
    pairs = len(list(plan.candidates))
    if tries_all_pairs(plan) and pairs > 1:
        log.warning(
            "the phase 'choices' is a grid: it tries each of %d pairs once, and leaves nothing to the sampler; for a "
            "Bayesian one name a dimension in choices.over, such as lr, or ask for fewer trials",
            pairs,
        )


def _check_judges(plan: SearchPlan, phase: PhaseName) -> None:
    """What a trial is judged by is the plan's to say."""
    settings = plan.config(phase, {"method": plan.methods[0]}, None, "", "").evaluation
    for name, instead in (("keep_best", "`metrics` and `take`"), ("patience", "`patience`")):
        if getattr(settings, name) is not None:
            raise ValueError(f"{name} must be left out of a trial; the plan has {instead}.")


def _evaluations_of(config: RunConfig, stages: Stages) -> int:
    """How often a run is measured, its end included."""
    if not tasks_of(config):
        return 0
    if config.evaluation.evaluations is not None:
        return min(config.evaluation.evaluations, stages.training)
    every = config.evaluation.evaluate_every * stages.steps_per_epoch
    return -(-stages.training // every) if every else 1


def _check_pruning(plan: SearchPlan, evaluations: Mapping[PhaseName, int]) -> None:
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
    most = max(evaluations.values())
    if plan.patience is not None and most <= plan.patience + 1:
        raise ValueError(
            f"patience {plan.patience} can end no run early, since runs have at most {most} evaluation(s); {how}, "
            "or leave patience out."
        )
