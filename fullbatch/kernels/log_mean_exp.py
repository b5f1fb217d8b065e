"""The one primitive: reduce pairwise terms of anchors against others, with its exact gradient, a few rows at a time.

    x_ij = loss(s_ij - r_i) / tau_i            s_ij = anchor_i . other_j,  r_i the reference (s_ii, or 0 for raw terms)
    value_i = log sum_j exp(x_ij)              or, for SigLIP, sum_j log(1 + exp(x_ij))

Every objective is made of it, and it is the place where a GPU kernel goes.  With ``chunk`` rows at a time no
anchors x others matrix exists; with ``chunk=None`` the matrix is kept and the backward pass need not compute it again.
"""

# R: rows at hand   C: columns at hand   B: anchors on this rank   N: anchors (or others) on all ranks   D: width

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fullbatch import distributed
from fullbatch.config import Identity, Pairwise, Sigmoid, SquaredHinge


@dataclass(frozen=True)
class Pairs:
    """Anchors against others, in numbers.  ``own_column`` is where row 0's positive lies; None: nothing is excluded."""

    anchor_RD: Tensor
    other_ND: Tensor
    reference_R: Tensor
    tau_R: Tensor
    own_column: int | None
    pairwise: Pairwise

    def chunks(self, rows: int | None) -> Iterator[tuple[slice, Pairs]]:
        count = self.anchor_RD.shape[0]
        step = count if rows is None else rows
        for start in range(0, count, max(step, 1)):
            here = slice(start, min(start + step, count))
            column = None if self.own_column is None else self.own_column + start
            part = Pairs(
                self.anchor_RD[here], self.other_ND, self.reference_R[here], self.tau_R[here], column, self.pairwise
            )
            yield here, part

    def set_own_column(self, matrix_RN: Tensor, value: float) -> Tensor:
        if self.own_column is not None:
            matrix_RN.diagonal(self.own_column)[: matrix_RN.shape[0]] = value
        return matrix_RN


def exponents(pairs: Pairs) -> Tensor:
    """x_ij, with minus infinity where the anchor's own positive lies."""
    if isinstance(pairs.pairwise, SquaredHinge):
        sim_RN = pairs.anchor_RD @ pairs.other_ND.T
        gap_RN = sim_RN.sub_((pairs.reference_R - pairs.pairwise.margin)[:, None])
        x_RN = gap_RN.clamp_(min=0).square_().div_(pairs.tau_R[:, None])
    else:
        shift_R = -pairs.reference_R / pairs.tau_R
        x_RN = torch.addmm(shift_R[:, None], pairs.anchor_RD / pairs.tau_R[:, None], pairs.other_ND.T)
    return pairs.set_own_column(x_RN, -math.inf)


def reduce_row(x_RN: Tensor, pairwise: Pairwise) -> Tensor:
    if isinstance(pairwise, Sigmoid):
        return -logsigmoid(-x_RN).sum(1)
    return torch.logsumexp(x_RN, dim=1)


def weights(x_RN: Tensor, value_R: Tensor, pairwise: Pairwise) -> Tensor:
    """d value_i / d x_ij: softmax weights, or the sigmoid's."""
    if isinstance(pairwise, Sigmoid):
        return torch.sigmoid(x_RN)
    return torch.exp(x_RN - value_R[:, None])


def similarity_weights(pairs: Pairs, x_RN: Tensor, value_R: Tensor) -> Tensor:
    """tau_i d value_i / d s_ij."""
    weight_RN = weights(x_RN, value_R, pairs.pairwise)
    if isinstance(pairs.pairwise, SquaredHinge):
        hinge_RN = (x_RN * pairs.tau_R[:, None]).clamp_(min=0).sqrt_()
        weight_RN.mul_(hinge_RN.mul_(2.0))
    return weight_RN


def mean_exponent(x_RN: Tensor, value_R: Tensor, pairs: Pairs) -> Tensor:
    """sum_j w_ij x_ij = -tau_i d value_i / d tau_i; what the temperatures' rules are made of."""
    product_RN = weights(x_RN, value_R, pairs.pairwise).mul_(x_RN)
    return pairs.set_own_column(product_RN, 0.0).sum(1)


