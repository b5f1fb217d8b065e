"""The one primitive: reduce pairwise terms of anchors against others, with its exact gradient, a few rows at a time.

    x_ij = loss(s_ij - r_i) / tau_i            s_ij = anchor_i . other_j,  r_i the reference (s_ii, or 0 for raw terms)
    value_i = log sum_j exp(x_ij)              or, for SigLIP, sum_j log(1 + exp(x_ij))

Rows and columns of one similarity matrix can both be anchors (image -> text and text -> image), so that both
directions of a batch share the matrix products.  With ``chunk`` rows at a time no rows x columns matrix exists; with
``chunk=None`` the similarities are kept and the backward pass need not compute them again.
"""

# R: rows at hand   C: columns at hand   B: rows on this rank   N: rows on all ranks   M: prototypes   D: width

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fullbatch import distributed
from fullbatch.config.axes import Identity, Pairwise, Sigmoid, SquaredHinge

# ---------------------------------------------------------------------------------------------------------------------
# terms of one block of the similarity matrix; ``dim`` is 1 where its rows are the anchors, 0 where its columns are, and
# ``unsqueeze(dim)`` lays one scalar an anchor along the anchors


def exponents(sim_RC: Tensor, reference: Tensor, tau: Tensor, dim: int, pairwise: Pairwise) -> Tensor:
    """x_ij for every pair."""
    if isinstance(pairwise, SquaredHinge):
        gap_RC = sim_RC - (reference - pairwise.margin).unsqueeze(dim)
        return gap_RC.clamp_(min=0).square_().div_(tau.unsqueeze(dim))
    return torch.sub(sim_RC, reference.unsqueeze(dim)).div_(tau.unsqueeze(dim))


def reduce_terms(x_RC: Tensor, dim: int, pairwise: Pairwise) -> Tensor:
    if isinstance(pairwise, Sigmoid):
        return -logsigmoid(-x_RC).sum(dim)
    return torch.logsumexp(x_RC, dim)


def term_weights(x_RC: Tensor, value: Tensor, dim: int, pairwise: Pairwise) -> Tensor:
    """d value_i / d x_ij: softmax weights, or the sigmoid's.  Overwrites x."""
    if isinstance(pairwise, Sigmoid):
        return torch.sigmoid_(x_RC)
    return x_RC.sub_(value.unsqueeze(dim)).exp_()


@dataclass(frozen=True)
class Tile:
    """Some rows against some columns.  Row k's own positive is column ``first_pair`` + k, and is left out; None: it is
    not among the columns."""

    rows: slice
    columns: slice
    first_pair: int | None = None

    def chunks(self, size: int | None) -> Iterator[Tile]:
        """The block in pieces of ``size`` rows."""
        step = self.rows.stop - self.rows.start if size is None else size
        for start in range(self.rows.start, self.rows.stop, max(step, 1)):
            piece = slice(start, min(start + step, self.rows.stop))
            offset = None if self.first_pair is None else self.first_pair + start - self.rows.start
            yield Tile(piece, self.columns, offset)


def fill_pairs(matrix_RC: Tensor, offset: int | None, value: float) -> Tensor:
    if offset is not None:
        matrix_RC.diagonal(offset)[: matrix_RC.shape[0]] = value
    return matrix_RC


@dataclass(frozen=True)
class Table:
    """One modality's embeddings: this rank's with gradient, all ranks' without; and its anchors' scalars."""

    local_BD: Tensor
    all_ND: Tensor
    reference_B: Tensor
    reference_N: Tensor
    tau_B: Tensor
    tau_N: Tensor


@dataclass
class Side:
    """One side's anchors: their values, and the mean exponents where asked for."""

    value: Tensor
    mean: Tensor | None


def reduce_block(
    sim_RC: Tensor, offset: int | None, anchors: Table, here: slice, dim: int, pairwise: Pairwise, with_mean: bool
) -> Side:
    """This block's part of the anchors' values, and of the mean exponent where asked for."""
    x_RC = exponents(sim_RC, anchors.reference_N[here], anchors.tau_N[here], dim, pairwise)
    value = reduce_terms(fill_pairs(x_RC, offset, -math.inf), dim, pairwise)
    if not with_mean:
        return Side(value, None)
    weight_RC = term_weights(x_RC.clone(), value, dim, pairwise)
    return Side(value, fill_pairs(weight_RC.mul_(x_RC), offset, 0.0).sum(dim))


@dataclass(frozen=True)
class Pull:
    """The gradient of sum_i grad_i value_i to this block's similarities, and to its anchors' scalars."""

    sim_RC: Tensor
    reference: Tensor
    tau: Tensor


