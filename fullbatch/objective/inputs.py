"""What a caller may hand to an objective; every mistake gets one sentence that says what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from fullbatch import distributed

SampleIds = Tensor | tuple[Tensor, Tensor]
_NORM_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # 16-bit rows are rounded, so they get more room
_NORM_TOLERANCE_16_BIT = 2e-2
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_shapes(image: Tensor, text: Tensor, width: int | None) -> None:
    for name, rows in (("image_embeddings", image), ("text_embeddings", text)):
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
            found = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"{name} must be a floating-point tensor of shape (batch, width), got {found}.")
    if image.shape != text.shape:
        raise ValueError(
            f"image_embeddings and text_embeddings must have the same shape, got {tuple(image.shape)} and "
            f"{tuple(text.shape)}; row i of one is the pair of row i of the other."
        )
    if image.device != text.device:
        raise ValueError(
            f"image_embeddings are on {image.device} and text_embeddings on {text.device}; move one with .to(device)."
        )
    if width is not None and image.shape[1] != width:
        raise ValueError(
            f"The embeddings have width {image.shape[1]} and this objective was made with width={width}; "
            f"make it with width={image.shape[1]}."
        )
    if distributed.world().size * image.shape[0] < 2:
        raise ValueError(
            f"A batch of {image.shape[0]} pair(s) has no negatives; use at least 2 (drop_last=True in the data loader "
            "avoids a short last batch)."
        )


def check_unit_rows(name: str, rows_BD: Tensor) -> None:
    """One number decides (a NaN fails the comparison); only a failure looks closer."""
    norm_B = rows_BD.detach().to(torch.float32).norm(dim=1)
    if float((norm_B - 1.0).abs().max()) <= _NORM_TOLERANCE.get(rows_BD.dtype, _NORM_TOLERANCE_16_BIT):
        return
    finite_B = torch.isfinite(rows_BD.detach()).all(dim=1)
    if not bool(finite_B.all()):
        row = int((~finite_B).nonzero()[0])
        raise ValueError(
            f"{name} holds a non-finite value in row {row}: the encoder diverged or overflowed; look at its learning "
            "rate, its precision (bf16 instead of fp16) and its inputs."
        )
    row = int((norm_B - 1.0).abs().argmax())
    raise ValueError(
        f"{name} must have rows of length 1, but row {row} has length {float(norm_B[row]):.4g}; pass "
        f"torch.nn.functional.normalize({name}, dim=-1)."
    )


def check_ids(sample_ids: SampleIds | None, needed: bool, batch: int, num_samples: int | None) -> Tensor | None:
    """Image and text ids side by side, or None where no method memory needs them."""
    if not needed:
        return None
    if sample_ids is None:
        raise ValueError(
            "This method remembers something for every sample, so it needs sample_ids: "
            "objective(image, text, sample_ids) with whole numbers from 0 to num_samples - 1 that name the same "
            "sample in every epoch."
        )
    if isinstance(sample_ids, (tuple, list)) and len(sample_ids) != 2:
        raise ValueError(
            "sample_ids must be one tensor, such as torch.tensor([4, 8, 2]), or a pair (image_ids, text_ids), "
            f"got a {type(sample_ids).__name__} of {len(sample_ids)}."
        )
    image_ids, text_ids = sample_ids if isinstance(sample_ids, (tuple, list)) else (sample_ids, sample_ids)
    for name, ids in (("image", image_ids), ("text", text_ids)):
        whole = isinstance(ids, Tensor) and ids.dtype in _WHOLE
        if not whole or ids.shape != (batch,):
            found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"The {name} ids must be a tensor of {batch} whole numbers, one a row, got {found}.")
    return torch.stack([image_ids.to(torch.int64), text_ids.to(torch.int64)], dim=1)


def check_id_range(ids_B2: Tensor, num_samples: int) -> None:
    low, high = (int(value) for value in torch.aminmax(ids_B2))
    if low < 0 or high >= num_samples:
        bad = low if low < 0 else high
        raise ValueError(
            f"sample_ids must lie in [0, {num_samples - 1}] for num_samples={num_samples}, got {bad}; "
            "give num_samples the size of the data set, or renumber the samples."
        )
