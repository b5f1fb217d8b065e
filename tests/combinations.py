"""Every combination of the axes that is not excluded, in a small size: what the contract suite runs over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

import fullbatch as fb
from fullbatch.config.methods import excluded_because

WIDTH, SAMPLES = 6, 24

PAIRWISE = {
    "identity": fb.Identity(),
    "raw": fb.RawSimilarity(),
    "hinge": fb.SquaredHinge(0.1),
    "robust_positives": fb.RobustPositives(),
    "sigmoid": fb.Sigmoid(-2.0),
}
NORMALIZERS = {
    "none": fb.NoNormalizer(),
    "infonce": fb.BatchMean(),
    "batch": fb.BatchMean(epsilon=1e-14),
    "average": fb.MovingAverage(gamma=0.6, gamma_epochs=2),
    "shared": fb.MovingAverage(gamma=0.6, gamma_epochs=2, shared=True),
    "unit_mean": fb.MovingAverage(gamma=0.6, gamma_epochs=2, unit_mean=True),
    "prototypes": fb.Prototypes(prototypes=40, updates=2, restart_every=2),
    "prototypes_from_batch": fb.Prototypes(prototypes=40, updates=2, restart_every=2, restart_from="batch"),
    "simultaneous": fb.Prototypes(prototypes=40, schedule="simultaneous", restart_every=None),
    "separate": fb.Prototypes(prototypes=5, updates=2, restart_every=2, fit="separate", prototype_gradient="detached"),
    "rolling": fb.Rolling(prototypes=40, updates=2),
    "xbm": fb.BatchAndQueue(queue=16, starts_after=2),
    "scent": fb.Scent(log_step=1.0),
    "mlp": fb.Mlp(updates=2, restart_every=2),
    "amortized": fb.Amortized(blend_epochs=2),
    "amortized_net": fb.Amortized(blend_epochs=2, divide_by="net"),
}
TEMPERATURES = {
    "constant": fb.Constant(0.1),
    "learned": fb.LearnedScale(0.1),
    "robust": fb.RobustGlobal(0.1, rho=1.0),
    "per_sample": fb.PerSample(0.1, rho=1.0),
    "per_sample_adam": fb.PerSample(0.1, rho=1.0, rule="adam", temperature_min=0.05),
    "predicted": fb.Predicted(rho=1.0, centers=8, temperature_min=0.05, temperature_max=0.3),
}


def _exists(pairwise: Any, normalizer: Any, temperature: Any) -> bool:
    try:
        method = fb.Method(pairwise, normalizer, temperature)
    except ValueError:
        return False
    assert excluded_because(method) is None
    return True


COMBINATIONS = [
    "-".join(names)
    for names in itertools.product(PAIRWISE, NORMALIZERS, TEMPERATURES)
    if _exists(PAIRWISE[names[0]], NORMALIZERS[names[1]], TEMPERATURES[names[2]])
]
# Variants of a normalizer, whose every pairing says little that the normalizer's own does not.
_VARIANTS = {"batch", "shared", "unit_mean", "prototypes_from_batch", "simultaneous", "separate", "amortized_net"}


def _is_common(name: str) -> bool:
    pairwise, normalizer, temperature = name.split("-")
    if pairwise == "identity" and normalizer not in _VARIANTS:
        return True
    return temperature in ("constant", "per_sample" if pairwise == "identity" else "robust")


def tiered(names: Iterable[str]) -> list[Any]:
    """For parametrize: the rarer combinations are in the slow tier."""
    rare = {name for name in COMBINATIONS if not _is_common(name)}
    return [pytest.param(name, marks=pytest.mark.slow) if name in rare else name for name in names]


def parts(name: str) -> dict[str, Any]:
    pairwise, normalizer, temperature = name.split("-")
    return {
        "pairwise": PAIRWISE[pairwise],
        "normalizer": NORMALIZERS[normalizer],
        "temperature": TEMPERATURES[temperature],
    }


def make(name: str, **changes: Any) -> fb.Objective:
    """A combination by its name, or a named method in a small size; ``changes`` as in make_objective."""
    sizes: dict[str, Any] = {"width": WIDTH, "num_samples": SAMPLES}
    if "-" in name:
        return fb.make_objective("openclip", scale=fb.Scale(), **{**sizes, **parts(name), **changes})
    small = {
        "neuclip": {"prototypes": 8, "updates": 2},
        "rolling": {"prototypes": 24, "updates": 2},
        "queue": {"prototypes": 24},
        "xbm": {"queue": 16, "starts_after": 2},
    }
    return fb.make_objective(name, **{**sizes, **small.get(name, {}), **changes})
