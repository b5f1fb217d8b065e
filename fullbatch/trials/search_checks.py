"""What cannot work is said before the first trial starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from fullbatch.assembly import pick_device
from fullbatch.config.data import Data
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.data.loader import open_pool
from fullbatch.evaluation.tasks import check_captions_unneeded, check_tasks, tasks_of
from fullbatch.models.build import build_model
from fullbatch.training.stages import Stages
from fullbatch.trials.comparison_checks import stages_of
from fullbatch.trials.phases import phases_of, tries_all_pairs
from fullbatch.trials.plan_parts import CHOSEN
from fullbatch.trials.search_plan import PRUNED, SearchPlan
from fullbatch.trials.slots import PhaseName
from fullbatch.trials.space import Dimension

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Checked:
    """What is known of a search before it starts.

    steps         of a run of each phase, the longest
    evaluations   of such a run, the fewest
    """

    steps: Mapping[PhaseName, int]
    evaluations: Mapping[PhaseName, int]


def check_search(plan: SearchPlan) -> Checked:
    """Does every phase have data, tasks, a model, a device, metrics and enough steps, at every end of the space?"""
    phases = phases_of(plan)
    check_metrics(plan, phases)
    check_judges(plan, phases)
    warn_of_grid(plan)
    runs = _Runs({}, set(), set())
    steps: dict[PhaseName, int] = {}
    evaluations: dict[PhaseName, int] = {}
    for phase in phases:
        for params in tried(plan, phase):
            try:
                config = plan.config(phase, params, None, "runs", "checked")
                stages = runs.check(config)
            except ValueError as error:
                raise ValueError(f"{_words(phase, params)}: {error}") from None
            steps[phase] = max(stages.total, steps.get(phase, 0))
            evaluations[phase] = min(evaluations_of(config, stages), evaluations.get(phase, stages.total))
    check_pruning(plan, evaluations)
    return Checked(steps, evaluations)


@dataclass(frozen=True)
class _Runs:
    """Configs are checked one by one; what many of them share is opened once."""

    epochs: dict[Data, int]
    tasks: set[tuple[str, ...]]
    models: set[tuple[Model, int | None]]

    def check(self, config: RunConfig) -> Stages:
        data, tasks, model = config.data, tasks_of(config), replace(config.model, embed_dim=None)
        if data not in self.epochs:
            self.epochs[data] = open_pool(data)[1].epoch_size
        if tasks not in self.tasks:
            if config.model.view_tower is not None:
                check_captions_unneeded(tasks)
            check_tasks(tasks)
            self.tasks.add(tasks)
        if (model, data.image_size) not in self.models:
            pick_device(config)
            _check_model(config)
            self.models.add((model, data.image_size))
        return stages_of(config, self.epochs[data])


def _check_model(config: RunConfig) -> None:
    """Its shapes without its memory; weights are the first trial's to load, but for a file's, which may not fit."""
    if config.model.pretrained is None:
        local = isinstance(config.model.image_weights, str)
        weights = config.model.image_weights if local else False
        with nullcontext() if local else torch.device("meta"):
            build_model(replace(config.model, image_weights=weights, text_weights=False), config.data.image_size)


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
