"""The config tree as command line flags: each field is a flag, its help is its line in the class's docstring."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from fullbatch.config.checks import title
from fullbatch.config.data import Source
from fullbatch.config.methods import METHODS, NORMALIZERS, PAIRWISE, PARTS, TEMPERATURES
from fullbatch.config.optimization import OPTIMIZERS
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict

_LISTS = ("evaluate", "templates")  # that are None where the user names none
TRAIN = "Train a CLIP-style model. Also: --recipe NAME, --config FILE.yaml, --resume RUN_FOLDER."
# Texts of which only some are allowed, shown as choices.
_CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "pairwise": tuple(PAIRWISE),
    "normalizer": tuple(NORMALIZERS),
    "temperature_rule": tuple(TEMPERATURES),
    "optimizer": OPTIMIZERS,
    "table_dtype": ("float32", "float16"),
}


def _switch_or_file(words: list[str]) -> bool | str:
    """
    >>> _switch_or_file([]), _switch_or_file(["False"]), _switch_or_file(["resnet50.pth"])
    (True, False, 'resnet50.pth')
    """
    if len(words) > 1:
        raise ValueError(f"one file at most, got {' '.join(words)}")
    return {"True": True, "False": False}.get(words[0], words[0]) if words else True


_SWITCH_OR_FILE = tyro.constructors.PrimitiveConstructorSpec[bool | str](
    nargs="*",
    metavar="[FILE]",
    instance_from_str=_switch_or_file,
    is_instance=lambda value: isinstance(value, bool | str),
    str_from_instance=lambda value: [str(value)],
)


def field_help(kind: type) -> dict[str, str]:
    """``name   what it is`` lines of a docstring; a line that is indented further goes on with the one before."""
    found: dict[str, str] = {}
    names = {field.name for field in dataclasses.fields(kind)}
    current: list[str] = []
    for line in (kind.__doc__ or "").splitlines():
        match = re.match(r"    (?P<names>\w+(, \w+)*) {2,}(?P<help>\S.*)", line)
        listed = [name.strip() for name in match["names"].split(",")] if match else []
        if match and set(listed) <= names:
            current = listed
            found.update(dict.fromkeys(listed, match["help"]))
        elif current and line.startswith("      ") and line.strip():
            found.update({name: f"{found[name]} {line.strip()}" for name in current})
        else:
            current = []
    return found


def flags_of(base: RunConfig, about: str = TRAIN) -> Any:
    """A class for tyro with the tree's groups; the method's own settings are in the group ``settings``."""
    groups: list[Any] = []
    for field in dataclasses.fields(base):
        group = getattr(base, field.name)
        shown: Any = _group_class(type(group), group, skip=("settings",))
        groups.append((field.name, Annotated[shown, tyro.conf.OmitArgPrefixes], dataclasses.field(default=shown())))
        if field.name == "objective":
            settings = _settings_class(base)
            groups.append(("settings", settings, dataclasses.field(default=settings())))
    made = dataclasses.make_dataclass("Train", groups, frozen=True)
    made.__doc__ = about
    return made


def _group_class(kind: type, values: Any, skip: tuple[str, ...]) -> type:
    hints, helps = get_type_hints(kind), field_help(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            fields.append(_flag(field.name, hints[field.name], getattr(values, field.name), helps.get(field.name, "")))
    made = dataclasses.make_dataclass(kind.__name__, fields, frozen=True)
    made.__doc__ = (kind.__doc__ or "").strip().splitlines()[0]
    return made


def _flag(name: str, hint: Any, value: Any, text: str) -> tuple[str, Any, Any]:
    if name in _CHOICES:
        choices: Any = Literal[_CHOICES[name]]
        hint = choices | None if hint == (str | None) else choices
    if hint == (bool | str):
        hint = Annotated[hint, _SWITCH_OR_FILE]
    return name, Annotated[hint, tyro.conf.arg(help=text)], dataclasses.field(default=value)


def _settings_class(base: RunConfig) -> type:
    method = base.objective.build()
    fields: dict[str, Any] = {}
    for axis in PARTS:
        part = getattr(method, axis)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            hints, helps = get_type_hints(type(part)), field_help(type(part))
            for field in dataclasses.fields(part):
                text = helps.get(field.name, "")
                fields[field.name] = _flag(field.name, hints[field.name], getattr(part, field.name), text)
    made = dataclasses.make_dataclass("Settings", list(fields.values()), frozen=True)
    made.__doc__ = f"Settings of {base.objective.method}."
    return made


def config_from_flags(
    base: RunConfig, arguments: Sequence[str], command: str = "train", about: str = TRAIN
) -> RunConfig:
    """``base`` with what the flags of ``fullbatch COMMAND`` change."""
    shown = flags_of(base, about)
    given = [argument.split("=", 1)[0][2:].replace("-", "_") for argument in arguments if argument.startswith("--")]
    _refuse_repeated(base, given)
    parsed: Any = tyro.cli(shown, args=list(arguments), prog=f"fullbatch {command}")
    values = {field.name: dataclasses.asdict(getattr(parsed, field.name)) for field in dataclasses.fields(parsed)}
    settings = values.pop("settings")
    before = dataclasses.asdict(shown().settings)
    named = {name.removeprefix("settings.").removeprefix("no_") for name in given if name.startswith("settings.")}
    changed = {name: value for name, value in settings.items() if value != before[name] or name in named}
    values["objective"]["settings"] = {**base.objective.settings, **changed}
    return from_dict(RunConfig, values)


def naming_flags(text: str, command: str = "") -> str:
    """A message of the config's own checks in the words of ``fullbatch COMMAND``: in Python they speak of fields.

    >>> naming_flags("Training.graphs must be left out with micro_batch, got True.")
    '--graphs must be left out with --micro-batch, got True.'
    >>> naming_flags("RobustGlobal.rho must be a number, got None."), naming_flags("Search.jobs must be 1.", "search")
    ('--settings.rho must be a number, got None.', '--jobs must be 1.')
    """
    of_field = {**_flag_of_field(), **_options_of(command)}
    of_name = {name.split(".")[1]: flag for name, flag in reversed(of_field.items())}

    told = re.sub(r"(?<![\w./'\"`=-])[A-Z]\w+\.[a-z]\w*", lambda found: of_field.get(found[0], found[0]), text)
    if told == text:
        return text
    siblings = r"(?<![\w./'\"`=-])[a-z]+(_[a-z]+)+\b|(?<=`)[a-z_]+(?=`)"  # other fields, as they stand in a sentence
    return re.sub(siblings, lambda found: of_name.get(found[0], found[0]), told)


def _options_of(command: str) -> dict[str, str]:
    """The same of what a command has beside a run's settings."""
    if command not in ("compare", "search"):
        return {}
    kind = getattr(importlib.import_module(f"fullbatch.commands.{command}"), command.capitalize())
    names = [field.name for field in dataclasses.fields(kind)]
    return {f"{kind.__name__}.{name}": f"--{name.replace('_', '-')}" for name in names}


def _flag_of_field() -> dict[str, str]:
    """How ``Class.field`` is given on the command line."""
    kinds: list[tuple[Any, str]] = [(type(group), "--") for group in vars(RunConfig()).values()]
    kinds += [(kind, "--settings.") for kinds in PARTS.values() for kind in kinds if dataclasses.is_dataclass(kind)]
    found = {
        f"{title(kind)}.{field.name}": lead + field.name.replace("_", "-")
        for kind, lead in [*kinds, (Source, "?")]
        for field in dataclasses.fields(kind)
    }
    del found["Objective.settings"]
    return found


def _refuse_repeated(base: RunConfig, given: Sequence[str]) -> None:
    """Of a flag that is given twice the last one counts; with a list of values that is not what was meant."""
    for group in dataclasses.fields(base):
        for name, value in vars(getattr(base, group.name)).items():
            if given.count(name) > 1 and (isinstance(value, tuple) or name in _LISTS):
                raise ValueError(f"--{name} is given {given.count(name)} times; name all after one: --{name} A B.")
