"""In which precision the towers work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fullbatch.config.training import Precision

_DTYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in it."""
    dtype = _DTYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
