"""What the icon study compares: rows of a plan for ``fullbatch compare``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FITTED = {"temperature": 0.05, "rho": 6.0}
_LIKE_NEUCLIP = {"settings": {**_FITTED, "prototype_lr": 0.02}, "temperature_lr": 1e-6}
# ``neuclip`` has the settings that a former study chose, with a temperature that
# hardly moves; the arms beside it share them.  The schedules of gamma, of AmorLIP's rho and of its blend are spread
# over the run's 24 epochs as their authors' are over theirs.
ARMS: dict[str, dict[str, Any]] = {
    "openclip": {"method": "openclip", "temperature_lr": 1.25e-4},
    "neuclip": {"method": "neuclip", **_LIKE_NEUCLIP},
    "rolling": {"method": "rolling", **_LIKE_NEUCLIP},
    "queue": {"method": "queue", "settings": _FITTED, "temperature_lr": 1e-6},
    "stale": {"method": "queue", "settings": {**_FITTED, "prototypes": 105_900}, "temperature_lr": 1e-6},  # all of them
    # its queue counts from early on at every size: 1,000 batches, as published, are all of a short run at B 2048
    "xbm": {"method": "xbm", "settings": {"starts_after": 200}, "temperature_lr": 1.25e-4},
    "siglip": {"method": "siglip", "temperature_lr": 1.25e-4},
    "sogclr": {"method": "sogclr"},
    "scent": {"method": "scent"},
    "fastclip_v3": {
        "method": "fastclip_v3",
        "settings": {**_FITTED, "gamma": 0.8, "gamma_epochs": 12.0},
        "temperature_lr": 1.25e-4,
    },
    "amorlip": {
        "method": "amorlip",
        "settings": {"temperature": 0.05, "blend_epochs": 12.0, "rho_late_epoch": 8.0},
        "temperature_lr": 1.25e-4,
    },
    "neuclip default": {"method": "neuclip"},
}
# For the study of batches, at B 128: blocks of 10 batches have as many samples as Cho et al.'s of 40 batches of 32.
_SPECTRAL = {"batches": "spectral", "block_batches": 10}
ARMS |= {"openclip spectral": {**ARMS["openclip"], **_SPECTRAL}} | {
    f"{arm} spectral, {correction}": {**ARMS[arm], **_SPECTRAL, "correction": correction}
    for arm in ("neuclip", "sogclr")
    for correction in ("none", "normalizers", "weights")
}

# ---------------------------------------------------------------------------------------------------------------------
# which part does the work

_NEUCLIP = ARMS["neuclip"]["settings"]
_UNTUNED = {name: value for name, value in _NEUCLIP.items() if name != "prototype_lr"}
# What is changed in ``neuclip``: settings, or a row of its own.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "neuclip": {},
    **{f"Tu={count}": {"settings": {**_NEUCLIP, "updates": count}} for count in (0, 2, 5)},
    **{f"Tr={every or 'never'}": {"settings": {**_NEUCLIP, "restart_every": every}} for every in (20, 100, 0)},
    **{f"m={count}": {"settings": {**_NEUCLIP, "prototypes": count}} for count in (256, 1024, 16384)},
    "prototype_lr default": {"settings": _UNTUNED},
    "detached": {"settings": {**_NEUCLIP, "prototype_gradient": "detached"}},
    "separate": {"settings": {**_NEUCLIP, "fit": "separate"}},
    "MLP": {"settings": _UNTUNED, "normalizer": "mlp"},
    "MLP separate": {"settings": {**_UNTUNED, "fit": "separate"}, "normalizer": "mlp"},
    "simultaneous": {"settings": {**_NEUCLIP, "schedule": "simultaneous", "restart_every": 0}},
    "openclip": ARMS["openclip"],
    "rolling": ARMS["rolling"],
    "rolling, own positive kept": {
        **ARMS["rolling"],
        "settings": {**ARMS["rolling"]["settings"], "own_positive": "kept"},
    },
}


# How far from uniform may batches be?  Blocks of 256 neighbours, of which so many are mixed.
_WINDOWS: Mapping[str, Mapping[str, Any]] = {
    "full": {"shuffle": "full"},
    **{
        f"{256 * count:,} mixed": {"shuffle": "blocks", "block_samples": 256, "window_blocks": count}
        for count in (4, 16, 64, 256)
    },
}
WINDOWS: Mapping[str, Mapping[str, Any]] = {
    f"{arm}, {order}": {**ARMS[arm], **changes}
    for arm in ("openclip", "neuclip")
    for order, changes in _WINDOWS.items()
}
VARIANTS = {"parts": PARTS, "windows": WINDOWS}
