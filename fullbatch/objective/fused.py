"""The primitive on a GPU: the two functions of an engine in fused kernels, with operands of 16 bits.

Forward, one pass over tiles of the similarity matrix gives the values of both directions, their mean exponents and mean
slopes.  They are all that tau and the reference need on the way back, since x is proportional to 1 / tau:

    d value_i / d tau_i = -(mean exponent) / tau_i          d value_i / d r_i = -(mean slope) / tau_i

Backward, the gradient to the similarities, G, is made a piece at a time from tiles computed again, both directions in
one, and two matrix products take it to the rows and to the columns.

Operands are float32 rows rounded to float16 ("float16") or the sum of two float16 ("split"), and sums are float32.  G
is float16 times a power of two that brings the largest entry there can be near 2^15.  An entry is then rounded by at
most 2^-11 of itself or, where that is more, 2^-39 (2e-12) of that bound; nothing else is lost of small ones.

Beyond its inputs a batch of B = 65,536 rows of width 512 takes 128 MiB for the operands of both sides, then forward 384
MiB at most for partial sums, and backward 128 MiB for a piece of G and 256 MiB for the gradients it returns.
"""

# R, C: rows and columns of a piece   B: rows on this rank   N: rows on all ranks   M: columns   D: width

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from functools import reduce as fold
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fullbatch.config.axes import Pairwise, Sigmoid, SquaredHinge
from fullbatch.objective import triton_kernels as kernels
from fullbatch.objective.chunked import tf32_products
from fullbatch.objective.pairs import Gradients, Layout, Side, Table, Tile, joined, within


class Tiles(NamedTuple):
    """What one program of a kernel has at hand, and how it goes about it."""

    rows: int
    columns: int
    depth: int  # of the width at a time
    warps: int
    stages: int
    registers: int | None = None  # a thread's at most; None: what the compiler wants


# by the most pairs of a block they are meant for: the fastest of those tried on an H200, D 512
REDUCE_TILES = {2**22: Tiles(128, 64, 64, 4, 3), math.inf: Tiles(128, 128, 64, 4, 3)}
WEIGHT_TILES = {2**22: Tiles(128, 64, 64, 8, 3), math.inf: Tiles(64, 128, 64, 4, 3, 168)}
SIGMOID_TILES = {math.inf: Tiles(64, 64, 64, 4, 3)}  # its sums have more numbers at hand
PROGRAMS = 528  # that a forward pass is divided into at least, where there are as many tiles: four a processor of 132
GROUP = 8  # tiles of rows that share their columns while these are in the cache
PIECE = 8192  # rows, and columns, of a piece of G: 128 MiB, and long enough sums for fast products

_NO_PAIR = -(2**30)  # an offset that leads to no column
_WIDE_SUMS = hasattr(torch.ops.aten.addmm, "dtype_out")  # float16 products in float32: torch >= 2.8


class Scalars(NamedTuple):
    """One side's anchors, float32, without gaps in memory; the last two for the way back."""

    reference: Tensor
    tau: Tensor
    value: Tensor | None = None
    grad: Tensor | None = None

    def at(self, here: slice) -> Scalars:
        return Scalars(*(None if t is None else t[here] for t in self))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# operands and products


def make_operands(row_ND: Tensor, column_MD: Tensor, operands: str) -> tuple[Tensor, Tensor]:
    """Rows as the kernels take them; the first D numbers of each are the row in float16.  "split" is high . high + high
    . low + low . high as one product of three times the width; low . low is less than rounding."""
    return _operand(row_ND, operands, (0, 0, 1)), _operand(column_MD, operands, COLUMN_PARTS)


COLUMN_PARTS = (0, 1, 0)


def _operand(rows_ND: Tensor, operands: str, order: tuple[int, ...]) -> Tensor:
    high = rows_ND.to(torch.float16)
    if operands == "float16":
        return high.contiguous()
    parts = high, (rows_ND - high).to(torch.float16)
    return torch.cat([parts[place] for place in order], dim=1)


