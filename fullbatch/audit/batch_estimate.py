"""What one random batch says of its anchors' normalizers: the yardstick of every other estimate."""

# A: anchors   G: anchors that share a batch   B: rows of a batch   n: samples of the data set   D: width

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.audit.exact import Negatives, references, wide_dtype
from fullbatch.config import Pairwise
from fullbatch.kernels.log_mean_exp import exponents

FEWEST_BATCHES = 16  # so that one odd batch does not decide the error of them all


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
    """log g_i(batch), without epsilon, of image anchors and of text anchors; the ranks share the work.

    Anchors of a group share their batch, as in training.  B random rows are drawn for a group: an anchor among them has
    the others as negatives, any other anchor takes the place of the last row.  Either way its batch is a random one of
    those that contain it.
    """
    count, anchors = image_nD.shape[0], rows_A.shape[0]
    size = max(1, min(batch, math.ceil(anchors / FEWEST_BATCHES)))
    groups = list(torch.split(torch.arange(anchors, device=rows_A.device), size))
    drawn = _distinct_batches(count, batch, len(groups), generator)
    found = [torch.stack(taus, dim=1)[:0]]
    for group in torch.arange(len(groups)).tensor_split(distributed.world().size)[distributed.world().rank].tolist():
        rows_G, rows_B = rows_A[groups[group]], drawn[group].to(rows_A.device)
        is_own_GB = rows_G[:, None] == rows_B
        is_own_GB[:, -1] |= ~is_own_GB.any(dim=1)
        pair = [
            _log_mean(own_nD, other_nD, rows_G, rows_B, is_own_GB, tau_A[groups[group]], pairwise, negatives)
            for own_nD, other_nD, tau_A in ((image_nD, text_nD, taus[0]), (text_nD, image_nD, taus[1]))
        ]
        found.append(torch.stack(pair, dim=1))
    image_A, text_A = distributed.gather_uneven(torch.cat(found)).unbind(dim=1)
    return image_A, text_A


def _distinct_batches(count: int, batch: int, wanted: int, generator: torch.Generator) -> list[Tensor]:
    """Batches without replacement, epoch by epoch; the samples left over of an epoch are dropped."""
    batches: list[Tensor] = []
    while len(batches) < wanted:
        order = torch.randperm(count, generator=generator)
        batches += torch.split(order[: count // batch * batch], batch)
    return batches[:wanted]


def _log_mean(
    own_nD: Tensor,
    other_nD: Tensor,
    rows_G: Tensor,
    rows_B: Tensor,
    is_own_GB: Tensor,
    tau_G: Tensor,
    pairwise: Pairwise,
    negatives: Negatives,
) -> Tensor:
    dtype = wide_dtype(own_nD)
    anchor_GD = own_nD[rows_G].to(dtype)
    reference_G = references(anchor_GD, other_nD[rows_G].to(dtype), pairwise)
    sets = (other_nD,) if negatives == "across" else (other_nD, own_nD)
    terms = []
    for others_nD in sets:
        x_GB = exponents(anchor_GD @ others_nD[rows_B].to(dtype).T, reference_G, tau_G, 1, pairwise)
        terms.append(x_GB.masked_fill_(is_own_GB, -math.inf))
    return torch.logsumexp(torch.cat(terms, dim=1), dim=1) - math.log(len(sets) * (rows_B.shape[0] - 1))
