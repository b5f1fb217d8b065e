"""What is compared: rows (a method with its settings, under a label) x batch sizes x seeds, from one base config.

A plan is a YAML file and a frozen tree; it names every run before the first one starts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from fullbatch.config.checks import is_whole, require, require_choice, require_count
from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import named_method
from fullbatch.config.optimization import Optimizer
from fullbatch.config.run import RunConfig, layered
from fullbatch.config.tree import from_dict, read_yaml

Order = Literal["seeds", "batch_sizes", "methods"]
Scaling = Literal["none", "sqrt", "linear"]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    name          its label
    method        the method it trains with
    batch_sizes   its own; None: the plan's
    seeds         its own; None: the plan's
    at            what it changes at one batch size alone, such as a learning rate that was tuned there
    changes       what it changes in the base config, by the names of the flags: settings, lr, normalizer, data, ...
    """

    name: str
    method: str
    batch_sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    at: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), self, "name", "not be empty")
        named_method(self.method)
        good = all(is_whole(size, 2) and isinstance(changes, Mapping) for size, changes in self.at.items())
        require(good, self, "at", "map batch sizes to changes, as in at: {64: {lr: 0.0004}}")
        for owned in ("batch_size", "seed", "name", "runs"):
            for changes in (self.changes, *self.at.values()):
                require(owned not in changes, self, "changes", f"leave {owned} to the plan")
        _require_numbers(self, "batch_sizes", 2)
        _require_numbers(self, "seeds", 0)

    def as_dict(self) -> dict[str, Any]:
        own = {name: list(value) for name in ("batch_sizes", "seeds") if (value := getattr(self, name)) is not None}
        at = {"at": {size: dict(changes) for size, changes in self.at.items()}} if self.at else {}
        return {"name": self.name, "method": self.method, **own, **at, **self.changes}


@dataclass(frozen=True)
class Block:
    """Further runs, after the others: rows by their labels x batch sizes x seeds.  None: all of the plan's."""

    methods: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _require_numbers(self, "batch_sizes", 2)
        _require_numbers(self, "seeds", 0)


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
class Job:
    """A planned run with its config."""

    name: str
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.run.runs) / self.config.run.name


@dataclass(frozen=True)
class Plan:
    """A comparison.

    name            of its folder
    base            the config all runs share, in the groups of config.yaml
    methods         the rows
    batch_sizes     of every row that has none of its own
    seeds           of every row that has none of its own
    runs            further blocks of runs, after the grid
    baseline        the label of the row that the others are held against
    metric          the number to look at: METRIC or "TASK METRIC"; None: the main one of the first task
    order           the outermost loop: "seeds" has every cell once before any has two
    lr_scaling      the learning rates over batch sizes: as they are, by the root of the ratio, or by the ratio
    lr_base_batch   the batch size at which the learning rate is the one given
    equal_time      the label of a row: every other one trains as long as it does, not on as many samples
    """

    name: str
    base: Mapping[str, Any]
    methods: tuple[Row, ...]
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    baseline: str
    runs: tuple[Block, ...] = ()
    metric: str | None = None
    order: Order = "seeds"
    lr_scaling: Scaling = "none"
    lr_base_batch: int = 128
    equal_time: str | None = None

    def __post_init__(self) -> None:
        require(is_plain_name(self.name), self, "name", "be a plain folder name")
        require(bool(self.methods), self, "methods", "name at least one method")
        _require_numbers(self, "batch_sizes", 2)
        _require_numbers(self, "seeds", 0)
        require(bool(self.seeds), self, "seeds", "name at least one seed")
        require_choice(self, "order", get_args(Order))
        require_choice(self, "lr_scaling", get_args(Scaling))
        require_count(self, "lr_base_batch", 1)
        labels = [row.name for row in self.methods]
        folders = [folder_name(label) for label in labels]
        for label, name in zip(labels, folders, strict=True):
            if folders.count(name) > 1:
                raise ValueError(f"Two rows of the comparison are called {label!r}; give each `name` its own.")
        self.row(self.baseline, "baseline")
        if self.equal_time is not None:
            self.row(self.equal_time, "equal_time")
        for block in self.runs:
            for label in block.methods or ():
                self.row(label, "runs")
        if not self.planned:
            raise ValueError("The plan has no run: its batch sizes or its seeds are empty.")

    def row(self, label: str, asked: str) -> Row:
        for row in self.methods:
            if row.name == label:
                return row
        labels = [row.name for row in self.methods]
        raise ValueError(f"{asked}: no row is called {label!r}{nearest(label, labels)} They are {listed(labels)}.")

    @property
    def planned(self) -> tuple[PlannedRun, ...]:
        """Every run once, in the order in which they are started."""
        found: dict[str, PlannedRun] = {}
        for run in (*self._grid(), *self._further()):
            found.setdefault(run.name, run)
        return tuple(found.values())

    def _grid(self) -> Iterator[PlannedRun]:
        cells = []
        for place, row in enumerate(self.methods):
            sizes = self.batch_sizes if row.batch_sizes is None else row.batch_sizes
            seeds = self.seeds if row.seeds is None else row.seeds
            cells += [(place, row, size, seed) for size, seed in product(sizes, seeds)]
        sizes_in_order = _first_seen([cell[2] for cell in cells], self.batch_sizes)
        seeds_in_order = _first_seen([cell[3] for cell in cells], self.seeds)

        def turn(cell: tuple[int, Row, int, int]) -> tuple[int, ...]:
            place, _, size, seed = cell
            by_size, by_seed = sizes_in_order.index(size), seeds_in_order.index(seed)
            turns = {
                "seeds": (by_seed, by_size, place),
                "batch_sizes": (by_size, by_seed, place),
                "methods": (place, by_size, by_seed),
            }
            return turns[self.order]

        for _, row, size, seed in sorted(cells, key=turn):
            yield PlannedRun(row, size, seed)

    def _further(self) -> Iterator[PlannedRun]:
        for block in self.runs:
            rows = [row for row in self.methods if block.methods is None or row.name in block.methods]
            sizes, seeds = block.batch_sizes or self.batch_sizes, block.seeds or self.seeds
            for seed, size, row in product(seeds, sizes, rows):
                yield PlannedRun(row, size, seed)

    def config(self, run: PlannedRun, runs: str, samples: int | None = None) -> RunConfig:
        """The config of a run in the folder ``runs``; ``samples``: in place of the shared budget."""
        changes = {"method": run.row.method, **run.row.changes, **run.row.at.get(run.batch_size, {})}
        try:
            config = from_dict(RunConfig, layered(self.base, RunConfig.grouped(changes)))
        except ValueError as error:
            raise ValueError(f"The row {run.row.name!r}: {error}") from None
        ratio = run.batch_size / self.lr_base_batch
        factor = {"none": 1.0, "sqrt": ratio**0.5, "linear": ratio}[self.lr_scaling]
        training = replace(config.training, batch_size=run.batch_size, seed=run.seed)
        if samples is not None:
            training = replace(training, samples=samples)
        return replace(
            config,
            training=training,
            optimizer=_scaled(config.optimizer, factor),
            run=replace(config.run, runs=runs, name=run.name),
        )

    def as_dict(self) -> dict[str, Any]:
        """As the YAML file has it."""
        plain = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        blocks = [{k: list(v) for k, v in dataclasses.asdict(block).items() if v is not None} for block in self.runs]
        lists = {"batch_sizes": list(self.batch_sizes), "seeds": list(self.seeds), "runs": blocks}
        return {**plain, **lists, "methods": [row.as_dict() for row in self.methods]}


