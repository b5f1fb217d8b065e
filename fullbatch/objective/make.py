"""An objective by its method's name."""

from __future__ import annotations

import dataclasses
from typing import Any

from fullbatch.config.methods import AXES, method_with
from fullbatch.objective.objective import Objective
from fullbatch.objective.parts import Context

_CONTEXT = tuple(field.name for field in dataclasses.fields(Context))


def make_objective(name: str, **settings: Any) -> Objective:
    """An objective by its method's name, changed by settings.

    A setting is a field of one of the method's parts (``rho=6.5``, ``gamma=0.3``, ``prototypes=4096``), a whole part
    (``pairwise=SquaredHinge(0.1)``), or one of the surroundings: width, num_samples, chunk (rows at a time), seed,
    table_dtype, table_storage ("auto", "rank", "node" or a folder) and dataset (a fingerprint kept with the state).

    >>> objective = make_objective("sogclr", num_samples=1000, temperature=0.05)
    >>> objective.method.temperature
    Constant(temperature=0.05)
    """
    context = {key: settings.pop(key) for key in _CONTEXT if key in settings}
    parts = {axis: settings.pop(axis) for axis in AXES if axis in settings and not _is_number_for(settings, axis)}
    return Objective(method_with(name, parts, settings, _CONTEXT), Context(**context))


def _is_number_for(settings: dict[str, Any], axis: str) -> bool:
    """``temperature=0.07`` is a setting, ``temperature=PerSample(...)`` a part."""
    return axis == "temperature" and not dataclasses.is_dataclass(settings[axis])
