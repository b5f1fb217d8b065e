"""What is compared: rows (a method with its settings, under a label) x batch sizes x seeds, from one base config.

A plan is a YAML file and a frozen tree; it names every run before the first one starts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from fullbatch.config.checks import Checked, Count, Rule, is_whole, require
from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import named_method
from fullbatch.config.run import RunConfig, layered
from fullbatch.config.tree import from_dict, read_yaml, to_dict


def different(least: int) -> Rule:
    """Each a whole number of at least this, none twice."""

    def holds(values: Sequence[Any]) -> bool:
        return all(is_whole(value, least) for value in values) and len(set(values)) == len(values)

    return Rule(f"be different whole numbers of at least {least}", holds)


Order = Literal["seeds", "batch_sizes", "methods"]
Sizes = Annotated[tuple[int, ...], different(2)]
Seeds = Annotated[tuple[int, ...], different(0)]
_OF_A_ROW = ("name", "method", "batch_sizes", "seeds", "at")
Scaling = Literal["none", "sqrt", "linear"]


@dataclass(frozen=True)
class Row(Checked):
    """One row of the table."""

    name: str  # its label
    method: str
    batch_sizes: Sizes | None = None  # its own; None: the plan's
    seeds: Seeds | None = None  # its own; None: the plan's
    at: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # changes at one batch size alone: a tuned lr
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the base config, by the names of the flags

    def _check(self) -> None:
        require(bool(self.name.strip()), self, "name", "not be empty")
        named_method(self.method)
        good = all(is_whole(size, 2) and isinstance(changes, Mapping) for size, changes in self.at.items())
        require(good, self, "at", "map batch sizes to changes, as in at: {64: {lr: 0.0004}}")
        for owned, changes in product(("batch_size", "seed", "name", "runs"), (self.changes, *self.at.values())):
            require(owned not in changes, self, "changes", f"leave {owned} to the plan")

    def as_dict(self) -> dict[str, Any]:
        given = {name: value for name, value in to_dict(self).items() if value not in (None, {})}
        changes = given.pop("changes", {})
        return {**given, **changes}


@dataclass(frozen=True)
class Block(Checked):
    """Further runs, after the others: rows by their labels x batch sizes x seeds.  None: all of the plan's."""

    methods: tuple[str, ...] | None = None
    batch_sizes: Sizes | None = None
    seeds: Seeds | None = None


@dataclass(frozen=True)
class PlannedRun:
    row: Row
    batch_size: int
    seed: int

    @property
    def cell(self) -> str:
        """Where it stands in the table, without the seed."""
        return f"{folder_name(self.row.name)}-b{self.batch_size}"

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.cell}-seed{self.seed}"


