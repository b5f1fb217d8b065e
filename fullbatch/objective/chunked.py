"""The primitive in torch's own operations, a few rows at a time: the reference for fused.py, and what runs on a CPU."""

# R: rows at hand   C: columns at hand   B: rows on this rank   N: rows on all ranks   M: prototypes   D: width

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fullbatch.config.axes import Identity, Pairwise, Sigmoid, SquaredHinge
from fullbatch.objective.pairs import Gradients, Layout, Side, Table, Tile, joined, within

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


def fill_pairs(matrix_RC: Tensor, offset: int | None, value: float) -> Tensor:
    if offset is not None:
        matrix_RC.diagonal(offset)[: matrix_RC.shape[0]] = value
    return matrix_RC


def reduce_block(
    sim_RC: Tensor, offset: int | None, anchors: Table, here: slice, dim: int, pairwise: Pairwise, with_mean: bool
) -> Side:
    """This block's part of the anchors' values, and of the mean exponent where asked for."""
    x_RC = exponents(sim_RC, anchors.reference_N[here], anchors.tau_N[here], dim, pairwise)
    value = reduce_terms(fill_pairs(x_RC, offset, -math.inf), dim, pairwise)
    if not with_mean:
        return Side(value)
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


@contextmanager
def tf32_products(tensor: Tensor) -> Iterator[None]:
    """Matrix products of float32 on the tensor's GPU in TF32: 10 bits of mantissa, summed in float32."""
    if not tensor.is_cuda:
        yield
        return
    settings: Any = torch.backends.cuda.matmul
    name, fast = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    before = getattr(settings, name)
    setattr(settings, name, fast)
    try:
        yield
    finally:
        setattr(settings, name, before)


# ---------------------------------------------------------------------------------------------------------------------
# the two functions of an engine


def reduce(layout: Layout, tau_learns: bool) -> tuple[list[Side], list[Tensor | None]]:
    sides = [_empty(layout, span) for span in layout.spans]
    kept: list[Tensor | None] = []
    for piece in _pieces(layout):
        sim_RC = _similarities(layout, piece)
        for dim, anchors, side, here, is_own, span in zip(
            (1, 0), layout.anchors, sides, (piece.rows, piece.columns), layout.is_own(piece), layout.spans, strict=False
        ):
            if is_own:
                options = (dim, layout.pairwise, layout.with_mean)
                part = reduce_block(sim_RC, piece.first_pair, anchors, here, *options)
                _add(side, part, within(span, here), layout.pairwise)
        if layout.chunk is None:
            kept.append(sim_RC)
    return sides, kept


def pull_back(
    layout: Layout,
    values_N: Sequence[Tensor],
    grads_N: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> Gradients:
    row_ND, column_ND, similarities = layout.row.all_ND, layout.column.all_ND, iter(kept)
    to_row_BD = torch.zeros_like(row_ND[layout.rows]) if wanted[0] else None
    to_column_BD = torch.zeros_like(column_ND[layout.columns]) if wanted[1] else None
    own_grads = [grad_N[span] for grad_N, span in zip(grads_N, layout.spans, strict=True)]
    scalars = [(torch.zeros_like(grad_B), torch.zeros_like(grad_B)) for grad_B in own_grads]
    sides = list(zip(layout.anchors, values_N, grads_N, layout.spans, scalars, strict=True))
    for piece in _pieces(layout):
        kept_RC = next(similarities, None)
        sim_RC = _similarities(layout, piece) if kept_RC is None else kept_RC
        own = layout.is_own(piece)
        to_sim_RC: Tensor | None = None
        for dim, (table, value_N, grad_N, span, (to_reference_B, to_tau_B)), here, is_own in zip(
            (1, 0), sides, (piece.rows, piece.columns), own, strict=False
        ):
            pull = pull_back_block(sim_RC, piece.first_pair, table, value_N, grad_N, here, dim, layout.pairwise)
            to_sim_RC = pull.sim_RC if to_sim_RC is None else to_sim_RC.add_(pull.sim_RC)
            if is_own:
                to_reference_B[within(span, here)] += pull.reference
                to_tau_B[within(span, here)] += pull.tau
        assert to_sim_RC is not None
        if own[0] and to_row_BD is not None:
            to_row_BD[within(layout.rows, piece.rows)] += to_sim_RC @ column_ND[piece.columns]
        if own[1] and to_column_BD is not None:
            to_column_BD.addmm_(to_sim_RC.T, row_ND[piece.rows])
    return Gradients(to_row_BD, to_column_BD, scalars)


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
    """The gradient to the others alone: the prototype update in closed form.  ``to_value`` maps the log-means of the
    anchors at hand, and which they are, to the gradient that reaches them; ``first_pair`` as in ``log_mean_exp``.  In
    one pass over the rows, since an anchor's value needs its own row alone."""
    assert not isinstance(pairwise, Sigmoid), "prototypes stand for a mean of exponentials"
    block = Tile(slice(0, anchor_ND.shape[0]), slice(0, other_MD.shape[0]), first_pair)
    log_count = math.log(other_MD.shape[0] - (first_pair is not None))
    total_MD = torch.zeros_like(other_MD)
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


def _pieces(layout: Layout) -> Iterator[Tile]:
    for block in layout.blocks:
        yield from block.chunks(layout.chunk)


def _similarities(layout: Layout, piece: Tile) -> Tensor:
    return layout.row.all_ND[piece.rows] @ layout.column.all_ND[piece.columns].T


def _empty(layout: Layout, span: slice) -> Side:
    """Anchors without a term yet."""
    start = 0.0 if isinstance(layout.pairwise, Sigmoid) else -math.inf
    value = layout.row.all_ND.new_full((span.stop - span.start,), start)
    return Side(value, torch.zeros_like(value) if layout.with_mean else None)


def _add(total: Side, part: Side, here: slice, pairwise: Pairwise) -> None:
    old = Side(total.value[here], None if total.mean is None else total.mean[here])
    both = joined(old, part, pairwise)
    total.value[here] = both.value
    if total.mean is not None and both.mean is not None:
        total.mean[here] = both.mean
