"""Where tau comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fullbatch.config.checks import (
    BelowOne,
    Checked,
    Number,
    Positive,
    Rule,
    Tau,
    UpToOne,
    at_least,
    is_number,
    require,
)


class _Bounded(Checked):
    """It moves between temperature_min and temperature_max."""

    def _check(self: Any) -> None:
        low = self.temperature_min
        require(self.temperature_max > low, self, "temperature_max", f"exceed temperature_min ({low})")


_Budget = Annotated[float | None, Rule("be a number or None", lambda value: value is None or is_number(value))]


def temperature_bounds(owner: LearnedScale | RobustGlobal | PerSample) -> tuple[float, float]:
    """The bounds, widened where the start lies outside them: who starts at 0.005 means it."""
    return min(owner.temperature_min, owner.temperature), max(owner.temperature_max, owner.temperature)


@dataclass(frozen=True)
class Constant(Checked):
    """One temperature that never moves.

    temperature   tau
    """

    temperature: Tau = 0.07


@dataclass(frozen=True)
class LearnedScale(_Bounded):
    """CLIP's learned 1/tau, kept as log tau; the bounds are CLIP's 1 to 100 on the scale.

    temperature   where tau starts
    temperature_min, temperature_max   its bounds
    """

    temperature: Tau = 0.07
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0


@dataclass(frozen=True)
class RobustGlobal(_Bounded):
    """One learned temperature with a KL budget ``rho``: the loss gains rho * tau a direction.  NeuCLIP eq. (1), (13).

    temperature   where tau starts
    rho           the KL budget; below log(number of negatives), or tau falls to its least value.  None: half of the
                  largest there can be, log(number of samples - 1), or 6.5 where that number is not known
    temperature_min, temperature_max   the bounds of tau
    rho_late      replaces rho from epoch rho_late_epoch on (AmorLIP's script does that); None: rho stays
    rho_late_epoch   see rho_late
    rule          "equation": tau's gradient is eq. (13); "released": that of FastCLIP's released code, in which the
                  terms with tau inside g count twice: tau comes to rest lower, and FastCLIP's published rho is meant so
    """

    temperature: Tau = 0.07
    rho: _Budget = None
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0
    rho_late: _Budget = None
    rho_late_epoch: Number = 0.0
    rule: Literal["equation", "released"] = "equation"

    def for_samples(self, count: int | None) -> RobustGlobal:
        """With a budget, where none was given: the papers' lie between 0.44 and 0.67 of the largest there can be."""
        if self.rho is not None:
            return self
        return replace(self, rho=6.5 if count is None else 0.5 * math.log(max(count - 1, 2)))

    def rho_at(self, epoch: float) -> float:
        assert self.rho is not None, "for_samples chooses it"
        late = self.rho_late is not None and epoch >= self.rho_late_epoch
        return self.rho_late if late and self.rho_late is not None else self.rho


@dataclass(frozen=True)
class PerSample(_Bounded):
    """iSogCLR: a temperature per sample and direction, moved by its own rule inside the objective.

    temperature   where each tau starts
    rho           the KL budget of both directions
    rho_image, rho_text   the budget of one direction; None: rho
    temperature_lr   step size of the rule
    temperature_min, temperature_max   the bounds of each tau
    rule          "momentum": m <- (1 - beta) m + beta dtau; "adam": FastCLIP v2's per-sample Adam
    beta          of the rule "momentum"
    clip          bound on the temperature's gradient, None for none
    """

    temperature: Tau = 0.01
    rho: Number = 8.0
    rho_image: Number | None = None
    rho_text: Number | None = None
    temperature_lr: Positive = 0.03
    temperature_min: Tau = 0.005
    temperature_max: Tau = 1.0
    rule: Literal["momentum", "adam"] = "momentum"
    beta: UpToOne = 0.9
    clip: Positive | None = 5.0


@dataclass(frozen=True)
class Predicted(_Bounded):
    """TempNet: a small net per direction predicts each anchor's temperature; its weights are trained by your optimizer.

    rho           the KL budget of both directions
    rho_image, rho_text   the budget of one direction; None: rho
    temperature_min, temperature_max   what the net can predict
    centers       unit vectors it compares with; they start from the first batch of the other modality
    dropout       inside the net
    """

    rho: Number = 7.0
    rho_image: Number | None = None
    rho_text: Number | None = None
    temperature_min: Tau = 0.005
    temperature_max: Tau = 0.05
    centers: Annotated[int, at_least(2)] = 256
    dropout: BelowOne = 0.5


Temperature = Constant | LearnedScale | RobustGlobal | PerSample | Predicted


def rho_of_direction(temperature: PerSample | Predicted, direction: str) -> float:
    own = temperature.rho_image if direction == "image" else temperature.rho_text
    return temperature.rho if own is None else own
