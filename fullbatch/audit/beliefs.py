"""What a method believes its anchors' normalizers are, brought to one convention: log(epsilon + g_i), one epsilon."""

# A: anchors   Q: rows of a question, on all ranks   n: samples of the data set   D: width

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch import distributed
from fullbatch.audit.exact import references
from fullbatch.config.axes import (
    Amortized,
    BatchAndQueue,
    BatchMean,
    Mlp,
    MovingAverage,
    NoNormalizer,
    Prototypes,
    Rolling,
    Scent,
)
from fullbatch.objective.amortized import AmortizedNormalizer, blend_share
from fullbatch.objective.log_domain import log_add, log_or_minus_inf
from fullbatch.objective.normalizers import BatchAndQueueNormalizer, MovingAverageNormalizer
from fullbatch.objective.objective import Objective
from fullbatch.objective.step import DIRECTIONS, Progress

Pair = tuple[Tensor, Tensor]  # of image anchors and of text anchors

PIECE = 1024  # anchors a rank asks about at a time: an objective compares the rows of a question with each other
READABLE = 1e-3  # the least share of an estimate that is taken to be told apart from the constant in it


@dataclass(frozen=True)
class AskedAnchors:
    """The anchors' rows of the two tables, and their sample ids where a method wants them."""

    image_AD: Tensor
    text_AD: Tensor
    ids_A: Tensor | None

    def sides(self, taus: Pair, log_batch: Pair) -> list[_Side]:
        tables = (self.image_AD, self.text_AD), (self.text_AD, self.image_AD)
        return [
            _Side(name, *rows, self.ids_A, tau_A, log_batch_A)
            for name, rows, tau_A, log_batch_A in zip(DIRECTIONS, tables, taus, log_batch, strict=True)
        ]


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


@dataclass(frozen=True)
class Belief:
    """One direction's estimates of log(epsilon + g_i(data set)).

    known_A        what the method remembers or predicts; None: it has no normalizer
    in_use_A       what a step on the anchor's batch would divide by
    unseen_A       where there is nothing to remember yet; ``known_A`` is nan there
    unreadable_A   where ``known_A`` is hardly more than the constant the method adds
    """

    known_A: Tensor | None
    in_use_A: Tensor | None
    unseen_A: Tensor
    unreadable_A: Tensor


def temperatures(objective: Objective, anchors: AskedAnchors) -> Pair:
    image_A, text_A = _ask(objective.anchor_temperatures, anchors)[0].unbind(dim=1)
    return image_A, text_A


def beliefs(
    objective: Objective, anchors: AskedAnchors, taus: Pair, log_batch: Pair, batch: int, epsilon: float
) -> list[Belief]:
    """Of both directions.  ``log_batch`` is log g_i(batch) of a batch of ``batch`` rows that contains the anchor."""
    normalizer, sides = objective.method.normalizer, anchors.sides(taus, log_batch)
    none_A = torch.zeros_like(taus[0], dtype=torch.bool)
    match normalizer:
        case NoNormalizer():
            return [Belief(None, None, none_A, none_A)] * 2
        case BatchMean():  # it has no memory, and its own epsilon, 1 / (B - 1) for openclip, would mask the error
            return [Belief(log_add(log_A, epsilon), log_add(log_A, epsilon), none_A, none_A) for log_A in log_batch]
        case BatchAndQueue():
            return [_with_queue(objective, side, batch, epsilon) for side in sides]
        case MovingAverage() | Scent() | Prototypes() | Rolling() | Mlp() | Amortized():
            alpha_A2, rows = _ask(objective.log_normalizers, anchors)
        case _ as unknown:
            assert_never(unknown)
    result = []
    for side, alpha_A in zip(sides, alpha_A2.unbind(dim=1), strict=True):
        if isinstance(normalizer, Amortized):
            result.append(_amortized(objective, side, alpha_A, rows, batch, epsilon))
            continue
        in_use_A, unseen_A = alpha_A, none_A
        if isinstance(normalizer, (MovingAverage, Scent)):
            alpha_A, in_use_A = _moving_average(objective, side)
            unseen_A = alpha_A.isnan()
        log_constant_A = torch.full_like(alpha_A, log_or_minus_inf(normalizer.epsilon))
        if normalizer.epsilon == epsilon:
            result.append(Belief(alpha_A, in_use_A, unseen_A, none_A))
            continue
        known_A, in_use_A = (log_add(without(x_A, log_constant_A), epsilon) for x_A in (alpha_A, in_use_A))
        result.append(Belief(known_A, in_use_A, unseen_A, is_unreadable(alpha_A, log_constant_A)))
    return result


