"""The rules of fields, as part of their annotations: ``lr: Positive``.  A broken one is a sentence with rule and value.
``Checked`` settings keep the rules of their fields; None passes where the annotation allows it."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


def title(kind: type) -> str:
    """What a group of settings is called in messages: "Objective" for ``ObjectiveConfig``."""
    return kind.__name__.removesuffix("Config")


def field_comments(kind: type) -> dict[str, str]:
    """What a field is: the comment behind it, or above it; a field without one shares that of the field before it."""
    texts: dict[str, str] = {}
    above: list[str] = []
    text = ""
    for line in inspect.getsource(kind).splitlines():
        field, comment = re.fullmatch(r"    (\w+): [^#]*(?:# (.*))?", line), re.fullmatch(r"    # (.*)", line)
        if field and field[1] in kind.__annotations__:
            text = " ".join([*above, field[2] or ""]).strip() or text
            texts |= {field[1]: text} if text else {}
        above = [*above, comment[1]] if comment else []
    return texts


def require(holds: bool, owner: object, field: str, rule: str, hint: str = "") -> None:
    if not holds:
        advice = f"; {hint}" if hint else ""
        raise ValueError(f"{title(type(owner))}.{field} must {rule}, got {getattr(owner, field)!r}{advice}.")


def is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True)
class Rule:
    """The value must ..."""

    words: str
    holds: Callable[[Any], bool]
    hint: str = ""


def number(words: str, holds: Callable[[float], bool], hint: str = "") -> Rule:
    return Rule(words, lambda value: is_number(value) and holds(value), hint)


def at_least(least: int) -> Rule:
    return Rule(f"be a whole number of at least {least}", lambda value: is_whole(value, least))


def one_of(*allowed: object) -> Rule:
    def holds(value: object) -> bool:
        return any(type(choice) is type(value) and choice == value for choice in allowed)

    return Rule(f"be one of {', '.join(map(repr, allowed))}", holds)


_ABOUT_TAU = "it divides similarities in [-1, 1], so useful values lie between 0.005 and 1"
Number = Annotated[float, Rule("be a number", is_number)]
Positive = Annotated[float, number("be a positive number", lambda value: value > 0)]
NotNegative = Annotated[float, number("be a number of at least 0", lambda value: value >= 0.0)]
BelowOne = Annotated[float, number("lie in [0, 1)", lambda value: 0.0 <= value < 1.0)]
Chance = Annotated[float, number("lie in [0, 1]", lambda value: 0.0 <= value <= 1.0)]
UpToOne = Annotated[float, number("lie in (0, 1]", lambda value: 0.0 < value <= 1.0)]
Gamma = Annotated[
    float, number("lie in (0, 1]", lambda value: 0.0 < value <= 1.0, "for no memory use normalizer=BatchMean()")
]
Tau = Annotated[float, number("be a number in (0, 10]", lambda value: 0.0 < value <= 10.0, _ABOUT_TAU)]
Whole = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Text = Annotated[str, Rule("be a name or a path", is_text)]
Crop = Annotated[
    tuple[float, float],
    Rule(
        "be two shares of the area, 0 < least <= most <= 1",
        lambda crop: len(crop) == 2 and all(map(is_number, crop)) and 0.0 < crop[0] <= crop[1] <= 1.0,
    ),
]


class Checked:
    """Settings that keep the rules of their fields; ``_check`` has those between fields."""

    def __post_init__(self) -> None:
        kind: Any = self.__class__  # mypy holds no class for hashable
        for field, rule in _rules(kind):
            value = getattr(self, field)
            left_out = value is None and type(None) in _options(kind)[field]
            require(left_out or rule.holds(value), self, field, rule.words, rule.hint)
        self._check()

    def _check(self) -> None:
        pass

    def leave_out(self, where: bool, rule: str, *fields: str, hint: str = "") -> None:
        """Where this holds, the fields must keep their defaults."""
        for field in fields:
            require(not where or getattr(self, field) == getattr(type(self), field), self, field, rule, hint)


@functools.cache
def _options(kind: type) -> dict[str, tuple[Any, ...]]:
    """What each field may be: the members of a union, or the one type."""
    hints, unions = get_type_hints(kind, include_extras=True), (Union, types.UnionType)
    return {name: get_args(hint) if get_origin(hint) in unions else (hint,) for name, hint in hints.items()}


@functools.cache
def _rules(kind: type) -> tuple[tuple[str, Rule], ...]:
    """A bool or a Literal must be one of its values."""
    options = _options(kind).items()
    return tuple((field, rule) for field, them in options for each in them for rule in _rules_of(each, len(them) == 1))


def _rules_of(option: Any, alone: bool) -> Iterator[Rule]:
    if get_origin(option) is Annotated:
        yield from (rule for rule in option.__metadata__ if isinstance(rule, Rule))
    elif get_origin(option) is Literal:
        yield one_of(*get_args(option))
    elif option is bool and alone:
        yield one_of(True, False)