@dataclass
class RowGradients:
    anchor_RD: Tensor
    other_CD: Tensor
    reference_R: Tensor
    tau_R: Tensor


def pull_back_rows(pairs: Pairs, x_RN: Tensor, value_R: Tensor, grad_R: Tensor, columns: slice) -> RowGradients:
    """The gradient of sum_i grad_i value_i, in two matrix products; to the others in ``columns`` only.

    x is (gap + margin)_+ to a power (1 or 2) over tau, so sum_j w x needs no third pass over the matrix: it is
    sum_j (dx/ds)(gap + margin) / power, and sum_j (dx/ds) s_ij is the row product with the anchor.
    """
    weight_RN = similarity_weights(pairs, x_RN, value_R)
    row_RD, weight_R, scale_R = weight_RN @ pairs.other_ND, weight_RN.sum(1), grad_R / pairs.tau_R
    margin, power = (pairs.pairwise.margin, 2.0) if isinstance(pairs.pairwise, SquaredHinge) else (0.0, 1.0)
    gap_R = (row_RD * pairs.anchor_RD).sum(1) - weight_R * (pairs.reference_R - margin)
    return RowGradients(
        anchor_RD=row_RD * scale_R[:, None],
        other_CD=weight_RN[:, columns].T @ (pairs.anchor_RD * scale_R[:, None]),
        reference_R=-scale_R * weight_R,
        tau_R=-scale_R * gap_R / (power * pairs.tau_R),
    )


def pull_back_to_others(pairs: Pairs, value_R: Tensor, grad_R: Tensor, chunk: int | None) -> Tensor:
    """Only the gradient to the others: what remote anchors, and a prototype update, need."""
    grad_ND = torch.zeros_like(pairs.other_ND)
    for here, part in pairs.chunks(chunk):
        weight_RN = similarity_weights(part, exponents(part), value_R[here])
        grad_ND.addmm_(weight_RN.T, part.anchor_RD * (grad_R[here] / part.tau_R)[:, None])
    return grad_ND


def reduce_rows(pairs: Pairs, chunk: int | None, with_mean: bool = False) -> tuple[Tensor, Tensor | None]:
    """value_i of every row, and the mean exponent where asked for; no gradient, no matrix beyond ``chunk`` rows."""
    value_R = torch.empty_like(pairs.reference_R)
    mean_R = torch.empty_like(pairs.reference_R) if with_mean else None
    for here, part in pairs.chunks(chunk):
        x_RN = exponents(part)
        value_R[here] = reduce_row(x_RN, part.pairwise)
        if mean_R is not None:
            mean_R[here] = mean_exponent(x_RN, value_R[here], part)
    return value_R, mean_R


# ---------------------------------------------------------------------------------------------------------------------
# the differentiable primitive


@dataclass(frozen=True)
class Remote:
    """All ranks' anchors and others (detached), needed where the others are themselves spread over ranks."""

    anchor_ND: Tensor
    other_ND: Tensor
    reference_N: Tensor
    tau_N: Tensor
    rows: slice


@dataclass(frozen=True)
class Options:
    pairwise: Pairwise
    chunk: int | None
    exclude_own: bool
    with_mean: bool


