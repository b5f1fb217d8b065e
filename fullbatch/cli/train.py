"""``fullbatch train``: flags over a recipe over the defaults, then the run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullbatch.cli.help import short_help
from fullbatch.config.data import BUILTIN, Source
from fullbatch.config.run import AXES, RIVALS, RunConfig, giving_way, layered
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.recipes import DEFAULT_RECIPE, recipe_values


@dataclass(frozen=True)
class Command:
    """A command that takes a run's flags."""

    name: str = "train"
    about: str = "Train a CLIP-style model on pictures and their captions."  # the first lines of its help
    recipe: str | None = None  # where the user names neither recipe nor config; None: the demo's, on its data
    own: tuple[Any, ...] = ()  # groups of flags beside a run's


def train_config(
    arguments: Sequence[str], values: Mapping[str, Any] | None = None, command: Command = Command()
) -> tuple[RunConfig, str | None]:
    """The config of ``fullbatch train ARGUMENTS``, and the run folder to resume if one is named.

    Later wins: the defaults, the recipe, the config file (or the resumed run's config), the flags.
    ``values`` stand in a config file's place.
    """
    going_on = _automatic(arguments, values, command)
    base, chosen = _start(going_on, values, command)
    from fullbatch.cli.flags import config_from_flags

    config = config_from_flags(base, going_on, command.name, command.about, command.own)
    if chosen.resume and (config.run.runs, config.run.name) != (base.run.runs, base.run.name):
        raise ValueError(f"--resume goes on in {chosen.resume}; leave --name and --runs out.")
    return _as_begun(base, config) if chosen.resume else config, chosen.resume


def _as_begun(begun: RunConfig, config: RunConfig) -> RunConfig:
    """A run that ``holding_out`` began keeps its parts where its data are given again as they were given then."""
    given, tasks = config.data.sources, begun.evaluation.evaluate or ()
    split = [(replace(source, part="train"), _held_out_task(source) in tasks) for source in given]
    parts = [part if task else source for source, (part, task) in zip(given, split, strict=True)]
    if parts != list(begun.data.sources):
        return config
    return replace(config, data=replace(config.data, data=begun.data.data))


def _automatic(arguments: Sequence[str], values: Mapping[str, Any] | None, command: Command) -> Sequence[str]:
    """``--resume auto``, for a scheduler that starts a command again and again: the run of this --name goes on if it
    has begun, and begins otherwise."""
    chosen, beginning = _taken(arguments, "resume")
    if chosen.resume != "auto":
        return arguments
    run = train_config(beginning, values, command)[0].run
    if not run.name:
        raise ValueError("--resume auto goes on with the run of this --name, or begins it: give a --name.")
    folder = Path(run.runs) / run.name
    if not (folder / "config.yaml").is_file():
        return beginning
    others = _taken(arguments, "resume", "recipe", "config")[1]  # the run brings its own
    return [*others, "--resume", str(folder)]


def _taken(arguments: Sequence[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    """What these flags say, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(arguments)


def help_asked(arguments: Sequence[str], command: Command = Command()) -> bool:
    """Print the short help, if it is asked for."""
    if not {"-h", "--help"} & set(arguments):
        return False
    asked = [word for word in arguments if word not in ("-h", "--help")]
    chosen, beginning = _taken(asked, "resume")
    base, _ = _start(beginning if chosen.resume == "auto" else asked, None, command, demo=False)
    print(short_help(command.name, command.about, base))
    return True


def _start(
    arguments: Sequence[str], values: Mapping[str, Any] | None, command: Command, demo: bool = True
) -> tuple[RunConfig, argparse.Namespace]:
    """The config that the other flags change, and the flags that decide on it."""
    first = argparse.ArgumentParser(prog=f"fullbatch {command.name}", add_help=False, allow_abbrev=False)
    for name in ("recipe", "config", "resume", *AXES, *(name for names in RIVALS for name in names)):
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    first.add_argument("--data", nargs="+")
    chosen, _ = first.parse_known_args(arguments)

    if chosen.resume and (chosen.recipe or chosen.config):
        raise ValueError("--resume brings the run's own config; leave --recipe and --config out.")
    if chosen.epochs is not None and chosen.samples is not None:
        raise ValueError("--epochs and --samples both say how long to train; give one of them.")
    own_data = any(Source.parse(text).path not in BUILTIN for text in chosen.data or ())
    own_values = chosen.config or chosen.resume or values is not None
    usual = command.recipe or (None if own_data or not demo else DEFAULT_RECIPE)
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
    return from_dict(RunConfig, merged(values, {"objective": axes}) if axes else values), chosen


def holding_out(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> RunConfig:
    """Where all data is the user's own and nothing says what to measure on: train on a part of it, measure on the rest.
    Not where a source has too few pictures for that, or a great many, nor where less than a batch would be left."""
    sources = config.data.sources
    own = all(source.path not in BUILTIN and source.part == "all" for source in sources)
    if config.evaluation.evaluate is not None or config.model.view_tower is not None or not own:
        return config
    from fullbatch.data.sources import LARGE, open_source, parts_of

    data, tasks, left = [], [], 0
    for source in sources:
        whole = open_source(source)
        if len(whole) > LARGE:
            return config
        trained, held = parts_of(whole)
        left += len(trained)
        data.append(str(replace(source, part="train") if len(held) else source))
        if len(held):
            tasks.append(_held_out_task(source))
            say(f"{len(held):,} of {len(held.whole):,} pictures of {source} are kept out of training, to measure on")
    if not tasks or left < config.training.batch_size:
        return config
    held_out = replace(config.evaluation, evaluate=tuple(tasks))
    return replace(config, data=replace(config.data, data=tuple(data)), evaluation=held_out)


def _held_out_task(source: Source) -> str:
    return f"retrieval:{replace(source, part='held_out', weight=1.0)}"


def train(arguments: list[str]) -> int:
    if help_asked(arguments):
        return 0
    config, resume = train_config(arguments)
    from fullbatch import training_run
    from fullbatch.assembly import check_packages
    from fullbatch.cli.printing import print_lines, result_lines
    from fullbatch.finetuning.record import FILE
    from fullbatch.training.display import Display

    if resume is not None and (Path(resume) / FILE).is_file():
        raise ValueError(f"{resume} fine-tunes a model; go on with `fullbatch finetune --resume {resume}`.")
    first = int(os.environ.get("RANK", "0")) == 0
    check_packages(config)  # before the data are opened
    if resume is None:
        notes: list[str] = []
        split = holding_out(config, notes.append)
        for note in notes if split != config else ():
            Display(first, quiet=True).say(f"{note}; name other tasks with --evaluate, or none at all")
        config = split
    trained = training_run.train(config, resume)
    if first:
        print_lines(
            [
                *result_lines(trained),
                "Measure it on other tasks, look at it, search pictures with it, or write it for other programs, with",
                f"  fullbatch evaluate {trained.folder} --tasks TASK ...",
                f"  fullbatch report {trained.folder}",
                f"  fullbatch find {trained.folder} FOLDER_OF_PICTURES --serve",
                f"  fullbatch export {trained.folder} FOLDER",
            ]
        )
    return 0
