"""What an objective says to its user, always with what to do: of a mistake in what it is handed, and unasked of a guard
that acted, a temperature that got stuck, a budget out of reach."""

from __future__ import annotations

import logging
import math
import warnings

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.config import axes
from fullbatch.config.methods import Method
from fullbatch.objective.loss import Metrics
from fullbatch.objective.step import DIRECTIONS

log = logging.getLogger("fullbatch")

SampleIds = Tensor | tuple[Tensor, Tensor]
_NORM_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # 16-bit rows are rounded, so they get more room
_NORM_TOLERANCE_16_BIT = 2e-2
LEAST_CORRECTION = -20.0  # a plan of a billion rows comes to -log of those to a batch, and float32 has room for it
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_shapes(image: Tensor, text: Tensor, width: int | None) -> None:
    for name, rows in (("image_embeddings", image), ("text_embeddings", text)):
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
            given = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"{name} must be a floating-point tensor of shape (batch, width), got {given}.")
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


def check_ids(sample_ids: SampleIds | None, rows_BD: Tensor, num_samples: int, look: bool) -> Tensor:
    """Image and text ids side by side, or once for both, where the rows are; on a GPU their range is only checked if we
    may ``look``."""
    batch = rows_BD.shape[0]
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
            given = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"The {name} ids must be a tensor of {batch} whole numbers, one a row, got {given}.")
    columns = [image_ids] if image_ids is text_ids else [image_ids, text_ids]
    ids_BK = torch.stack([column.to(torch.int64) for column in columns], dim=1)
    if look or ids_BK.device.type == "cpu":
        low, high = (int(value) for value in torch.aminmax(ids_BK))
        if low < 0 or high >= num_samples:
            raise ValueError(
                f"sample_ids must lie in [0, {num_samples - 1}] for num_samples={num_samples}, "
                f"got {low if low < 0 else high}; give num_samples the size of the data set, or renumber the samples."
            )
    else:
        ids_BK = ids_BK.masked_fill(ids_BK < 0, num_samples)  # out of range too, where an index below 0 would wrap
    return ids_BK.to(rows_BD.device, non_blocking=True)


def check_correction(log_correction: Tensor, rows_BD: Tensor, look: bool) -> Tensor:
    """Two numbers a row, where the rows are; on a GPU their size is only checked if we may ``look``."""
    if not isinstance(log_correction, Tensor) or log_correction.shape != (rows_BD.shape[0], 2):
        given = tuple(log_correction.shape) if isinstance(log_correction, Tensor) else type(log_correction).__name__
        raise ValueError(f"log_correction must be a tensor of shape {(rows_BD.shape[0], 2)}, got {given}.")
    fits = log_correction.isfinite() & (log_correction >= LEAST_CORRECTION)
    if (look or log_correction.device.type == "cpu") and not bool(fits.all()):
        raise ValueError(
            f"log_correction must be finite and at least {LEAST_CORRECTION:g}, since gradients are divided by its "
            f"exponential, and one value is {float(log_correction[~fits][0]):g}; those of a batch chosen from "
            "some rows are at least log(batch / rows), and 0 says that nothing is known of a sample."
        )
    return log_correction.to(rows_BD.device, non_blocking=True)


class Notices:
    """Each kind is logged the first time it is seen, and then ever more rarely (2nd, 4th, 8th, ...)."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.counts: dict[str, int] = {}
        self.guarded: Tensor | float = 0.0  # the largest share since last looked at; stays on the device

    def _log(self, kind: str, step: int, message: str) -> None:
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        if count & (count - 1) == 0:
            log.warning("%s (step %d, seen %d times)", message, step, count)

    def _advice(self) -> str:
        match self.method.normalizer:
            case axes.Prototypes() | axes.Mlp():
                return "more frequent restarts (restart_every) or another prototype_lr"
            case axes.Rolling():
                return "fewer prototypes, whose embeddings are newer, or another prototype_lr"
            case axes.MovingAverage():
                return "a larger gamma"
            case axes.Scent():
                return "a larger log_step"
            case axes.Amortized():
                return "more updates or another net_lr"
            case _:
                return "a larger temperature"

    def remember(self, metrics: Metrics) -> None:
        """Keep what happens between two looks, without waiting for the device."""
        now = metrics.get("guarded", 0.0)
        self.guarded = torch.maximum(now, torch.as_tensor(self.guarded).to(now)) if isinstance(now, Tensor) else 0.0

    def watch(self, metrics: Metrics, step: int, batch_size: int) -> None:
        """Look at a step's metrics; reads numbers off the device."""
        self.remember(metrics)
        guarded, self.guarded = float(self.guarded), 0.0
        if guarded > 0:
            self._log(
                "guard",
                step,
                f"up to {guarded:.1%} of a batch's anchors had a stale normalizer and their weights were bounded (the "
                f"setting guard); {self._advice()} may help",
            )
        temperature = self.method.temperature
        if isinstance(temperature, (axes.LearnedScale, axes.RobustGlobal, axes.PerSample)) and "tau" in metrics:
            tau, (low, _) = float(metrics["tau"]), axes.temperature_bounds(temperature)
            if tau <= low * (1 + 1e-5) and tau < temperature.temperature * (1 - 1e-4):
                self._log(
                    "bound",
                    step,
                    f"the temperature has fallen to its lower bound {low} and stays there; a smaller rho or a smaller "
                    "learning rate for it lets it move",
                )
        if step == 0 and isinstance(self.method.normalizer, axes.BatchMean):
            self.warn_if_rho_unreachable(batch_size, "the batch")
        elif step == 0 and metrics.get("gamma") == 1.0:
            self.warn_if_rho_unreachable(batch_size, "the batch, which is all that counts while gamma is 1")

    def warn_if_rho_unreachable(self, count: int, where: str) -> None:
        """At u = g, half of eq. (13) is rho - KL(softmax over negatives, uniform), and KL <= log(negatives)."""
        temperature = self.method.temperature
        if isinstance(temperature, (axes.Constant, axes.LearnedScale)) or count < 3:
            return
        bound = math.log(count - 1)
        if isinstance(temperature, axes.RobustGlobal):
            rho = temperature.rho_at(0.0)
        else:
            rho = max(axes.rho_of_direction(temperature, name) for name in DIRECTIONS)
        if rho >= bound:
            warnings.warn(
                f"rho={rho} is at or above log(negatives) = {bound:.2f} of {where} ({count} samples): no softmax can "
                f"use that budget, so the temperature will fall to its lower bound. Use rho below {bound:.2f}.",
                stacklevel=4,
            )
