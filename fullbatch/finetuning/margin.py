"""How wide the hinge's margin is where nobody says: a function of the temperature of the weights that are tuned."""

from __future__ import annotations

import math
from dataclasses import replace

from fullbatch.config.axes import SquaredHinge
from fullbatch.config.run import RunConfig

MARGIN, TEMPERATURE = 0.1, 0.01  # TuneCLIP's, section 5
# The exponent of a negative at gap d is (d + m)^2 / tau.  1: its slope at d = 0, 2 m / tau, is TuneCLIP's at every tau;
# 0.5: its value there, m^2 / tau, is.
POWER = 1.0
WIDEST = 2.0  # no gap of unit rows is larger


def margin_at(temperature: float) -> float:
    """m = 0.1 (tau / 0.01)^POWER.

    >>> margin_at(0.01)
    0.1
    """
    return min(MARGIN * math.pow(temperature / TEMPERATURE, POWER), WIDEST)


def with_margin(config: RunConfig, margin: float | None) -> RunConfig:
    """``config`` with this margin, unless its loss has none or the user gave one; None: as the method has it."""
    objective = config.objective
    hinged = isinstance(objective.build().pairwise, SquaredHinge)
    if margin is None or not hinged or "margin" in objective.settings:
        return config
    return replace(config, objective=replace(objective, settings={**objective.settings, "margin": margin}))
