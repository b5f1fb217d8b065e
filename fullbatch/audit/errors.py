"""How wrong is a normalizer?  What a method believes of its anchors against the exact value over the data set.

NeuCLIP section B.6: the mean squared difference of the logs.  Three estimates of log(epsilon + g_i(data set)) are
judged on the same anchors, with one small epsilon for all methods:

    normalizer   what the method remembers or predicts: the table's row, the net's answer; for a plain batch mean the
                 batch estimate, for SigLIP and VICReg nothing
    in use       what a training step would divide by, where that differs: the moving average after it has taken in the
                 batch, AmorLIP's blended target
    batch        one random batch of the run's size that contains the anchor
"""

# A: anchors   Q: rows of a question, on all ranks   n: samples of the data set   D: width

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch import distributed
from fullbatch.audit.exact import checked_anchors, log_means, log_means_of_batches, references
from fullbatch.config import axes
from fullbatch.config.checks import is_whole
from fullbatch.objective import normalizers
from fullbatch.objective.advice import check_shapes, check_unit_rows
from fullbatch.objective.log_domain import log_add, log_or_minus_inf
from fullbatch.objective.objective import Objective
from fullbatch.objective.step import DIRECTIONS

EPSILON = 1e-14
PIECE = 1024  # anchors a rank asks about at a time: an objective compares the rows of a question with each other
READABLE = 1e-3  # the least share of an estimate that is taken to be told apart from the constant in it


ERRORS = tuple(f"{estimate}_{what}" for estimate in ("normalizer", "in_use", "batch") for what in ("error", "bias"))


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
) -> dict[str, Any]:
    """Judge what ``objective`` believes by the embeddings of the whole data set; nothing of it changes.

    ``image_nD`` and ``text_nD`` are unit rows, embedded by the model the objective was trained with, the same on every
    rank and on the objective's device; ``ids`` their sample ids (None for methods that keep nothing per sample).
    ``anchors`` are row numbers, or how many to draw at random.  ``batch_size`` is that of training, over all ranks.
    ``generator`` is on the CPU, in the same state on every rank.  The ranks share the work.

    The numbers, as in audit.json: of each estimate the error, the mean over the anchors of (estimate - exact)^2 in
    logs, and the bias, that of estimate - exact; None: the method has no such estimate, or none yet.

    tau          mean over the anchors and directions; errors at different temperatures do not compare
    samples      of the data set that the exact value is taken over
    unseen       anchors that the moving average has not met yet: left out of ``normalizer``; in use they start as
                 their batch says
    unreadable   share of the estimates that are hardly more than the constant the method adds (see ``without``)
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
    pairwise = axes.Identity() if isinstance(method.normalizer, axes.NoNormalizer) else method.pairwise
    ids_A = None if ids is None else ids.to(rows_A.device)[rows_A]
    tau_A2, _ = _ask(objective.anchor_temperatures, image_nD[rows_A], text_nD[rows_A], ids_A)
    taus = tau_A2[:, 0], tau_A2[:, 1]

    terms: dict[str, Any] = {"pairwise": pairwise, "negatives": method.negatives}
    log_batch = log_means_of_batches(image_nD, text_nD, rows_A, taus, batch, generator, **terms)
    tables = (image_nD, text_nD), (text_nD, image_nD)
    sides = [
        _Side(name, own_nD[rows_A], other_nD[rows_A], ids_A, tau_A, log_batch_A)
        for name, (own_nD, other_nD), tau_A, log_batch_A in zip(DIRECTIONS, tables, taus, log_batch, strict=True)
    ]
    believed = _beliefs(objective, sides, batch, epsilon)
    by_direction = {}
    for side, both_nD, belief in zip(sides, tables, believed, strict=True):
        mine_A, tau_mine_A = (rows.tensor_split(world.size)[world.rank] for rows in (rows_A, side.tau_A))
        log_mean_A = log_means(*both_nD, mine_A, tau_mine_A, chunk=chunk, **terms)
        exact_A = log_add(distributed.gather_uneven(log_mean_A), epsilon)
        seen_A = ~_unseen(objective, belief)
        known_A = None if belief.known_A is None or not seen_A.any() else belief.known_A[seen_A]
        estimates = (belief.in_use_A, exact_A), (log_add(side.log_batch_A, epsilon), exact_A)
        values = [value for pair in ((known_A, exact_A[seen_A]), *estimates) for value in _error(*pair)]
        by_direction[side.name] = dict(zip(ERRORS, values, strict=True))
    tau_2A = torch.stack(taus).double()
    return {
        "tau": float(tau_2A.mean()),
        "tau_min": float(tau_2A.min()),
        "tau_max": float(tau_2A.max()),
        "anchors": rows_A.shape[0],
        "samples": count,
        "unseen": max(int(_unseen(objective, belief).sum()) for belief in believed),
        "unreadable": float(torch.stack([belief.unreadable_A for belief in believed]).float().mean()),
        **mean_errors(list(by_direction.values())),
        "by_direction": by_direction,
    }


def _error(estimate_A: Tensor | None, exact_A: Tensor) -> tuple[float | None, float | None]:
    """And the bias."""
    if estimate_A is None:
        return None, None
    gap_A = (estimate_A - exact_A).double()
    return float(gap_A.square().mean()), float(gap_A.mean())


def _unseen(objective: Objective, belief: _Belief) -> Tensor:
    """Anchors that a table has no estimate of yet.  A nan of another method is an error, and shown."""
    if belief.known_A is None or not isinstance(objective.method.normalizer, (axes.MovingAverage, axes.Scent)):
        return torch.zeros_like(belief.unreadable_A)
    return belief.known_A.isnan()


def mean_errors(several: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Number by number; None where one of them has none."""
    numbers = {name: [errors[name] for errors in several] for name in ERRORS}
    return {name: None if None in values else statistics.fmean(values) for name, values in numbers.items()}


