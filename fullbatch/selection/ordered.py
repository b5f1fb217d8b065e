"""Batches of large loss, by looking at many: ordered SGD (Kawaguchi and Lu 2020), as "Mini-Batch Optimization of
Contrastive Loss" (Cho et al. 2023) has it in Algorithms 6 and 7.

Two readings.  *Sequential*, the authors' code: draw k random batches, keep the q of largest loss, train on them in q
steps, look again (``drawn_batches``, then ``hardest``).  *Averaged*, Algorithm 7 read literally: an epoch's partition
is looked at k batches at a time, and the q kept make one step, on the mean over them (``batches_of_partition``, then
``hardest``); the other k - q are dropped.  In either reading a sample may come often or never.
"""

# P: places of an epoch, in uniform order   K: batches looked at   q: batches kept   B: batch size   D: width

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fullbatch.selection.spectral import Ints

_ELEMENTS_AT_ONCE = 2**24  # of a chunk's rows or similarities


def batch_losses(image_KBD: Tensor, text_KBD: Tensor, tau: float) -> Tensor:
    """L_con of each batch (the paper's section 3, with tau): the mean over its rows, the sum over both directions.
    That is twice openclip's loss.  Rows never seen (not finite) are left out, and the negatives seen stand for all B -
    1; a batch with fewer than two rows seen has the loss -inf: nothing is known of it."""
    size = image_KBD.shape[1]
    seen_KB = image_KBD.isfinite().all(-1) & text_KBD.isfinite().all(-1)
    dtype = torch.promote_types(image_KBD.dtype, torch.float32)
    image_KBD, text_KBD = (
        torch.where(seen_KB[..., None], table, torch.zeros_like(table)).to(dtype) for table in (image_KBD, text_KBD)
    )
    sim_KBB = image_KBD @ text_KBD.mT
    own_KB = sim_KBB.diagonal(dim1=1, dim2=2)
    seen_K = seen_KB.sum(1)
    others_KBB = seen_KB[:, None] & ~torch.eye(size, dtype=torch.bool, device=sim_KBB.device)
    scale_K = torch.log((size - 1) / (seen_K - 1).clamp(min=1).to(dtype))

    def one_direction(sims_KBB: Tensor) -> Tensor:
        gap_KBB = ((sims_KBB - own_KB[..., None]) / tau).masked_fill(~others_KBB, -math.inf)
        log_sum_KB = gap_KBB.logsumexp(2) + scale_K[:, None]
        losses_KB = torch.logaddexp(log_sum_KB, torch.zeros_like(log_sum_KB))
        return torch.where(seen_KB, losses_KB, 0.0).sum(1) / seen_K.clamp(min=1)

    return torch.where(seen_K >= 2, one_direction(sim_KBB) + one_direction(sim_KBB.mT), -math.inf)


def losses_at(image_PD: Tensor, text_PD: Tensor, places_KB: Ints, tau: float) -> Tensor:
    """``batch_losses`` of the batches at these places, some at a time, so that memory does not grow with K."""
    batch, width = places_KB.shape[1], image_PD.shape[1]
    chunk = max(1, _ELEMENTS_AT_ONCE // (batch * max(batch, width)))
    pieces = [torch.from_numpy(places_KB[start : start + chunk]) for start in range(0, len(places_KB), chunk)]
    return torch.cat([batch_losses(image_PD[piece], text_PD[piece], tau) for piece in pieces])


def drawn_batches(places: int, batch_size: int, drawn: int, seed: int) -> Ints:
    """``drawn`` random batches (K, B) of range(places).  Cut from random permutations, as many as it takes: no sample
    is twice in a batch, nor in two batches before all that fill whole batches have been in one."""
    rng, whole = np.random.default_rng(seed % 2**64), places // batch_size
    rounds = [rng.permutation(places)[: whole * batch_size] for _ in range(-(-drawn // whole))]
    return np.concatenate(rounds).reshape(-1, batch_size)[:drawn]


def batches_of_partition(places: int, batch_size: int, drawn: int, group: int) -> Ints:
    """Algorithm 7's S_B: the batches (K, B) of group number ``group`` of the epoch's partition, ``drawn`` in each.  The
    places stand in uniform order already, so the partition is consecutive.  The last group may be smaller."""
    whole = places // batch_size
    batches = np.arange(whole * batch_size).reshape(whole, batch_size)
    return batches[group * drawn : (group + 1) * drawn]


def hardest(image_PD: Tensor, text_PD: Tensor, places_KB: Ints, kept: int, tau: float) -> Ints:
    """The ``kept`` batches of largest loss, the largest first; of equal ones the earlier.  All, if there are fewer."""
    losses_K = losses_at(image_PD, text_PD, places_KB, tau)
    hardest_q: Ints = losses_K.argsort(descending=True, stable=True)[:kept].numpy(force=True)
    return places_KB[hardest_q]