@dataclass(frozen=True)
class Plan(Checked):
    """A comparison."""

    name: str  # of its folder
    base: Mapping[str, Any]  # the config all runs share, in the groups of config.yaml
    methods: tuple[Row, ...]
    batch_sizes: Sizes  # of every row that has none of its own
    seeds: Seeds  # of every row that has none of its own
    baseline: str  # the label of the row that the others are held against
    runs: tuple[Block, ...] = ()  # further runs, after the grid
    metric: str | None = None  # the number to look at: METRIC or "TASK METRIC"; None: the main one of the first task
    order: Order = "seeds"  # the outermost loop: "seeds" has every cell once before any has two
    lr_scaling: Scaling = "none"  # the learning rates over batch sizes: by the root of the ratio, or by the ratio
    lr_base_batch: Count = 128  # the batch size at which the learning rate is the one given
    equal_time: str | None = None  # the label of a row: all others train as long as it does, not on as many samples

    def _check(self) -> None:
        plain = bool(self.name) and "/" not in self.name and self.name not in (".", "..")
        require(plain, self, "name", "be a plain folder name")
        require(bool(self.methods), self, "methods", "name at least one method")
        require(bool(self.seeds), self, "seeds", "name at least one seed")
        folders = [folder_name(row.name) for row in self.methods]
        for row in self.methods:
            if folders.count(folder_name(row.name)) > 1:
                raise ValueError(f"Two rows of the comparison are called {row.name!r}; give each `name` its own.")
        self.row(self.baseline, "baseline")
        if self.equal_time is not None:
            self.row(self.equal_time, "equal_time")
        for block in self.runs:
            for label in block.methods or ():
                self.row(label, "runs")
        if not self.planned:
            raise ValueError("The plan has no run: its batch sizes or its seeds are empty.")

    def row(self, label: str, asked: str) -> Row:
        rows = {row.name: row for row in self.methods}
        if label not in rows:
            raise ValueError(f"{asked}: no row is called {label!r}{nearest(label, rows)} They are {listed(rows)}.")
        return rows[label]

    @property
    def planned(self) -> tuple[PlannedRun, ...]:
        """Every run once, in the order in which they are started."""
        runs = self._grid()
        for block in self.runs:
            rows = [row for row in self.methods if block.methods is None or row.name in block.methods]
            sizes, seeds = block.batch_sizes or self.batch_sizes, block.seeds or self.seeds
            runs += [PlannedRun(row, size, seed) for seed in seeds for size in sizes for row in rows]
        once: dict[str, PlannedRun] = {}
        for run in runs:
            once.setdefault(run.name, run)
        return tuple(once.values())

    def _grid(self) -> list[PlannedRun]:
        runs = []
        for row in self.methods:
            sizes = self.batch_sizes if row.batch_sizes is None else row.batch_sizes
            seeds = self.seeds if row.seeds is None else row.seeds
            runs += [PlannedRun(row, size, seed) for size, seed in product(sizes, seeds)]
        sizes = tuple(dict.fromkeys((*self.batch_sizes, *(run.batch_size for run in runs))))
        seeds = tuple(dict.fromkeys((*self.seeds, *(run.seed for run in runs))))

        def turn(run: PlannedRun) -> tuple[int, ...]:
            row, size, seed = self.methods.index(run.row), sizes.index(run.batch_size), seeds.index(run.seed)
            turns = {"seeds": (seed, size, row), "batch_sizes": (size, seed, row), "methods": (row, size, seed)}
            return turns[self.order]

        return sorted(runs, key=turn)

    def config(self, run: PlannedRun, runs: str, samples: int | None = None) -> RunConfig:
        """The config of a run in the folder ``runs``; ``samples``: in place of the shared budget."""
        changes = {"method": run.row.method, **run.row.changes, **run.row.at.get(run.batch_size, {})}
        try:
            config = from_dict(RunConfig, layered(self.base, RunConfig.grouped(changes)))
        except ValueError as error:
            raise ValueError(f"The row {run.row.name!r}: {error}") from None
        ratio = run.batch_size / self.lr_base_batch
        factor = {"none": 1.0, "sqrt": ratio**0.5, "linear": ratio}[self.lr_scaling]
        rates = config.optimizer
        temperature_lr = rates.temperature_lr  # where it is not given it is a share of the other anyway
        scaled = None if temperature_lr is None else temperature_lr * factor
        samples = config.training.samples if samples is None else samples
        return replace(
            config,
            training=replace(config.training, batch_size=run.batch_size, seed=run.seed, samples=samples),
            optimizer=replace(rates, lr=rates.lr * factor, temperature_lr=scaled),
            run=replace(config.run, runs=runs, name=run.name),
        )

    def configs(self, folder: Path, samples: Mapping[str, int] | None = None) -> list[RunConfig]:
        """Of all runs, in the comparison's folder; ``samples``: of each of them, in place of the shared budget."""
        runs = str(folder / "runs")
        return [self.config(run, runs, samples[run.name] if samples else None) for run in self.planned]

    def as_dict(self) -> dict[str, Any]:
        """As the YAML file has it."""
        return {**to_dict(self), "methods": [row.as_dict() for row in self.methods]}


def read_plan(path: Path, kind: type[Any] = Plan) -> dict[str, Any]:
    """The values of a plan file; what it may leave out is the command line's to fill in."""
    values = read_yaml(path)
    known = [*(field.name for field in dataclasses.fields(kind)), "recipe"]
    for key in values:
        if key not in known:
            called = "a plan" if kind is Plan else "a search"
            raise ValueError(f"{path}: {called} has no {key!r}{nearest(key, known)} It has {listed(known)}.")
    if not isinstance(values.get("base"), Mapping | None):
        raise ValueError(f"{path}: base must map names to values, as config.yaml does, got {values['base']!r}.")
    return values


def plan_from(values: Mapping[str, Any]) -> Plan:
    """The plan of a YAML file's values, once nothing is missing."""
    rows = []
    for row in named_rows(values.get("methods")):
        own: dict[str, Any] = {key: row.pop(key) for key in _OF_A_ROW if key in row}
        rows.append({**own, "changes": row})
    return from_dict(Plan, {**values, "methods": rows})


def named_rows(methods: Any) -> list[dict[str, Any]]:
    """A plan's rows as mappings, each with its label.  A row may be written as a method's name alone."""
    if not isinstance(methods, Sequence) or isinstance(methods, str):
        raise ValueError(f"A plan's `methods` is a list, got {methods!r}.")
    rows = []
    for row in methods:
        full = {"method": row} if isinstance(row, str) else row
        if not isinstance(full, Mapping) or "method" not in full:
            raise ValueError(f"A row of a plan is a method's name or a mapping with `method`, got {row!r}.")
        rows.append({"name": full["method"], **full})
    return rows


def folder_name(label: str) -> str:
    """A label as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", label)