def _scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    """The temperature's rate goes along; where it is not given it is a share of the other anyway."""
    given = optimizer.temperature_lr
    return replace(optimizer, lr=optimizer.lr * factor, temperature_lr=None if given is None else given * factor)


def read_plan(path: Path) -> dict[str, Any]:
    return read_plan_file(path, Plan, "a plan")


def read_plan_file(path: Path, kind: type[Any], called: str) -> dict[str, Any]:
    """The values of a plan file; what it may leave out is the command line's to fill in."""
    values = read_yaml(path)
    known = [*(field.name for field in dataclasses.fields(kind)), "recipe"]
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: {called} has no {key!r}{nearest(key, known)} It has {listed(known)}.")
    if not isinstance(values.get("base"), Mapping | None):
        raise ValueError(f"{path}: base must map names to values, as config.yaml does, got {values['base']!r}.")
    return values


def plan_from(values: Mapping[str, Any]) -> Plan:
    """The plan of a YAML file's values, once nothing is missing."""
    own = ("name", "method", "batch_sizes", "seeds", "at")
    rows = []
    for row in named_rows(values.get("methods")):
        changes = {key: value for key, value in row.items() if key not in own}
        rows.append({**{key: row[key] for key in own if key in row}, "changes": changes})
    return from_dict(Plan, {**values, "methods": rows})


def named_rows(methods: Any) -> list[dict[str, Any]]:
    """A plan's rows as mappings, each with its label.  A row may be written as a method's name alone."""
    if not isinstance(methods, Sequence) or isinstance(methods, str):
        raise ValueError(f"A plan's `methods` is a list, got {methods!r}.")
    found = []
    for row in methods:
        full = {"method": row} if isinstance(row, str) else row
        if not isinstance(full, Mapping) or "method" not in full:
            raise ValueError(f"A row of a plan is a method's name or a mapping with `method`, got {row!r}.")
        found.append({"name": full["method"], **full})
    return found


def is_plain_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name and name not in (".", "..")


def folder_name(label: str) -> str:
    """A label as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", label)


def _first_seen(values: list[int], first: Sequence[int]) -> list[int]:
    return list(dict.fromkeys((*first, *values)))


def _require_numbers(owner: object, name: str, least: int) -> None:
    values = getattr(owner, name)
    if values is None:
        return
    good = all(is_whole(value, least) for value in values) and len(set(values)) == len(values)
    require(good, owner, name, f"be different whole numbers of at least {least}")
