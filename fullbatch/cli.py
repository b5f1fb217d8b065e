"""The command line: parse, then call one function.  Flags, help and defaults all come from the config tree."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import torch
import tyro
from rich.console import Console

import fullbatch
from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.config.words import listed, nearest
from fullbatch.data.builtin import BUILTIN
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
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.WARNING)
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[terminal])
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("fullbatch: stopped before the first step.", file=sys.stderr)
        return 130
    except Interrupted as stopped:
        print(f"fullbatch: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except BrokenPipeError:  # `fullbatch recipes NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if os.environ.get("FULLBATCH_TRACEBACK"):
            raise
        print(f"fullbatch: {_advice(error)}", file=sys.stderr)
        return 1


def _advice(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        first = str(error).split(".")[0]
        return f"{first}. The same gradient in less memory: --micro-batch (a divisor of a rank's share of the batch)."
    return str(error)


def run() -> None:
    """The console script."""
    warnings.showwarning = _log_warning
    sys.exit(main())


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line without the line of code, on the terminal and in the run's log."""
    logging.getLogger("fullbatch").warning("%s", message)


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "export": _export, "recipes": _recipes}
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
            return 0
        case ["--version", *_]:
            print(f"fullbatch {fullbatch.__version__}")
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