def without(log_total: Tensor, log_constant: Tensor) -> Tensor:
    """log(exp(log_total) - exp(log_constant)), but for a difference below READABLE of the total, READABLE of it.

    An estimate of a sum says nothing of the part beside a constant when it is hardly more, or by its own error less,
    than the constant; the bound keeps it finite and increasing.
    """
    share = -torch.expm1(log_constant - log_total)
    return log_total + share.clamp(min=READABLE).log()


def is_unreadable(log_total: Tensor, log_constant: Tensor) -> Tensor:
    return -torch.expm1(log_constant - log_total) < READABLE


def _ask(question: Callable[..., tuple[Tensor, Tensor]], anchors: AskedAnchors) -> tuple[Tensor, int]:
    """Both directions' answers for all anchors, in a column each, and how many rows a question had.

    The ranks share the anchors.  An objective gathers what they ask, so all ask equally often about equally many rows:
    at the end they begin again with the first.
    """
    world, count = distributed.world(), anchors.image_AD.shape[0]
    share = min(PIECE, max(2, math.ceil(count / world.size)))
    answers = []
    for start in range(0, count, share * world.size):
        place = torch.arange(start, start + share, device=anchors.image_AD.device) + world.rank * share
        rows = place % count
        ids = None if anchors.ids_A is None else anchors.ids_A[rows]
        pair = question(anchors.image_AD[rows], anchors.text_AD[rows], ids)
        answers.append(distributed.gather_rows(torch.stack(pair, dim=1)))
    return torch.cat(answers)[:count], share * world.size


def _moving_average(objective: Objective, side: _Side) -> Pair:
    """The table's rows, nan where never seen, and what the next step would make of them with this batch."""
    normalizer = objective.normalizers[side.name]
    assert isinstance(normalizer, MovingAverageNormalizer) and side.ids_A is not None
    log_u_A = normalizer.log_u.get(side.ids_A, side.log_batch_A.dtype)
    log_new_A = log_add(side.log_batch_A, normalizer.config.epsilon)
    now = Progress(objective.step, objective.epoch, objective.context.seed, training=False)
    return log_u_A, normalizer.moved(log_u_A, log_new_A, now)


def _with_queue(objective: Objective, side: _Side, batch: int, epsilon: float) -> Belief:
    """XBM remembers a queue, and divides by the mean over its batch and the queue."""
    normalizer, tau_A = objective.normalizers[side.name], side.tau_A
    assert isinstance(normalizer, BatchAndQueueNormalizer)
    none_A = torch.zeros_like(tau_A, dtype=torch.bool)
    if not normalizer.active:
        return Belief(None, log_add(side.log_batch_A, epsilon), none_A, none_A)
    log_queue_A = normalizer.log_mean_of_queue(side.own_AD.to(tau_A.dtype), side.reference_A(objective), tau_A)
    log_both_A = normalizer.with_queue(side.log_batch_A, log_queue_A, batch - 1)
    return Belief(log_add(log_queue_A, epsilon), log_add(log_both_A, epsilon), none_A, none_A)


def _amortized(objective: Objective, side: _Side, alpha_A: Tensor, rows: int, batch: int, epsilon: float) -> Belief:
    """AmorLIP's lambda is a sum over the B - 1 negatives of a batch plus a little of the positive.

    The objective's answer divides it by the negatives of the question, which are not those of training; here it is
    divided by B - 1, and the positive's part is taken out.
    """
    normalizer, tau_A = objective.normalizers[side.name], side.tau_A
    assert isinstance(normalizer, AmortizedNormalizer)
    config, log_count = normalizer.config, math.log(batch - 1)
    alpha_A = alpha_A + math.log(rows - 1) - log_count
    reference_A = side.reference_A(objective)
    positive_A = (side.own_AD * side.other_AD).sum(1).to(tau_A.dtype)
    log_constant_A = (positive_A - reference_A) / tau_A + math.log(config.positive_weight) - log_count
    in_use_A = alpha_A
    if config.divide_by == "target":
        in_use_A, share = torch.logaddexp(side.log_batch_A, log_constant_A), blend_share(config, objective.epoch)
        if share > 0.0:
            log_previous_A = normalizer.previous(side.own_AD.to(tau_A.dtype)) - reference_A / tau_A - log_count
            in_use_A = torch.logaddexp(log_previous_A + math.log(share), in_use_A + log_or_minus_inf(1.0 - share))
    known_A, in_use_A = (log_add(without(x_A, log_constant_A), epsilon) for x_A in (alpha_A, in_use_A))
    none_A = torch.zeros_like(known_A, dtype=torch.bool)
    return Belief(known_A, in_use_A, none_A, is_unreadable(alpha_A, log_constant_A))
