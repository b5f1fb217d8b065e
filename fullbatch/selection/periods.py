"""A run's batches in periods with a plan each, and where the plans lie.  A plan says which places of an epoch's order
make up each batch of its period: an array (batches, B) in a file, written once and read by every rank and every data
worker.  What is drawn at a place, sample, crop and caption, is the order's affair and stays as it is; so a plan that
rearranges an epoch shows the same samples in the same crops."""

# L: batches of a period   B: rows of a batch, on all ranks   W: whole batches of an epoch

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from typing_extensions import assert_never

from fullbatch.config.training import Selection
from fullbatch.data.order import Ints, PeriodPlan

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Period:
    number: int
    batches: range  # the numbers they have in the run
    epoch: int  # in whose order their places lie
    first: int  # how many whole batches of that epoch lie before the period's own


@dataclass(frozen=True)
class Periods:
    """Spectral: a period is an epoch, or a stretch of one, and rearranges its own places.  Ordered: a period draws from
    the whole data set, each in an order of its own, so that a sample that comes again is cropped anew; averaged, it
    looks at ``drawn_batches`` of an epoch's partition at a time and drops the others."""

    selection: Selection
    whole: int  # batches of a uniform epoch, W

    @property
    def length(self) -> int:
        """Batches of a period; an epoch's last may have fewer."""
        if self.selection.batches == "ordered":
            return self.selection.kept_batches
        return min(self.selection.period_steps or self.whole, self.whole)

    @property
    def looked_at(self) -> int:
        """Batches that an averaged period chooses from."""
        return min(self.selection.drawn_batches, self.whole)

    @property
    def an_epoch(self) -> int:
        """Periods of an epoch, where a period lies in one."""
        return self.whole // self.looked_at if self.selection.averages else -(-self.whole // self.length)

    @property
    def trained_batches(self) -> int:
        """Batches that are trained on in what counts as an epoch."""
        return self.an_epoch * self.length if self.selection.averages else self.whole

    def __getitem__(self, number: int) -> Period:
        kind = self.selection.batches
        match kind:
            case "uniform" | "spectral":
                epoch, part = divmod(number, self.an_epoch)
                first = part * self.length
                start = epoch * self.whole + first
                return Period(number, range(start, start + min(self.length, self.whole - first)), epoch, first)
            case "ordered":
                batches = range(number * self.length, (number + 1) * self.length)
                epoch, group = divmod(number, self.an_epoch) if self.selection.averages else (number, 0)
                return Period(number, batches, epoch, group * self.looked_at)
            case unknown:
                assert_never(unknown)

    def of(self, batch: int) -> Period:
        """The one that batch number ``batch`` of the run belongs to."""
        if self.selection.batches == "ordered":
            return self[batch // self.length]
        epoch, within = divmod(batch, self.whole)
        return self[epoch * self.an_epoch + within // self.length]


@dataclass(frozen=True)
class Plans:
    folder: Path  # where they lie
    periods: Periods
    batch_size: int
    _last: dict[int, PeriodPlan] = field(default_factory=dict, repr=False, compare=False)  # read last, by its number

    def path(self, number: int) -> Path:
        return self.folder / f"period-{number:06d}.npy"

    def of(self, batch: int) -> PeriodPlan:
        """The plan of the period that batch number ``batch`` of the run belongs to.  It must be there by now."""
        period = self.periods.of(batch)
        if period.number not in self._last:
            self._last.clear()
            places_LB = self._places(period)
            self._last[period.number] = PeriodPlan(period.number, period.batches.start, period.epoch, places_LB)
        return self._last[period.number]

    def _places(self, period: Period) -> Ints:
        if period.number < self.periods.selection.first_planned:  # uniform
            numbers_L = np.arange(period.first, period.first + len(period.batches)) % self.periods.whole
            return numbers_L[:, None] * self.batch_size + np.arange(self.batch_size)
        places_LB: Ints = np.load(self.path(period.number), mmap_mode="r", allow_pickle=False)
        return places_LB

    def write(self, number: int, places_LB: Ints) -> None:
        period = self.periods[number]
        assert places_LB.shape == (len(period.batches), self.batch_size), "a plan has the shape of its period"
        replace_file(self.path(number), lambda file: np.save(file, places_LB, allow_pickle=False))


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Whole or not at all, and on the disk when this returns, with its name."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # a name that ``Folder.sweep`` knows
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """The arrays PREFIX-NUMBER.npy of a folder."""
    named = ((path.stem.removeprefix(f"{prefix}-"), path) for path in folder.glob(f"{prefix}-*.npy"))
    return {int(number): path for number, path in named if number.isdecimal()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl or losses.jsonl; a line that was cut off, or is damaged, is left out."""
    lines, texts = [], path.read_text(encoding="utf-8", errors="replace").splitlines()
    for text in texts:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    if len(lines) < len(texts):
        log.warning("%s: %d of %d lines cannot be read and are left out", path, len(texts) - len(lines), len(texts))
    return lines
