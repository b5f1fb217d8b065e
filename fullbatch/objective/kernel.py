"""The one primitive: reduce pairwise terms of anchors against others, with its exact gradient.

    x_ij = loss(s_ij - r_i) / tau_i            s_ij = anchor_i . other_j,  r_i the reference (s_ii, or 0 for raw terms)
    value_i = log sum_j exp(x_ij)              or, for SigLIP, sum_j log(1 + exp(x_ij))

Rows and columns of one similarity matrix can both be anchors (image -> text and text -> image), so that both
directions of a batch share the matrix products.  With ``chunk`` rows at a time no rows x columns matrix exists; with
``chunk=None`` the similarities are kept and the backward pass need not compute them again.  On a GPU float32 rows take
the fused kernels, which never have that matrix, unless ``operands`` is "float32".
"""

# B: rows on this rank   N: rows on all ranks   M: prototypes   D: width

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.config.axes import Identity, Pairwise
from fullbatch.objective import chunked
from fullbatch.objective.pairs import Engine, Layout, Side, Table, Tile

log = logging.getLogger("fullbatch")


@functools.cache
def _has_triton() -> bool:
    """And the C compiler that it builds its launchers with."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        log.warning("the loss takes torch's own operations: its kernels need a C compiler, gcc or clang")
        return False
    return True


def runs_fused(rows_ND: Tensor, operands: str) -> bool:
    """Whether the fused kernels take these rows: float32 ones on a GPU that has tensor cores for float16."""
    if operands == "float32" or rows_ND.dtype != torch.float32 or not (rows_ND.is_cuda and _has_triton()):
        return False
    return torch.cuda.get_device_properties(rows_ND.device).major >= 8


def fused_kernels(rows_ND: Tensor, operands: str) -> Any | None:
    """The module of them, where they take these rows."""
    if not runs_fused(rows_ND, operands):
        return None
    from fullbatch.objective import fused  # imports Triton, which a CPU does not need

    return fused


def engine_for(layout: Layout) -> Engine:
    engine: Engine = fused_kernels(layout.row.all_ND, layout.operands) or chunked
    return engine


# -- the differentiable primitive --------------------------------------------------------------------------------------


class Reductions(NamedTuple):
    """What the primitive gives, flat as autograd wants it.  ``_B`` values carry the gradient, ``_N`` values are all
    ranks', without; None: those of the columns where columns are no anchors, the means where nobody asks, and the
    values of all ranks where there is one."""

    row_value_B: Tensor
    column_value_B: Tensor | None
    row_value_N: Tensor | None
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
        sides, kept = engine_for(layout).reduce(layout, ctx.needs_input_grad[3] or ctx.needs_input_grad[5])
        many = layout.spread and distributed.world().size > 1
        gathered = _gather_sides(sides) if many else sides
        ctx.layout = layout
        ctx.save_for_backward(*(side.value for side in gathered), *kept)
        values_N = [side.value for side in gathered] if many else []
        means_N = [side.mean for side in gathered]
        ctx.mark_non_differentiable(*(t for t in (*values_N, *means_N) if t is not None))
        ctx.set_materialize_grads(False)
        return Reductions(*_two([side.value for side in sides]), *_two(values_N), *_two(means_N))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, row_grad_B: Tensor | None, column_grad_B: Tensor | None, *_: Any) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        grads = [row_grad_B, column_grad_B][: len(layout.anchors)]
        values_N, kept = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
        grads_B = [
            values_N[0].new_zeros(span.stop - span.start) if g is None else g
            for g, span in zip(grads, layout.spans, strict=True)
        ]
        grads_N = distributed.gather_together(*grads_B) if layout.spread else grads_B
        found = engine_for(layout).pull_back(layout, values_N, grads_N, kept, ctx.needs_input_grad)
        scalars = [t for pair in found.scalars for t in pair]
        return found.row_BD, found.column_BD, *scalars, *([None] * (4 - len(scalars))), None


def reduce_pairs(layout: Layout) -> Reductions:
    own = (layout.column.reference_B, layout.column.tau_B) if layout.columns_are_anchors else (None, None)
    scalars = layout.row.reference_B, layout.row.tau_B, *own
    return Reductions(*_ReducePairs.apply(layout.row.local_BD, layout.column.local_BD, *scalars, layout))


def _gather_sides(sides: Sequence[Side]) -> list[Side]:
    tensors = [t for side in sides for t in (side.value, side.mean) if t is not None]
    all_ranks = iter(distributed.gather_together(*tensors))
    return [Side(next(all_ranks), None if side.mean is None else next(all_ranks)) for side in sides]


def _two(found: Sequence[Tensor | None]) -> list[Any]:
    """Of the rows and of the columns, or None for them."""
    return [*found, None, None][:2]


@dataclass(frozen=True)
class Reduced:
    """``log_mean_B`` carries the gradient; the ``_N`` values are all ranks', detached."""

    log_mean_B: Tensor
    log_mean_N: Tensor
    mean_exponent_N: Tensor | None

    def corrected(self, log_c_N: Tensor, rows: slice, tau_B: Tensor, weights: bool) -> Reduced:
        """c g in place of g, where a batch was selected and c g is what a uniform one would show.  The value and tau's
        gradient are those of c g; the embeddings', the pairs' weights, are those of g, so that hard pairs keep their
        emphasis, unless ``weights`` are to be corrected, too."""
        assert self.mean_exponent_N is not None
        raw_B, log_c_B = self.log_mean_B, log_c_N[rows]
        if weights:
            return Reduced(raw_B + log_c_B, self.log_mean_N + log_c_N, self.mean_exponent_N)
        share_B = torch.exp(-log_c_B)
        slope_B = -self.mean_exponent_N[rows] / tau_B.detach()  # d log g / d tau
        by_tau_B = slope_B * (tau_B - tau_B.detach())
        by_rows_B = share_B * (raw_B - raw_B.detach())  # and 1 / c of what comes by tau
        log_mean_B = raw_B.detach() + log_c_B + by_rows_B + (1.0 - share_B) * by_tau_B
        return Reduced(log_mean_B, self.log_mean_N + log_c_N, self.mean_exponent_N)