class _ReducePairs(torch.autograd.Function):
    """Forward: this rank's anchors against all others.  Backward: scalars travel, gradients of rows do not.

    The gradient to this rank's *others* has a part from every rank's anchors.  Each rank computes it itself from the
    gathered embeddings and one gathered scalar an anchor (FastCLIP's scheme).  On one rank no anchor is remote.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor_BD: Tensor,
        other_BD: Tensor,
        reference_B: Tensor,
        tau_B: Tensor,
        remote: Remote | None,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        other_ND = other_BD if remote is None else remote.other_ND
        own = (remote.rows.start if remote else 0) if options.exclude_own else None
        pairs = Pairs(anchor_BD, other_ND, reference_B, tau_B, own, options.pairwise)
        kept_BN = None
        if options.chunk is None:
            kept_BN = exponents(pairs)
            value_B = reduce_row(kept_BN, options.pairwise)
            mean_B = mean_exponent(kept_BN, value_B, pairs) if options.with_mean else None
        else:
            value_B, mean_B = reduce_rows(pairs, options.chunk, options.with_mean)
        value_N, mean_N = _gather_columns(value_B, mean_B)
        ctx.save_for_backward(anchor_BD, other_BD, reference_B, tau_B, value_B, value_N, kept_BN)
        ctx.remote, ctx.options, ctx.own = remote, options, own
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (value_N, mean_N) if t is not None))
        return value_B, value_N, mean_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        anchor_BD, other_BD, reference_B, tau_B, value_B, value_N, kept_BN = ctx.saved_tensors
        remote, options = ctx.remote, ctx.options
        if grad_B is None:
            return (None,) * 6
        other_ND = other_BD if remote is None else remote.other_ND
        columns = slice(0, other_ND.shape[0]) if remote is None else remote.rows
        pairs = Pairs(anchor_BD, other_ND, reference_B, tau_B, ctx.own, options.pairwise)
        total = RowGradients(*(torch.zeros_like(t) for t in (anchor_BD, other_BD, reference_B, tau_B)))
        for here, part in pairs.chunks(options.chunk):
            x_RN = exponents(part) if kept_BN is None else kept_BN
            rows = pull_back_rows(part, x_RN, value_B[here], grad_B[here], columns)
            total.anchor_RD[here] = rows.anchor_RD
            total.other_CD += rows.other_CD
            total.reference_R[here] = rows.reference_R
            total.tau_R[here] = rows.tau_R
        if remote is not None:
            grad_N = distributed.gather_rows(grad_B)
            before, after = slice(0, remote.rows.start), slice(remote.rows.stop, None)
            for there in (before, after):
                far = Pairs(
                    remote.anchor_ND[there],
                    other_BD,
                    remote.reference_N[there],
                    remote.tau_N[there],
                    None,
                    options.pairwise,
                )
                total.other_CD += pull_back_to_others(far, value_N[there], grad_N[there], options.chunk)
        return total.anchor_RD, total.other_CD, total.reference_R, total.tau_R, None, None


def _gather_columns(value_B: Tensor, mean_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if mean_B is None:
        return distributed.gather_rows(value_B).clone(), None
    both_N2 = distributed.gather_rows(torch.stack([value_B, mean_B], dim=1))
    return both_N2[:, 0].contiguous(), both_N2[:, 1].contiguous()


@dataclass(frozen=True)
class Reduced:
    """``log_mean_B`` carries the gradient; the ``_N`` values are all ranks', detached."""

    log_mean_B: Tensor
    log_mean_N: Tensor
    mean_exponent_N: Tensor | None


def log_mean_exp(
    anchor_BD: Tensor,
    other_BD: Tensor,
    reference_B: Tensor,
    tau_B: Tensor,
    *,
    pairwise: Pairwise = Identity(),
    remote: Remote | None = None,
    exclude_own: bool = False,
    with_mean: bool = False,
    chunk: int | None = None,
) -> Reduced:
    """log of the mean of exp(x_ij) over the others (all but the anchor's own when ``exclude_own``)."""
    count = (other_BD if remote is None else remote.other_ND).shape[0] - int(exclude_own)
    options = Options(pairwise, chunk, exclude_own, with_mean)
    value_B, value_N, mean_N = _ReducePairs.apply(anchor_BD, other_BD, reference_B, tau_B, remote, options)
    return Reduced(value_B - math.log(count), value_N - math.log(count), mean_N)


def sum_softplus(
    anchor_BD: Tensor, other_BD: Tensor, reference_B: Tensor, tau_B: Tensor, *, remote: Remote, chunk: int | None
) -> Tensor:
    """sum over j != i of log(1 + exp(x_ij)), SigLIP's negatives."""
    options = Options(Sigmoid(), chunk, exclude_own=True, with_mean=False)
    value_B: Tensor = _ReducePairs.apply(anchor_BD, other_BD, reference_B, tau_B, remote, options)[0]
    return value_B
