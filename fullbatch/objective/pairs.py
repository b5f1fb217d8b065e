"""Which pairs a reduction is over: blocks of a similarity matrix, and the embeddings and scalars of its two sides."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullbatch.config.axes import Pairwise, Sigmoid


@dataclass(frozen=True)
class Tile:
    """Some rows against some columns.  Row k's own positive is column ``first_pair`` + k, and is left out; None: it is
    not among the columns."""

    rows: slice
    columns: slice
    first_pair: int | None = None

    def chunks(self, rows: int | None, columns: int | None = None) -> Iterator[Tile]:
        """The block in pieces of so many rows and so many columns; None: all."""
        for row in _spans(self.rows, rows):
            for column in _spans(self.columns, columns):
                moved = row.start - self.rows.start - (column.start - self.columns.start)
                yield Tile(row, column, None if self.first_pair is None else self.first_pair + moved)


def _spans(whole: slice, size: int | None) -> list[slice]:
    step = max(whole.stop - whole.start if size is None else size, 1)
    return [slice(start, min(start + step, whole.stop)) for start in range(whole.start, whole.stop, step)]


def within(outer: slice, inner: slice) -> slice:
    """``inner`` counted from the start of ``outer``."""
    return slice(inner.start - outer.start, inner.stop - outer.start)


@dataclass(frozen=True)
class Table:
    """One modality's embeddings: this rank's with gradient, all ranks' without; and its anchors' scalars."""

    local_BD: Tensor
    all_ND: Tensor
    reference_B: Tensor
    reference_N: Tensor
    tau_B: Tensor
    tau_N: Tensor


@dataclass(frozen=True)
class Side:
    """One side's anchors: their values and, where asked for, the means of x_ij and of tau_i dx_ij/ds_ij under the
    weights d value_i / d x_ij.  The sigmoid's weights do not add up to one, and its means are sums."""

    value: Tensor
    mean: Tensor | None = None
    slope: Tensor | None = None


def joined(first: Side, second: Side, pairwise: Pairwise) -> Side:
    """The same anchors over the terms of both."""
    if isinstance(pairwise, Sigmoid):
        return Side(first.value + second.value, *_means(first, second, torch.add))

    def weigh(mean: Tensor, other: Tensor) -> Tensor:
        share = torch.sigmoid(second.value - first.value).nan_to_num(0.0)  # NaN: neither has a term yet
        return torch.lerp(mean, other, share)

    return Side(torch.logaddexp(first.value, second.value), *_means(first, second, weigh))


def _means(first: Side, second: Side, join: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
    both = ((first.mean, second.mean), (first.slope, second.slope))
    return [None if a is None or b is None else join(a, b) for a, b in both]


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
    operands: str  # of products on a GPU: "float16", "split" or "float32"
    with_mean: bool
    spread: bool  # whether the columns are spread over ranks as the rows are

    @property
    def anchors(self) -> list[Table]:
        return [self.row, self.column] if self.columns_are_anchors else [self.row]

    @property
    def spans(self) -> list[slice]:
        """Where this rank's anchors lie."""
        return [self.rows, self.columns][: len(self.anchors)]

    def is_own(self, piece: Tile) -> tuple[bool, bool]:
        """Whether the piece's rows, and its columns, are this rank's."""
        own = zip((self.rows, self.columns), (piece.rows, piece.columns), strict=True)
        row, column = (span.start <= here.start < span.stop for span, here in own)
        return row, column


@dataclass(frozen=True)
class Gradients:
    """What reaches this rank's rows and columns, and the reference and tau of its anchors, side by side."""

    row_BD: Tensor | None
    column_BD: Tensor | None
    scalars: Sequence[tuple[Tensor | None, Tensor | None]]


class Engine(Protocol):
    """How a reduction is computed: chunked.py does it with torch's own operations, fused.py in kernels of its own."""

    def reduce(self, layout: Layout, tau_learns: bool) -> tuple[list[Side], list[Tensor | None]]:
        """This rank's anchors against all others, side by side, and what the way back is to be handed."""

    def pull_back(
        self,
        layout: Layout,
        values_N: Sequence[Tensor],
        grads_N: Sequence[Tensor],
        kept: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> Gradients:
        """The gradient of sum_i grad_i value_i over all ranks' anchors.  ``wanted``: to the rows, to the columns."""
