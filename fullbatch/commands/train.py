"""``fullbatch train``: flags over a recipe over the defaults, then the run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.data.builtin import BUILTIN
from fullbatch.flags import config_from_flags
from fullbatch.recipes import DEFAULT_RECIPE, recipe_values


def train_config(arguments: Sequence[str]) -> tuple[RunConfig, str | None]:
    """The config of ``fullbatch train ARGUMENTS``, and the run folder to resume if one is named.

    Later wins: the defaults, the recipe, the config file (or the resumed run's config), the flags.
    """
    first = argparse.ArgumentParser(prog="fullbatch train", add_help=False, allow_abbrev=False)
    for name in ("recipe", "config", "resume", *_AXES, *(name for names in _RIVALS for name in names)):
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    first.add_argument("--data", nargs="+")
    chosen, _ = first.parse_known_args([argument for argument in arguments if argument not in ("-h", "--help")])

    if chosen.resume and (chosen.recipe or chosen.config):
        raise ValueError("--resume brings the run's own config; leave --recipe and --config out.")
    values: dict[str, Any] = {}
    if chosen.epochs is not None and chosen.samples is not None:
        raise ValueError("--epochs and --samples both say how long to train; give one of them.")
    own_data = any(Source.parse(text).path not in BUILTIN for text in chosen.data or ())
    recipe = chosen.recipe or (None if chosen.config or chosen.resume or own_data else DEFAULT_RECIPE)
    if recipe:
        values = _layered(values, recipe_values(recipe))
    if chosen.config:
        values = _layered(values, read_yaml(Path(chosen.config)))
    if chosen.resume:
        from fullbatch.training.run_folder import Folder

        values = _layered(values, to_dict(Folder(Path(chosen.resume)).read_config()))
    axes = {axis: None if value == "None" else value for axis in _AXES if (value := getattr(chosen, axis)) is not None}
    lengths = {name: getattr(chosen, name) for names in _RIVALS for name in names}
    values = _giving_way(values, {"objective": axes, "training": lengths, "schedule": lengths})
    base = from_dict(RunConfig, merged(values, {"objective": axes}) if axes else values)
    config = config_from_flags(base, _without(arguments, ("--recipe", "--config", "--resume")))
    if chosen.resume and (config.run.runs, config.run.name) != (base.run.runs, base.run.name):
        raise ValueError(f"--resume goes on in {chosen.resume}; leave --name and --runs out.")
    return config, chosen.resume


_AXES = ("method", "pairwise", "normalizer", "temperature_rule")
# Fields that say one thing in several units.
_RIVALS = (
    ("epochs", "samples"),
    ("warmup_steps", "warmup_epochs", "warmup_share"),
    ("cooldown_steps", "cooldown_epochs"),
)


def _layered(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins."""
    return merged(_giving_way(base, over), over)


def _giving_way(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` without what ``over`` displaces.  A method's settings are its own: naming another method, or another
    choice on an axis, leaves them behind; and so does a length its rival in another unit."""
    left = {group: dict(fields) if isinstance(fields, Mapping) else fields for group, fields in base.items()}
    for group, fields in left.items():
        above = over.get(group)
        if not isinstance(fields, dict) or not isinstance(above, Mapping):
            continue
        before = {"method": RunConfig().objective.method, **fields}
        if group == "objective" and any(above[axis] != before.get(axis) for axis in _AXES if axis in above):
            fields.pop("settings", None)
        for names in _RIVALS:
            if any(above.get(name) is not None for name in names):
                for name in names:
                    fields.pop(name, None)
    return left


def _without(arguments: Sequence[str], flags: tuple[str, ...]) -> list[str]:
    """The arguments but for these flags and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif argument.split("=", 1)[0] not in flags:
            kept.append(argument)
    return kept


def train(arguments: list[str]) -> int:
    config, resume = train_config(arguments)
    from fullbatch import run
    from fullbatch.results import print_results

    trained = run.train(config, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        print_results(trained, Console(highlight=False))
    return 0
