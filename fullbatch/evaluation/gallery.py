"""What one searches in: rows that are equal get similarities that are equal, to the bit."""

# B: rows   U: different rows   C: anchors at a time   D: width

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Gallery:
    """A matrix product gives equal rows similarities that differ in their last bit, by where in a block they lie; so
    each different row is multiplied once.

    place_B   which of rows_UD each row is; None where all differ
    """

    rows_UD: Tensor
    place_B: Tensor | None

    @classmethod
    def of(cls, rows_BD: Tensor) -> Gallery:
        table = np.ascontiguousarray(rows_BD.cpu().numpy())
        as_bytes = table.view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel()
        _, first_U, place_B = np.unique(as_bytes, return_index=True, return_inverse=True)
        if len(first_U) == len(rows_BD):
            return cls(rows_BD, None)
        chosen, place = (torch.from_numpy(numbers).to(rows_BD.device) for numbers in (first_U, place_B.reshape(-1)))
        return cls(rows_BD[chosen], place)

    def similarities(self, anchors_CD: Tensor) -> Tensor:
        sim_CU = anchors_CD @ self.rows_UD.T
        return sim_CU if self.place_B is None else sim_CU[:, self.place_B]
