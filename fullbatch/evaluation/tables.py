"""Batches in, two tables of embeddings out, on the device and in the order of the ids; the ranks share the work."""

# n: samples   D: width

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.data.loader import Batch
from fullbatch.evaluation.embed import Embedder
from fullbatch.models.precision import in_precision


@dataclass(frozen=True)
class Tables:
    ids_n: Tensor
    image_nD: Tensor
    text_nD: Tensor


@torch.no_grad()
def embed_batches(embedder: Embedder, batches: Iterable[Batch]) -> Tables:
    """Every rank brings equally many batches, some of which may be empty; the tables are whole on every rank."""
    model, device = embedder.model, embedder.device
    found: tuple[list[Tensor], ...] = ([], [], [])
    training = model.training
    model.eval()
    try:
        for batch in batches:
            rows, full = len(batch.ids), batch.to(device)
            if rows == 0:  # sharded towers need every rank's presence at every batch
                size = (1, 3, embedder.image_size, embedder.image_size)
                full = Batch(full.ids, torch.zeros(size, dtype=torch.uint8, device=device), _no_words(embedder))
            with in_precision(embedder.precision, device):
                image_BD, text_BD = model(full.images, full.tokens)
            for kept, part in zip(found, (full.ids, image_BD[:rows], text_BD[:rows]), strict=True):
                kept.append(part)
    finally:
        model.train(training)
    ids_n, image_nD, text_nD = (distributed.gather_uneven(torch.cat(parts)) for parts in found)
    order = ids_n.argsort()
    return Tables(ids_n[order], image_nD[order], text_nD[order])


def _no_words(embedder: Embedder) -> Tensor:
    return embedder.tokenize([""]).to(embedder.device)
