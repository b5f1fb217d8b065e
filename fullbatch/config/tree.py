"""The config tree as a mapping and as YAML: what goes out comes in the same, and an unknown key is refused."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from fullbatch.config.messages import listed, nearest

Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values only, in the order of the fields."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_dict(kind: type[Config], values: Any, where: str = "") -> Config:
    """``kind`` from a mapping; missing keys take their defaults.  ``where`` is the path of keys so far, for errors."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or kind.__name__} must map names to values, got {values!r}.")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            place = f" in {where}" if where else ""
            groups = [name for name in names if dataclasses.is_dataclass(hints[name])]
            home = [name for name in groups if key in {field.name for field in dataclasses.fields(hints[name])}]
            guess = f"; it belongs under {home[0]!r}." if home else nearest(key, names)
            raise ValueError(f"Unknown key {key!r}{place}{guess} The keys are {listed(names)}.")
    needed = [field.name for field in dataclasses.fields(kind) if _is_needed(field)]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where or kind.__name__} needs {listed(missing)}.")
    return kind(**{key: _typed(hints[key], value, f"{where}.{key}".strip(".")) for key, value in values.items()})


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed(hint: Any, value: Any, where: str) -> Any:
    """YAML has lists for our tuples, whole numbers for our floats, mappings for our dataclasses."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, {} if value is None else value, where)
    if get_origin(hint) in (Union, types.UnionType):
        others = [option for option in get_args(hint) if option is not type(None)]
        return None if value is None else _typed(others[0], value, where) if len(others) == 1 else value
    if get_origin(hint) in (Mapping, dict):
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{where} must map names to values, got {value!r}.")
        return {} if value is None else value
    if get_origin(hint) is tuple:
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_typed(get_args(hint)[0], item, where) for item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    wrong = hint in (str, bool, int, float) and not isinstance(value, hint)
    if wrong or (hint is int and isinstance(value, bool)):
        words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
        raise ValueError(f"{where} must be {words[hint]}, got {value!r}.")
    return value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; everybody means the number."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that ``_Loader`` would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+|[-+]?\.\d+([eE][-+]?\d+)?"),
        list("-+.0123456789"),
    )


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ValueError(f"There is no config file {path}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The config file {path} cannot be read: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"The config file {path} must map names to values, got {type(values).__name__}.")
    return values


def write_yaml(config: Any) -> str:
    return write_values(to_dict(config))


def write_values(values: Mapping[str, Any]) -> str:
    """``read_yaml`` reads it back the same."""
    return str(yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins, mapping by mapping."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result
