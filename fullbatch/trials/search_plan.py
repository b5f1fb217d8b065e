"""What is searched: methods x optimizers x a space of settings, in phases, from one base config.

A plan is a YAML file, a frozen tree, and JSON in the study's storage, so that other machines need no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fullbatch.config.checks import Checked, Count, at_least, require
from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import Method, named_method
from fullbatch.config.optimization import OPTIMIZERS, Optimizer
from fullbatch.config.run import RunConfig, layered
from fullbatch.config.tree import from_dict, merged, to_dict
from fullbatch.evaluation.metric_names import Metric, parse_metrics
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.trials.comparison_plan import Seeds
from fullbatch.trials.space import (
    Choice,
    Dimension,
    Place,
    Value,
    Whole,
    dimension_as_dict,
    dimension_from,
    known_to_one,
    place_of,
    resolved,
    searched_place,
    value_in,
)

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

PhaseName = Literal["choices", "grid", "fine", "finals"]
PHASES: tuple[PhaseName, ...] = ("choices", "grid", "fine", "finals")
CHOSEN = ("method", "optimizer")
Take = Literal["best", "last"]  # which evaluation's values are a trial's
Pruner = Literal["asha", "hyperband", "median", "none"]
Sampler = Literal["tpe", "even"]
_NAME = re.compile(r"\w([\w .+=@,-]*[\w+=@-])?")
PRUNED: tuple[PhaseName, ...] = ("choices", "fine")  # a grid and finals compare whole runs

# ---------------------------------------------------------------------------------------------------------------------
# The phases.  ``changes``: what trials of the phase have otherwise than the base, by names as in the space.


def all_different(values: Sequence[Any]) -> bool:
    return len(set(values)) == len(values)


@dataclass(frozen=True)
class Choices(Checked):
    """Phase 1, Bayesian: which method and which optimizer, in short trials."""

    trials: Count = 30
    over: tuple[str, ...] | None = CHOSEN  # what is chosen: these, and dimensions of the space; None: all of it
    changes: Mapping[str, Any] = field(default_factory=dict)
    cover: bool = True  # each method and each optimizer is tried once before the sampler chooses
    # "even": every pair equally often, the other dimensions spread over their ranges, whatever came out so far.  It
    # finds a winner later than "tpe", but importance then speaks of all of the space, not of where the sampler went.
    sampler: Sampler = "tpe"


@dataclass(frozen=True)
class Grid(Checked):
    """Phase 2: the best few methods x the best few optimizers of phase 1."""

    methods: Count = 3
    optimizers: Count = 3
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fine(Checked):
    """Phase 3, Bayesian: the settings of the winner, which is the first to be tried."""

    trials: Count = 30
    over: tuple[str, ...] | None = None  # dimensions of the space; None: all that the winner has
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finals(Checked):
    """Phase 4: the best few of the last phase again, with several seeds, beside methods as they come."""

    best: Count = 3
    seeds: Seeds = (0, 1, 2)
    baselines: tuple[str, ...] = ()  # methods with their defaults and the base's optimizer
    changes: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        require(bool(self.seeds), self, "seeds", "be different whole numbers of at least 0")
        for method in self.baselines:
            named_method(method)
        require(all_different(self.baselines), self, "baselines", "be different methods")


Phase = Choices | Grid | Fine | Finals


@dataclass(frozen=True)
class SearchPlan(Checked):
    """A search.  Names in the space, in ``defaults`` and in a phase's changes are those of flags and methods' settings;
    they count for whom they mean something."""

    name: str  # of the study and of its folder
    base: Mapping[str, Any]  # the config all trials share, in the groups of config.yaml
    metrics: tuple[str, ...]  # METRIC, "TASK METRIC", "mean(A, B, ...)" or "seconds"; several: a Pareto front
    methods: tuple[str, ...]  # the candidates
    optimizers: tuple[str, ...]  # the candidates
    space: Mapping[str, Dimension] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of candidates, where neither phase nor sampler decides
    choices: Choices = Choices()
    grid: Grid | None = Grid()  # None, as for the next two: there is no such phase
    fine: Fine | None = Fine()
    finals: Finals | None = Finals()
    pruner: Pruner = "none"  # what ends bad trials of phases 1 and 3 early, by their evaluations
    pruner_start: Count = 1  # evaluations of a trial before it may act
    pruner_factor: Annotated[int, at_least(2)] = 3  # of asha and hyperband: one in so many goes on at each rung
    patience: Count | None = None  # evaluations without improvement after which a trial ends; None: it does not
    take: Take = "best"  # a trial's value: of its best evaluation, or of its last
    seed: Annotated[int, at_least(0)] = 0  # of the samplers, and of the runs but for the finals

    def _check(self) -> None:
        named = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        require(named, self, "name", "be a plain folder name of letters, digits, spaces and . _ + = @ , -")
        for names in ("metrics", "methods", "optimizers"):
            require(bool(getattr(self, names)), self, names, "name at least one")
            require(all_different(getattr(self, names)), self, names, "all be different")
        for method in self.methods:
            named_method(method)
        for optimizer in self.optimizers:
            if optimizer not in OPTIMIZERS:
                guess = nearest(str(optimizer).lower(), OPTIMIZERS)
                raise ValueError(f"Unknown optimizer {optimizer!r}{guess} The optimizers are {listed(OPTIMIZERS)}.")
        self._check_names()
        self._check_over()
        self._check_something_to_choose()

    @property
    def candidates(self) -> Iterator[tuple[str, str]]:
        return product(self.methods, self.optimizers)

    @cached_property
    def phases(self) -> dict[PhaseName, Phase]:
        """Those that the plan has, in their order."""
        return {name: phase for name in PHASES if (phase := getattr(self, name)) is not None}

    def dimensions(self, phase: PhaseName, method: str, optimizer: str) -> dict[str, Dimension]:
        """What the sampler chooses for this method and this optimizer in this phase, by Optuna's names.

        What the phase's changes say is not searched in it.
        """
        part = self.phases[phase]
        if not isinstance(part, Choices | Fine):
            return {}
        fixed = {place.plain for place in self._changes(phase, method, optimizer)}
        return {
            place.key: dimension
            for place, dimension in self._resolved("space", self.space, method, optimizer).items()
            if place.plain not in fixed and (part.over is None or not {place.key, place.plain}.isdisjoint(part.over))
        }

    def suggest(self, phase: PhaseName, trial: BaseTrial, given: Mapping[str, Any]) -> dict[str, Any]:
        """All of a trial's params, by Optuna's names: ``given`` ones as they are, the others by the sampler.

        A given one that is a dimension is asked for as well, so that the sampler learns from it; the trial, which was
        enqueued with it, gives it back.
        """
        chosen = dict(given)
        if phase in ("grid", "finals"):
            return chosen  # a baseline has no optimizer of its own
        if phase == "choices":
            for name, among in zip(CHOSEN, (self.methods, self.optimizers), strict=True):
                chosen[name] = Choice(among).suggest(trial, name) if len(among) > 1 else among[0]
        for name, dimension in self.dimensions(phase, chosen["method"], chosen["optimizer"]).items():
            chosen[name] = dimension.suggest(trial, name)
        return chosen

    def params_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Params by their plain names: "lr" for "sgd.lr"."""
        return {key if key in CHOSEN else place_of(key, "params").plain: value for key, value in params.items()}

    def carried(self, phase: PhaseName, params: Mapping[str, Any]) -> dict[str, Any]:
        """Of a candidate's params what a trial of the phase has as well: not what the phase's changes settle, nor what
        says in another unit what they settle or what the phase searches."""
        settled = self._changes(phase, params["method"], params["optimizer"])
        searched = [place_of(key, "space") for key in self.dimensions(phase, params["method"], params["optimizer"])]
        gone = {place.plain for place in settled} | {rival for place in (*settled, *searched) for rival in place.rivals}
        gone -= {place.plain for place in searched}
        return {
            key: value for key, value in params.items() if key in CHOSEN or place_of(key, "params").plain not in gone
        }

    def values_at(self, phase: PhaseName, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a run with these params has on the phase's dimensions, by Optuna's names, where it lies in the range."""
        config = self.config(phase, params, None, "", "")
        values = {}
        for key, dimension in self.dimensions(phase, params["method"], params["optimizer"]).items():
            value = value_in(config, place_of(key, "space"))
            if dimension.holds(value):
                values[key] = int(value) if isinstance(dimension, Whole) else value
        return values

    def config(
        self, phase: PhaseName, params: Mapping[str, Any], seed: int | None, runs: str | Path, name: str
    ) -> RunConfig:
        """The config of a trial in the folder ``runs``/``name``.  Params without an optimizer are a baseline's."""
        method, candidate = params["method"], "optimizer" in params
        values: Mapping[str, Any] = layered(self.base, {"objective": {"method": method}})
        if candidate:
            values = merged(values, {"optimizer": {"optimizer": params["optimizer"]}})
        optimizer = values.get("optimizer", {}).get("optimizer", Optimizer().optimizer)
        if candidate:
            values = _over(values, self._resolved("defaults", self.defaults, method, optimizer))
        values = _over(values, self._changes(phase, method, optimizer))
        values = _over(values, {place_of(key, "params"): params[key] for key in params if key not in CHOSEN})
        config = from_dict(RunConfig, values)
        training = replace(config.training, seed=self.seed if seed is None else seed)
        return replace(config, training=training, run=replace(config.run, runs=str(runs), name=name))

    def _resolved(self, where: str, values: Mapping[str, Value], method: str, optimizer: str) -> dict[Place, Value]:
        return resolved(values, where, method, self._built[method], optimizer)

    def _changes(self, phase: PhaseName, method: str, optimizer: str) -> dict[Place, Any]:
        return self._resolved(f"{phase}.changes", self.phases[phase].changes, method, optimizer)

    @cached_property
    def _built(self) -> dict[str, Method]:
        """With the parts that the base has in place of the method's own."""
        names = dict.fromkeys((*self.methods, *(self.finals.baselines if self.finals else ())))
        overs = {name: layered(self.base, {"objective": {"method": name}}) for name in names}
        return {name: from_dict(RunConfig, values).objective.build() for name, values in overs.items()}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tasks_of(from_dict(RunConfig, self.base))

    @cached_property
    def measures(self) -> tuple[Metric, ...]:
        return parse_metrics(self.metrics, self.tasks)

    def measures_in(self, phase: PhaseName) -> tuple[Metric, ...]:
        """The same where the phase measures on other tasks: finals on data that nothing was chosen by."""
        tasks = tasks_of(self.config(phase, {"method": self.methods[0]}, None, "", ""))
        return self.measures if tasks == self.tasks else parse_metrics(self.metrics, tasks)

    @property
    def maximise(self) -> tuple[bool, ...]:
        return tuple(metric.maximise for metric in self.measures)

    def _check_names(self) -> None:
        """Every name is known, counts for somebody, and means one thing for everybody."""
        for key in self.space:
            searched_place(key)
        if "evaluate" in self.defaults:
            raise ValueError("defaults.evaluate cannot be set there: baselines are measured too; name it under `base`.")
        candidates = [(method, self._built[method], optimizer) for method, optimizer in self.candidates]
        usual = from_dict(RunConfig, self.base).optimizer.optimizer
        baselines = [(method, self._built[method], usual) for method in (self.finals.baselines if self.finals else ())]
        named: dict[str, Mapping[str, Any]] = {"space": self.space, "defaults": self.defaults}
        named |= {f"{name}.changes": phase.changes for name, phase in self.phases.items()}
        for where, values in named.items():
            known_to_one(values, where, [*candidates, *baselines] if where == "finals.changes" else candidates)
            for who in candidates:
                resolved(values, where, *who)

    def _check_over(self) -> None:
        """`over` names dimensions that the phase does not settle."""
        places = [searched_place(key) for key in self.space]
        plain = {name: place.plain for place in places for name in (place.key, place.plain)}
        for name, phase in self.phases.items():
            allowed = (*CHOSEN, *plain) if name == "choices" else tuple(plain)
            settled = [place_of(key, f"{name}.changes").plain for key in phase.changes]
            for asked in (phase.over or ()) if isinstance(phase, Choices | Fine) else ():
                if asked not in allowed:
                    more = " The winner keeps its method and its optimizer." if asked in CHOSEN else ""
                    raise ValueError(
                        f"{name}.over: the space has no {asked!r}{nearest(asked, allowed)} It has "
                        f"{listed(allowed) or 'no dimension'}.{more}"
                    )
                if plain.get(asked) in settled:
                    raise ValueError(f"{name}.over has {asked!r}, which {name}.changes sets; leave one out.")

    def _check_something_to_choose(self) -> None:
        """For whoever may win."""
        over = self.choices.over
        for one, names in zip(CHOSEN, (self.methods, self.optimizers), strict=True):
            if over is not None and one not in over and len(names) > 1:
                raise ValueError(f"choices.over must have {one!r}, since there are several: {listed(names)}.")
        most = max(len(self.methods), len(self.optimizers))
        if self.choices.cover and self.choices.trials < most:
            raise ValueError(
                f"choices.trials must be at least {most} to try each method and each optimizer once, got "
                f"{self.choices.trials}; or set `cover: false`."
            )
        pairs = list(self.candidates)
        if len(pairs) == 1 and not self.dimensions("choices", *pairs[0]):
            raise ValueError(
                "The space of the phase 'choices' is empty: there is one method, one optimizer and no dimension in "
                "choices.over; name more `methods` or `optimizers`, or dimensions of the `space`."
            )
        for method, optimizer in pairs if self.fine is not None else ():
            if not self.dimensions("fine", method, optimizer):
                raise ValueError(
                    f"The space of the phase 'fine' is empty for {method} with {optimizer}, which may win; add a "
                    "dimension that they have, such as lr, or leave the phase out with `fine: null`."
                )

    def as_dict(self) -> dict[str, Any]:
        """As the YAML file has it."""
        return {**to_dict(self), "space": {key: dimension_as_dict(ends) for key, ends in self.space.items()}}


def _over(values: Mapping[str, Any], over: Mapping[Place, Any]) -> dict[str, Any]:
    """All at once, so that two lengths of one kind are refused and do not hide each other."""
    grouped: dict[str, Any] = {}
    for place, value in over.items():
        grouped = merged(grouped, place.grouped(value))
    return layered(values, grouped)


def search_from(values: Mapping[str, Any]) -> SearchPlan:
    """The plan of a YAML file's values, once ``base`` is whole (a `recipe` is part of it by then)."""
    for name in ("name", "base", "metrics", "methods", "optimizers"):
        if values.get(name) is None:
            raise ValueError(f"A search needs `{name}`; the plan has none.")
    if not isinstance(values["base"], Mapping):
        raise ValueError(f"base must map names to values, as config.yaml does, got {values['base']!r}.")
    space = values.get("space") or {}
    if not isinstance(space, Mapping):
        raise ValueError(f"space must map names to dimensions, got {space!r}.")
    if "choices" in values and values["choices"] is None:
        raise ValueError("The phase `choices` cannot be left out: the others start from it.")
    own = {key: value for key, value in values.items() if key != "recipe"}
    dimensions = {searched_place(str(key)).key: dimension_from(str(key), ends) for key, ends in space.items()}
    return from_dict(SearchPlan, {**own, "space": dimensions})
