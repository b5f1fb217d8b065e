"""The command line: parse, then call one function.  Flags, help and defaults all come from the config tree."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.config.words import listed, nearest
from fullbatch.flags import config_from_flags
from fullbatch.recipes import DEFAULT_RECIPE, RECIPES, recipe_summary, recipe_text, recipe_values

USAGE = """\
usage: fullbatch COMMAND [OPTIONS]

  train      train a CLIP-style model; with no options: NeuCLIP on the built-in emoji, in minutes on a CPU
  export     write a trained model for open_clip, Hugging Face transformers, or as safetensors
  recipes    list the recipes, or show one: fullbatch recipes NAME

`fullbatch COMMAND --help` shows a command's options; `fullbatch train --method sogclr --help` a method's settings.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; a user's mistake is one message, not a traceback."""
    from fullbatch.training.interruption import Interrupted

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return _dispatch(arguments)
    except Interrupted as stopped:
        print(f"fullbatch: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except (ValueError, OSError) as error:
        if os.environ.get("FULLBATCH_TRACEBACK"):
            raise
        print(f"fullbatch: {error}", file=sys.stderr)
        return 1


def run() -> None:
    """The console script."""
    sys.exit(main())


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "export": _export, "recipes": _recipes}
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
            return 0
        case ["--version", *_]:
            print(f"fullbatch {version('fullbatch')}")
            return 0
        case [name, *rest] if name in commands:
            return commands[name](rest)
        case [name, *_]:
            raise ValueError(f"There is no command {name!r}{nearest(name, commands)} They are {listed(commands)}.")
    raise AssertionError("every list of arguments has its case")


# ---------------------------------------------------------------------------------------------------------------------
# train


def train_config(arguments: Sequence[str]) -> tuple[RunConfig, str | None]:
    """The config of ``fullbatch train ARGUMENTS``, and the run folder to resume if one is named.

    Later wins: the defaults, the recipe, the config file (or the resumed run's config), the flags.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--recipe", "--config", "--resume", "--method", "--pairwise", "--normalizer", "--temperature-rule"):
        first.add_argument(flag, dest=flag[2:].replace("-", "_"))
    first.add_argument("--data", nargs="+")
    chosen, _ = first.parse_known_args([argument for argument in arguments if argument not in ("-h", "--help")])

    if chosen.resume and (chosen.recipe or chosen.config):
        raise ValueError("--resume brings the run's own config; leave --recipe and --config out.")
    values: dict[str, Any] = {}
    own_data = chosen.data not in (None, ["emoji"])
    recipe = chosen.recipe or (None if chosen.config or chosen.resume or own_data else DEFAULT_RECIPE)
    if recipe:
        values = merged(values, recipe_values(recipe))
    if chosen.config:
        values = merged(values, read_yaml(Path(chosen.config)))
    if chosen.resume:
        from fullbatch.training.run_folder import Folder

        values = merged(values, to_dict(Folder(Path(chosen.resume)).read_config()))
    values["objective"] = _with_chosen_method(dict(values.get("objective") or {}), chosen)
    base = from_dict(RunConfig, values)
    return config_from_flags(base, _without(arguments, ("--recipe", "--config", "--resume"))), chosen.resume


def _with_chosen_method(objective: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """A method's settings are its own: naming another method, or another choice on an axis, leaves them behind."""
    named = {
        axis: value
        for axis in ("method", "pairwise", "normalizer", "temperature_rule")
        if (value := getattr(chosen, axis)) is not None and value != objective.get(axis)
    }
    if named and not (set(named) == {"method"} and "method" not in objective and not objective.get("settings")):
        objective.pop("settings", None)
    return {**objective, **named}


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


def _train(arguments: list[str]) -> int:
    config, resume = train_config(arguments)
    from fullbatch.results import print_results
    from fullbatch.run import train

    trained = train(config, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        print_results(trained, Console(highlight=False))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# export, recipes


@dataclass(frozen=True)
class _Export:
    """Write a trained model for other programs."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a run folder, or one of its checkpoints")]
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="the file or folder to write")]
    format: Annotated[
        Literal["open_clip", "huggingface", "safetensors"],
        tyro.conf.arg(help="open_clip: FILE.pt or a folder; huggingface: a folder; safetensors: either"),
    ] = "open_clip"
    average: Annotated[bool, tyro.conf.arg(help="the averaged weights, where the run kept an average")] = True


def _export(arguments: list[str]) -> int:
    options = tyro.cli(_Export, args=arguments, prog="fullbatch export")
    from fullbatch.run import export_run

    print(export_run(options.run, options.output, options.format, options.average))
    return 0


def _recipes(arguments: list[str]) -> int:
    match arguments:
        case []:
            width = max(len(name) for name in RECIPES)
            for name in RECIPES:
                print(f"{name:{width}}  {recipe_summary(name)}")
            print("\nShow one: fullbatch recipes NAME.  Use one: fullbatch train --recipe NAME --data ...")
        case ["-h" | "--help"]:
            print("usage: fullbatch recipes [NAME]")
        case [name]:
            print(recipe_text(name), end="")
        case _:
            raise ValueError("usage: fullbatch recipes [NAME]")
    return 0
