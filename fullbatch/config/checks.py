"""Checks of a field: the rule and the value in one sentence.  None passes where the field's annotation allows it."""

from __future__ import annotations

import functools
import math
import numbers
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def title(kind: type) -> str:
    """What a group of settings is called in messages: "Objective" for ``ObjectiveConfig``."""
    return kind.__name__.removesuffix("Config")


def require(holds: bool, owner: object, field: str, rule: str, hint: str = "") -> None:
    if not holds:
        advice = f"; {hint}" if hint else ""
        raise ValueError(f"{title(type(owner))}.{field} must {rule}, got {getattr(owner, field)!r}{advice}.")


def is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


@functools.cache
def _annotations(kind: type) -> dict[str, tuple[Any, ...]]:
    """What each field may be: the members of a union, or the one type."""
    hints = get_type_hints(kind)
    unions = (Union, types.UnionType)
    return {name: get_args(hint) if get_origin(hint) in unions else (hint,) for name, hint in hints.items()}


def _left_out(owner: Any, field: str) -> bool:
    return getattr(owner, field) is None and type(None) in _annotations(owner.__class__)[field]


def _require_or_none(owner: object, field: str, good: bool, rule: str, hint: str = "") -> None:
    require(good or _left_out(owner, field), owner, field, rule, hint)


def require_number(owner: object, *fields: str) -> None:
    for field in fields:
        _require_or_none(owner, field, is_number(getattr(owner, field)), "be a number")


def require_positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        _require_or_none(owner, field, is_number(value) and value > 0, "be a positive number")


def require_at_least_zero(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        _require_or_none(owner, field, is_number(value) and value >= 0.0, "be a number of at least 0")


def require_share(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        _require_or_none(owner, field, is_number(value) and 0.0 <= value < 1.0, "lie in [0, 1)")


def require_chance(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        require(is_number(value) and 0.0 <= value <= 1.0, owner, field, "lie in [0, 1]")


def require_crop(owner: object, field: str) -> None:
    crop = getattr(owner, field)
    low, high = crop if len(crop) == 2 else (0.0, 0.0)
    good = is_number(low) and is_number(high) and 0.0 < low <= high <= 1.0
    require(good, owner, field, "be two shares of the area, 0 < least <= most <= 1")


def require_count(owner: object, field: str, least: int) -> None:
    good = is_whole(getattr(owner, field), least)
    _require_or_none(owner, field, good, f"be a whole number of at least {least}")


def require_counts(owner: object, **least: int) -> None:
    for field, number in least.items():
        require_count(owner, field, number)


def require_choice(owner: object, field: str, allowed: tuple[object, ...]) -> None:
    value = getattr(owner, field)
    same_kind = [choice for choice in allowed if type(choice) is type(value)]
    require(value in same_kind, owner, field, f"be one of {', '.join(map(repr, allowed))}")


def require_choices(owner: Any) -> None:
    """Every field that is annotated as a bool or a Literal holds one of its values."""
    for field, options in _annotations(owner.__class__).items():
        allowed = next((get_args(option) for option in options if get_origin(option) is Literal), ())
        allowed = (True, False) if options == (bool,) else allowed
        if allowed and not _left_out(owner, field):
            require_choice(owner, field, allowed)


def require_temperature(owner: object, field: str = "temperature") -> None:
    value = getattr(owner, field)
    hint = "it divides similarities in [-1, 1], so useful values lie between 0.005 and 1"
    _require_or_none(owner, field, is_number(value) and 0.0 < value <= 10.0, "be a number in (0, 10]", hint)


def require_gamma(owner: object) -> None:
    value = getattr(owner, "gamma")  # noqa: B009
    good = is_number(value) and 0.0 < value <= 1.0
    require(good, owner, "gamma", "lie in (0, 1]", "for no memory use normalizer=BatchMean()")
