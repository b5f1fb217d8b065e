"""How wrong is a normalizer?  What a method believes of its anchors against the exact value over the data set.

NeuCLIP section B.6: the mean squared difference of the logs.  Three estimates of log(epsilon + g_i(data set)) are
judged on the same anchors, with one small epsilon for all methods:

    normalizer   what the method remembers or predicts: the table's row, the net's answer; for a plain batch mean the
                 batch estimate, for SigLIP and VICReg nothing
    in use       what a training step would divide by, where that differs: the moving average after it has taken in the
                 batch, AmorLIP's blended target
    batch        one random batch of the run's size that contains the anchor
"""

# A: anchors   n: samples of the data set   D: width

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.audit.beliefs import AskedAnchors, Belief, beliefs, temperatures
from fullbatch.audit.exact import checked_anchors, log_means, log_means_of_batches
from fullbatch.config.axes import Identity, NoNormalizer
from fullbatch.config.checks import is_whole
from fullbatch.objective.advice import check_shapes, check_unit_rows
from fullbatch.objective.log_domain import log_add
from fullbatch.objective.objective import Objective
from fullbatch.objective.step import DIRECTIONS

EPSILON = 1e-14


@dataclass(frozen=True)
class Errors:
    """Of one direction, or of both together.

    error   mean over the anchors of (estimate - exact)^2, in logs; bias: mean of estimate - exact
    None: the method has no such estimate, or none yet
    """

    normalizer_error: float | None
    normalizer_bias: float | None
    in_use_error: float | None
    in_use_bias: float | None
    batch_error: float | None
    batch_bias: float | None


@dataclass(frozen=True)
class AuditNumbers:
    """tau          mean over the anchors and directions; errors at different temperatures do not compare
    total        both directions together: the mean of ``image`` and ``text``
    anchors      how many were asked
    samples      of the data set that the exact value is taken over
    batch        rows of a batch, as in training
    unseen       anchors that the moving average has not met yet: left out of ``normalizer``; in use they start as
                 their batch says
    unreadable   share of the estimates that are hardly more than the constant the method adds (see ``without``)
    """

    tau: float
    tau_min: float
    tau_max: float
    total: Errors
    image: Errors
    text: Errors
    anchors: int
    samples: int
    batch: int
    unseen: int
    unreadable: float
    epsilon: float

    def as_dict(self) -> dict[str, Any]:
        """Flat, as in audit.json and metrics.jsonl."""
        return {
            "tau": self.tau,
            "tau_min": self.tau_min,
            "tau_max": self.tau_max,
            **dataclasses.asdict(self.total),
            "anchors": self.anchors,
            "samples": self.samples,
            "unseen": self.unseen,
            "unreadable": self.unreadable,
            "by_direction": {name: dataclasses.asdict(getattr(self, name)) for name in DIRECTIONS},
        }


@torch.no_grad()
def normalizer_audit(
    objective: Objective,
    image_nD: Tensor,
    text_nD: Tensor,
    ids: Tensor | None,
    anchors: int | Tensor,
    batch_size: int,
    generator: torch.Generator,
    *,
    epsilon: float = EPSILON,
    chunk: int | None = None,
) -> AuditNumbers:
    """Judge what ``objective`` believes by the embeddings of the whole data set; nothing of it changes.

    ``image_nD`` and ``text_nD`` are unit rows, embedded by the model the objective was trained with, the same on every
    rank and on the objective's device; ``ids`` their sample ids (None for methods that keep nothing per sample).
    ``anchors`` are row numbers, or how many to draw at random.  ``batch_size`` is that of training, over all ranks.
    ``generator`` is on the CPU, in the same state on every rank.  The ranks share the work.
    """
    check_shapes(image_nD, text_nD, objective.context.width)
    for name, rows_nD in (("image_embeddings", image_nD), ("text_embeddings", text_nD)):
        check_unit_rows(name, rows_nD)
    count = image_nD.shape[0]
    if not is_whole(batch_size, 2):
        raise ValueError(f"batch_size must be that of training, a whole number of at least 2, got {batch_size!r}.")
    drawn = torch.randperm(count, generator=generator)[:anchors] if isinstance(anchors, int) else anchors
    rows_A = checked_anchors(drawn, count).to(image_nD.device)
    if rows_A.numel() == 0:
        raise ValueError("An audit needs at least one anchor.")
    method, batch, world = objective.method, min(batch_size, count), distributed.world()
    pairwise = Identity() if isinstance(method.normalizer, NoNormalizer) else method.pairwise
    asked = AskedAnchors(image_nD[rows_A], text_nD[rows_A], None if ids is None else ids.to(rows_A.device)[rows_A])
    taus = temperatures(objective, asked)

    def exact(own_nD: Tensor, other_nD: Tensor, tau_A: Tensor) -> Tensor:
        mine_A, tau_mine_A = (rows.tensor_split(world.size)[world.rank] for rows in (rows_A, tau_A))
        log_mean_A = log_means(own_nD, other_nD, mine_A, tau_mine_A, pairwise, negatives=method.negatives, chunk=chunk)
        return log_add(distributed.gather_uneven(log_mean_A), epsilon)

    log_batch = log_means_of_batches(
        image_nD, text_nD, rows_A, taus, batch, generator, pairwise=pairwise, negatives=method.negatives
    )
    believed = beliefs(objective, asked, taus, log_batch, batch, epsilon)
    image = _errors(exact(image_nD, text_nD, taus[0]), log_add(log_batch[0], epsilon), believed[0])
    text = _errors(exact(text_nD, image_nD, taus[1]), log_add(log_batch[1], epsilon), believed[1])
    tau_2A = torch.stack(taus).double()
    return AuditNumbers(
        tau=float(tau_2A.mean()),
        tau_min=float(tau_2A.min()),
        tau_max=float(tau_2A.max()),
        total=mean_errors([image, text]),
        image=image,
        text=text,
        anchors=rows_A.shape[0],
        samples=count,
        batch=batch,
        unseen=max(int(belief.unseen_A.sum()) for belief in believed),
        unreadable=float(torch.stack([belief.unreadable_A for belief in believed]).float().mean()),
        epsilon=epsilon,
    )


def _errors(exact_A: Tensor, batch_A: Tensor, belief: Belief) -> Errors:
    known_A = None if belief.known_A is None else belief.known_A[~belief.unseen_A]
    return Errors(
        *_error_and_bias(known_A, exact_A[~belief.unseen_A]),
        *_error_and_bias(belief.in_use_A, exact_A),
        *_error_and_bias(batch_A, exact_A),
    )


def _error_and_bias(found_A: Tensor | None, exact_A: Tensor) -> tuple[float | None, float | None]:
    if found_A is None or found_A.numel() == 0:
        return None, None
    gap_A = (found_A - exact_A).double()
    return float(gap_A.square().mean()), float(gap_A.mean())


def mean_errors(several: Sequence[Errors]) -> Errors:
    """Number by number; None where one of them has none."""
    numbers = {field.name: [getattr(errors, field.name) for errors in several] for field in dataclasses.fields(Errors)}
    return Errors(**{name: None if None in values else statistics.fmean(values) for name, values in numbers.items()})
