"""Values over values: defaults, a recipe, a file, flags.  Later wins, and some fields displace others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.tree import merged

AXES = ("method", "pairwise", "normalizer", "temperature_rule")
# Fields that say one thing in several units.
RIVALS = (
    ("epochs", "samples"),
    ("warmup_steps", "warmup_epochs", "warmup_share"),
    ("cooldown_steps", "cooldown_epochs"),
    ("recovery_epochs", "recovery_steps"),
    ("evaluate_every", "evaluations"),
)


def layered(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins."""
    return merged(giving_way(base, over), over)


def giving_way(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` without what ``over`` displaces.  A method's settings are its own: naming another method, or another
    choice on an axis, leaves them behind; and so does a length its rival in another unit."""
    left = {group: dict(fields) if isinstance(fields, Mapping) else fields for group, fields in base.items()}
    for group, fields in left.items():
        above = over.get(group)
        if not isinstance(fields, dict) or not isinstance(above, Mapping):
            continue
        before = {"method": ObjectiveConfig().method, **fields}
        if group == "objective" and any(above[axis] != before.get(axis) for axis in AXES if axis in above):
            fields.pop("settings", None)
        for names in RIVALS:
            if any(above.get(name) is not None for name in names):
                for name in names:
                    fields.pop(name, None)
    return left
