"""The exact log-normalizers of a whole data set, streamed: what every estimate is judged by (NeuCLIP section B.6).
And what one random batch says of its anchors' normalizers: the yardstick of every other estimate."""

# A: anchors   R: anchors at hand   C: others at hand   G: anchors that share a batch   B: rows of a batch
# n: samples of the data set   D: width

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.config.axes import RAW, Identity, Pairwise, SquaredHinge
from fullbatch.config.checks import is_number, is_whole
from fullbatch.objective.advice import check_shapes, check_unit_rows
from fullbatch.objective.chunked import exponents, reduce_terms
from fullbatch.objective.log_domain import log_add

FEWEST_BATCHES = 16  # so that one odd batch does not decide the error of them all
Temperatures = float | Tensor | tuple[Tensor, Tensor]
Negatives = Literal["across", "both"]


def exact_log_normalizers(
    image: Tensor,
    text: Tensor,
    temperature: Temperatures,
    epsilon: float = 1e-14,
    anchors: Tensor | None = None,
    *,
    pairwise: Pairwise = Identity(),
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log(epsilon + g_i(data set)) for image anchors and for text anchors, NeuCLIP eq. (9).

    ``image`` and ``text`` are (n, D) unit rows of the whole data set.  ``temperature`` is a number, one value a sample
    (n,), or a pair of such tensors for images and texts.  ``anchors`` are the rows asked for (all by default).  No
    matrix larger than chunk x chunk exists; None: 1,024 rows on a CPU, whose caches they fit, 8,192 on a GPU.

    >>> image = torch.nn.functional.normalize(torch.randn(100, 8), dim=-1)
    >>> log_image, log_text = exact_log_normalizers(image, image, temperature=0.1, anchors=torch.arange(5))
    >>> log_image.shape
    torch.Size([5])
    """
    check_shapes(image, text, None)
    for name, rows in (("image", image), ("text", text)):
        check_unit_rows(name, rows)
    if not isinstance(pairwise, (Identity, SquaredHinge, *RAW)):
        allowed = "Identity(), RawSimilarity(), SquaredHinge() or RobustPositives()"
        raise ValueError(f"{pairwise!r} has no normalizer; pass {allowed}.")
    if not is_number(epsilon) or epsilon < 0.0:
        raise ValueError(f"epsilon must be a number of at least 0, got {epsilon!r}.")
    if chunk is not None and not is_whole(chunk, 1):
        raise ValueError(f"chunk must be a number of rows of at least 1, got {chunk!r}.")
    rows_A = checked_anchors(anchors, image.shape[0]).to(image.device)
    pair = temperature if isinstance(temperature, tuple) else (temperature, temperature)
    tau_image_A, tau_text_A = (_per_anchor(tau, rows_A, image.shape[0], wide_dtype(image)) for tau in pair)
    return (
        log_add(log_means(image, text, rows_A, tau_image_A, pairwise, chunk=chunk), epsilon),
        log_add(log_means(text, image, rows_A, tau_text_A, pairwise, chunk=chunk), epsilon),
    )


def wide_dtype(rows: Tensor) -> torch.dtype:
    """Sums of exponentials are never taken in less than float32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def checked_anchors(anchors: Tensor | None, count: int) -> Tensor:
    rows_A = torch.arange(count) if anchors is None else torch.as_tensor(anchors)
    if rows_A.dim() != 1 or rows_A.dtype not in (torch.int64, torch.int32):
        given = f"{rows_A.dtype} of shape {tuple(rows_A.shape)}"
        raise ValueError(f"anchors must be row numbers, a tensor of whole numbers in one dimension, got {given}.")
    if rows_A.numel() and (int(rows_A.min()) < 0 or int(rows_A.max()) >= count):
        raise ValueError(f"anchors must lie in [0, {count - 1}], got {int(rows_A.min())} to {int(rows_A.max())}.")
    return rows_A


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
def log_means(
    anchor_nD: Tensor,
    other_nD: Tensor,
    rows_A: Tensor,
    tau_A: Tensor,
    pairwise: Pairwise,
    *,
    negatives: Negatives = "across",
    chunk: int | None = None,
) -> Tensor:
    """log g_i(data set) of one direction: all rows but the anchor's own are its negatives, without epsilon.  With
    ``negatives`` "both" the anchors' own modality is a second set of negatives of the same size."""
    dtype, sets = wide_dtype(anchor_nD), (other_nD,) if negatives == "across" else (other_nD, anchor_nD)
    chunk = chunk or (1024 if anchor_nD.device.type == "cpu" else 8192)
    log_sums = [tau_A[:0]]
    for here in range(0, rows_A.shape[0], chunk):
        rows_R, tau_R = rows_A[here : here + chunk], tau_A[here : here + chunk]
        anchor_RD = anchor_nD[rows_R].to(dtype)
        reference_R = references(anchor_RD, other_nD[rows_R].to(dtype), pairwise)
        log_sum_R = torch.full_like(reference_R, -math.inf)
        for others_nD in sets:
            for start in range(0, others_nD.shape[0], chunk):
                other_CD = others_nD[start : start + chunk].to(dtype)
                own_R = rows_R - start
                inside_R = (own_R >= 0) & (own_R < other_CD.shape[0])
                x_RC = exponents(anchor_RD @ other_CD.T, reference_R, tau_R, 1, pairwise)
                x_RC[inside_R.nonzero()[:, 0], own_R[inside_R]] = -math.inf
                log_sum_R = torch.logaddexp(log_sum_R, reduce_terms(x_RC, 1, pairwise))
        log_sums.append(log_sum_R)
    return torch.cat(log_sums) - math.log(len(sets) * (other_nD.shape[0] - 1))


def references(anchor_RD: Tensor, own_RD: Tensor, pairwise: Pairwise) -> Tensor:
    """What a negative's similarity is compared with: the positive's, or 0 where raw similarities are used."""
    positive_R = (anchor_RD * own_RD).sum(1)
    return torch.zeros_like(positive_R) if isinstance(pairwise, RAW) else positive_R


@torch.no_grad()
def log_means_of_batches(
    image_nD: Tensor,
    text_nD: Tensor,
    rows_A: Tensor,
    taus: tuple[Tensor, Tensor],
    batch: int,
    generator: torch.Generator,
    *,
    pairwise: Pairwise,
    negatives: Negatives = "across",
) -> tuple[Tensor, Tensor]:
    """log g_i(batch), without epsilon, of image anchors and of text anchors; the ranks share the work.  Anchors of a
    group share their batch, B random rows: an anchor among them has the others as negatives, any other takes the place
    of the last row.  Either way its batch is a random one of those that contain it."""
    count, anchors = image_nD.shape[0], rows_A.shape[0]
    size = max(1, min(batch, math.ceil(anchors / FEWEST_BATCHES)))
    groups = list(torch.split(torch.arange(anchors, device=rows_A.device), size))
    drawn: list[Tensor] = []
    while len(drawn) < len(groups):  # epoch by epoch; the samples left over of an epoch are dropped
        drawn += torch.split(torch.randperm(count, generator=generator)[: count // batch * batch], batch)
    dtype, answers = wide_dtype(image_nD), [torch.stack(taus, dim=1)[:0]]
    for group in torch.arange(len(groups)).tensor_split(distributed.world().size)[distributed.world().rank].tolist():
        rows_G, rows_B = rows_A[groups[group]], drawn[group].to(rows_A.device)
        is_own_GB = rows_G[:, None] == rows_B
        is_own_GB[:, -1] |= ~is_own_GB.any(dim=1)
        pair = []
        for own_nD, other_nD, tau_A in ((image_nD, text_nD, taus[0]), (text_nD, image_nD, taus[1])):
            anchor_GD = own_nD[rows_G].to(dtype)
            reference_G = references(anchor_GD, other_nD[rows_G].to(dtype), pairwise)
            terms = []
            for others_nD in (other_nD,) if negatives == "across" else (other_nD, own_nD):
                sim_GB = anchor_GD @ others_nD[rows_B].to(dtype).T
                x_GB = exponents(sim_GB, reference_G, tau_A[groups[group]], 1, pairwise)
                terms.append(x_GB.masked_fill_(is_own_GB, -math.inf))
            pair.append(torch.logsumexp(torch.cat(terms, dim=1), dim=1) - math.log(len(terms) * (batch - 1)))
        answers.append(torch.stack(pair, dim=1))
    image_A, text_A = distributed.gather_uneven(torch.cat(answers)).unbind(dim=1)
    return image_A, text_A
