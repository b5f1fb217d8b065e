"""``fullbatch train``: flags over a recipe over the defaults, then the run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fullbatch.config.data import Source
from fullbatch.config.layers import AXES, RIVALS, giving_way, layered
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.data.builtin import BUILTIN
from fullbatch.flags import TRAIN, config_from_flags
from fullbatch.recipes import DEFAULT_RECIPE, recipe_values


@dataclass(frozen=True)
class Command:
    """A command that takes a run's flags.

    about    the first line of its help
    recipe   what it starts from where the user names neither recipe nor config; None: the demo's, where there is no
             data of the user's own
    """

    name: str = "train"
    about: str = TRAIN
    recipe: str | None = None


def train_config(
    arguments: Sequence[str], values: Mapping[str, Any] | None = None, command: Command = Command()
) -> tuple[RunConfig, str | None]:
    """The config of ``fullbatch train ARGUMENTS``, and the run folder to resume if one is named.

    Later wins: the defaults, the recipe, the config file (or the resumed run's config), the flags.
    ``values`` stand in a config file's place.
    """
    first = argparse.ArgumentParser(prog=f"fullbatch {command.name}", add_help=False, allow_abbrev=False)
    for name in ("recipe", "config", "resume", *AXES, *(name for names in RIVALS for name in names)):
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    first.add_argument("--data", nargs="+")
    chosen, _ = first.parse_known_args([argument for argument in arguments if argument not in ("-h", "--help")])

    if chosen.resume and (chosen.recipe or chosen.config):
        raise ValueError("--resume brings the run's own config; leave --recipe and --config out.")
    if chosen.epochs is not None and chosen.samples is not None:
        raise ValueError("--epochs and --samples both say how long to train; give one of them.")
    own_data = any(Source.parse(text).path not in BUILTIN for text in chosen.data or ())
    own_values = chosen.config or chosen.resume or values is not None
    usual = command.recipe or (None if own_data else DEFAULT_RECIPE)
    recipe = chosen.recipe or (None if own_values else usual)
    values = layered(recipe_values(recipe) if recipe else {}, values or {})
    if chosen.config:
        values = layered(values, read_yaml(Path(chosen.config)))
    if chosen.resume:
        from fullbatch.training.run_folder import Folder

        values = layered(values, to_dict(Folder(Path(chosen.resume)).read_config()))
    axes = {axis: None if value == "None" else value for axis in AXES if (value := getattr(chosen, axis)) is not None}
    lengths = {name: getattr(chosen, name) for names in RIVALS for name in names}
    over = {"objective": axes, "training": lengths, "schedule": lengths, "recovery": lengths, "evaluation": lengths}
    values = giving_way(values, over)
    base = from_dict(RunConfig, merged(values, {"objective": axes}) if axes else values)
    config = config_from_flags(
        base, _without(arguments, ("--recipe", "--config", "--resume")), command.name, command.about
    )
    if chosen.resume and (config.run.runs, config.run.name) != (base.run.runs, base.run.name):
        raise ValueError(f"--resume goes on in {chosen.resume}; leave --name and --runs out.")
    return config, chosen.resume


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


def holding_out(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> RunConfig:
    """Where all data is the user's own and nothing says what to measure on: train on a part of it, measure on the rest.

    Not where a source has too few pictures for that, or a great many, nor where less than a batch would be left.
    """
    sources = config.data.sources
    own = all(source.path not in BUILTIN and source.part == "all" for source in sources)
    if config.evaluation.evaluate is not None or config.model.view_tower is not None or not own:
        return config
    from fullbatch.data import share
    from fullbatch.data.sources import open_source

    data, tasks, left = [], [], 0
    for source in sources:
        whole = open_source(source)
        if len(whole) > share.LARGE:
            return config
        trained, held = share.parts_of(whole)
        left += len(trained)
        data.append(str(replace(source, part="train") if len(held) else source))
        if len(held):
            tasks.append(f"retrieval:{replace(source, part='held_out', weight=1.0)}")
            say(f"{len(held):,} of {len(held.whole):,} pictures of {source} are kept out of training, to measure on")
    if not tasks or left < config.training.batch_size:
        return config
    held_out = replace(config.evaluation, evaluate=tuple(tasks))
    return replace(config, data=replace(config.data, data=tuple(data)), evaluation=held_out)


def train(arguments: list[str]) -> int:
    config, resume = train_config(arguments)
    from fullbatch import training_run
    from fullbatch.finetuning.record import FILE
    from fullbatch.results import print_results
    from fullbatch.training.display import Display, print_line

    if resume is not None and (Path(resume) / FILE).is_file():
        raise ValueError(f"{resume} fine-tunes a model; go on with `fullbatch finetune --resume {resume}`.")
    first = int(os.environ.get("RANK", "0")) == 0
    if resume is None:
        said: list[str] = []
        split = holding_out(config, said.append)
        for line in said if split != config else ():
            Display(first, quiet=True).say(f"{line}; --evaluate names other tasks, or none")
        config = split
    trained = training_run.train(config, resume)
    if first:
        console = Console(highlight=False)
        print_results(trained, console)
        for line in (
            "Measure it on other tasks, look at it, or write it for open_clip or transformers, with",
            f"  fullbatch evaluate {trained.folder} --tasks TASK ...",
            f"  fullbatch report {trained.folder}",
            f"  fullbatch export {trained.folder} FOLDER --format open_clip",
        ):
            print_line(console, line)
    return 0
