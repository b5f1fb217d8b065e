"""The config tree as command line flags: each field is a flag, its help is its comment."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from fullbatch.config.checks import field_comments, title
from fullbatch.config.data import Source
from fullbatch.config.methods import METHODS, NORMALIZERS, OPERANDS, PAIRWISE, PARTS, TEMPERATURES
from fullbatch.config.optimization import OPTIMIZERS
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict

_LISTS = ("evaluate", "templates")  # that are None where the user names none
# Texts of which only some are allowed, shown as choices.
_CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "pairwise": tuple(PAIRWISE),
    "normalizer": tuple(NORMALIZERS),
    "temperature_rule": tuple(TEMPERATURES),
    "optimizer": OPTIMIZERS,
    "loss_operands": ("auto", *OPERANDS),
    "table_dtype": ("float32", "float16"),
}


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where the settings come from, before the other flags change them.

    recipe   a recipe's; `fullbatch recipes` lists them
    config   a YAML file's, over the recipe's
    resume   those of the run in this folder, which goes on; auto: with the --name's, if it has begun
    """

    recipe: str | None = None
    config: str | None = None
    resume: str | None = None


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
    """The fields' comments, or ``name   what it is`` lines of a docstring; a line that is indented further goes on with
    the one before."""
    texts = field_comments(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    current: list[str] = []
    for line in (kind.__doc__ or "").splitlines():
        match = re.match(r"    (?P<names>\w+(, \w+)*) {2,}(?P<help>\S.*)", line)
        listed = match["names"].split(", ") if match else []
        if match and set(listed) <= names:
            current = listed
            texts.update(dict.fromkeys(listed, match["help"]))
        elif current and line.startswith("      ") and line.strip():
            texts.update({name: f"{texts[name]} {line.strip()}" for name in current})
        else:
            current = []
    return texts


def _flags_of(base: RunConfig, own: Sequence[Any], about: str) -> Any:
    """A class for tyro with the tree's groups; the method's own settings are in the group ``settings``."""
    groups: dict[str, Any] = {}
    for name, values in {**{type(group).__name__.strip("_").lower(): group for group in own}, **vars(base)}.items():
        shown = _class_of(name, (type(values).__doc__ or "").strip().splitlines()[0], _flags_in(values))
        groups[name] = (name, Annotated[shown, tyro.conf.OmitArgPrefixes], dataclasses.field(default=shown()))
        if name == "objective":
            method = base.objective.build()
            parts = [part for axis in PARTS if dataclasses.is_dataclass(part := getattr(method, axis))]
            flags = {flag[0]: flag for part in parts for flag in _flags_in(part)}
            shown = _class_of("settings", f"Settings of {base.objective.method}.", flags.values())
            groups["settings"] = ("settings", shown, dataclasses.field(default=shown()))
    return _class_of("flags", about, groups.values())


def _class_of(name: str, about: str, fields: Iterable[tuple[str, Any, Any]]) -> Any:
    made = dataclasses.make_dataclass(name, fields, frozen=True)
    made.__doc__ = about
    return made


def _flags_in(part: Any) -> Iterator[tuple[str, Any, Any]]:
    hints, helps = get_type_hints(type(part)), field_help(type(part))
    for name, value in vars(part).items():
        if name == "settings":
            continue
        hint = hints[name]
        if name in _CHOICES:
            choices: Any = Literal[_CHOICES[name]]
            hint = choices | None if hint == (str | None) else choices
        if hint == (bool | str):
            hint = Annotated[hint, _SWITCH_OR_FILE]
        yield name, Annotated[hint, tyro.conf.arg(help=helps.get(name, ""))], dataclasses.field(default=value)


def config_from_flags(
    base: RunConfig, arguments: Sequence[str], command: str, about: str, own: Sequence[Any] = ()
) -> RunConfig:
    """``base`` with what the flags of ``fullbatch COMMAND`` change; ``own`` are groups beside the config's."""
    kind = _flags_of(base, (_Start(), *own), about)
    given = [argument.split("=", 1)[0][2:].replace("-", "_") for argument in arguments if argument.startswith("--")]
    for name, value in ((name, value) for group in vars(base).values() for name, value in vars(group).items()):
        if given.count(name) > 1 and (isinstance(value, tuple) or name in _LISTS):  # the last one would count
            raise ValueError(f"--{name} is given {given.count(name)} times; name all after one: --{name} A B.")
    typed = ["--help" if argument == "--help-all" else argument for argument in arguments]
    parsed: Any = tyro.cli(kind, args=typed, prog=f"fullbatch {command}")
    values = {name: dataclasses.asdict(getattr(parsed, name)) for name in vars(base)}
    before = vars(kind().settings)
    named = {name.removeprefix("settings.").removeprefix("no_") for name in given if name.startswith("settings.")}
    settings = vars(parsed.settings).items()
    changed = {name: value for name, value in settings if value != before[name] or name in named}
    values["objective"]["settings"] = {**base.objective.settings, **changed}
    return from_dict(RunConfig, values)


def naming_flags(text: str, command: str = "") -> str:
    """A message of the config's own checks in the words of ``fullbatch COMMAND``: in Python they speak of fields.

    >>> naming_flags("Training.graphs must be left out with micro_batch, got True.")
    '--graphs must be left out with --micro-batch, got True.'
    >>> naming_flags("RobustGlobal.rho must be a number, got None."), naming_flags("Search.jobs must be 1.", "search")
    ('--settings.rho must be a number, got None.', '--jobs must be 1.')
    """
    kinds: list[tuple[Any, str]] = [(type(group), "--") for group in vars(RunConfig()).values()]
    kinds += [(kind, "--settings.") for kinds in PARTS.values() for kind in kinds if dataclasses.is_dataclass(kind)]
    kinds += [(Source, "?")]
    if command in ("compare", "search"):  # what they have beside a run's settings
        options = getattr(importlib.import_module(f"fullbatch.cli.{command}"), command.capitalize())
        kinds += [(options, "--")]
    flags = {
        f"{title(kind)}.{field.name}": lead + field.name.replace("_", "-")
        for kind, lead in kinds
        for field in dataclasses.fields(kind)
    }
    del flags["Objective.settings"]
    of_name = {field.split(".")[1]: flag for field, flag in reversed(flags.items())}

    renamed = re.sub(r"(?<![\w./'\"`=-])[A-Z]\w+\.[a-z]\w*", lambda match: flags.get(match[0], match[0]), text)
    if renamed == text:
        return text
    siblings = r"(?<![\w./'\"`=-])[a-z]+(_[a-z]+)+\b|(?<=`)[a-z_]+(?=`)"  # other fields, as they stand in a sentence
    return re.sub(siblings, lambda match: of_name.get(match[0], match[0]), renamed)