# ---------------------------------------------------------------------------------------------------------------------
# what a method believes, brought to one convention: log(epsilon + g_i), one epsilon


@dataclass(frozen=True)
class _Belief:
    """One direction's estimates of log(epsilon + g_i(data set))."""

    known_A: Tensor | None  # what the method remembers or predicts; None: no normalizer; nan: nothing to remember yet
    in_use_A: Tensor | None  # what a step on the anchor's batch would divide by
    unreadable_A: Tensor  # where ``known_A`` is hardly more than the constant the method adds


@dataclass(frozen=True)
class _Side:
    """One direction's anchors, their positives in the other table, and what is known of them without asking."""

    name: str
    own_AD: Tensor
    other_AD: Tensor
    ids_A: Tensor | None
    tau_A: Tensor
    log_batch_A: Tensor

    def reference_A(self, objective: Objective) -> Tensor:
        return references(self.own_AD, self.other_AD, objective.method.pairwise).to(self.tau_A.dtype)


def _beliefs(objective: Objective, sides: Sequence[_Side], batch: int, epsilon: float) -> list[_Belief]:
    """Of both directions; a batch has ``batch`` rows and contains the anchor."""
    normalizer, image = objective.method.normalizer, sides[0]
    none_A = torch.zeros_like(image.tau_A, dtype=torch.bool)
    match normalizer:
        case axes.NoNormalizer():
            return [_Belief(None, None, none_A)] * 2
        case axes.BatchMean():  # it has no memory, and its own epsilon, 1 / (B - 1) for openclip, would mask the error
            seen = [log_add(side.log_batch_A, epsilon) for side in sides]
            return [_Belief(seen_A, seen_A, none_A) for seen_A in seen]
        case axes.BatchAndQueue():
            return [_with_queue(objective, side, batch, epsilon) for side in sides]
        case axes.MovingAverage() | axes.Scent() | axes.Prototypes() | axes.Rolling() | axes.Mlp() | axes.Amortized():
            alpha_A2, rows = _ask(objective.log_normalizers, image.own_AD, image.other_AD, image.ids_A)
        case _ as unknown:
            assert_never(unknown)
    beliefs = []
    for side, alpha_A in zip(sides, alpha_A2.unbind(dim=1), strict=True):
        in_use_A = alpha_A
        if isinstance(normalizer, axes.Amortized):
            alpha_A, in_use_A, log_constant_A = _amortized(objective, side, alpha_A, rows, batch)
        else:
            if isinstance(normalizer, (axes.MovingAverage, axes.Scent)):
                alpha_A, in_use_A = _moving_average(objective, side)
            log_constant_A = torch.full_like(alpha_A, log_or_minus_inf(normalizer.epsilon))
            if normalizer.epsilon == epsilon:
                beliefs.append(_Belief(alpha_A, in_use_A, none_A))
                continue
        known_A, in_use_A = (log_add(without(x_A, log_constant_A), epsilon) for x_A in (alpha_A, in_use_A))
        beliefs.append(_Belief(known_A, in_use_A, _share_beside(alpha_A, log_constant_A) < READABLE))
    return beliefs


