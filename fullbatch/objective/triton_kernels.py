"""The Triton kernels of fused.py.  They work in base 2, which a GPU's exponential is in, and never leave the similarity
matrix in memory.  Every sum has a fixed order: no atomics, the same bits in every run."""

# R: rows of a tile   C: columns of a tile   K: a piece of the width   P: partial sums at hand   A: anchors at hand

import triton
import triton.language as tl

# ---------------------------------------------------------------------------------------------------------------------
# terms of one tile; LOSS is "identity", "hinge" or "sigmoid"


@triton.jit
def _similarities(
    row_ptr, column_ptr, rows_R, columns_C, N, M,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Operands as they are stored, summed in float32.  Places beyond the tables hold some row's numbers."""
    row_at_R = row_ptr + tl.where(rows_R < N, rows_R, 0).to(tl.int64) * D
    column_at_C = column_ptr + tl.where(columns_C < M, columns_C, 0).to(tl.int64) * D
    sim_RC = tl.zeros((R, C), dtype=tl.float32)
    for start in range(0, D, K):
        at_K = start + tl.arange(0, K)
        if D % K == 0:
            row_RK = tl.load(row_at_R[:, None] + at_K[None, :])
            column_KC = tl.load(column_at_C[None, :] + at_K[:, None])
        else:
            row_RK = tl.load(row_at_R[:, None] + at_K[None, :], mask=at_K[None, :] < D, other=0.0)
            column_KC = tl.load(column_at_C[None, :] + at_K[:, None], mask=at_K[:, None] < D, other=0.0)
        sim_RC = tl.dot(row_RK, column_KC, sim_RC)
    return sim_RC


@triton.jit
def _exponents(sim_RC, reference, tau, margin, LOSS: tl.constexpr):
    """x / ln 2, and tau dx/ds."""
    scale = 1.4426950408889634 / tau
    gap_RC = sim_RC - reference
    if LOSS == "hinge":
        hinge_RC = tl.maximum(gap_RC + margin, 0.0)
        x_RC, slope_RC = hinge_RC * hinge_RC * scale, 2.0 * hinge_RC
    else:
        x_RC, slope_RC = gap_RC * scale, gap_RC  # nobody reads a slope that is 1
    return x_RC, slope_RC


@triton.jit
def _log2_of_one_plus(e):
    """Of e in [0, 1]; by its series where 1 + e would round e away."""
    series = e * (1.0 - e * (0.5 - e * (0.3333333333333333 - e * 0.25)))
    return tl.where(e < 0.015625, series * 1.4426950408889634, tl.log2(1.0 + e))


@triton.jit
def _finite(top):
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _sums_of_tile(x_RC, slope_RC, is_term_RC, AXIS: tl.constexpr, LOSS: tl.constexpr, MEAN: tl.constexpr):
    """Sums of the weights, of x and of the slopes under them, in units of 2^top; the sigmoid's first is its value."""
    if LOSS == "sigmoid":
        e_RC = tl.exp2(-tl.abs(x_RC))
        total = tl.sum(tl.where(is_term_RC, tl.maximum(x_RC, 0.0) + _log2_of_one_plus(e_RC), 0.0), AXIS)
        weight_RC = tl.where(is_term_RC, tl.where(x_RC > 0.0, 1.0, e_RC) / (1.0 + e_RC), 0.0)
        top = tl.zeros_like(total)
        slope = tl.sum(weight_RC, AXIS)
    else:
        term_RC = tl.where(is_term_RC, x_RC, -float("inf"))
        top = tl.max(term_RC, AXIS)
        weight_RC = tl.exp2(term_RC - tl.expand_dims(_finite(top), AXIS))
        total = tl.sum(weight_RC, AXIS)
        slope = total
        if LOSS == "hinge":
            slope = tl.sum(weight_RC * slope_RC, AXIS)
    mean = total
    if MEAN:
        mean = tl.sum(weight_RC * x_RC, AXIS)
    return top, total, mean, slope


@triton.jit
def _add_sums(top, total, mean, slope, other_top, other_total, other_mean, other_slope):
    new = tl.maximum(top, other_top)
    old, other = tl.exp2(top - _finite(new)), tl.exp2(other_top - _finite(new))
    return new, total * old + other_total * other, mean * old + other_mean * other, slope * old + other_slope * other


@triton.jit
def _store_sums(
    out_ptr, at, stride, mask, top, total, mean, slope, unit, LOSS: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """Values, then mean exponents, then mean slopes, ``stride`` apart; values and exponents times ``unit``."""
    if LOSS == "sigmoid":
        value = total
    else:
        value = top + tl.log2(total)
        share = tl.where(total > 0.0, 1.0 / total, 0.0)
        mean, slope = mean * share, slope * share
    tl.store(out_ptr + at, value * unit, mask=mask)
    if MEAN:
        tl.store(out_ptr + stride + at, mean * unit, mask=mask)
    if LOSS != "identity":
        tl.store(out_ptr + (1 + MEAN) * stride + at, slope, mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# forward


@triton.jit(do_not_specialize=["first_pair", "span"])
def reduce_kernel(
    row_ptr, column_ptr, row_reference_ptr, row_tau_ptr, column_reference_ptr, column_tau_ptr,
    row_part_ptr, column_part_ptr, N, M, first_pair, span, margin,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    LOSS: tl.constexpr, MEAN: tl.constexpr, BOTH: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Some rows against ``span`` tiles of columns: one partial sum a row and span and, where columns are anchors too,
    one a column and tile of rows."""
    row_tile, part = tl.program_id(0), tl.program_id(1)
    rows_R = row_tile * R + tl.arange(0, R)
    row_reference_R = tl.load(row_reference_ptr + rows_R, mask=rows_R < N, other=0.0)
    row_tau_R = tl.load(row_tau_ptr + rows_R, mask=rows_R < N, other=1.0)
    top_R = tl.full((R,), -float("inf"), tl.float32)
    total_R = tl.zeros((R,), tl.float32)
    mean_R = tl.zeros((R,), tl.float32)
    slope_R = tl.zeros((R,), tl.float32)
    for tile in range(part * span, tl.minimum((part + 1) * span, tl.cdiv(M, C))):
        columns_C = tile * C + tl.arange(0, C)
        sim_RC = _similarities(row_ptr, column_ptr, rows_R, columns_C, N, M, D, R, C, K)
        is_term_RC = (rows_R[:, None] < N) & (columns_C[None, :] < M)
        is_term_RC = is_term_RC & (columns_C[None, :] != rows_R[:, None] + first_pair)
        x_RC, dx_RC = _exponents(sim_RC, row_reference_R[:, None], row_tau_R[:, None], margin, LOSS)
        top, total, mean, slope = _sums_of_tile(x_RC, dx_RC, is_term_RC, 1, LOSS, MEAN)
        top_R, total_R, mean_R, slope_R = _add_sums(top_R, total_R, mean_R, slope_R, top, total, mean, slope)
        if BOTH:
            reference_C = tl.load(column_reference_ptr + columns_C, mask=columns_C < M, other=0.0)
            tau_C = tl.load(column_tau_ptr + columns_C, mask=columns_C < M, other=1.0)
            x_RC, dx_RC = _exponents(sim_RC, reference_C[None, :], tau_C[None, :], margin, LOSS)
            top_C, total_C, mean_C, slope_C = _sums_of_tile(x_RC, dx_RC, is_term_RC, 0, LOSS, MEAN)
            here = column_part_ptr + row_tile.to(tl.int64) * PLANES * M
            _store_sums(here, columns_C, M, columns_C < M, top_C, total_C, mean_C, slope_C, 1.0, LOSS, MEAN)
    here = row_part_ptr + part.to(tl.int64) * PLANES * N
    _store_sums(here, rows_R, N, rows_R < N, top_R, total_R, mean_R, slope_R, 1.0, LOSS, MEAN)


@triton.jit
def merge_kernel(
    part_ptr, out_ptr, parts, N,
    P: tl.constexpr, A: tl.constexpr, LOSS: tl.constexpr, MEAN: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Partial sums, parts x PLANES x N, to PLANES x N in natural logarithms."""
    anchors_A = tl.program_id(0) * A + tl.arange(0, A)
    top_A = tl.full((A,), -float("inf"), tl.float32)
    total_A = tl.zeros((A,), tl.float32)
    mean_A = tl.zeros((A,), tl.float32)
    slope_A = tl.zeros((A,), tl.float32)
    for start in range(0, parts, P):
        parts_P = start + tl.arange(0, P)
        mask_PA = (parts_P[:, None] < parts) & (anchors_A[None, :] < N)
        at_PA = part_ptr + parts_P[:, None].to(tl.int64) * PLANES * N + anchors_A[None, :]
        if LOSS == "sigmoid":
            value_PA = tl.load(at_PA, mask=mask_PA, other=0.0)
            total = tl.sum(value_PA, 0)
            top = tl.zeros_like(total)
            weight_PA = tl.full((P, A), 1.0, tl.float32)
        else:
            value_PA = tl.load(at_PA, mask=mask_PA, other=-float("inf"))
            top = tl.max(value_PA, 0)
            weight_PA = tl.exp2(value_PA - _finite(top)[None, :])
            total = tl.sum(weight_PA, 0)
        mean = total
        slope = total
        if MEAN:
            mean = tl.sum(weight_PA * tl.load(at_PA + N, mask=mask_PA, other=0.0), 0)
        if LOSS != "identity":
            slope = tl.sum(weight_PA * tl.load(at_PA + (1 + MEAN) * N, mask=mask_PA, other=0.0), 0)
        top_A, total_A, mean_A, slope_A = _add_sums(top_A, total_A, mean_A, slope_A, top, total, mean, slope)
    ln2 = 0.6931471805599453
    _store_sums(out_ptr, anchors_A, N, anchors_A < N, top_A, total_A, mean_A, slope_A, ln2, LOSS, MEAN)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@triton.jit
def _largest(grad_ptr, tau_ptr, count, A: tl.constexpr):
    largest_A = tl.zeros((A,), tl.float32)
    for start in range(0, count, A):
        at_A = start + tl.arange(0, A)
        grad_A = tl.load(grad_ptr + at_A, mask=at_A < count, other=0.0)
        largest_A = tl.maximum(largest_A, tl.abs(grad_A) / tl.load(tau_ptr + at_A, mask=at_A < count, other=1.0))
    return tl.max(largest_A, 0)


@triton.jit
def scale_kernel(
    row_grad_ptr, row_tau_ptr, column_grad_ptr, column_tau_ptr, out_ptr, N, M, steepest,
    BOTH: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """The power of two that brings the largest gradient to a similarity there can be to at most 2^14, and its inverse.
    By one program: it reads two numbers an anchor."""
    bound = _largest(row_grad_ptr, row_tau_ptr, N, A)
    if BOTH:
        bound += _largest(column_grad_ptr, column_tau_ptr, M, A)
    exponent = tl.floor(14.0 - tl.log2(tl.maximum(bound * steepest, 1e-30)))
    tl.store(out_ptr, tl.exp2(exponent))
    tl.store(out_ptr + 1, tl.exp2(-exponent))


@triton.jit
def _anchor_weights(
    sim_RC, reference_ptr, tau_ptr, value_ptr, grad_ptr, at, count, scale, margin,
    AXIS: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """scale grad_i d value_i / d s_ij."""
    mask = at < count
    reference = tl.expand_dims(tl.load(reference_ptr + at, mask=mask, other=0.0), AXIS)
    tau = tl.load(tau_ptr + at, mask=mask, other=1.0)
    factor = tl.expand_dims(tl.load(grad_ptr + at, mask=mask, other=0.0) * scale / tau, AXIS)
    x_RC, dx_RC = _exponents(sim_RC, reference, tl.expand_dims(tau, AXIS), margin, LOSS)
    if LOSS == "sigmoid":
        weight_RC = 1.0 / (1.0 + tl.exp2(-x_RC))
    else:
        value = tl.load(value_ptr + at, mask=mask, other=0.0) * 1.4426950408889634
        weight_RC = tl.exp2(x_RC - tl.expand_dims(value, AXIS))
    if LOSS == "hinge":
        weight_RC = weight_RC * dx_RC
    return weight_RC * factor


@triton.jit(do_not_specialize=["first_pair"])
def weights_kernel(
    row_ptr, column_ptr, row_reference_ptr, row_tau_ptr, row_value_ptr, row_grad_ptr,
    column_reference_ptr, column_tau_ptr, column_value_ptr, column_grad_ptr, scale_ptr, out_ptr,
    N, M, first_pair, margin,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    LOSS: tl.constexpr, BOTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient to the similarities, N x M, both directions in one, scaled.  Tiles go in groups of GROUP tiles of
    rows, whose operands stay in the GPU's cache."""
    program, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(N, R), tl.cdiv(M, C)
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    place = program % (GROUP * column_tiles)
    rows_R = (first + place % size) * R + tl.arange(0, R)
    columns_C = place // size * C + tl.arange(0, C)
    sim_RC = _similarities(row_ptr, column_ptr, rows_R, columns_C, N, M, D, R, C, K)
    scale = tl.load(scale_ptr)
    total_RC = _anchor_weights(
        sim_RC, row_reference_ptr, row_tau_ptr, row_value_ptr, row_grad_ptr, rows_R, N, scale, margin, 1, LOSS
    )
    if BOTH:
        total_RC += _anchor_weights(
            sim_RC, column_reference_ptr, column_tau_ptr, column_value_ptr, column_grad_ptr, columns_C, M, scale,
            margin, 0, LOSS,
        )  # fmt: skip
    # an own positive, which no value counts, may have a weight beyond any number
    total_RC = tl.where(columns_C[None, :] == rows_R[:, None] + first_pair, 0.0, total_RC)
    at_RC = out_ptr + rows_R[:, None].to(tl.int64) * M + columns_C[None, :]
    tl.store(at_RC, total_RC.to(out_ptr.dtype.element_ty), mask=(rows_R[:, None] < N) & (columns_C[None, :] < M))
