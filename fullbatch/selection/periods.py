"""A run's batches in periods that are planned each from one snapshot, piece by piece, and where the plans lie.  A piece
says which places of an epoch's order make up each of its batches: an array (batches, B) in a file, written once and
read by every rank and every data worker.  What is drawn at a place, sample, crop and caption, is the order's affair and
stays as it is; so a plan that rearranges an epoch shows the same samples in the same crops."""

# L: batches of a piece   B: rows of a batch, on all ranks   W: whole batches of an epoch

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_never

from fullbatch.config.methods import Method
from fullbatch.config.training import Selection
from fullbatch.data.durable import replace_array, replace_file
from fullbatch.data.order import BatchPlan, Ints

# What a plan's file says of a row: its place, and the log of the correction for an image and for a text as the anchor.
ROW = np.dtype([("place", "<i8"), ("log_c", "<f4", (2,))])
Rows = npt.NDArray[np.void]


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
    joined: range = range(0)  # batches that are taken several in a step, for which no correction would be right

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

    @property
    def first_planned(self) -> int:
        """The periods before this one are uniform: there is nothing to go by yet, it is so wished, or their batches are
        joined."""
        seen = 1 if self.selection.embeddings == "passes" else 0
        sequential = self.selection.batches == "ordered" and not self.selection.averages  # no period ends with an epoch
        periods = -(-self.selection.uniform_epochs * self.whole // self.length)
        wished = periods if sequential else self.selection.uniform_epochs * self.an_epoch
        joined = self.of(self.joined[-1]).number + 1 if self.joined else 0
        return max(self.selection.lead + seen, wished, joined)

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

    def piece(self, batch: int) -> range:
        """The batches that are planned together with this one: a block of a spectral period, else a whole period."""
        batches = self.of(batch).batches
        if self.selection.batches != "spectral":
            return batches
        size = self.selection.block_batches
        start = batch - (batch - batches.start) % size
        return range(start, min(start + size, batches.stop))

    def pieces(self, batches: range) -> list[range]:
        """That these batches lie in."""
        found = [self.piece(batches.start)]
        while found[-1].stop < batches.stop:
            found.append(self.piece(found[-1].stop))
        return found


@dataclass(frozen=True)
class Plans:
    folder: Path  # where they lie
    periods: Periods
    batch_size: int
    corrects_for: Method | None = None  # the method that batches come with corrections for; None: without
    _last: dict[int, Rows] = field(default_factory=dict, repr=False, compare=False)  # the piece read last, by its start

    def path(self, piece: range) -> Path:
        return self.folder / f"plan-{piece.start:09d}.npy"

    def of(self, batch: int, stop: int | None = None) -> BatchPlan:
        """Of batch number ``batch`` of the run, and of those up to ``stop`` that are of its period.  It must be there
        by now."""
        period = self.periods.of(batch)
        if period.number < self.periods.first_planned:
            return self._uniform(batch, period)
        asked = range(batch, min(stop or batch + 1, period.batches.stop))
        pieces = self.periods.pieces(asked)
        rows_LB = np.concatenate([self._read(piece) for piece in pieces]) if len(pieces) > 1 else self._read(pieces[0])
        planned = range(pieces[0].start, pieces[-1].stop)
        return BatchPlan(planned, period.epoch, rows_LB["place"], rows_LB["log_c"] if self.corrects_for else None)

    def _uniform(self, batch: int, period: Period) -> BatchPlan:
        """Of the period's batches those of this one's epoch: an ordered period may reach over several."""
        batches, epoch, first = period.batches, period.epoch, period.first
        if not self.periods.selection.averages:
            whole, epoch = self.periods.whole, batch // self.periods.whole
            batches = range(max(batches.start, epoch * whole), min(batches.stop, (epoch + 1) * whole))
            first = batches.start - epoch * whole
        numbers_L = np.arange(first, first + len(batches))
        places_LB = numbers_L[:, None] * self.batch_size + np.arange(self.batch_size)
        log_c_LB2 = np.broadcast_to(np.float32(0.0), (*places_LB.shape, 2)) if self.corrects_for else None
        return BatchPlan(batches, epoch, places_LB, log_c_LB2)

    def _read(self, piece: range) -> Rows:
        if piece.start not in self._last:
            self._last.clear()
            self._last[piece.start] = np.load(self.path(piece), mmap_mode="r", allow_pickle=False)
        return self._last[piece.start]


@dataclass(frozen=True)
class PieceStatistics:
    """What is to be said of a piece that was made; by the snapshot, and only of batches it knows something of."""

    losses: list[float]  # of the batches chosen
    uniform: list[float]  # of as many that were not chosen, but stood there in uniform order
    rows: int
    equal: int  # rows that meet an equal text in their batch
    seconds: float  # that it took
    checksum: int | None = None  # of the plan's rows; None: an earlier version wrote none


def write_piece(path: Path, places_LB: Ints, log_c_LB2: npt.NDArray[np.float32], about: PieceStatistics) -> None:
    """The plan last: where it lies, what is to be said of it does, too."""
    rows_LB = np.empty(places_LB.shape, ROW)
    rows_LB["place"], rows_LB["log_c"] = places_LB, log_c_LB2
    about = replace(about, checksum=zlib.crc32(rows_LB.tobytes()))
    replace_file(path.with_suffix(".json"), lambda file: file.write(json.dumps(asdict(about)).encode()))
    replace_array(path, rows_LB)


def read_statistics(path: Path) -> PieceStatistics:
    return PieceStatistics(**json.loads(path.with_suffix(".json").read_text()))


def is_whole(path: Path) -> bool:
    """Whether a plan is as it was written, and what is to be said of it there."""
    try:
        rows_LB, said = np.load(path, mmap_mode="r", allow_pickle=False), read_statistics(path)
        numbers = (*said.losses, *said.uniform, said.rows, said.equal)
        own = rows_LB.dtype == ROW and all(map(math.isfinite, numbers)) and said.rows > 0
        return own and (said.checksum is None or zlib.crc32(rows_LB.tobytes()) == said.checksum)
    except Exception:  # NumPy's reader of headers alone has half a dozen ways to fail
        return False


def take_over(path: Path, plans: Plans, period: Period) -> bool:
    """Cut up the plan of an earlier version, which has all of a period in one file, and no corrections.  False: it is
    damaged."""
    try:
        places_LB = np.load(path, allow_pickle=False)
        whole = places_LB.shape == (len(period.batches), plans.batch_size) and places_LB.dtype == np.int64
        whole = whole and places_LB.min() >= 0 and places_LB.max() < plans.periods.whole * plans.batch_size
    except Exception:  # as above
        whole = False
    for piece in plans.periods.pieces(period.batches) if whole else ():
        first = piece.start - period.batches.start
        part_LB = places_LB[first : first + len(piece)]
        about = PieceStatistics([], [], part_LB.size, 0, 0.0)  # its losses were told when it was made
        write_piece(plans.path(piece), part_LB, np.zeros((*part_LB.shape, 2), np.float32), about)
    return bool(whole)


def forget_piece(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """The arrays PREFIX-NUMBER.npy of a folder."""
    named = ((path.stem.removeprefix(f"{prefix}-"), path) for path in folder.glob(f"{prefix}-*.npy"))
    return {int(number): path for number, path in named if number.isdecimal()}
