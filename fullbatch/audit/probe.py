"""The audit during training: a few fixed anchors against a fixed random part of the data set, every so many steps.

The "exact" value of a part of S random samples has itself the error of a batch of S.  What a batch of B says is judged
too kindly, by a share of about B / S, and every other estimate too harshly; ``fullbatch audit`` takes the whole data
set.  A probe changes nothing in training: neither towers, nor objective, nor random generators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from fullbatch import distributed
from fullbatch.assembly import Batches
from fullbatch.audit.errors import normalizer_audit
from fullbatch.config.training import Evaluation
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.data.loader import LoadedBatch, SamplePool
from fullbatch.data.order import key_of, shuffled
from fullbatch.data.sources import Share
from fullbatch.evaluation.embed import Embedder
from fullbatch.objective.objective import Objective

log = logging.getLogger("fullbatch")

AUDITS = 10  # in a run, unless its settings say otherwise
SHARE = 0.04  # of a run's work that its audits may be, by default
FORWARD = 1 / 3  # of the work of a training step that embedding its samples is
BATCHES = 4  # times the size of a batch that a probe should have, for a batch to be tellable from it
MOST = 4096  # samples of a probe, unless a batch is large
ON_DEVICE = 512 << 20  # bytes of a rank's part of the probe that may stay on a GPU; a larger one waits on the host


@dataclass(frozen=True)
class AuditPlan:
    every: int | Fraction  # steps between audits
    anchors: int  # that are asked about
    samples: int  # of the data set that stand for it

    def due(self, step: int) -> bool:
        """After this many steps; where ``every`` is no whole number, at the first step beyond each multiple."""
        return step // self.every > (step - 1) // self.every


def plan_audits(settings: Evaluation, batch_size: int, total_steps: int, num_samples: int) -> AuditPlan | None:
    """When a run audits itself, and on how much; None: not at all.  By default up to ten times, on as many samples as
    SHARE of the run's work allows; a run too short for one audit on four batches' worth of samples has none.  Never by
    a clock, so that a resumed run audits where the first one would have."""
    least, most = min(num_samples, BATCHES * batch_size), min(num_samples, max(MOST, BATCHES * batch_size))
    samples = most if settings.audit_samples is None else min(num_samples, settings.audit_samples)
    every: int | Fraction | None = settings.audit_every
    if settings.audits is not None:
        every = Fraction(total_steps, min(settings.audits, total_steps))
    if every is None:
        budget = int(SHARE / FORWARD * total_steps * batch_size)  # samples to embed in the whole run
        if settings.audit_samples is not None:
            least = samples
        audits = min(AUDITS, total_steps, budget // least)
        if audits == 0:
            return None
        every = -(-total_steps // audits)
        samples = min(samples, max(least, budget // audits))
    return AuditPlan(every, min(settings.audit_anchors, samples), samples) if every else None


class Probe:
    """Read once, at the first audit, and kept as pixels and tokens: of each rank its share.  ``batches`` are those of
    training, whose samples may lie in memory already."""

    def __init__(self, plan: AuditPlan, embedder: Embedder, batches: Batches, objective: Objective) -> None:
        self.plan, self.embedder, self.batches, self.objective = plan, embedder, batches, objective
        self.due, self.seed = plan.due, batches.order.seed
        ids = np.sort(shuffled(np.arange(plan.samples), len(batches.pool), key_of(self.seed, 3)))
        self.samples = Share(batches.pool, ids)
        self._uncropped: list[LoadedBatch] | None = None

    def audit(self) -> dict[str, Any]:
        """A line for the metrics.  Every rank must call."""
        start = time.monotonic()
        device = self.embedder.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            tables = self.embedder.tables(self._read())
            if len(tables.ids_n) < 2:
                raise ValueError(
                    f"Of the {len(self.samples)} samples that the audit during training would use, fewer than two can "
                    "be read; repair the data, or switch it off with --audit-every 0."
                )
            ids = torch.tensor(self.samples.ids, device=device)[tables.ids_n]
            generator = torch.Generator().manual_seed(self.seed)
            anchors, size = self.plan.anchors, self.batches.batch_size
            numbers = normalizer_audit(self.objective, tables.image_nD, tables.text_nD, ids, anchors, size, generator)
        del numbers["by_direction"]
        return {**numbers, "seconds": time.monotonic() - start}

    def _read(self) -> Iterable[LoadedBatch]:
        embedder = self.embedder
        if isinstance(self.batches, InMemoryBatches):
            return self.batches.chosen(self.samples.ids, embedder.batch_size)
        if self._uncropped is None:
            share = -(-len(self.samples) // distributed.world().size)
            small = share * 3 * embedder.image_size**2 <= ON_DEVICE
            place, rows = embedder.device if small else torch.device("cpu"), min(embedder.batch_size, share)
            self._uncropped = list(embedder.uncropped(SamplePool([self.samples]), place, rows))
            for error in (error for batch in self._uncropped for error in batch.bad):
                log.info("left a bad sample out of the audit: %s", error)
        return self._uncropped
