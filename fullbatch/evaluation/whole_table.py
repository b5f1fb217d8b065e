"""The whole training set embedded by the model as it is now, for a selection that goes by fresh embeddings."""

# n: samples   D: width

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.data.images import EvalTransform
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.data.loader import Batch, EvaluationBatches, Pool, load
from fullbatch.evaluation.embed import Embedder


def whole_table(embedder: Embedder, pool: Pool, in_memory: InMemoryBatches | None) -> Tensor:
    """(n, 2, D), NaN where a sample cannot be read; the random generators are as they were.

    The towers are in evaluation mode, samples uncropped, captions the first ones.  Every rank must call.
    """
    device = embedder.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        found = embedder.tables(_batches(embedder, pool, in_memory))
    both_m2D = torch.stack([found.image_nD, found.text_nD], dim=1).float()
    rows_n2D = torch.full((len(pool), *both_m2D.shape[1:]), torch.nan, device=device)
    return rows_n2D.index_copy_(0, found.ids_n, both_m2D)


def _batches(embedder: Embedder, pool: Pool, in_memory: InMemoryBatches | None) -> Iterable[Batch]:
    if in_memory is not None:
        return in_memory.chosen(range(len(pool)), embedder.batch_size)
    transform = EvalTransform(embedder.image_size, embedder.max_pixels)
    world = distributed.world()
    batches = EvaluationBatches(pool, embedder.batch_size, transform, embedder.tokenize, world, embedder.views)
    return load(batches, range(len(batches)), embedder.workers, device=embedder.device)