def layout_of_batch(
    row: Table,
    column: Table,
    rows: slice,
    *,
    columns_are_anchors: bool,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
    operands: str = "float16",
    with_mean: bool = False,
) -> Layout:
    """This rank's row anchors (and column anchors) against all other pairs of the batch: the parts of the N x N matrix
    that they have a share in; on one rank it is one block."""
    around = (slice(0, rows.start), slice(rows.stop, row.all_ND.shape[0]))
    remote = [part for part in around if part.stop > part.start]
    own = Tile(rows, rows, first_pair=0)
    blocks = own, *(Tile(rows, part) for part in remote), *(Tile(part, rows) for part in remote)
    options = (columns_are_anchors, pairwise, chunk, operands, with_mean)
    return Layout(row, column, rows, rows, blocks, *options, spread=True)


def reduce_batch(row: Table, column: Table, rows: slice, **options: Any) -> Reductions:
    """Values of this rank's row anchors (and column anchors) over all other pairs of the batch."""
    return reduce_pairs(layout_of_batch(row, column, rows, **options))


def log_mean_exp_of_batch(
    row: Table, column: Table, rows: slice, *, columns_are_anchors: bool = True, **options: Any
) -> tuple[Reduced, ...]:
    """log g_i: the log of the mean of exp(x_ij) over the N - 1 others, for the rows and for the columns as anchors."""
    both = reduce_batch(row, column, rows, columns_are_anchors=columns_are_anchors, **options)
    log_count = math.log(row.all_ND.shape[0] - 1)

    def reduced(value_B: Tensor, value_N: Tensor | None, mean_N: Tensor | None) -> Reduced:
        log_mean_B = value_B - log_count
        return Reduced(log_mean_B, log_mean_B.detach() if value_N is None else value_N - log_count, mean_N)

    of_rows = reduced(both.row_value_B, both.row_value_N, both.row_mean_N)
    if both.column_value_B is None:
        return (of_rows,)
    return of_rows, reduced(both.column_value_B, both.column_value_N, both.column_mean_N)


def log_mean_exp(
    anchor_BD: Tensor,
    other_MD: Tensor,
    reference_B: Tensor,
    tau_B: Tensor,
    *,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
    operands: str = "float16",
    first_pair: int | None = None,
) -> Tensor:
    """log of the mean of exp(x_ij) over others that every rank holds, such as prototypes; gradients to all inputs.
    Anchor k's own positive is other ``first_pair`` + k, and is left out of the mean; None: it is not among them."""
    rows, columns = slice(0, anchor_BD.shape[0]), slice(0, other_MD.shape[0])
    scalars = reference_B, reference_B.detach(), tau_B, tau_B.detach()
    row, column = (Table(table, table.detach(), *scalars) for table in (anchor_BD, other_MD))  # only rows are anchors
    blocks = (Tile(rows, columns, first_pair),)
    options = (pairwise, chunk, operands)
    layout = Layout(row, column, rows, columns, blocks, False, *options, with_mean=False, spread=False)
    return reduce_pairs(layout).row_value_B - math.log(columns.stop - (first_pair is not None))
