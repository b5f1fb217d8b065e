"""Checks of a field: the rule and the value in one sentence."""

from __future__ import annotations

import math
import numbers


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


def require_number(owner: object, *fields: str) -> None:
    for field in fields:
        require(is_number(getattr(owner, field)), owner, field, "be a number")


def require_positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        require(is_number(value) and value > 0, owner, field, "be a positive number")


def require_share(owner: object, field: str) -> None:
    value = getattr(owner, field)
    require(is_number(value) and 0.0 <= value < 1.0, owner, field, "lie in [0, 1)")


def require_count(owner: object, field: str, least: int) -> None:
    require(is_whole(getattr(owner, field), least), owner, field, f"be a whole number of at least {least}")


def require_choice(owner: object, field: str, allowed: tuple[object, ...]) -> None:
    value = getattr(owner, field)
    same_kind = [choice for choice in allowed if type(choice) is type(value)]
    require(value in same_kind, owner, field, f"be one of {', '.join(map(repr, allowed))}")


def require_temperature(owner: object, field: str = "temperature") -> None:
    value = getattr(owner, field)
    hint = "it divides similarities in [-1, 1], so useful values lie between 0.005 and 1"
    require(is_number(value) and 0.0 < value <= 10.0, owner, field, "be a number in (0, 10]", hint)


def require_epsilon(owner: object) -> None:
    value = getattr(owner, "epsilon")  # noqa: B009
    require(is_number(value) and value >= 0.0, owner, "epsilon", "be a number of at least 0")


def require_gamma(owner: object) -> None:
    value = getattr(owner, "gamma")  # noqa: B009
    good = is_number(value) and 0.0 < value <= 1.0
    require(good, owner, "gamma", "lie in (0, 1]", "for no memory use normalizer=BatchMean()")
