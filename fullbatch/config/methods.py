"""The named methods: points of the table pairwise x normalizer x temperature, and how settings move them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fullbatch.config.messages import listed, nearest
from fullbatch.config.method import PARTS, Method, Scale
from fullbatch.config.normalizer import (
    Amortized,
    BatchAndQueue,
    BatchMean,
    Mlp,
    MovingAverage,
    NoNormalizer,
    Prototypes,
    Rolling,
    Scent,
)
from fullbatch.config.pairwise import (
    CycleConsistency,
    Identity,
    RawSimilarity,
    RobustPositives,
    Sigmoid,
    SquaredHinge,
    VarianceCovariance,
)
from fullbatch.config.temperature import Constant, LearnedScale, PerSample, Predicted, RobustGlobal

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
        "xbm": Method(Identity(), BatchAndQueue(), LearnedScale(0.07), _CLIP),
        # a moving average per sample
        "sogclr": Method(Identity(), MovingAverage(gamma=0.8), Constant(0.07)),
        "sogclr_views": Method(RawSimilarity(), MovingAverage(gamma=0.9, shared=True), Constant(0.1), negatives="both"),
        "scent": Method(Identity(), Scent(), Constant(0.07)),
        "fastclip_v0": Method(Identity(), _FASTCLIP, LearnedScale(0.07), Scale(times_temperature=False)),
        "fastclip_v1": Method(Identity(), _FASTCLIP, Constant(0.07)),
        "fastclip_v2": Method(
            Identity(),
            _FASTCLIP,
            PerSample(0.03, rho=7.0, temperature_lr=0.0133, temperature_min=0.01, rule="adam"),
        ),
        "fastclip_v3": Method(Identity(), _FASTCLIP, RobustGlobal(0.07)),
        "isogclr": Method(Identity(), MovingAverage(gamma=0.8), PerSample(0.01, rho=8.0)),
        "isogclr_new": Method(
            Identity(),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, beta=0.5, temperature_lr=1e-5, temperature_max=0.05),
        ),
        "isogclr_new_v2": Method(
            RobustPositives(strength=1.0, gamma=0.8),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, temperature_lr=0.001, clip=None),
        ),
        "tempnet": Method(Identity(), MovingAverage(gamma=0.8), Predicted(rho=7.0)),
        "tuneclip": Method(SquaredHinge(0.1), MovingAverage(gamma=0.9, gamma_epochs=4), Constant(0.01)),
        # a network predicts the normalizer
        "neuclip": Method(Identity(), Prototypes(), RobustGlobal(0.07)),
        "rolling": Method(Identity(), Rolling(), RobustGlobal(0.07)),
        "queue": Method(Identity(), Rolling(updates=0), RobustGlobal(0.07)),
        "amorlip": Method(
            Identity(),
            Amortized(),
            RobustGlobal(0.07, rho=8.5, rho_late=-8.5, rho_late_epoch=11),
            Scale(rho_terms="once"),
        ),
    }
)

# The choices on each axis by the names they have on the command line and in YAML.
PAIRWISE: Mapping[str, type] = MappingProxyType(
    {
        "identity": Identity,
        "raw": RawSimilarity,
        "squared_hinge": SquaredHinge,
        "robust_positives": RobustPositives,
        "sigmoid": Sigmoid,
        "variance_covariance": VarianceCovariance,
    }
)
NORMALIZERS: Mapping[str, type] = MappingProxyType(
    {
        "none": NoNormalizer,
        "batch_mean": BatchMean,
        "batch_and_queue": BatchAndQueue,
        "moving_average": MovingAverage,
        "scent": Scent,
        "prototypes": Prototypes,
        "rolling": Rolling,
        "mlp": Mlp,
        "amortized": Amortized,
    }
)
TEMPERATURES: Mapping[str, type] = MappingProxyType(
    {
        "constant": Constant,
        "learned": LearnedScale,
        "robust": RobustGlobal,
        "per_sample": PerSample,
        "predicted": Predicted,
    }
)

AXES = (*PARTS, "negatives")
_ELSEWHERE = {"clip": "openclip", "infonce": "openclip", "nt_xent": "simclr"}  # what others call a method


def named_method(name: object) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        known = _ELSEWHERE.get(str(name).lower(), name)
        raise ValueError(f"Unknown method {name!r}{nearest(known, METHODS)} The methods are {listed(METHODS)}.")
    return METHODS[name]


def method_with(
    name: str, parts: Mapping[str, Any], settings: Mapping[str, Any], surroundings: tuple[str, ...] = ()
) -> Method:
    """A named method with whole ``parts`` replaced (``pairwise=...``), then fields of parts set (``rho=6.5``).

    ``surroundings`` are further settings the caller takes; they are named when a setting is not known.
    """
    method = named_method(name)
    chosen = {axis: parts.get(axis, getattr(method, axis)) for axis in AXES}
    Method(**chosen)  # a wrong part is refused before its settings are
    _refuse_unknown(name, settings, chosen, surroundings)
    for axis in PARTS:
        own = {key: value for key, value in settings.items() if key in _fields(chosen[axis])}
        if own:
            chosen[axis] = dataclasses.replace(chosen[axis], **own)
    return Method(**chosen)


def settings_of(method: Method) -> tuple[str, ...]:
    """The keyword settings a method takes, beside whole parts and surroundings."""
    return tuple(sorted({field for axis in PARTS for field in _fields(getattr(method, axis))}))


def _fields(part: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()


def _refuse_unknown(
    name: str, settings: Mapping[str, Any], parts: Mapping[str, Any], surroundings: tuple[str, ...]
) -> None:
    known = {field for axis in AXES for field in _fields(parts[axis])}
    for key in settings:
        if key not in known:
            allowed = {*known, *surroundings, *AXES} - {key}
            around = f"; surroundings: {listed(surroundings)}" if surroundings else ""
            raise ValueError(
                f"{name!r} has no setting {key!r}{nearest(key, allowed)} Its settings are {listed(sorted(known))}; "
                f"whole parts: {listed(AXES)}{around}."
            )
