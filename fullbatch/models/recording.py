"""Whether the work given to a GPU is being recorded into a CUDA graph, to be replayed later (training/graphs.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def being_recorded(tensor: Tensor) -> bool:
    """While recording nothing runs, so no number can be read, and no seed set."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
