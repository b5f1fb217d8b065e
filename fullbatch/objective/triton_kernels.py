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
def _hinge(sim, reference, margin):
    """max(0, gap + margin), which stays no number where the gap is none, as tl.maximum would not."""
    gap = sim - (reference - margin)
    return tl.where(gap < 0.0, 0.0, gap)


@triton.jit
def _exponents(sim, reference, tau, margin, LOSS: tl.constexpr):
    """x / ln 2."""
    scale = 1.4426950408889634 / tau
    if LOSS == "hinge":
        hinge = _hinge(sim, reference, margin)
        x = hinge * hinge * scale
    else:
        x = sim * scale - reference * scale
    return x


@triton.jit
def _log2_of_one_plus(e):
    """Of e in [0, 1]; by its series where 1 + e would round e away."""
    series = e * (1.0 - e * (0.5 - e * (0.3333333333333333 - e * 0.25)))
    return tl.where(e < 0.015625, series * 1.4426950408889634, tl.log2(1.0 + e))


@triton.jit
def _softmax_sums(sim_RC, reference, tau, margin, AXIS: tl.constexpr, LOSS: tl.constexpr, MEAN: tl.constexpr):
    """The largest x, and in units of its 2^x the sums of the weights, of x and of tau dx/ds under them.  x grows with
    s, so the largest is that of the largest s; where it is linear in s, a tile needs two numbers an anchor at hand."""
    top_sim = tl.max(sim_RC, AXIS)
    top = _exponents(top_sim, reference, tau, margin, LOSS)
    scale = 1.4426950408889634 / tau
    if LOSS == "hinge":
        hinge_RC = _hinge(sim_RC, tl.expand_dims(reference, AXIS), margin)
        weight_RC = tl.exp2(hinge_RC * hinge_RC * tl.expand_dims(scale, AXIS) - tl.expand_dims(top, AXIS))
        weight_RC = tl.where(sim_RC < -1e20, 0.0, weight_RC)
        total = tl.sum(weight_RC, AXIS)
        slope = 2.0 * tl.sum(weight_RC * hinge_RC, AXIS)
    else:
        weight_RC = tl.exp2((sim_RC - tl.expand_dims(top_sim, AXIS)) * tl.expand_dims(scale, AXIS))
        total = tl.sum(weight_RC, AXIS)
        slope = total
    mean = total
    if MEAN:
        if LOSS == "hinge":
            mean = tl.sum(weight_RC * (hinge_RC * hinge_RC), AXIS) * scale
        else:
            mean = (tl.sum(weight_RC * sim_RC, AXIS) - reference * total) * scale
    return tl.where(top_sim > -1e20, top, -float("inf")), total, mean, slope


@triton.jit
def _sigmoid_sums(sim_RC, reference, tau, AXIS: tl.constexpr):
    """The value, and the sums of x and of tau dx/ds, which is 1, under the weights; its unit is 1."""
    x_RC = _exponents(sim_RC, tl.expand_dims(reference, AXIS), tl.expand_dims(tau, AXIS), 0.0, "sigmoid")
    e_RC = tl.exp2(-tl.abs(x_RC))
    value = tl.sum(tl.maximum(x_RC, 0.0) + _log2_of_one_plus(e_RC), AXIS)
    weight_RC = tl.where(x_RC > 0.0, 1.0, e_RC) / (1.0 + e_RC)
    return tl.zeros_like(value), value, tl.sum(weight_RC * x_RC, AXIS), tl.sum(weight_RC, AXIS)


@triton.jit
def _sums_of_tile(sim_RC, reference, tau, margin, AXIS: tl.constexpr, LOSS: tl.constexpr, MEAN: tl.constexpr):
    if LOSS == "sigmoid":
        top, total, mean, slope = _sigmoid_sums(sim_RC, reference, tau, AXIS)
    else:
        top, total, mean, slope = _softmax_sums(sim_RC, reference, tau, margin, AXIS, LOSS, MEAN)
    return top, total, mean, slope


@triton.jit
def _finite(top):
    return tl.where(top == -float("inf"), 0.0, top)


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
        sim_RC = tl.where(is_term_RC, sim_RC, -1e30)  # no term: its weight is 0
        top, total, mean, slope = _sums_of_tile(sim_RC, row_reference_R, row_tau_R, margin, 1, LOSS, MEAN)
        top_R, total_R, mean_R, slope_R = _add_sums(top_R, total_R, mean_R, slope_R, top, total, mean, slope)
        if BOTH:
            reference_C = tl.load(column_reference_ptr + columns_C, mask=columns_C < M, other=0.0)
            tau_C = tl.load(column_tau_ptr + columns_C, mask=columns_C < M, other=1.0)
            top_C, total_C, mean_C, slope_C = _sums_of_tile(sim_RC, reference_C, tau_C, margin, 0, LOSS, MEAN)
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
def _store_scale(out_ptr, bound):
    """The power of two that brings the bound to at most 2^15, and its inverse."""
    exponent = tl.floor(15.0 - tl.log2(tl.maximum(bound, 1e-30)))
    tl.store(out_ptr, tl.exp2(exponent))
    tl.store(out_ptr + 1, tl.exp2(-exponent))


