"""Where tau comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fullbatch.config.checks import (
    is_number,
    require,
    require_choices,
    require_count,
    require_number,
    require_positive,
    require_share,
    require_temperature,
)


def _check_bounds(owner: LearnedScale | RobustGlobal | PerSample | Predicted) -> None:
    low, high = owner.temperature_min, owner.temperature_max
    require_temperature(owner, "temperature_min")
    require_temperature(owner, "temperature_max")
    require(high > low, owner, "temperature_max", f"exceed temperature_min ({low})")


def temperature_bounds(owner: LearnedScale | RobustGlobal | PerSample) -> tuple[float, float]:
    """The bounds, widened where the start lies outside them: who starts at 0.005 means it."""
    return min(owner.temperature_min, owner.temperature), max(owner.temperature_max, owner.temperature)


@dataclass(frozen=True)
class Constant:
    """One temperature that never moves.

    temperature   tau
    """

    temperature: float = 0.07

    def __post_init__(self) -> None:
        require_temperature(self)


@dataclass(frozen=True)
class LearnedScale:
    """CLIP's learned 1/tau, kept as log tau; the bounds are CLIP's 1 to 100 on the scale.

    temperature   where tau starts
    temperature_min, temperature_max   its bounds
    """

    temperature: float = 0.07
    temperature_min: float = 0.01
    temperature_max: float = 1.0

    def __post_init__(self) -> None:
        require_temperature(self)
        _check_bounds(self)


@dataclass(frozen=True)
class RobustGlobal:
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

    temperature: float = 0.07
    rho: float | None = None
    temperature_min: float = 0.01
    temperature_max: float = 1.0
    rho_late: float | None = None
    rho_late_epoch: float = 0.0
    rule: Literal["equation", "released"] = "equation"

    def __post_init__(self) -> None:
        require_choices(self)
        require_temperature(self)
        _check_bounds(self)
        require_number(self, "rho_late_epoch")
        for name in ("rho", "rho_late"):
            value = getattr(self, name)
            require(value is None or is_number(value), self, name, "be a number or None")

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
class PerSample:
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

    temperature: float = 0.01
    rho: float = 8.0
    rho_image: float | None = None
    rho_text: float | None = None
    temperature_lr: float = 0.03
    temperature_min: float = 0.005
    temperature_max: float = 1.0
    rule: Literal["momentum", "adam"] = "momentum"
    beta: float = 0.9
    clip: float | None = 5.0

    def __post_init__(self) -> None:
        require_choices(self)
        require_temperature(self)
        _check_bounds(self)
        require_number(self, "rho", "rho_image", "rho_text")
        require_positive(self, "temperature_lr", "clip")
        require(is_number(self.beta) and 0.0 < self.beta <= 1.0, self, "beta", "lie in (0, 1]")


@dataclass(frozen=True)
class Predicted:
    """TempNet: a small net per direction predicts each anchor's temperature; its weights are trained by your optimizer.

    rho           the KL budget of both directions
    rho_image, rho_text   the budget of one direction; None: rho
    temperature_min, temperature_max   what the net can predict
    centers       unit vectors it compares with; they start from the first batch of the other modality
    dropout       inside the net
    """

    rho: float = 7.0
    rho_image: float | None = None
    rho_text: float | None = None
    temperature_min: float = 0.005
    temperature_max: float = 0.05
    centers: int = 256
    dropout: float = 0.5

    def __post_init__(self) -> None:
        _check_bounds(self)
        require_number(self, "rho", "rho_image", "rho_text")
        require_count(self, "centers", 2)
        require_share(self, "dropout")


Temperature = Constant | LearnedScale | RobustGlobal | PerSample | Predicted


def rho_of_direction(temperature: PerSample | Predicted, direction: str) -> float:
    own = temperature.rho_image if direction == "image" else temperature.rho_text
    return temperature.rho if own is None else own
