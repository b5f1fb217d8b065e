"""What a selection of batches goes by: embeddings and a temperature.  The table has what training last embedded of each
sample, so that no extra pass is needed."""

# B: rows on this rank   N: rows on all ranks   n: samples   D: width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch import distributed
from fullbatch.objective.objective import Objective

ASKED = 256  # samples whose mean temperature stands for all, where samples have their own


class EmbeddingTable:
    """Image and text embedding of each sample; NaN: not met yet.  The same on every rank.

    float32 by default: a selection is no continuous function of it, and runs on one and on two ranks, whose embeddings
    differ in the last digits, would part ways more often by float16's steps.

    ``put`` runs in the step and may be recorded in a CUDA graph: it waits for no number.
    """

    def __init__(self, samples: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.rows_n2D = torch.full((samples, 2, width), torch.nan, dtype=dtype, device=device)

    @torch.no_grad()
    def put(self, ids_B: Tensor, image_BD: Tensor, text_BD: Tensor) -> None:
        """All ranks' rows, in the order that one rank alone would have them in."""
        rows_N2D = distributed.gather_rows(torch.stack([image_BD, text_BD], dim=1).to(self.rows_n2D.dtype))
        self.rows_n2D.index_copy_(0, distributed.gather_rows(ids_B), rows_N2D)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows_n2D}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"].shape != self.rows_n2D.shape:
            raise KeyError(f"it has the shape {tuple(state['rows'].shape)}, not {tuple(self.rows_n2D.shape)}")
        self.rows_n2D.copy_(state["rows"])


def mean_temperature(objective: Objective, rows_n2D: Tensor) -> float:
    """Over some of the samples whose embeddings are known, of both directions.  Every rank must ask."""
    known_n = rows_n2D.isfinite().flatten(1).all(1).nonzero()[:, 0]
    if not len(known_n):
        return 1.0  # and nothing to use it on
    ids = known_n[:: max(1, len(known_n) // ASKED)]
    image_BD, text_BD = normalize(rows_n2D[ids].float(), dim=-1).unbind(1)
    return float(torch.cat(objective.anchor_temperatures(image_BD, text_BD, ids)).double().mean())
