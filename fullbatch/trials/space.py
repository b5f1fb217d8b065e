"""The space of a search: dimensions, their names, and for which method and optimizer each of them counts.

A name is that of a flag of `fullbatch train` (lr, embed_dim) or of a setting of a method (gamma, rho_image).  Three are
both, ``temperature_lr``, ``schedule`` and ``ema``: there the plain name is the flag's, and ``settings.NAME`` the
method's.  ``sgd.lr`` and ``sogclr.gamma`` are for that optimizer or method alone, in the plain one's place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fullbatch.config.axes import LearnedScale, Predicted, RobustGlobal, Sigmoid
from fullbatch.config.checks import Checked, Count, Number, Positive, Rule, is_number, require
from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import METHODS, PARTS, Method, settings_of
from fullbatch.config.model import DEFAULT_PAIR_WIDTH
from fullbatch.config.optimization import OPTIMIZER_SETTINGS, OPTIMIZERS
from fullbatch.config.run import RIVALS, RunConfig

if TYPE_CHECKING:  # Optuna is loaded by a search only
    from optuna.trial import BaseTrial

Value = TypeVar("Value")


@dataclass(frozen=True)
class Real(Checked):
    """Numbers from ``low`` to ``high``; ``log``: evenly by their logarithms; ``step``: only these."""

    low: Number
    high: Number
    log: Annotated[Any, Rule("be true or false", lambda value: isinstance(value, bool))] = False
    step: Positive | None = None

    def _check(self) -> None:
        require(self.low < self.high, self, "low", f"be less than high ({self.high})")
        require(not self.log or self.low > 0, self, "low", "be positive with log")
        if self.step is not None:
            require(not self.log or self.step == type(self).step, self, "step", "be left out with log")
            require(self.holds(self.high), self, "step", f"divide high - low ({self.high - self.low:g})")

    @property
    def ends(self) -> tuple[float, ...]:
        return self.low, self.high

    def holds(self, value: Any) -> bool:
        """Whether it is one of the dimension's."""
        if not is_number(value) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step is not None else 0.0
        return bool(abs(steps - round(steps)) < 1e-8)

    def place(self, value: float) -> float:
        """From 0 at ``low`` to 1 at ``high``, evenly as it is searched.

        >>> Real(1e-4, 1e-2, log=True).place(1e-3)
        0.5
        """
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round((at - low) / (high - low), 9)

    def at(self, place: float) -> float:
        """The value at that place."""
        if self.log:
            value = self.low * math.exp(place * math.log(self.high / self.low))
        else:
            value = self.low + place * (self.high - self.low)
        return min(max(value, self.low), self.high)

    def suggest(self, trial: BaseTrial, name: str) -> float:
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Whole(Real):
    """The same in whole numbers."""

    step: Count = 1

    def suggest(self, trial: BaseTrial, name: str) -> int:
        return trial.suggest_int(name, int(self.low), int(self.high), step=self.step, log=self.log)


Plain = str | int | float | bool | None


@dataclass(frozen=True)
class Choice(Checked):
    """One of these: words, numbers, true, false or null (the field's None)."""

    values: tuple[Plain, ...]

    def _check(self) -> None:
        plain = all(value is None or isinstance(value, str | int | float | bool) for value in self.values)
        require(plain, self, "values", "be words, numbers, true, false or null")
        different = len(set(self.values)) == len(self.values)  # Optuna tells them apart by ==, so that 1 is 1.0
        require(different and len(self.values) >= 2, self, "values", "be at least two, all different")

    @property
    def ends(self) -> tuple[Plain, ...]:
        return self.values

    def holds(self, value: Any) -> bool:
        """Whether it is one of the dimension's."""
        return any(own == value and isinstance(own, bool) == isinstance(value, bool) for own in self.values)

    def suggest(self, trial: BaseTrial, name: str) -> Plain:
        return trial.suggest_categorical(name, self.values)


Dimension = Real | Choice


