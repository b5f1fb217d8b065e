"""The named methods: points of the table pairwise x normalizer x temperature, and how settings move them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fullbatch.config import (
    Amortized,
    BatchMean,
    Constant,
    CycleConsistency,
    Identity,
    LearnedScale,
    Method,
    MovingAverage,
    NoNormalizer,
    PerSample,
    Predicted,
    Prototypes,
    RobustGlobal,
    RobustPositives,
    Scale,
    Sigmoid,
    SquaredHinge,
    VarianceCovariance,
)
from fullbatch.objective.objective import Objective
from fullbatch.objective.parts import Context

_CLIP = Scale(times_temperature=False, directions="mean", log_of_sum=True)
_FASTCLIP = MovingAverage(gamma=0.2, gamma_epochs=16)

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        # baselines
        "openclip": Method(Identity(), BatchMean(), LearnedScale(0.07), _CLIP),
        "siglip": Method(Sigmoid(), NoNormalizer(), LearnedScale(0.1)),
        "simclr": Method(Identity(), BatchMean(), Constant(0.1), _CLIP, negatives="both"),
        "cyclip": Method(Identity(), BatchMean(), LearnedScale(0.07), _CLIP, penalty=CycleConsistency()),
        "vicreg": Method(VarianceCovariance(), NoNormalizer(), Constant()),
        "gcl_batch": Method(Identity(), BatchMean(epsilon=1e-14), Constant(0.07)),
        # a moving average per sample
        "sogclr": Method(Identity(), MovingAverage(gamma=0.8), Constant(0.07)),
        "fastclip_v0": Method(Identity(), _FASTCLIP, LearnedScale(0.07), Scale(times_temperature=False)),
        "fastclip_v1": Method(Identity(), _FASTCLIP, Constant(0.07)),
        "fastclip_v2": Method(
            Identity(),
            _FASTCLIP,
            PerSample(0.03, rho=7.0, temperature_lr=0.0133, temperature_min=0.01, rule="adam"),
        ),
        "fastclip_v3": Method(Identity(), _FASTCLIP, RobustGlobal(0.07, rho=6.5)),
        "isogclr": Method(Identity(), MovingAverage(gamma=0.8), PerSample(0.01, rho=8.0)),
        "isogclr_new": Method(
            Identity(),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, beta=0.5, temperature_max=0.05),
        ),
        "isogclr_new_v2": Method(
            RobustPositives(strength=1.0, gamma=0.8),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, temperature_lr=0.01, clip=None),
        ),
        "tempnet": Method(Identity(), MovingAverage(gamma=0.8), Predicted(rho=7.0)),
        "tuneclip": Method(SquaredHinge(0.1), MovingAverage(gamma=0.9, gamma_epochs=4), Constant(0.01)),
        # a network predicts the normalizer
        "neuclip": Method(Identity(), Prototypes(), RobustGlobal(0.07, rho=6.5)),
        "amorlip": Method(
            Identity(),
            Amortized(),
            RobustGlobal(0.07, rho=8.5, rho_late=-8.5, rho_late_epoch=11),
            Scale(rho_terms="once"),
        ),
    }
)

_AXES = ("pairwise", "normalizer", "temperature", "scale", "penalty", "negatives")
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
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"Unknown method {name!r}{_nearest(name, METHODS)} The methods are {_listed(METHODS)}.")
    method = METHODS[name]
    parts = {
        axis: settings.pop(axis) for axis in _AXES if axis in settings and not _is_temperature_value(settings, axis)
    }
    context = {key: settings.pop(key) for key in _CONTEXT if key in settings}
    changed = {axis: parts.get(axis, getattr(method, axis)) for axis in _AXES}
    Method(**changed)  # a wrong part is refused before its settings are
    _refuse_unknown(name, settings, changed)
    for axis in ("pairwise", "normalizer", "temperature", "scale", "penalty"):
        own = {key: value for key, value in settings.items() if key in _fields(changed[axis])}
        if own:
            changed[axis] = dataclasses.replace(changed[axis], **own)
    return Objective(Method(**changed), Context(**context))


def settings_of(method: Method) -> tuple[str, ...]:
    """The keyword settings a method takes, beside whole parts and surroundings."""
    parts = (method.pairwise, method.normalizer, method.temperature, method.scale, method.penalty)
    return tuple(sorted({field for part in parts for field in _fields(part)}))


def _is_temperature_value(settings: Mapping[str, Any], axis: str) -> bool:
    """``temperature=0.07`` is a setting, ``temperature=PerSample(...)`` a part."""
    return axis == "temperature" and not dataclasses.is_dataclass(settings[axis])


def _fields(part: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()


def _refuse_unknown(name: str, settings: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    known = {field for axis in _AXES for field in _fields(parts[axis])}
    for key in settings:
        if key not in known:
            allowed = {*known, *_CONTEXT, *_AXES} - {key}
            raise ValueError(
                f"{name!r} has no setting {key!r}{_nearest(key, allowed)} Its settings are {_listed(sorted(known))}; "
                f"whole parts: {_listed(_AXES)}; surroundings: {_listed(_CONTEXT)}."
            )


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