def add_product(out: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """out = beta out + left @ right, from float16 in float32.  Older torch takes the same numbers as TF32, which has
    all bits of a float16."""
    if out.is_cuda and _WIDE_SUMS:
        torch.addmm(out, left, right, out_dtype=torch.float32, beta=beta, out=out)
    else:
        with tf32_products(out):
            out.addmm_(left.float(), right.float(), beta=beta)


# ---------------------------------------------------------------------------------------------------------------------
# launches


def _launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """On the device of the tensors; Triton by itself takes the current one."""
    with torch.cuda.device_of(given[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*given, **options)


def _loss_of(pairwise: Pairwise) -> tuple[str, float]:
    """The kernels' name for it, and the margin."""
    if isinstance(pairwise, SquaredHinge):
        return "hinge", float(pairwise.margin)
    return "sigmoid" if isinstance(pairwise, Sigmoid) else "identity", 0.0


def _steepest(pairwise: Pairwise) -> float:
    """The largest |tau dx/ds|; a hinge of unit rows is at most 2 + margin."""
    loss, margin = _loss_of(pairwise)
    return 2.0 * (2.0 + margin) if loss == "hinge" else 1.0


def _tiles(table: dict[float, Tiles], rows: int, columns: int, width: int) -> tuple[Tiles, dict[str, Any]]:
    tiles = next(tiles for most, tiles in table.items() if rows * columns <= most)
    depth = min(tiles.depth, max(triton.next_power_of_2(width), 16))
    sizes = {"D": width, "R": tiles.rows, "C": tiles.columns, "K": depth}
    limits = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    return tiles, {**sizes, "num_warps": tiles.warps, "num_stages": tiles.stages, **limits}


def reduce_block(
    row_ND: Tensor,
    column_MD: Tensor,
    row: Scalars,
    column: Scalars | None,
    first_pair: int | None,
    pairwise: Pairwise,
    with_mean: bool,
) -> list[Side]:
    """The rows as anchors and, where they are given scalars, the columns."""
    (count, width), others = row_ND.shape, column_MD.shape[0]
    loss, margin = _loss_of(pairwise)
    tiles, options = _tiles(SIGMOID_TILES if loss == "sigmoid" else REDUCE_TILES, count, others, width)
    row_tiles, column_tiles = triton.cdiv(count, tiles.rows), triton.cdiv(others, tiles.columns)
    span = triton.cdiv(column_tiles, min(column_tiles, triton.cdiv(PROGRAMS, row_tiles)))
    spans = triton.cdiv(column_tiles, span)
    planes = 1 + with_mean + (loss != "identity")
    row_part = row.tau.new_empty(spans, planes, count)
    column_part = row_part if column is None else row.tau.new_empty(row_tiles, planes, others)
    terms = {"LOSS": loss, "MEAN": with_mean, "PLANES": planes}
    _launch(
        kernels.reduce_kernel, (row_tiles, spans),
        row_ND, column_MD, *row[:2], *(column or row)[:2], row_part, column_part,
        count, others, _NO_PAIR if first_pair is None else first_pair, span, margin,
        BOTH=column is not None, **terms, **options,
    )  # fmt: skip
    return [_merge(part, terms) for part in ([row_part] if column is None else [row_part, column_part])]


def _merge(part: Tensor, terms: dict[str, Any]) -> Side:
    parts, planes, count = part.shape
    out = part.new_empty(planes, count)
    _launch(kernels.merge_kernel, (triton.cdiv(count, 64),), part, out, parts, count, P=16, A=64, **terms)
    value, *means = out.unbind()
    mean = means.pop(0) if terms["MEAN"] else None
    return Side(value, mean, means[0] if means else None)


def gradient_scale(row: Scalars, column: Scalars | None, pairwise: Pairwise) -> Tensor:
    """G's factor and its inverse, on the device, so that the host need not wait.  |G_ij| <= |grad_i| / tau_i
    max |tau dx/ds| + the same of column j, since no weight exceeds 1."""
    out, other = row.tau.new_empty(2), column or row
    _launch(
        kernels.scale_kernel, (1,),
        row.grad, row.tau, other.grad, other.tau, out, row.tau.shape[0], other.tau.shape[0], _steepest(pairwise),
        BOTH=column is not None, A=4096, num_warps=16,
    )  # fmt: skip
    return out


def similarity_gradient(
    row_ND: Tensor,
    column_MD: Tensor,
    row: Scalars,
    column: Scalars | None,
    first_pair: int | None,
    pairwise: Pairwise,
    scale: Tensor,
) -> Tensor:
    """G times its scale."""
    (count, width), others = row_ND.shape, column_MD.shape[0]
    tiles, options = _tiles(WEIGHT_TILES, count, others, width)
    out_RC = torch.empty(count, others, dtype=torch.float16, device=row_ND.device)
    loss, margin = _loss_of(pairwise)
    _launch(
        kernels.weights_kernel, (triton.cdiv(count, tiles.rows) * triton.cdiv(others, tiles.columns),),
        row_ND, column_MD, *row, *(column or row), scale, out_RC,
        count, others, _NO_PAIR if first_pair is None else first_pair, margin,
        LOSS=loss, BOTH=column is not None, GROUP=GROUP, **options,
    )  # fmt: skip
    return out_RC


# ---------------------------------------------------------------------------------------------------------------------
# the two functions of an engine


def _scalars(layout: Layout, *of_sides: Sequence[Tensor]) -> tuple[Scalars, Scalars | None]:
    """Of all ranks' anchors; ``of_sides`` are values, then gradients."""

    def of(table: Table, *more: Tensor) -> Scalars:
        return Scalars(*(t.contiguous() for t in (table.reference_N, table.tau_N, *more)))

    sides = [of(table, *more) for table, *more in zip(layout.anchors, *of_sides, strict=True)]
    return sides[0], sides[1] if layout.columns_are_anchors else None


def reduce(layout: Layout, tau_learns: bool) -> tuple[list[Side], list[Tensor | None]]:
    row_ND, column_ND = make_operands(layout.row.all_ND, layout.column.all_ND, layout.operands)
    row, column = _scalars(layout)
    parts: list[list[Side]] = [[] for _ in layout.anchors]
    with_mean = layout.with_mean or tau_learns
    for block in layout.blocks:
        options = (block.first_pair, layout.pairwise, with_mean)
        rows_own, columns_own = layout.is_own(block)
        row_RD, column_CD, row_R = row_ND[block.rows], column_ND[block.columns], row.at(block.rows)
        column_C = column.at(block.columns) if column is not None and columns_own else None
        if rows_own:
            found = reduce_block(row_RD, column_CD, row_R, column_C, *options)
        elif column_C is not None:  # another rank's rows: the columns alone are anchors, so they take the rows' part
            assert block.first_pair is None
            found = reduce_block(column_CD, row_RD, column_C, None, *options)
        else:
            continue
        for side, part in zip(parts if rows_own else parts[1:], found, strict=False):
            side.append(part)
    sides = [fold(partial(joined, pairwise=layout.pairwise), side) for side in parts]
    asked = [Side(side.value, side.mean if layout.with_mean else None) for side in sides]
    return asked, [row_ND, column_ND, *(t for side in sides for t in (side.mean, side.slope))]


def pull_back(
    layout: Layout,
    values_N: Sequence[Tensor],
    grads_N: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> Gradients:
    row_ND, column_ND, *means = kept
    assert row_ND is not None and column_ND is not None
    row, column = _scalars(layout, values_N, grads_N)
    scale, width = gradient_scale(row, column, layout.pairwise), layout.row.all_ND.shape[1]
    to_row_BD = torch.zeros_like(layout.row.all_ND[layout.rows]) if wanted[0] else None
    to_column_BD = torch.zeros_like(layout.column.all_ND[layout.columns]) if wanted[1] else None
    for piece in (piece for block in layout.blocks for piece in _pieces(block, layout.chunk)):
        rows_own, columns_own = layout.is_own(piece)
        row_RD, column_CD = row_ND[piece.rows], column_ND[piece.columns]
        sides = row.at(piece.rows), None if column is None else column.at(piece.columns)
        to_sim_RC = similarity_gradient(row_RD, column_CD, *sides, piece.first_pair, layout.pairwise, scale)
        if rows_own and to_row_BD is not None:
            add_product(to_row_BD[within(layout.rows, piece.rows)], to_sim_RC, column_CD[:, :width])
        if columns_own and to_column_BD is not None:
            add_product(to_column_BD[within(layout.columns, piece.columns)], to_sim_RC.T, row_RD[:, :width])
    for total_BD in (to_row_BD, to_column_BD):
        if total_BD is not None:
            total_BD.mul_(scale[1])
    own_sides = [side.at(span) for side, span in zip((row, column), layout.spans, strict=False) if side is not None]
    scalars = [_to_scalars(side, *means[2 * k : 2 * k + 2]) for k, side in enumerate(own_sides)]
    return Gradients(to_row_BD, to_column_BD, scalars)


def _to_scalars(side: Scalars, mean: Tensor | None, slope: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """To the reference and to tau; the mean slope of raw and plain gaps is 1."""
    assert side.grad is not None
    factor = -side.grad / side.tau
    return factor if slope is None else factor * slope, None if mean is None else factor * mean


def _pieces(block: Tile, chunk: int | None) -> Iterator[Tile]:
    """Pieces of PIECE x PIECE pairs, as near to square as the block is; with fewer rows where the user wants so."""
    rows, columns = block.rows.stop - block.rows.start, block.columns.stop - block.columns.start
    rows = min(rows, max(PIECE, PIECE**2 // max(columns, 1)), chunk or rows)
    return block.chunks(rows, PIECE**2 // max(rows, 1))


# ---------------------------------------------------------------------------------------------------------------------
# prototypes


class Fit(NamedTuple):
    """How prototypes learn: AdaGrad on eq. (12) of NeuCLIP or, ``separate``, on half the squared log error."""

    updates: int
    rate: float
    log_epsilon: float
    guard: float
    separate: bool


def fit_prototypes(
    fit: Fit,
    used_MD: Tensor,
    accumulator_MD: Tensor,
    anchor_ND: Tensor,
    reference_N: Tensor,
    tau_N: Tensor,
    log_total_N: Tensor,
    *,
    first_pair: int | None,
    pairwise: Pairwise,
    chunk: int | None,
    operands: str,
) -> None:
    """``prototypes.adagrad_update`` so many times, in six launches each."""
    (count, width), log_count = used_MD.shape, math.log(used_MD.shape[0] - (first_pair is not None))
    row_ND = make_operands(anchor_ND, anchor_ND[:0], operands)[0]
    side, steepest = Scalars(reference_N.contiguous(), tau_N.contiguous()), _steepest(pairwise)
    parts = 1 if operands == "float16" else len(COLUMN_PARTS)
    column_MD = torch.empty(count, parts * width, dtype=torch.float16, device=used_MD.device)
    to_unit_MD, grad_N, scale = torch.empty_like(used_MD), torch.empty_like(tau_N), tau_N.new_empty(2)
    padded = triton.next_power_of_2(width)
    at_hand = max(2048 // padded, 1)  # prototypes of a program

    def step(update: bool) -> None:
        _launch(
            kernels.prototype_kernel, (triton.cdiv(count, at_hand),),
            used_MD, accumulator_MD, to_unit_MD, scale, column_MD, count, fit.rate,
            D=width, W=padded, R=at_hand, PARTS=parts, UPDATE=update,
        )  # fmt: skip

    step(update=False)
    for _ in range(fit.updates):
        (found,) = reduce_block(row_ND, column_MD, side, None, first_pair, pairwise, with_mean=False)
        _launch(
            kernels.fit_kernel, (1,),
            found.value, side.tau, log_total_N, grad_N, scale, len(tau_N), log_count, *fit[2:4], steepest,
            SEPARATE=fit.separate, A=1024, num_warps=8,
        )  # fmt: skip
        anchors = Scalars(*side[:2], found.value, grad_N)
        for piece in _pieces(Tile(slice(0, len(tau_N)), slice(0, count), first_pair), chunk):
            here = row_ND[piece.rows], column_MD[piece.columns], anchors.at(piece.rows), None
            to_sim_RC = similarity_gradient(*here, piece.first_pair, pairwise, scale)
            first = piece.rows.start == 0
            add_product(to_unit_MD[piece.columns], to_sim_RC.T, row_ND[piece.rows, :width], beta=0 if first else 1)
        step(update=True)
