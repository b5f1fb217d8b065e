"""What an objective tells its user unasked: a guard that acted, a temperature that got stuck, a budget out of reach."""

from __future__ import annotations

import logging
import math
import warnings

import torch
from torch import Tensor

from fullbatch.config import (
    Amortized,
    BatchMean,
    Constant,
    LearnedScale,
    Method,
    Mlp,
    MovingAverage,
    Prototypes,
    RobustGlobal,
    Rolling,
    Scent,
    rho_of_direction,
    temperature_bounds,
)
from fullbatch.objective.loss import Metrics
from fullbatch.objective.step import DIRECTIONS

log = logging.getLogger("fullbatch")


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
            case Prototypes() | Mlp():
                return "more frequent restarts (restart_every) or another prototype_lr"
            case Rolling():
                return "fewer prototypes, whose embeddings are newer, or another prototype_lr"
            case MovingAverage():
                return "a larger gamma"
            case Scent():
                return "a larger log_step"
            case Amortized():
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
        if isinstance(temperature, (LearnedScale, RobustGlobal)) and "tau" in metrics:
            tau, (low, _) = float(metrics["tau"]), temperature_bounds(temperature)
            if tau <= low * (1 + 1e-5) and tau < temperature.temperature * (1 - 1e-4):
                self._log(
                    "bound",
                    step,
                    f"the temperature has fallen to its lower bound {low} and stays there; a smaller rho or a smaller "
                    "learning rate for it lets it move",
                )
        if step == 0 and isinstance(self.method.normalizer, BatchMean):
            self.warn_if_rho_unreachable(batch_size, "the batch")
        elif step == 0 and metrics.get("gamma") == 1.0:
            self.warn_if_rho_unreachable(batch_size, "the batch, which is all that counts while gamma is 1")

    def warn_if_rho_unreachable(self, count: int, where: str) -> None:
        """At u = g, half of eq. (13) is rho - KL(softmax over negatives, uniform), and KL <= log(negatives)."""
        temperature = self.method.temperature
        if isinstance(temperature, (Constant, LearnedScale)) or count < 3:
            return
        bound = math.log(count - 1)
        if isinstance(temperature, RobustGlobal):
            rho = temperature.rho_at(0.0)
        else:
            rho = max(rho_of_direction(temperature, name) for name in DIRECTIONS)
        if rho >= bound:
            warnings.warn(
                f"rho={rho} is at or above log(negatives) = {bound:.2f} of {where} ({count} samples): no softmax can "
                f"use that budget, so the temperature will fall to its lower bound. Use rho below {bound:.2f}.",
                stacklevel=4,
            )