def dimension_from(name: str, values: Any) -> Dimension:
    """A dimension as YAML has it: whole numbers where low, high and step are whole; a list is short for choices."""
    if isinstance(values, list | tuple):
        values = {"choices": values}
    if not isinstance(values, Mapping):
        raise ValueError(f"space.{name} must be {{low: ..., high: ...}} or {{choices: [...]}}, got {values!r}.")
    known = ("low", "high", "log", "step", "choices")
    for key in values:
        if key not in known:
            raise ValueError(f"space.{name} has no {key!r}{nearest(key, known)} It has {listed(known)}.")
    if "choices" in values and (len(values) > 1 or not isinstance(values["choices"], list | tuple)):
        raise ValueError(f"space.{name}: choices are a list, without low, high, log or step, got {dict(values)!r}.")
    given = {key: value for key, value in values.items() if value is not None}
    if "choices" not in values and not {"low", "high"} <= given.keys():
        raise ValueError(f"space.{name} must have low and high, or choices, got {dict(values)!r}.")
    numbers = [given[key] for key in ("low", "high", "step") if key in given]
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    try:
        if "choices" in values:
            return Choice(tuple(values["choices"]))
        return Whole(**given) if whole else Real(**given)
    except ValueError as error:
        raise ValueError(f"space.{name}: {error}") from None


def dimension_as_dict(dimension: Dimension) -> dict[str, Any]:
    """As ``dimension_from`` reads it."""
    if isinstance(dimension, Choice):
        return {"choices": list(dimension.values)}
    default = {field.name: field.default for field in dataclasses.fields(dimension)}
    return {name: value for name, value in vars(dimension).items() if value != default[name]}


_AXES = ("pairwise", "normalizer", "temperature_rule")  # which settings there are depends on them
_OWNED: Mapping[str, str] = {
    "method": "`methods` names them all",
    "optimizer": "`optimizers` names them all",
    "settings": "name the settings themselves, such as gamma",
    "seed": "`seed` and `finals.seeds` are the plan's",
    "name": "it is the plan's",
    "runs": "it is the plan's",
    **dict.fromkeys(_AXES, "it decides which settings there are; name it under `base`"),
}
_NO_SEARCH = ("run", "evaluation")  # groups that do not touch what a run learns
_PREFIX = "settings."


@cache
def _home() -> dict[str, str]:
    """The group of each flag."""
    default = RunConfig()
    groups = [(one.name, getattr(default, one.name)) for one in dataclasses.fields(default)]
    return {field.name: name for name, group in groups for field in dataclasses.fields(group)}


@cache
def _settings() -> frozenset[str]:
    """Of every part that a method has, or may have in place of its own."""
    kinds = [kind for kinds in PARTS.values() for kind in kinds if dataclasses.is_dataclass(kind)]
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind))


@dataclass(frozen=True)
class Place:
    """Where a value goes."""

    scope: str  # the method or the optimizer that alone has it; "": all that know it
    name: str  # of the flag or the setting
    group: str  # of the flag, in config.yaml; "": it is a setting of a method

    @property
    def plain(self) -> str:
        """Its name, whatever the scope."""
        return f"{_PREFIX}{self.name}" if not self.group and self.name in _home() else self.name

    @property
    def key(self) -> str:
        """Its name in the space and in Optuna, where one name is one range."""
        return f"{self.scope}.{self.plain}" if self.scope else self.plain

    @property
    def rivals(self) -> tuple[str, ...]:
        """Flags that say the same in another unit."""
        names = next((names for names in RIVALS if self.group and self.name in names), ())
        return tuple(name for name in names if name != self.name)

    def counts(self, method_name: str, method: Method, optimizer: str) -> bool:
        """Whether a run with this method, as it is built, and this optimizer reads it."""
        if self.scope and self.scope not in (method_name, optimizer):
            return False
        if not self.group:
            return self.name in settings_of(method)
        if self.name in ("temperature_lr", "temperature_lr_drop_below"):
            learned = isinstance(method.temperature, LearnedScale | RobustGlobal | Predicted)
            return learned or isinstance(method.pairwise, Sigmoid)
        special = {name for names in OPTIMIZER_SETTINGS.values() for name in names}
        return self.name not in special or self.name in OPTIMIZER_SETTINGS[optimizer]

    def grouped(self, value: Any) -> dict[str, dict[str, Any]]:
        """In the groups of config.yaml."""
        return {self.group: {self.name: value}} if self.group else {"objective": {"settings": {self.name: value}}}