@triton.jit
def scale_kernel(
    row_grad_ptr, row_tau_ptr, column_grad_ptr, column_tau_ptr, out_ptr, N, M, steepest,
    BOTH: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Of the largest gradient to a similarity there can be.  By one program: it reads two numbers an anchor."""
    bound = _largest(row_grad_ptr, row_tau_ptr, N, A)
    if BOTH:
        bound += _largest(column_grad_ptr, column_tau_ptr, M, A)
    _store_scale(out_ptr, bound * steepest)


@triton.jit
def _anchor_weights(
    sim_RC, reference_ptr, tau_ptr, value_ptr, grad_ptr, at, count, scale, margin,
    AXIS: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """scale grad_i d value_i / d s_ij."""
    mask = at < count
    reference = tl.load(reference_ptr + at, mask=mask, other=0.0)
    tau = tl.load(tau_ptr + at, mask=mask, other=1.0)
    factor = tl.load(grad_ptr + at, mask=mask, other=0.0) * scale / tau
    x_RC = _exponents(sim_RC, tl.expand_dims(reference, AXIS), tl.expand_dims(tau, AXIS), margin, LOSS)
    if LOSS == "sigmoid":
        weight_RC = 1.0 / (1.0 + tl.exp2(-x_RC))
    else:
        value = tl.load(value_ptr + at, mask=mask, other=0.0) * 1.4426950408889634
        weight_RC = tl.exp2(x_RC - tl.expand_dims(value, AXIS))
    if LOSS == "hinge":
        weight_RC = weight_RC * (2.0 * _hinge(sim_RC, tl.expand_dims(reference, AXIS), margin))
    return weight_RC * tl.expand_dims(factor, AXIS)


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


# ---------------------------------------------------------------------------------------------------------------------
# prototypes


@triton.jit
def fit_kernel(
    value_ptr, tau_ptr, log_total_ptr, grad_ptr, scale_ptr, N, log_count, log_epsilon, guard, steepest,
    SEPARATE: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """From the anchors' values to the gradient that reaches them, as prototypes.py has it, and its scale."""
    largest_A = tl.zeros((A,), tl.float32)
    for start in range(0, N, A):
        at_A = start + tl.arange(0, A)
        mask_A = at_A < N
        log_mean_A = tl.load(value_ptr + at_A, mask=mask_A, other=0.0) - log_count
        tau_A = tl.load(tau_ptr + at_A, mask=mask_A, other=1.0)
        log_total_A = tl.load(log_total_ptr + at_A, mask=mask_A, other=0.0)
        e_A = tl.exp(-tl.abs(log_mean_A - log_epsilon))
        alpha_A = tl.maximum(log_mean_A, log_epsilon) + tl.log(1.0 + e_A)
        share_A = tl.where(log_mean_A > log_epsilon, 1.0, e_A) / (1.0 + e_A)
        if SEPARATE:
            to_alpha_A = alpha_A - log_total_A
        else:
            to_alpha_A = tau_A * (1.0 - tl.exp(tl.minimum(log_total_A - alpha_A, guard)))
        grad_A = to_alpha_A * share_A / N
        tl.store(grad_ptr + at_A, grad_A, mask=mask_A)
        largest_A = tl.maximum(largest_A, tl.where(mask_A, tl.abs(grad_A) / tau_A, 0.0))
    _store_scale(scale_ptr, tl.max(largest_A, 0) * steepest)


@triton.jit
def _unit_rows(rows_RD):
    norm_R1 = tl.maximum(tl.sqrt(tl.sum(rows_RD * rows_RD, 1, keep_dims=True)), 1e-12)
    return rows_RD / norm_R1, norm_R1


@triton.jit
def prototype_kernel(
    row_ptr, accumulator_ptr, to_unit_ptr, scale_ptr, operand_ptr, M, rate,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Some prototypes take an AdaGrad step, through their normalisation, and are written down as operands: unit rows
    in float16, or that, what it leaves, and that again.  W: the width, rounded up to a power of two."""
    rows_R, at_W = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)
    mask_RW = (rows_R[:, None] < M) & (at_W[None, :] < D)
    at_RW = rows_R[:, None].to(tl.int64) * D + at_W[None, :]
    row_RW = tl.load(row_ptr + at_RW, mask=mask_RW, other=0.0)
    unit_RW, norm_R1 = _unit_rows(row_RW)
    if UPDATE:
        to_unit_RW = tl.load(to_unit_ptr + at_RW, mask=mask_RW, other=0.0) * tl.load(scale_ptr + 1)
        radial_R1 = tl.sum(to_unit_RW * unit_RW, 1, keep_dims=True)
        grad_RW = (to_unit_RW - radial_R1 * unit_RW) / norm_R1
        sum_RW = tl.load(accumulator_ptr + at_RW, mask=mask_RW, other=0.0) + grad_RW * grad_RW
        row_RW = row_RW - rate * grad_RW / (tl.sqrt(sum_RW) + 1e-10)  # epsilon as in torch
        tl.store(accumulator_ptr + at_RW, sum_RW, mask=mask_RW)
        tl.store(row_ptr + at_RW, row_RW, mask=mask_RW)
        unit_RW, norm_R1 = _unit_rows(row_RW)
    high_RW = unit_RW.to(tl.float16)
    out_RW = operand_ptr + rows_R[:, None].to(tl.int64) * PARTS * D + at_W[None, :]
    tl.store(out_RW, high_RW, mask=mask_RW)
    if PARTS == 3:
        tl.store(out_RW + D, (unit_RW - high_RW.to(tl.float32)).to(tl.float16), mask=mask_RW)
        tl.store(out_RW + 2 * D, high_RW, mask=mask_RW)