def similarity_weights(weight_RC: Tensor, sim_RC: Tensor, reference: Tensor, dim: int, pairwise: Pairwise) -> Tensor:
    """tau_i d value_i / d s_ij from d value_i / d x_ij, which it overwrites."""
    if isinstance(pairwise, SquaredHinge):
        hinge_RC = (sim_RC - (reference - pairwise.margin).unsqueeze(dim)).clamp_(min=0)
        weight_RC.mul_(hinge_RC.mul_(2.0))
    return weight_RC


def pull_back_block(
    sim_RC: Tensor,
    offset: int | None,
    anchors: Table,
    value: Tensor,
    grad: Tensor,
    here: slice,
    dim: int,
    pairwise: Pairwise,
) -> Pull:
    """x is (gap + margin)_+ to a power (1 or 2) over tau; so sum_j w x is sum_j (dx/ds)(gap + margin) / power."""
    reference, tau = anchors.reference_N[here], anchors.tau_N[here]
    scale = grad[here] / tau
    x_RC = exponents(sim_RC, reference, tau, dim, pairwise)
    weight_RC = term_weights(x_RC, value[here], dim, pairwise)
    weight_RC = similarity_weights(weight_RC, sim_RC, reference, dim, pairwise)
    fill_pairs(weight_RC, offset, 0.0)
    margin, power = (pairwise.margin, 2.0) if isinstance(pairwise, SquaredHinge) else (0.0, 1.0)
    weight = weight_RC.sum(dim)
    gap = torch.linalg.vecdot(weight_RC, sim_RC, dim=dim) - weight * (reference - margin)
    return Pull(weight_RC.mul_(scale.unsqueeze(dim)), -scale * weight, -scale * gap / (power * tau))


# -- the differentiable primitive --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Which blocks make up a reduction, where this rank's rows and columns lie in the tables of all ranks."""

    row: Table
    column: Table
    rows: slice
    columns: slice
    blocks: tuple[Tile, ...]
    columns_are_anchors: bool
    pairwise: Pairwise
    chunk: int | None
    with_mean: bool
    spread: bool  # whether the columns are spread over ranks as the rows are

    def reduce(self) -> Reductions:
        own = (self.column.reference_B, self.column.tau_B) if self.columns_are_anchors else (None, None)
        scalars = self.row.reference_B, self.row.tau_B, *own
        return Reductions(*_ReducePairs.apply(self.row.local_BD, self.column.local_BD, *scalars, self))

    @property
    def anchors(self) -> list[Table]:
        return [self.row, self.column] if self.columns_are_anchors else [self.row]

    def pieces(self) -> Iterator[Tile]:
        for block in self.blocks:
            yield from block.chunks(self.chunk)

    def similarities(self, piece: Tile) -> Tensor:
        return self.row.all_ND[piece.rows] @ self.column.all_ND[piece.columns].T

    def is_own(self, piece: Tile) -> tuple[bool, bool]:
        """Whether the piece's rows, and its columns, are this rank's."""
        return self.rows.start <= piece.rows.start < self.rows.stop, piece.columns == self.columns

    def fresh(self, span: slice) -> Side:
        start = 0.0 if isinstance(self.pairwise, Sigmoid) else -math.inf
        value = self.row.all_ND.new_full((span.stop - span.start,), start)
        return Side(value, torch.zeros_like(value) if self.with_mean else None)

    def add(self, total: Side, part: Side, here: slice) -> None:
        old = total.value[here]
        if total.mean is not None and part.mean is not None:
            share = torch.sigmoid(part.value - old).nan_to_num(0.0)  # NaN: neither has a term yet
            total.mean[here] = torch.lerp(total.mean[here], part.mean, share)
        summed = isinstance(self.pairwise, Sigmoid)
        total.value[here] = old + part.value if summed else torch.logaddexp(old, part.value)


def _within(outer: slice, inner: slice) -> slice:
    """``inner`` counted from the start of ``outer``."""
    return slice(inner.start - outer.start, inner.stop - outer.start)


class Reductions(NamedTuple):
    """What the primitive gives, flat as autograd wants it.  ``_B`` values carry the gradient, ``_N`` values are all
    ranks', detached; those of the columns are None where columns are no anchors, the means where nobody asks."""

    row_value_B: Tensor
    column_value_B: Tensor | None
    row_value_N: Tensor
    column_value_N: Tensor | None
    row_mean_N: Tensor | None
    column_mean_N: Tensor | None


