"""How the towers' work runs on a device: in which precision, and whether it is only recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fullbatch.config.training import Precision

_DTYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in it."""
    dtype = _DTYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def being_recorded(tensor: Tensor) -> bool:
    """While recording nothing runs, so no number can be read, and no seed set."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
