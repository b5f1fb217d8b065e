"""What a user reads before a run: the flags that matter first, and ``fullbatch recipes``."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import METHODS
from fullbatch.config.run import RunConfig
from fullbatch.recipes import DEFAULT_RECIPE, RECIPES, SEARCHES, first_line, recipe_text, search_text

_USAGE = "usage: fullbatch recipes [NAME | search NAME]"
_Group = dict[str, tuple[str, str]]  # flag: (its value, what it is)

_START: _Group = {
    "recipe": ("NAME", "start from a recipe's settings; `fullbatch recipes` lists them (default: none)"),
    "config": ("FILE", "start from a YAML file's settings, such as a run's config.yaml (default: none)"),
    "resume": ("FOLDER", "go on with the run in this folder; auto: with the --name's, if it has begun (default: none)"),
}
_READING: _Group = {"workers": ("N", "processes that read and decode pictures")}
_COMPUTING: _Group = {
    "precision": ("NAME", "fp32, bf16 or fp16"),
    "device": ("NAME", "auto, cpu or cuda"),
    "micro_batch": ("N", "pairs a device holds at a time, to save memory; same gradient (default: all of its share)"),
    "seed": ("N", "of the weights, the order and the crops"),
}
_FOLDER: _Group = {
    "runs": ("FOLDER", "the folder of all runs"),
    "name": ("NAME", "the run's folder in it (default: named by what is trained, and when)"),
    "quiet": ("", "log lines instead of a progress bar"),
}
_SOURCES = "pictures with captions: a folder, tar shards, CSV, Parquet, COCO or Hugging Face files; several are mixed"
_TASKS = "what to measure: retrieval:SOURCE, zero_shot:SOURCE, imagenet:FOLDER, ..."

# The flags of the short help.  Each text ends with the config's default; its own words stand where the config has none.
ESSENTIALS: dict[str, dict[str, _Group]] = {
    "train": {
        "your data": {
            "data": ("SOURCE ...", _SOURCES),
            "evaluate": ("TASK ...", f"{_TASKS} (default: retrieval on a part of your data, which is held out)"),
            "image_size": ("PIXELS", "of a side of the pictures (default: what the model takes)"),
            **_READING,
        },
        "start from": _START,
        "model and method": {
            "model": ("NAME", 'an open_clip model such as "ViT-B-32", a JSON file in its format, or "tiny"'),
            "pretrained": ("WEIGHTS", "an open_clip tag, a checkpoint, or an exported model (default: from scratch)"),
            "method": ("NAME", f"one of {listed(METHODS)}"),
        },
        "training": {
            "batch_size": ("N", "pairs a step, on all devices together"),
            "epochs": ("N", "passes over the data"),
            "samples": ("N", "pairs to train on, instead of epochs (default: as many as the epochs have)"),
            "lr": ("RATE", "the highest learning rate"),
            **_COMPUTING,
        },
        "run folder": {"evaluate_every": ("N", "measure after every N epochs; 0: at the end only"), **_FOLDER},
    },
    "finetune": {
        "your data": {
            "data": ("SOURCE ...", f"{_SOURCES} (required)"),
            "evaluate": ("TASK ...", f"{_TASKS} (default: the tasks of the built-in emoji)"),
            **_READING,
        },
        "start from": {**_START, "recipe": ("NAME", "start from a recipe's settings (default: tuneclip)")},
        "model": {
            "model": ("NAME", "the model to tune (required)"),
            "pretrained": ("WEIGHTS", "of an open_clip name: a tag, or a checkpoint file (default: none)"),
        },
        "is it better?": {
            "metric": ("METRIC", 'picks the best epoch: "mean" of all tasks, or "TASK METRIC" (default: mean)'),
            "tolerance": ("SHARE", "a task that falls by more keeps the base (default: 0.01)"),
        },
        "tuning": {
            "recovery_epochs": ("N", "passes with frozen weights, before they move; 0: none"),
            "epochs": ("N", "passes that move the weights"),
            "batch_size": ("N", "pairs a step, on all devices together"),
            "lr": ("RATE", "the highest learning rate"),
            **_COMPUTING,
        },
        "run folder": _FOLDER,
    },
}


def short_help(command: str, about: str, base: RunConfig) -> str:
    """The essentials of `fullbatch COMMAND`, with their defaults in ``base``."""
    values: dict[str, Any] = {name: value for group in vars(base).values() for name, value in vars(group).items()}
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [f"usage: fullbatch {command} --data SOURCE ... [OPTIONS]", "", *textwrap.wrap(about, width)]
    for group, flags in ESSENTIALS[command].items():
        lines += ["", group]
        for name, (value, text) in flags.items():
            if values.get(name) not in (None, "") and not text.endswith("(required)"):
                text = f"{text.split(' (default: ')[0]} (default: {_written(values[name])})"
            head = f"  --{name.replace('_', '-')} {value}"
            lines += textwrap.wrap(text, width, initial_indent=f"{head:24}", subsequent_indent=" " * 24)
    lines += [
        "",
        f"Every flag, by group:     fullbatch {command} --help-all",
        f"A method's own settings:  fullbatch {command} --method sogclr --help-all",
        f"A recipe's values:        fullbatch {command} --recipe NAME -h",
    ]
    if command == "train":
        lines.append(f"Without --data the built-in demo is trained, by the recipe {DEFAULT_RECIPE}.")
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def recipes(arguments: list[str]) -> int:
    match arguments:
        case []:
            width = max(len(name) for name in (*RECIPES, *SEARCHES))
            for name in RECIPES:
                print(f"{name:{width}}  {first_line(recipe_text(name))}")
            print("\nShow one: fullbatch recipes NAME.  Use one: fullbatch train --recipe NAME --data ...")
            print("\nSearches:")
            for name in SEARCHES:
                print(f"{name:{width}}  {first_line(search_text(name))}")
            print("\nShow one: fullbatch recipes search NAME.  Use one: fullbatch search --recipe NAME --data ...")
        case ["-h" | "--help"]:
            print(_USAGE)
        case ["search", name]:
            print(search_text(name), end="")
        case [name] if name in RECIPES:
            print(recipe_text(name), end="")
        case [name] if name in SEARCHES:
            print(search_text(name), end="")
        case [name] if name != "search":
            names = tuple(dict.fromkeys((*RECIPES, *SEARCHES)))
            raise ValueError(f"There is no recipe {name!r}{nearest(name, names)} They are {listed(names)}.")
        case _:
            raise ValueError(_USAGE)
    return 0
