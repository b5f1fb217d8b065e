"""Selected batches are no uniform samples, so what they show of a normalizer is biased.  A plan knows by how much: the
rows it was made from are a uniform sample, and their embeddings, if older ones, are at hand.  For anchor i, with x_ij
the exponents of the method's loss, (s_ij - s_ii) / tau in most,

    log c_i = log mean over j != i of the plan's rows of exp(x_ij) - log mean over j != i of its batch of the same,

so that c_i g_i(batch) stands for g_i of a uniform batch."""

# P: rows a plan chooses from   M: rows of a mean   L: batches chosen   B: rows of a batch   D: width

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullbatch.config.methods import Method
from fullbatch.data.order import Ints
from fullbatch.objective.chunked import exponents

MOST = 2048  # rows outside a batch that stand for all of them


def log_corrections(
    image_PD: Tensor, text_PD: Tensor, chosen_LB: Ints, tau: float, ids_P: Ints, method: Method
) -> Tensor:
    """log c of the batches' rows, for images and for texts as anchors, (L, B, 2).  Rows never seen (not finite) count
    for nothing; where nothing is known of an anchor, or of all others, it is 0.  ``ids_P`` tells the samples: one may
    stand in several places, and is no negative of its own."""
    seen_P = image_PD.isfinite().all(1) & text_PD.isfinite().all(1)
    image_PD, text_PD = (rows_PD.where(seen_P[:, None], 0.0) for rows_PD in (image_PD, text_PD))
    batches, sample_P = torch.from_numpy(chosen_LB), torch.from_numpy(ids_P)
    reference_P, tau_P = (image_PD * text_PD).sum(1), torch.full((len(ids_P),), tau, dtype=image_PD.dtype)
    alone_B = torch.arange(chosen_LB.shape[1])

    def log_sum(anchor_BD: Tensor, others: Sequence[Tensor], here_B: Tensor, counts_BM: Tensor) -> Tensor:
        """Over the rows that count, of each kind of others; -inf: there are none."""
        sums = []
        for other_MD in others:
            x_BM = exponents(anchor_BD @ other_MD.T, reference_P[here_B], tau_P[here_B], 1, method.pairwise)
            sums.append(x_BM.masked_fill(~counts_BM, -torch.inf).logsumexp(1))
        return torch.stack(sums).logsumexp(0)

    sides = []
    for anchor_PD, other_PD in ((image_PD, text_PD), (text_PD, image_PD)):
        kinds = (other_PD,) if method.negatives == "across" else (other_PD, anchor_PD)
        log_c = []
        for here_B in batches:
            outside_P = seen_P.index_fill(0, here_B, value=False)
            shown = outside_P.nonzero()[:MOST, 0]  # in uniform order, so a uniform sample
            near_BB = seen_P[here_B] & (alone_B != alone_B[:, None])  # in a batch every other row is a negative
            far_BM = sample_P[shown] != sample_P[here_B][:, None]
            near_B = log_sum(anchor_PD[here_B], [rows_PD[here_B] for rows_PD in kinds], here_B, near_BB)
            far_B = log_sum(anchor_PD[here_B], [rows_PD[shown] for rows_PD in kinds], here_B, far_BM)
            more = outside_P.sum() / max(len(shown), 1)  # as often does each row outside count
            all_B = torch.logaddexp(near_B, far_B + more.log())
            counts_B = near_BB.sum(1), near_BB.sum(1) + more * far_BM.sum(1)
            log_c.append(all_B - near_B + counts_B[0].to(tau_P.dtype).log() - counts_B[1].to(tau_P.dtype).log())
        log_c_LB = torch.stack(log_c)
        sides.append(log_c_LB.where(seen_P[batches] & log_c_LB.isfinite(), 0.0))
    return torch.stack(sides, dim=2)
