"""What planners do: from a snapshot of the embeddings to the batches of a period, a piece at a time.  A piece of a plan
is a function of the snapshot and of what its task says, so it can be made again, anywhere: on another number of
planners, or after a kill."""

# n: samples   P: places of a piece   L: batches of a piece   K: batches looked at   B: rows of a batch   D: width

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_never

from fullbatch.data.durable import replace_array, replace_file
from fullbatch.data.order import Ints, Order, key_of
from fullbatch.selection.correction import log_corrections
from fullbatch.selection.ordered import batches_of_partition, drawn_batches, hardest, losses_at
from fullbatch.selection.periods import Period, PieceStatistics, Plans, write_piece
from fullbatch.selection.spectral import one_torch_thread, order_of_block

Floats = npt.NDArray[np.float64]
_PURPOSE = 6  # tells a planner's draws from those of orders and crops


@dataclass(frozen=True)
class Snapshot:
    """What plans are made from, on the disk: embeddings, the texts they are of, and a temperature."""

    table: Path

    @property
    def texts(self) -> Path:
        return self.table.with_suffix(".texts")

    @property
    def temperature(self) -> Path:
        return self.table.with_suffix(".json")

    def read_texts(self) -> Ints:
        """0, not known, where an earlier version wrote the snapshot."""
        if not self.texts.is_file():
            return np.zeros(len(np.load(self.table, mmap_mode="r", allow_pickle=False)), np.int64)
        texts_n: Ints = np.load(self.texts, mmap_mode="r", allow_pickle=False)
        return texts_n

    def write(self, rows_n2D: npt.NDArray[np.generic], texts_n: npt.NDArray[np.generic], tau: float) -> None:
        """The table last: where it lies, the others do."""
        replace_file(self.temperature, lambda file: file.write(json.dumps({"tau": tau}).encode()))
        replace_array(self.texts, texts_n)
        replace_array(self.table, rows_n2D)

    def forget(self) -> None:
        for path in (self.table, self.texts, self.temperature):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Task:
    """A piece of a plan to be made."""

    snapshot: Snapshot
    plans: Plans
    order: Order
    batches: range  # of the run, that the piece is for


@one_torch_thread()
def planned(task: Task) -> float:
    """Make it; the seconds that took."""
    start = time.monotonic()
    plans, periods, size = task.plans, task.plans.periods, task.plans.batch_size
    selection, period = periods.selection, periods.of(task.batches.start)
    seed = key_of(task.order.seed, _PURPOSE, period.number)
    places_KB = _places(task, period, seed)
    ids_P = task.order.ids(period.epoch, places_KB.reshape(-1))
    tau = json.loads(task.snapshot.temperature.read_text())["tau"]
    table_n2D = np.load(task.snapshot.table, mmap_mode="r", allow_pickle=False)
    image_PD, text_PD = torch.from_numpy(np.asarray(table_n2D[ids_P], np.float32)).unbind(1)
    texts_P = task.snapshot.read_texts()[ids_P]
    here_KB = np.arange(places_KB.size).reshape(places_KB.shape)
    if selection.batches == "spectral":
        number = (task.batches.start - period.batches.start) // selection.block_batches
        apart_P = np.where(texts_P == 0, -1 - ids_P, texts_P)  # a sample that comes twice is its own equal
        chosen_LB = order_of_block(image_PD, text_PD, size, tau, seed, number, apart_P).reshape(-1, size)
    else:
        chosen_LB = hardest(image_PD, text_PD, here_KB, selection.kept_batches, tau)
    log_c_LB2 = np.zeros((*chosen_LB.shape, 2), np.float32)
    if plans.corrects_for is not None:
        log_c_LB2 = log_corrections(image_PD, text_PD, chosen_LB, tau, ids_P, plans.corrects_for).numpy()
    losses, uniform = (
        losses_at(image_PD, text_PD, these_LB, tau).double().numpy()
        for these_LB in (chosen_LB, here_KB[: len(chosen_LB)])
    )
    seconds = time.monotonic() - start
    about = PieceStatistics(
        losses[np.isfinite(losses)].tolist(),
        uniform[np.isfinite(uniform)].tolist(),
        chosen_LB.size,
        meeting_equals(texts_P[chosen_LB]),
        seconds,
    )
    write_piece(task.plans.path(task.batches), places_KB.reshape(-1)[chosen_LB], log_c_LB2, about)
    return seconds


def _places(task: Task, period: Period, seed: int) -> Ints:
    """What there is to choose from, as it stands in uniform order."""
    periods, size = task.plans.periods, task.plans.batch_size
    kind = periods.selection.batches
    match kind:
        case "spectral":
            first = period.first + task.batches.start - period.batches.start
            return np.arange(first * size, (first + len(task.batches)) * size).reshape(-1, size)
        case "ordered" if periods.selection.averages:
            group = period.first // periods.looked_at
            return batches_of_partition(task.order.epoch_size, size, periods.looked_at, group)
        case "ordered":
            return drawn_batches(task.order.epoch_size, size, periods.selection.drawn_batches, seed)
        case "uniform":
            raise AssertionError("uniform batches have no plan")
        case unknown:
            assert_never(unknown)


def meeting_equals(texts_LB: Ints) -> int:
    """Rows whose text another row of their batch has as well; 0 stands for one that is not known."""
    sorted_LB = np.sort(texts_LB, axis=1)
    equal_LB = np.pad((sorted_LB[:, 1:] == sorted_LB[:, :-1]) & (sorted_LB[:, 1:] != 0), ((0, 0), (1, 1)))
    return int((equal_LB[:, 1:] | equal_LB[:, :-1]).sum())


class Making(Protocol):
    """A piece that is being made, or will be when it is asked for."""

    def done(self) -> bool: ...

    def result(self) -> float: ...


@dataclass(frozen=True)
class _Later:
    task: Task

    def done(self) -> bool:
        return "_seconds" in self.__dict__

    def result(self) -> float:
        return self._seconds

    @cached_property
    def _seconds(self) -> float:
        return planned(self.task)


class Planners:
    """``count`` processes that make pieces of plans; 0: this one, when a plan is asked for.  ``load`` is called in each
    process at its start, to import what the plans need."""

    def __init__(self, count: int, load: Callable[[], object] = int) -> None:
        self.count, self.load = count, load
        self._pool: ProcessPoolExecutor | None = None

    def start_processes(self) -> None:
        """Have the processes started: importing takes them seconds, which the first plan would have to wait for."""
        if self.count and self._pool is None:
            # started afresh rather than forked: a fork would take the locks of this process's threads with it
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, spawn, _start_planner, (self.load,))
            for _ in range(self.count):  # each task that finds no idle process has one started
                self._pool.submit(int)

    def start(self, tasks: Sequence[Task]) -> list[Making]:
        self.start_processes()
        pool = self._pool
        with _death_told():
            return [_Later(task) if pool is None else pool.submit(planned, task) for task in tasks]

    def finish(self, making: Making) -> float:
        """Wait for a piece; the seconds it took."""
        with _death_told():
            return making.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # and wait, for a piece at most: else a child process may hang


@contextmanager
def _death_told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise OSError(
            "A process that plans batches died. Is the memory full? Is the training script one that starts at "
            '`if __name__ == "__main__":`? --planners 0 plans in the training process.'
        ) from None


def _start_planner(load: Callable[[], object]) -> None:
    """One thread, at a low priority: data workers come first.  Whether to stop on a signal is the training process's
    decision, and a planner ends when that is gone, however it went."""
    torch.set_num_threads(1)
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: wait([parent.sentinel]) and os._exit(1), daemon=True).start()
    load()
