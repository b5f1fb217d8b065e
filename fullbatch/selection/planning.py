"""What planners do: from a snapshot of the embeddings to the batches of a period, a piece at a time.  A piece of a plan
is a function of the snapshot and of what its task says, so it can be made again, anywhere: on another number of
planners, or after a kill."""

# n: samples   P: places of a piece   L: batches of a piece   K: batches looked at   B: rows of a batch   D: width

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_never

from fullbatch.config.training import Selection
from fullbatch.data.order import Ints, Order, key_of
from fullbatch.selection.ordered import batches_of_partition, drawn_batches, hardest, losses_at
from fullbatch.selection.periods import Period, Periods
from fullbatch.selection.spectral import blocks, order_of_block

Floats = npt.NDArray[np.float64]
_PURPOSE = 6  # tells a planner's draws from those of orders and crops


@dataclass(frozen=True)
class Task:
    snapshot: Path  # the table's file
    places_KB: Ints  # of the epoch, as they stand in uniform order: what there is to choose from
    ids_P: Ints  # the samples there
    kept: int | None  # batches to choose, those of largest loss; None: rearrange them all
    tau: float
    seed: int
    piece: int  # which part of the period's plan it is


@dataclass(frozen=True)
class Piece:
    places_LB: Ints
    losses_L: Floats  # of the batches chosen, by the snapshot; only of those it knows something of
    uniform_L: Floats  # of as many that were not chosen, but stood there in uniform order
    seconds: float  # that it took


def tasks_of(period: Period, periods: Periods, order: Order, batch_size: int, snapshot: Path, tau: float) -> list[Task]:
    """The pieces of a period's plan, in its order."""
    selection: Selection = periods.selection
    seed = key_of(order.seed, _PURPOSE, period.number)
    kept = None
    kind = selection.batches
    match kind:
        case "spectral":
            first, count = period.first * batch_size, len(period.batches) * batch_size
            pieces = [
                np.arange(first + block.start, first + block.stop).reshape(-1, batch_size)
                for block in blocks(count, batch_size, selection.block_batches)
            ]
        case "ordered":
            kept = selection.kept_batches
            if selection.averages:
                group = period.first // periods.looked_at
                pieces = [batches_of_partition(order.epoch_size, batch_size, periods.looked_at, group)]
            else:
                pieces = [drawn_batches(order.epoch_size, batch_size, selection.drawn_batches, seed)]
        case "uniform":
            raise AssertionError("uniform batches have no plan")
        case unknown:
            assert_never(unknown)
    return [
        Task(snapshot, places_KB, order.ids(period.epoch, places_KB.reshape(-1)), kept, tau, seed, number)
        for number, places_KB in enumerate(pieces)
    ]


def planned(task: Task) -> Piece:
    start = time.monotonic()
    batches, rows = task.places_KB.shape
    table_n2D = np.load(task.snapshot, mmap_mode="r", allow_pickle=False)
    image_PD, text_PD = torch.from_numpy(np.asarray(table_n2D[task.ids_P], np.float32)).unbind(1)
    here_KB = np.arange(batches * rows).reshape(batches, rows)
    if task.kept is None:
        chosen_LB = order_of_block(image_PD, text_PD, rows, task.tau, task.seed, task.piece).reshape(-1, rows)
    else:
        chosen_LB = hardest(image_PD, text_PD, here_KB, task.kept, task.tau)
    losses_L, uniform_L = (
        losses_at(image_PD, text_PD, these_LB, task.tau).double().numpy()
        for these_LB in (chosen_LB, here_KB[: len(chosen_LB)])
    )
    places_LB = task.places_KB.reshape(-1)[chosen_LB]
    known = losses_L[np.isfinite(losses_L)], uniform_L[np.isfinite(uniform_L)]
    return Piece(places_LB, *known, seconds=time.monotonic() - start)


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

    def start(self, tasks: Sequence[Task]) -> list[Callable[[], Piece]]:
        """What gives the pieces, when they are there."""
        self.start_processes()
        pool = self._pool
        return [partial(planned, task) if pool is None else pool.submit(planned, task).result for task in tasks]

    def finish(self, started: Sequence[Callable[[], Piece]]) -> list[Piece]:
        try:
            return [piece() for piece in started]
        except BrokenProcessPool:
            raise OSError(
                "A process that plans batches died. Is the memory full? Is the training script one that starts at "
                '`if __name__ == "__main__":`? --planners 0 plans in the training process.'
            ) from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # and wait, for a piece at most: else a child process may hang


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