class _ReducePairs(torch.autograd.Function):
    """Forward: this rank's anchors against all others.  Backward: scalars travel, gradients of rows do not.  The
    gradient to this rank's rows has a part from every rank's anchors.  Each rank computes it itself from the gathered
    embeddings and one gathered scalar an anchor and direction (FastCLIP's scheme).  The numbers come from the layout;
    the tensors before it are there to receive gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        row_BD: Tensor,
        column_BD: Tensor,
        row_reference_B: Tensor,
        row_tau_B: Tensor,
        column_reference_B: Tensor | None,
        column_tau_B: Tensor | None,
        layout: Layout,
    ) -> Reductions:
        spans = (layout.rows, layout.columns)
        sides = [layout.fresh(span) for _, span in zip(layout.anchors, spans, strict=False)]
        kept: list[Tensor] = []
        for piece in layout.pieces():
            sim_RC = layout.similarities(piece)
            for dim, anchors, side, here, is_own, span in zip(
                (1, 0), layout.anchors, sides, (piece.rows, piece.columns), layout.is_own(piece), spans, strict=False
            ):
                if is_own:
                    options = (dim, layout.pairwise, layout.with_mean)
                    part = reduce_block(sim_RC, piece.first_pair, anchors, here, *options)
                    layout.add(side, part, _within(span, here))
            if layout.chunk is None:
                kept.append(sim_RC)
        tensors = [t for side in sides for t in (side.value, side.mean) if t is not None]
        all_ranks = iter(_gather_columns(tensors, layout.spread))
        gathered = [Side(next(all_ranks), None if side.mean is None else next(all_ranks)) for side in sides]
        ctx.layout = layout
        ctx.save_for_backward(*(side.value for side in gathered), *kept)
        ctx.mark_non_differentiable(*(t for side in gathered for t in (side.value, side.mean) if t is not None))
        ctx.set_materialize_grads(False)
        nothing = [Side(None, None)] * (2 - len(sides))  # type: ignore[arg-type]
        (row, column), (rows, columns) = [*sides, *nothing], [*gathered, *nothing]
        return Reductions(row.value, column.value, rows.value, columns.value, rows.mean, columns.mean)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, row_grad_B: Tensor | None, column_grad_B: Tensor | None, *_: Any) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        grads = [row_grad_B, column_grad_B][: len(layout.anchors)]
        values_N, kept = ctx.saved_tensors[: len(grads)], iter(ctx.saved_tensors[len(grads) :])
        spans = (layout.rows, layout.columns)
        grads_B = [
            values_N[0].new_zeros(span.stop - span.start) if g is None else g
            for g, span in zip(grads, spans, strict=False)
        ]
        grads_N = _gather_columns(grads_B, layout.spread)
        anchors = list(zip(layout.anchors, values_N, grads_N, strict=True))
        row_ND, column_ND = layout.row.all_ND, layout.column.all_ND
        to_row_BD = torch.zeros_like(row_ND[layout.rows]) if ctx.needs_input_grad[0] else None
        to_column_BD = torch.zeros_like(column_ND[layout.columns]) if ctx.needs_input_grad[1] else None
        scalars = [(torch.zeros_like(g), torch.zeros_like(g)) for g in grads_B]
        for piece in layout.pieces():
            sim_RC = next(kept) if layout.chunk is None else layout.similarities(piece)
            own = layout.is_own(piece)
            to_sim_RC: Tensor | None = None
            for dim, (table, value_N, grad_N), here, is_own, span, (to_reference_B, to_tau_B) in zip(
                (1, 0), anchors, (piece.rows, piece.columns), own, spans, scalars, strict=False
            ):
                pull = pull_back_block(sim_RC, piece.first_pair, table, value_N, grad_N, here, dim, layout.pairwise)
                to_sim_RC = pull.sim_RC if to_sim_RC is None else to_sim_RC.add_(pull.sim_RC)
                if is_own:
                    to_reference_B[_within(span, here)] += pull.reference
                    to_tau_B[_within(span, here)] += pull.tau
            assert to_sim_RC is not None
            if own[0] and to_row_BD is not None:
                to_row_BD[_within(layout.rows, piece.rows)] += to_sim_RC @ column_ND[piece.columns]
            if own[1] and to_column_BD is not None:
                to_column_BD.addmm_(to_sim_RC.T, row_ND[piece.rows])
        flat = [t for pair in scalars for t in pair]
        return to_row_BD, to_column_BD, *flat, *([None] * (4 - len(flat))), None


def _gather_columns(columns_B: Sequence[Tensor], spread: bool) -> list[Tensor]:
    """Several scalars a row, from all ranks, in one collective."""
    if not spread:
        return [column_B.detach().clone() for column_B in columns_B]
    return [c.contiguous() for c in distributed.gather_rows(torch.stack(list(columns_B), dim=1)).clone().unbind(1)]


@dataclass(frozen=True)
class Reduced:
    """``log_mean_B`` carries the gradient; the ``_N`` values are all ranks', detached."""

    log_mean_B: Tensor
    log_mean_N: Tensor
    mean_exponent_N: Tensor | None


