"""Checks of a field: the rule and the value in one sentence."""

from __future__ import annotations

import math


def require(holds: bool, owner: object, field: str, rule: str, hint: str = "") -> None:
    if not holds:
        advice = f"; {hint}" if hint else ""
        raise ValueError(f"{type(owner).__name__}.{field} must {rule}, got {getattr(owner, field)!r}{advice}.")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        require(is_number(value) and value > 0, owner, field, "be a positive number")


def require_count(owner: object, field: str, least: int) -> None:
    value = getattr(owner, field)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(whole, owner, field, f"be a whole number of at least {least}")


def require_choice(owner: object, field: str, allowed: tuple[str, ...]) -> None:
    require(getattr(owner, field) in allowed, owner, field, f"be one of {', '.join(map(repr, allowed))}")


def require_temperature(owner: object, field: str = "temperature") -> None:
    value = getattr(owner, field)
    hint = "it divides similarities in [-1, 1], so useful values lie between 0.005 and 1"
    require(is_number(value) and 0.0 < value <= 10.0, owner, field, "lie in (0, 10]", hint)


def require_epsilon(owner: object) -> None:
    value = getattr(owner, "epsilon")  # noqa: B009
    require(is_number(value) and value >= 0.0, owner, "epsilon", "be a number of at least 0")


def require_gamma(owner: object) -> None:
    value = getattr(owner, "gamma")  # noqa: B009
    good = is_number(value) and 0.0 < value <= 1.0
    require(good, owner, "gamma", "lie in (0, 1]", "for no memory use normalizer=BatchMean()")
