"""Batches that go by the embeddings: period after period a plan, made beside training from a snapshot of them.

At the start of period s the embeddings are written down (snapshot-s.npy; the temperature in its .json), and the plan of
period s + 1 (s, if training is to wait for it) is made from that by other processes (period-NUMBER.npy).

So a run can be killed at any moment: a plan is a function of its snapshot, the one or the other is on the disk before a
checkpoint is written that needs it (``settle``), and whatever lies after the checkpoint that a run goes on from is made
again.  Training waits for a copy of the embeddings, not for the disk.
"""

# n: samples   L: batches of a period   B: rows of a batch on this rank   N: on all ranks   D: width

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch import distributed
from fullbatch.data.order import Order
from fullbatch.objective.objective import Objective
from fullbatch.selection.periods import Period, Plans, numbered, read_lines, replace_file
from fullbatch.selection.planning import Floats, Piece, Planners, tasks_of

log = logging.getLogger("fullbatch")

ASKED = 256  # samples whose mean temperature stands for all, where samples have their own
BINS = 40  # of a histogram of losses


@dataclass
class Selector:
    """What a trainer knows of a selection: it takes its batches by ``ranges``, calls ``settle`` before it saves, logs
    ``costs``, and at the end calls ``close``."""

    plans: Plans  # where they are written, and what periods there are
    order: Order
    planners: Planners
    # of all samples as they are now, (n, 2, D); plans go by them.  Every rank calls it
    embeddings: Callable[[], Tensor]
    temperature: Callable[[Tensor], float]  # given the embeddings, likewise
    # the first batch that a run which goes on from the oldest checkpoint would read; None: there is none
    oldest: Callable[[], int | None]
    _started: dict[int, list[Callable[[], Piece]]] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict)
    _writing: Future[None] | None = None

    def __post_init__(self) -> None:
        self.folder, self.periods = self.plans.folder, self.plans.periods
        self.lead = self.periods.selection.lead
        self.first_planned = self.periods.selection.first_planned
        self.first_rank = distributed.world().rank == 0
        self._losses = self.folder / "losses.jsonl"
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def ranges(self, batches: range) -> Iterator[range]:
        """These batches of the run, period by period, each when its plan is there and the one before has been read.  A
        range must be asked for when all steps on the batches before it are done: embeddings are looked at then."""
        if self.first_rank:
            self.planners.start_processes()
        with self._stalled():
            self._go_on(batches)
        start = batches.start
        while start < batches.stop:
            period = self.periods.of(start)
            with self._stalled():
                if start == period.batches.start:
                    self._begin(period, batches.stop)
                if period.number >= self.first_planned:
                    self._await(period.number)
            stop = min(period.batches.stop, batches.stop)
            yield range(start, stop)
            start = stop

    def costs(self) -> dict[str, float]:
        """What selection has cost since the last call: seconds that training waited, seconds that planners worked."""
        costs, self._costs = self._costs, {}
        return costs

    def settle(self) -> None:
        """Wait until all that was seen is on the disk.  Every rank must call, before it saves."""
        with self._stalled():
            distributed.together(self._written)

    def close(self) -> None:
        self._hand.shutdown()
        self.planners.close()

    # -- one period -------------------------------------------------------------------------------------------------

    def _begin(self, period: Period, end: int) -> None:
        """At the start of a period: look, if a plan goes by what is seen now."""
        planned = period.number + self.lead
        if planned >= self.first_planned and self.periods[planned].batches.start < end:
            self._look(period.number)
        if self.first_rank:
            self._prune()

    def _await(self, number: int) -> None:
        distributed.together(lambda: self._finish(number) if self.first_rank else None)

    def _look(self, source: int) -> None:
        rows_n2D = self.embeddings()
        tau = self.temperature(rows_n2D)
        distributed.together(self._written)
        if self.first_rank:
            copy_n2D = rows_n2D.to("cpu", copy=True).numpy()  # the next step changes the table
            self._writing = self._hand.submit(self._write_down, source, copy_n2D, tau)

    def _write_down(self, source: int, rows_n2D: npt.NDArray[np.generic], tau: float) -> None:
        self.folder.mkdir(exist_ok=True)
        path = self._snapshot(source)
        replace_file(path.with_suffix(".json"), lambda file: file.write(json.dumps({"tau": tau}).encode()))
        replace_file(path, lambda file: np.save(file, rows_n2D, allow_pickle=False))
        self._start(source)

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _start(self, source: int) -> None:
        """Have the plan made that the snapshot of period ``source`` is for."""
        number, path = source + self.lead, self._snapshot(source)
        tau = json.loads(path.with_suffix(".json").read_text())["tau"]
        tasks = tasks_of(self.periods[number], self.periods, self.order, self.plans.batch_size, path, tau)
        self._started[number] = self.planners.start(tasks)

    def _finish(self, number: int) -> None:
        """Wait for a plan and write it; then its snapshot may go."""
        self._written()
        started = self._started.pop(number, None)
        if started is None:
            assert self.plans.path(number).is_file(), "a period begins with a plan, or with one under way"
            return
        pieces = self.planners.finish(started)
        self._add_line(number, pieces)
        self.plans.write(number, np.concatenate([piece.places_LB for piece in pieces]))
        self._forget_snapshot(self._snapshot(number - self.lead))
        self._add_cost("selection_seconds", sum(piece.seconds for piece in pieces))

    def _add_line(self, number: int, pieces: Sequence[Piece]) -> None:
        own = np.concatenate([piece.losses_L for piece in pieces])
        uniform = np.concatenate([piece.uniform_L for piece in pieces])
        if not len(own) or not len(uniform):
            return
        selection = self.periods.selection
        step = self.periods[number].batches.start // selection.batches_a_step
        place = {"period": number, "step": step, "batches": selection.batches}
        line = {**place, **loss_histograms(own, uniform)}
        with self._losses.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # -- what is kept, and what a run that goes on finds -------------------------------------------------------------

    def _go_on(self, batches: range) -> None:
        """Before the first batch: have made what is missing of the plans that were begun before it."""
        current = self.periods.of(batches.start)
        needed = [
            number
            for number in range(current.number, current.number + self.lead + 1)
            if number >= self.first_planned
            and self._is_past(number, batches.start)
            and self.periods[number].batches.start < batches.stop
        ]
        lost = distributed.together(lambda: self._recover(needed, batches.start) if self.first_rank else None)
        for number in distributed.from_first_rank(lost):
            log.info("period %d is planned by the embeddings of this checkpoint: there is no earlier snapshot", number)
            self._look(number - self.lead)

    def _is_past(self, number: int, batch: int) -> bool:
        """Whether the plan of this period goes by embeddings from before ``batch`` was read."""
        return self.periods[number - self.lead].batches.start < batch

    def _recover(self, needed: Sequence[int], batch: int) -> list[int]:
        """Forget what comes after ``batch``; start what can be made again from its snapshot, and return the rest."""
        plans = numbered(self.folder, "period")
        for number, path in plans.items():
            if not self._is_past(number, batch):
                path.unlink()
        for source, path in numbered(self.folder, "snapshot").items():
            if source + self.lead not in needed or source + self.lead in plans:
                self._forget_snapshot(path)
        missing = [number for number in needed if number not in plans]
        if self._losses.is_file():
            lines = [line for line in read_lines(self._losses) if line["period"] not in missing]
            lines = [line for line in lines if self._is_past(line["period"], batch)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            replace_file(self._losses, lambda file: file.write(text.encode()))
        lost = [number for number in missing if not self._snapshot(number - self.lead).is_file()]
        for number in missing:
            if number not in lost:
                self._start(number - self.lead)
        return lost

    def _prune(self) -> None:
        """Plans that no checkpoint will need again."""
        oldest = self.oldest()
        if oldest is not None and self.folder.is_dir():
            first = self.periods.of(oldest).number
            for path in (path for number, path in numbered(self.folder, "period").items() if number < first):
                path.unlink()

    def _snapshot(self, source: int) -> Path:
        return self.folder / f"snapshot-{source:06d}.npy"

    def _forget_snapshot(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._add_cost("selection_stall", time.monotonic() - start)

    def _add_cost(self, name: str, seconds: float) -> None:
        self._costs[name] = self._costs.get(name, 0.0) + seconds


def loss_histograms(own_L: Floats, uniform_L: Floats) -> dict[str, Any]:
    """Losses of selected and of uniform batches, on common bins."""
    edges = np.histogram_bin_edges(np.concatenate([own_L, uniform_L]), BINS)
    return {
        "mean": float(own_L.mean()),
        "uniform_mean": float(uniform_L.mean()),
        "edges": edges.tolist(),
        "counts": np.histogram(own_L, edges)[0].tolist(),
        "uniform_counts": np.histogram(uniform_L, edges)[0].tolist(),
    }


# -- what a selection goes by: embeddings and a temperature; the table needs no extra pass -----------------------------


class EmbeddingTable:
    """Image and text embedding of each sample; NaN: not met yet.  The same on every rank.  float32 by default: a
    selection is no continuous function of it, and runs on one and on two ranks, whose embeddings differ in the last
    digits, would part ways more often by float16's steps.  ``put`` runs in the step and may be recorded in a CUDA
    graph: it waits for no number."""

    def __init__(self, samples: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.rows_n2D = torch.full((samples, 2, width), torch.nan, dtype=dtype, device=device)

    @torch.no_grad()
    def put(self, ids_B: Tensor, image_BD: Tensor, text_BD: Tensor) -> None:
        """All ranks' rows, in the order that one rank alone would have them in."""
        rows_N2D = distributed.gather_rows(torch.stack([image_BD, text_BD], dim=1).to(self.rows_n2D.dtype))
        self.rows_n2D.index_copy_(0, distributed.gather_rows(ids_B), rows_N2D)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows_n2D}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"].shape != self.rows_n2D.shape:
            raise KeyError(f"it has the shape {tuple(state['rows'].shape)}, not {tuple(self.rows_n2D.shape)}")
        self.rows_n2D.copy_(state["rows"])


def mean_temperature(objective: Objective, rows_n2D: Tensor) -> float:
    """Over some of the samples whose embeddings are known, of both directions.  Every rank must ask."""
    known_n = rows_n2D.isfinite().flatten(1).all(1).nonzero()[:, 0]
    if not len(known_n):
        return 1.0  # and nothing to use it on
    ids = known_n[:: max(1, len(known_n) // ASKED)]
    image_BD, text_BD = normalize(rows_n2D[ids].float(), dim=-1).unbind(1)
    return float(torch.cat(objective.anchor_temperatures(image_BD, text_BD, ids)).double().mean())