def without(log_total: Tensor, log_constant: Tensor) -> Tensor:
    """log(exp(log_total) - exp(log_constant)), but for a difference below READABLE of the total, READABLE of it.  Where
    a sum is hardly more than a constant in it, an estimate says nothing of the rest; the bound keeps it finite."""
    return log_total + _share_beside(log_total, log_constant).clamp(min=READABLE).log()


def _share_beside(log_total: Tensor, log_constant: Tensor) -> Tensor:
    return -torch.expm1(log_constant - log_total)


def _ask(
    question: Callable[..., tuple[Tensor, Tensor]], image_AD: Tensor, text_AD: Tensor, ids_A: Tensor | None
) -> tuple[Tensor, int]:
    """Both directions' answers for all anchors, in a column each, and how many rows a question had.  An objective
    gathers what ranks ask, so all ask equally often about equally many rows: at the end they begin with the first."""
    world, count = distributed.world(), image_AD.shape[0]
    share = min(PIECE, max(2, math.ceil(count / world.size)))
    answers = []
    for start in range(0, count, share * world.size):
        rows = (torch.arange(start, start + share, device=image_AD.device) + world.rank * share) % count
        pair = question(image_AD[rows], text_AD[rows], None if ids_A is None else ids_A[rows])
        answers.append(distributed.gather_rows(torch.stack(pair, dim=1)))
    return torch.cat(answers)[:count], share * world.size


def _moving_average(objective: Objective, side: _Side) -> tuple[Tensor, Tensor]:
    """The table's rows, nan where never seen, and what the next step would make of them with this batch."""
    normalizer = objective.normalizers[side.name]
    assert isinstance(normalizer, normalizers.MovingAverageNormalizer) and side.ids_A is not None
    log_u_A = normalizer.log_u.get(side.ids_A, side.log_batch_A.dtype)
    log_new_A = log_add(side.log_batch_A, normalizer.config.epsilon)
    now = objective.progress(training=False)
    return log_u_A, normalizer.moved(log_u_A, log_new_A, now)


def _with_queue(objective: Objective, side: _Side, batch: int, epsilon: float) -> _Belief:
    """XBM remembers a queue, and divides by the mean over its batch and the queue."""
    normalizer, tau_A = objective.normalizers[side.name], side.tau_A
    assert isinstance(normalizer, normalizers.BatchAndQueueNormalizer)
    none_A = torch.zeros_like(tau_A, dtype=torch.bool)
    if not normalizer.rows_in_use(objective.step):
        return _Belief(None, log_add(side.log_batch_A, epsilon), none_A)
    log_queue_A = normalizer.log_mean_of_queue(side.own_AD.to(tau_A.dtype), side.reference_A(objective), tau_A)
    log_both_A = normalizer.with_queue(side.log_batch_A, log_queue_A, batch - 1)
    return _Belief(log_add(log_queue_A, epsilon), log_add(log_both_A, epsilon), none_A)


def _amortized(
    objective: Objective, side: _Side, alpha_A: Tensor, rows: int, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """AmorLIP's lambda is a sum over the B - 1 negatives of a batch plus a little of the positive: known, in use, and
    the positive's part of both.  The objective's answer is divided by the question's negatives, here by B - 1."""
    normalizer, tau_A = objective.normalizers[side.name], side.tau_A
    assert isinstance(normalizer, normalizers.AmortizedNormalizer)
    config, log_count = normalizer.config, math.log(batch - 1)
    alpha_A = alpha_A + math.log(rows - 1) - log_count
    reference_A = side.reference_A(objective)
    positive_A = (side.own_AD * side.other_AD).sum(1).to(tau_A.dtype)
    log_constant_A = (positive_A - reference_A) / tau_A + math.log(config.positive_weight) - log_count
    in_use_A = alpha_A
    if config.divide_by == "target":
        in_use_A = torch.logaddexp(side.log_batch_A, log_constant_A)
        share = normalizers.blend_share(config, objective.epoch)
        if share > 0.0:
            log_previous_A = normalizer.previous(side.own_AD.to(tau_A.dtype)) - reference_A / tau_A - log_count
            in_use_A = torch.logaddexp(log_previous_A + math.log(share), in_use_A + log_or_minus_inf(1.0 - share))
    return alpha_A, in_use_A, log_constant_A