def place_of(key: str, where: str) -> Place:
    """What a name means; ``where`` it was written, for errors."""
    scope, _, rest = key.partition(".")
    if rest and scope != "settings":
        if scope not in METHODS and scope not in OPTIMIZERS:
            names = (*METHODS, *OPTIMIZERS)
            raise ValueError(f"{where}.{key}: there is no method or optimizer {scope!r}{nearest(scope, names)}")
    else:
        scope, rest = "", key
    name = rest.removeprefix(_PREFIX)
    if name not in _settings() and (name != rest or name not in _home()):
        known = [*_home(), *sorted(_settings() - set(_home()))]
        raise ValueError(f"{where}: neither a run nor a method has {name!r}{nearest(name, known)}")
    is_setting = name != rest or name not in _home()
    if scope and name == "evaluate":
        raise ValueError(f"{where}.{key} cannot be set there: all trials of a phase are measured alike.")
    if not is_setting and name in _OWNED:
        raise ValueError(f"{where}.{key} cannot be set there: {_OWNED[name]}.")
    return Place(scope, name, "" if is_setting else _home()[name])


def searched_place(key: str) -> Place:
    """The same for a dimension."""
    place = place_of(key, "space")
    if place.group in _NO_SEARCH:
        raise ValueError(f"space.{key} is no dimension: it does not change what a run learns.")
    return place


def resolved(
    values: Mapping[str, Value], where: str, method_name: str, method: Method, optimizer: str
) -> dict[Place, Value]:
    """Of the values those that count for this method and this optimizer, a scoped one in the plain one's place."""
    found: dict[str, tuple[Place, Value]] = {}
    for key, value in values.items():
        place = place_of(key, where)
        if not place.counts(method_name, method, optimizer):
            continue
        before = found.get(place.plain)
        if before is not None and before[0].scope and place.scope:
            raise ValueError(
                f"{where}: {before[0].key} and {place.key} both say what {place.plain} is for {method_name} with "
                f"{optimizer}; leave one out."
            )
        if before is None or place.scope:
            found[place.plain] = (place, value)
    return dict(found.values())


def known_to_one(values: Iterable[str], where: str, candidates: Iterable[tuple[str, Method, str]]) -> None:
    """Each name counts for at least one of the candidates (a method's name, the method, an optimizer)."""
    pairs = list(candidates)
    for key in values:
        place = place_of(key, where)
        if not any(place.counts(*pair) for pair in pairs):
            names = listed(dict.fromkeys((*(pair[0] for pair in pairs), *(pair[2] for pair in pairs))))
            raise ValueError(f"{where}.{key}: none of the methods and optimizers here has it ({names}).")


def value_in(config: RunConfig, place: Place) -> Any:
    """What a config has there; where a field left at None stands for another's value, that one."""
    if not place.group:
        parts = vars(config.objective.build()).values()
        value = next(getattr(part, place.name) for part in parts if hasattr(part, place.name))
        if value is None and place.name in ("rho_image", "rho_text"):
            return value_in(config, Place("", "rho", ""))
        return value
    value = getattr(getattr(config, place.group), place.name)
    if value is not None:
        return value
    if place.name == "embed_dim" and config.model.is_pair:
        return DEFAULT_PAIR_WIDTH
    rivals: Iterable[str] = next((names for names in RIVALS if place.name in names), ())
    unset = rivals and all(getattr(getattr(config, place.group), name) is None for name in rivals)
    return 0 if unset and place.group == "schedule" else None
