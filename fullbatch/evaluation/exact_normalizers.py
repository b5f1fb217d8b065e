"""The exact log-normalizers of a whole data set, streamed: what every estimate is judged by (NeuCLIP section B.6)."""

# A: anchors   R: anchors at hand   C: others at hand   n: samples of the data set   D: width

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullbatch.config import Identity, Pairwise, RobustPositives, SquaredHinge
from fullbatch.config.checks import is_number, is_whole
from fullbatch.kernels.log_mean_exp import exponents, reduce_terms
from fullbatch.objective.checks import check_shapes, check_unit_rows
from fullbatch.objective.log_domain import log_add

Temperatures = float | Tensor | tuple[Tensor, Tensor]


def exact_log_normalizers(
    image: Tensor,
    text: Tensor,
    temperature: Temperatures,
    epsilon: float = 1e-14,
    anchors: Tensor | None = None,
    *,
    pairwise: Pairwise = Identity(),
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """log(epsilon + g_i(data set)) for image anchors and for text anchors, NeuCLIP eq. (9).

    ``image`` and ``text`` are (n, D) unit rows of the whole data set.  ``temperature`` is a number, one value a sample
    (n,), or a pair of such tensors for images and texts.  ``anchors`` are the rows asked for (all by default).  No
    matrix larger than chunk x chunk exists.

    >>> image = torch.nn.functional.normalize(torch.randn(100, 8), dim=-1)
    >>> log_image, log_text = exact_log_normalizers(image, image, temperature=0.1, anchors=torch.arange(5))
    >>> log_image.shape
    torch.Size([5])
    """
    check_shapes(image, text, None)
    for name, rows in (("image", image), ("text", text)):
        check_unit_rows(name, rows)
    if not isinstance(pairwise, (Identity, SquaredHinge, RobustPositives)):
        raise ValueError(f"{pairwise!r} has no normalizer; pass Identity(), SquaredHinge() or RobustPositives().")
    if not is_number(epsilon) or epsilon < 0.0:
        raise ValueError(f"epsilon must be a number of at least 0, got {epsilon!r}.")
    if not is_whole(chunk, 1):
        raise ValueError(f"chunk must be a number of rows of at least 1, got {chunk!r}.")
    count = image.shape[0]
    rows_A = torch.arange(count) if anchors is None else torch.as_tensor(anchors)
    if rows_A.dim() != 1 or rows_A.dtype not in (torch.int64, torch.int32):
        found = f"{rows_A.dtype} of shape {tuple(rows_A.shape)}"
        raise ValueError(f"anchors must be row numbers, a tensor of whole numbers in one dimension, got {found}.")
    rows_A = rows_A.to(image.device)
    if rows_A.numel() and (int(rows_A.min()) < 0 or int(rows_A.max()) >= count):
        raise ValueError(f"anchors must lie in [0, {count - 1}], got {int(rows_A.min())} to {int(rows_A.max())}.")
    wide = torch.float64 if image.dtype == torch.float64 else torch.float32
    pair = temperature if isinstance(temperature, tuple) else (temperature, temperature)
    tau_image_A, tau_text_A = (_per_anchor(tau, rows_A, count, wide) for tau in pair)
    return (
        _one_direction(image, text, rows_A, tau_image_A, epsilon, pairwise, chunk, wide),
        _one_direction(text, image, rows_A, tau_text_A, epsilon, pairwise, chunk, wide),
    )


def _per_anchor(temperature: float | Tensor, rows_A: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(temperature, Tensor) and not is_number(temperature):
        raise ValueError(f"temperature must be a number or one value a sample, got {temperature!r}.")
    tau = torch.as_tensor(temperature, dtype=dtype, device=rows_A.device)
    if not bool(torch.all(tau > 0)):
        raise ValueError(f"temperature must be positive, got {float(tau.min())}.")
    if tau.dim() == 0:
        return tau.expand(rows_A.shape[0])
    if tau.shape != (count,):
        raise ValueError(f"temperature must be a number or one value a sample ({count},), got {tuple(tau.shape)}.")
    return tau[rows_A]


@torch.no_grad()
def _one_direction(
    anchor_nD: Tensor,
    other_nD: Tensor,
    rows_A: Tensor,
    tau_A: Tensor,
    epsilon: float,
    pairwise: Pairwise,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    log_sums = []
    for here in range(0, rows_A.shape[0], chunk):
        rows_R, tau_R = rows_A[here : here + chunk], tau_A[here : here + chunk]
        anchor_RD = anchor_nD[rows_R].to(dtype)
        positive_R = (anchor_RD * other_nD[rows_R].to(dtype)).sum(1)
        reference_R = torch.zeros_like(positive_R) if isinstance(pairwise, RobustPositives) else positive_R
        log_sum_R = torch.full_like(positive_R, -math.inf)
        for start in range(0, other_nD.shape[0], chunk):
            other_CD = other_nD[start : start + chunk].to(dtype)
            own_R = rows_R - start
            inside_R = (own_R >= 0) & (own_R < other_CD.shape[0])
            x_RC = exponents(anchor_RD @ other_CD.T, reference_R, tau_R, 1, pairwise)
            x_RC[inside_R.nonzero()[:, 0], own_R[inside_R]] = -math.inf
            log_sum_R = torch.logaddexp(log_sum_R, reduce_terms(x_RC, 1, pairwise))
        log_sums.append(log_sum_R)
    log_mean_A = torch.cat(log_sums) - math.log(other_nD.shape[0] - 1) if log_sums else tau_A.clone()
    return log_add(log_mean_A, epsilon)