def reduce_batch(
    row: Table,
    column: Table,
    rows: slice,
    *,
    columns_are_anchors: bool,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
    with_mean: bool = False,
) -> Reductions:
    """Values of this rank's row anchors (and column anchors) over all other pairs of the batch."""
    # the parts of the N x N matrix that this rank's rows or columns have a share in; on one rank it is one block
    around = (slice(0, rows.start), slice(rows.stop, row.all_ND.shape[0]))
    remote = [part for part in around if part.stop > part.start]
    own = Tile(rows, rows, first_pair=0)
    blocks = own, *(Tile(rows, part) for part in remote), *(Tile(part, rows) for part in remote)
    return Layout(
        row, column, rows, rows, blocks, columns_are_anchors, pairwise, chunk, with_mean, spread=True
    ).reduce()


def log_mean_exp_of_batch(
    row: Table, column: Table, rows: slice, *, columns_are_anchors: bool = True, **options: Any
) -> tuple[Reduced, ...]:
    """log g_i: the log of the mean of exp(x_ij) over the N - 1 others, for the rows and for the columns as anchors."""
    both = reduce_batch(row, column, rows, columns_are_anchors=columns_are_anchors, **options)
    log_count = math.log(row.all_ND.shape[0] - 1)
    of_rows = Reduced(both.row_value_B - log_count, both.row_value_N - log_count, both.row_mean_N)
    if both.column_value_B is None or both.column_value_N is None:
        return (of_rows,)
    return of_rows, Reduced(both.column_value_B - log_count, both.column_value_N - log_count, both.column_mean_N)


def log_mean_exp(
    anchor_BD: Tensor,
    other_MD: Tensor,
    reference_B: Tensor,
    tau_B: Tensor,
    *,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
    first_pair: int | None = None,
) -> Tensor:
    """log of the mean of exp(x_ij) over others that every rank holds, such as prototypes; gradients to all inputs.
    Anchor k's own positive is other ``first_pair`` + k, and is left out of the mean; None: it is not among them."""
    rows, columns = slice(0, anchor_BD.shape[0]), slice(0, other_MD.shape[0])
    scalars = reference_B, reference_B.detach(), tau_B, tau_B.detach()
    row, column = (Table(table, table.detach(), *scalars) for table in (anchor_BD, other_MD))  # only rows are anchors
    blocks = (Tile(rows, columns, first_pair),)
    layout = Layout(row, column, rows, columns, blocks, False, pairwise, chunk, with_mean=False, spread=False)
    return layout.reduce().row_value_B - math.log(columns.stop - (first_pair is not None))


@torch.no_grad()
def gradient_to_others(
    anchor_ND: Tensor,
    other_MD: Tensor,
    reference_N: Tensor,
    tau_N: Tensor,
    to_value: Callable[[Tensor, slice], Tensor],
    *,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
    first_pair: int | None = None,
) -> Tensor:
    """The gradient to the others alone, in one pass over the rows: the prototype update in closed form.  ``to_value``
    maps the log-means of the anchors at hand, and which they are, to the gradient that reaches them; ``first_pair`` as
    in ``log_mean_exp``."""
    assert not isinstance(pairwise, Sigmoid), "prototypes stand for a mean of exponentials"
    total_MD = torch.zeros_like(other_MD)
    block = Tile(slice(0, anchor_ND.shape[0]), slice(0, other_MD.shape[0]), first_pair)
    log_count = math.log(other_MD.shape[0] - (first_pair is not None))
    for piece in block.chunks(chunk):
        here, offset = piece.rows, piece.first_pair
        anchor_RD, reference_R, tau_R = anchor_ND[here], reference_N[here], tau_N[here]
        sim_RC = anchor_RD @ other_MD.T
        x_RC = exponents(sim_RC, reference_R, tau_R, 1, pairwise)
        log_weight_RC = torch.log_softmax(fill_pairs(x_RC, offset, -math.inf), dim=1)
        # The log-sum-exp is the same from every column, but for one that is left out.
        value_R = x_RC[:, 0] - log_weight_RC[:, 0] if offset is None else torch.logsumexp(x_RC, dim=1)
        scale_R = to_value(value_R - log_count, here) / tau_R
        weight_RC = similarity_weights(log_weight_RC.exp_(), sim_RC, reference_R, 1, pairwise)
        total_MD.addmm_(weight_RC.T, anchor_RD * scale_R[:, None])
    return total_MD
