"""Batches that go by the embeddings: period after period a plan, made beside training from a snapshot of them.

At the start of period s the embeddings are written down (snapshot-s), and the plan of period s + 1 (s, if training is
to wait for it) is made from that by other processes, piece by piece (plan-BATCH.npy, by its first batch).  Training
waits for the piece it comes to, not for the plan.

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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch import distributed
from fullbatch.data.durable import make_folder, read_lines, replace_file, sync, told_if_full
from fullbatch.data.order import Order
from fullbatch.objective.objective import Objective
from fullbatch.selection.periods import (
    Period,
    Plans,
    forget_piece,
    is_whole,
    numbered,
    read_statistics,
    take_over,
)
from fullbatch.selection.planning import Floats, Making, Planners, Snapshot, Task

log = logging.getLogger("fullbatch")

Array = npt.NDArray[np.generic]

ASKED = 256  # samples whose mean temperature stands for all, where samples have their own
BINS = 40  # of a histogram of losses
_ODD, _POSITIVE = 0x1E3779B97F4A7C15, 0x7FFFFFFFFFFFFFFF


class Seen(NamedTuple):
    """What is known of all samples."""

    rows_n2D: Tensor  # embeddings of image and text; NaN where there are none
    texts_n: Tensor  # tell texts apart (``text_keys``); 0: not known


@dataclass
class Selector:
    """What a trainer knows of a selection: it takes its batches by ``ranges``, calls ``settle`` before it saves, logs
    ``costs``, and at the end calls ``close``."""

    plans: Plans  # where they are written, and what periods there are
    order: Order
    planners: Planners
    seen: Callable[[], Seen]  # of all samples as they are now; plans go by it.  Every rank calls it
    temperature: Callable[[Tensor], float]  # given the embeddings, likewise
    # the first batch that a run which goes on from the oldest checkpoint would read; None: there is none
    oldest: Callable[[], int | None]
    _started: dict[int, dict[range, Making]] = field(default_factory=dict)  # by period and piece
    _costs: dict[str, float] = field(default_factory=dict)
    _writing: Future[None] | None = None
    _first: int = 0  # the batches that are asked for: what lies before or beyond is not planned
    _end: int = 0

    def __post_init__(self) -> None:
        self.folder, self.periods = self.plans.folder, self.plans.periods
        self.lead = self.periods.selection.lead
        self.first_planned = self.periods.first_planned
        self.first_rank = distributed.world().rank == 0
        self._losses = self.folder / "losses.jsonl"
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def ranges(self, batches: range) -> Iterator[range]:
        """These batches of the run, as many at a time as are planned by then, and at most a period.  A range must be
        asked for when all steps on the batches before it are done: embeddings are looked at then."""
        if self.first_rank:
            self.planners.start_processes()
        self._first, self._end = batches.start, batches.stop
        with self._stalled():
            self._go_on(batches.start)
        start = batches.start
        while start < batches.stop:
            period = self.periods.of(start)
            with self._stalled():
                if start == period.batches.start:
                    self._begin(period)
                stop = period.batches.stop if period.number < self.first_planned else self._await(start)
            stop = min(stop, batches.stop)
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

    def _begin(self, period: Period) -> None:
        """At the start of a period: look, if a plan goes by what is seen now."""
        planned = period.number + self.lead
        if planned >= self.first_planned and self.periods[planned].batches.start < self._end:
            self._look(period.number)
        if self.first_rank:
            self._prune()

    def _await(self, batch: int) -> int:
        """Wait for the piece with this batch; where those end that are there by then, one after the other."""
        stop = distributed.together(lambda: self._finish(batch) if self.first_rank else 0)
        return int(distributed.from_first_rank(stop))

    def _look(self, source: int) -> None:
        rows_n2D, texts_n = self.seen()
        tau = self.temperature(rows_n2D)
        distributed.together(self._written)
        if self.first_rank:
            self._writing = self._hand.submit(self._write_down, source, _copy(rows_n2D), _copy(texts_n), tau)

    def _write_down(self, source: int, rows: Callable[[], Array], texts: Callable[[], Array], tau: float) -> None:
        make_folder(self.folder)
        self._snapshot(source).write(rows(), texts(), tau)
        self._start(source)

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _start(self, source: int) -> None:
        """Have made what is missing of the plan that the snapshot of period ``source`` is for."""
        missing = self._missing(source + self.lead)
        tasks = [Task(self._snapshot(source), self.plans, self.order, piece) for piece in missing]
        self._started[source + self.lead] = dict(zip(missing, self.planners.start(tasks), strict=True))

    def _pieces(self, number: int) -> list[range]:
        """Of a period's plan, up to the end of the run."""
        batches = self.periods[number].batches
        return self.periods.pieces(range(batches.start, min(batches.stop, self._end)))

    def _missing(self, number: int) -> list[range]:
        """Those that are still to be read, and not there."""
        pieces = self._pieces(number)
        return [piece for piece in pieces if piece.stop > self._first and not self.plans.path(piece).is_file()]

    def _finish(self, batch: int) -> int:
        period = self.periods.of(batch)
        if period.number not in self._started:
            self._written()  # it may be planned from what is being written now
        end = min(period.batches.stop, self._end)
        if period.number not in self._started:
            assert not self._missing(period.number), "a period begins with a plan, or with one under way"
            return end
        started, piece = self._started[period.number], self.periods.piece(batch)
        if piece in started:
            self.planners.finish(started[piece])
        while batch < end and ((piece := self.periods.piece(batch)) not in started or started[piece].done()):
            batch = piece.stop
        if batch >= end:
            self._end_plan(period.number)
        return batch

    def _end_plan(self, number: int) -> None:
        """All of it is there; its snapshot may go."""
        seconds = sum(self.planners.finish(making) for making in self._started[number].values())
        self._add_cost("selection_seconds", seconds)
        self._add_line(number)
        self._snapshot(number - self.lead).forget()
        del self._started[number]

    def _add_line(self, number: int) -> None:
        paths = [self.plans.path(piece) for piece in self._pieces(number)]
        about = [read_statistics(path) for path in paths if path.is_file()]
        own = np.array([loss for each in about for loss in each.losses])
        uniform = np.array([loss for each in about for loss in each.uniform])
        if not len(own) or not len(uniform):
            return
        selection = self.periods.selection
        line = {
            "period": number,
            "step": self.periods[number].batches.start // selection.batches_a_step,
            "batches": selection.batches,
            **loss_histograms(own, uniform),
            "equal_texts": sum(each.equal for each in about) / sum(each.rows for each in about),
        }
        with told_if_full(self._losses):
            with self._losses.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            for path in (self._losses, self.folder):  # the line and the file's name, before the snapshot goes
                sync(path)

    # -- what is kept, and what a run that goes on finds -------------------------------------------------------------

    def _go_on(self, batch: int) -> None:
        """Before the first batch: have made what is missing of the plans that were begun before it."""
        current = self.periods.of(batch)
        needed = [
            number
            for number in range(current.number, current.number + self.lead + 1)
            if number >= self.first_planned
            and self._is_past(number, batch)
            and self.periods[number].batches.start < self._end
        ]
        lost = distributed.together(lambda: self._recover(needed, batch) if self.first_rank else None)
        for number in distributed.from_first_rank(lost):
            log.info("period %d is planned by the embeddings of this checkpoint: there is no earlier snapshot", number)
            self._look(number - self.lead)

    def _is_past(self, number: int, batch: int) -> bool:
        """Whether the plan of this period goes by embeddings from before ``batch`` was read."""
        return self.periods[number - self.lead].batches.start < batch

    def _recover(self, needed: Sequence[int], batch: int) -> list[int]:
        """Forget what comes after ``batch``; start what can be made again from its snapshot, and return the rest."""
        for number, path in numbered(self.folder, "period").items():
            if self._is_past(number, batch) and not take_over(path, self.plans, self.periods[number]):
                log.warning("%s is damaged; it is made again", path)
            path.unlink()
        for first, path in numbered(self.folder, "plan").items():
            past = self._is_past(self.periods.of(first).number, batch)
            whole = past and is_whole(path)
            if past and not whole:
                log.warning("%s is damaged; it is made again", path)
            if not whole:
                forget_piece(path)
        sources = numbered(self.folder, "snapshot")
        for source in sources:
            if source + self.lead not in needed:
                self._snapshot(source).forget()
        again = [number for number in needed if number - self.lead in sources]
        lost = [number for number in needed if number not in again and self._missing(number)]
        if self._losses.is_file():
            lines = read_lines(self._losses, ("step", "period"))
            lines = [line for line in lines if line["period"] not in (*again, *lost)]
            lines = [line for line in lines if self._is_past(line["period"], batch)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            replace_file(self._losses, lambda file: file.write(text.encode()))
        for number in again:
            self._start(number - self.lead)
        return lost

    def _prune(self) -> None:
        """Plans that no checkpoint will need again."""
        oldest = self.oldest()
        if oldest is not None and self.folder.is_dir():
            first = self.periods.of(oldest).batches.start
            for path in (path for batch, path in numbered(self.folder, "plan").items() if batch < first):
                forget_piece(path)

    def _snapshot(self, source: int) -> Snapshot:
        return Snapshot(self.folder / f"snapshot-{source:06d}.npy")

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._add_cost("selection_stall", time.monotonic() - start)

    def _add_cost(self, name: str, seconds: float) -> None:
        self._costs[name] = self._costs.get(name, 0.0) + seconds


def _copy(table: Tensor) -> Callable[[], Array]:
    """As it is now, since the next step changes it; what is returned brings it to the host.  Training waits for a copy
    on the device, where there is room for one, and the way to the host is another stream's."""
    if not table.is_cuda:
        return table.clone().numpy
    if torch.cuda.mem_get_info(table.device)[0] < 2 * table.nbytes:  # the next step may need what is left
        return table.cpu().numpy
    copy, stream = table.clone(), torch.cuda.Stream(table.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(table.device))

    def moved() -> Array:
        with torch.cuda.stream(stream):
            return copy.cpu().numpy()

    return moved


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
    """Image and text embedding of each sample as it was met last, and which text that was.  The same on every rank.
    float32 by default: a selection is no continuous function of it, and runs on one and on two ranks, whose embeddings
    differ in the last digits, would part ways more often by float16's steps.  ``put`` runs in the step and may be
    recorded in a CUDA graph: it waits for no number."""

    def __init__(self, samples: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        rows_n2D = torch.full((samples, 2, width), torch.nan, dtype=dtype, device=device)
        self.seen = Seen(rows_n2D, torch.zeros(samples, dtype=torch.int64, device=device))

    @torch.no_grad()
    def put(self, ids_B: Tensor, image_BD: Tensor, text_BD: Tensor, tokens: Tensor) -> None:
        """All ranks' rows, in the order that one rank alone would have them in."""
        rows_n2D, texts_n = self.seen
        ids_N, keys_N = distributed.gather_rows(torch.stack([ids_B, text_keys(tokens)], dim=1)).unbind(1)
        rows_N2D = distributed.gather_rows(torch.stack([image_BD, text_BD], dim=1).to(rows_n2D.dtype))
        rows_n2D.index_copy_(0, ids_N, rows_N2D)
        texts_n.index_copy_(0, ids_N, keys_N)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.seen.rows_n2D, "texts": self.seen.texts_n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows_n2D, texts_n = self.seen
        if state["rows"].shape != rows_n2D.shape:
            raise KeyError(f"it has the shape {tuple(state['rows'].shape)}, not {tuple(rows_n2D.shape)}")
        rows_n2D.copy_(state["rows"])
        texts_n.copy_(state.get("texts", torch.zeros_like(texts_n)))  # older checkpoints have none


def text_keys(tokens: Tensor) -> Tensor:
    """A number for each text, the same for equal ones; 0 where these are no texts but second views.  A linear hash in
    whole numbers, which wrap alike on every device."""
    if tokens.ndim != 2:
        return torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    places_L = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    scattered_L = (places_L * _ODD) ^ ((places_L * _ODD) >> 29)
    return (((tokens.long() + 1) * (scattered_L * _ODD | 1)).sum(1) & _POSITIVE) | 1


def mean_temperature(objective: Objective, rows_n2D: Tensor) -> float:
    """Over some of the samples whose embeddings are known, of both directions.  Every rank must ask."""
    known_n = rows_n2D.isfinite().flatten(1).all(1).nonzero()[:, 0]
    if not len(known_n):
        return 1.0  # and nothing to use it on
    ids = known_n[:: max(1, len(known_n) // ASKED)]
    image_BD, text_BD = normalize(rows_n2D[ids].float(), dim=-1).unbind(1)
    return float(torch.cat(objective.anchor_temperatures(image_BD, text_BD, ids)).double().mean())
