"""``fullbatch compare``: methods x batch sizes x seeds on the same data, model and budget."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml
from rich.console import Console
from tyro.conf import arg

from fullbatch.cli.train import train_config
from fullbatch.config.checks import require
from fullbatch.config.methods import named_method, settings_of
from fullbatch.config.tree import to_dict
from fullbatch.training.display import print_line


@dataclass(frozen=True)
class Compare:
    """Race methods x batch sizes x seeds on the same data, model and budget.

    Every flag of `fullbatch train` that is not named here applies to all runs: --data, --model, --samples, --lr, ...
    """

    methods: Annotated[tuple[str, ...], arg(help="the methods; a plan file can have several rows of one")] = (
        "openclip", "sogclr", "neuclip",
    )  # fmt: skip
    batch_sizes: Annotated[tuple[int, ...] | None, arg(help="None: the recipe's")] = None
    seeds: Annotated[tuple[int, ...] | None, arg(help="None: 0 1 2")] = None
    settings_of: Annotated[
        tuple[str, ...], arg(help="a method's own settings or flags: neuclip.rho=5 openclip.temperature_lr=1e-4")
    ] = ()
    name: Annotated[str, arg(help='the folder of the comparison; "": by the time')] = ""
    comparisons: Annotated[Path, arg(help="the folder of all comparisons")] = Path("comparisons")
    plan: Annotated[Path | None, arg(help="a YAML file in place of --methods; see docs/how-to/compare.md")] = None
    resume: Annotated[Path | None, arg(help="go on with the comparison in this folder")] = None
    baseline: Annotated[str | None, arg(help="what the others are held against; None: openclip, or the first")] = None
    metric: Annotated[str | None, arg(help="METRIC or 'TASK METRIC'; None: the main one of the first task")] = None
    lr_scaling: Annotated[
        Literal["none", "sqrt", "linear"] | None, arg(help="the learning rate over batch sizes; None: none")
    ] = None
    lr_base_batch: Annotated[int | None, arg(help="the batch size --lr is meant for; None: the recipe's")] = None
    equal_time: Annotated[
        str | None, arg(help="train every method as long as this one takes, in place of equally many samples")
    ] = None
    order: Annotated[
        Literal["seeds", "batch_sizes", "methods"] | None, arg(help="the outermost loop of the runs; None: seeds")
    ] = None
    jobs: Annotated[int, arg(help="runs side by side, a process each; --workers are the data workers of each run")] = 1
    stop_after: Annotated[float | None, arg(help="minutes after which no further run is started")] = None
    retry_failed: Annotated[bool, arg(help="try runs again that failed")] = False
    quiet: Annotated[bool, arg(help="a line a run in place of bars")] = False
    page: Annotated[bool, arg(help="write report.html at the end")] = True

    def check(self) -> None:
        """Not at once: tyro would make a box of an error."""
        require(self.jobs >= 1, self, "jobs", "be a whole number of at least 1")
        require(self.stop_after is None or 0 < self.stop_after < math.inf, self, "stop_after", "be positive and finite")
        require(self.seeds != (), self, "seeds", "name at least one seed")
        require(self.batch_sizes != (), self, "batch_sizes", "name at least one batch size")


def compare(arguments: list[str]) -> int:
    options: Compare
    options, flags = parsed_options(Compare, "compare", "run", arguments)
    refuse_flags("compare", flags, _INSTEAD, "write --settings-of METHOD.NAME=VALUE")
    from fullbatch.trials.comparison import planned_in, race
    from fullbatch.trials.comparison_plan import plan_from
    from fullbatch.trials.processes import Pace
    from fullbatch.trials.progress import print_comparison

    pace = Pace(options.jobs, options.quiet, options.stop_after, options.retry_failed)
    if options.resume is not None:
        refuse_changes(options, flags, "--resume goes on with the plan in the folder", "retry_failed")
        plan, folder = planned_in(options.resume), options.resume
    else:
        plan = plan_from(plan_values(options, flags))
        folder = options.comparisons / plan.name
    summary = race(plan, folder, pace)
    statuses = {run["status"] for run in summary["runs"]}
    print_comparison(summary, Console(highlight=False))
    show_folder("comparison", folder, options.page)
    if "open" in statuses:
        say(f"go on with: fullbatch compare --resume {folder}")
    return 1 if "failed" in statuses else 0


def plan_values(options: Compare, flags: Sequence[str]) -> dict[str, Any]:
    """The plan's values: the file's, under what the command line says, with the base config whole."""
    from fullbatch.trials.comparison_plan import named_rows, read_plan

    file = read_plan(options.plan) if options.plan is not None else {}
    recipe = ["--recipe", str(file["recipe"])] if "recipe" in file else []
    base, _ = train_config([*recipe, *flags], file.get("base"))
    if options.plan is not None and options.methods != Compare().methods:
        raise ValueError("--plan has its own methods; leave --methods out.")
    rows = _with_settings(named_rows(file.get("methods", options.methods)), options.settings_of)
    labels = [row["name"] for row in rows]
    batch_size = base.training.batch_size
    usual = {
        "name": time.strftime("compare-%Y%m%d-%H%M%S"),
        "batch_sizes": () if file.get("runs") else (batch_size,),
        "seeds": (0, 1, 2),
        "baseline": "openclip" if "openclip" in labels or not labels else labels[0],
        "lr_base_batch": batch_size,
    }
    of_file = {name: value for name, value in file.items() if value not in (None, "") and name != "recipe"}
    names = (*usual, "metric", "lr_scaling", "equal_time", "order")
    over = {name: value for name in names if (value := getattr(options, name))}
    return {**usual, **of_file, **over, "base": to_dict(base), "methods": rows}


def _with_settings(rows: list[dict[str, Any]], settings: Sequence[str]) -> list[dict[str, Any]]:
    """``--settings-of LABEL.name=value`` put into its row: a setting of the method, else a flag."""
    for text in settings:
        place, equals, value = text.partition("=")
        label, dot, name = place.rpartition(".")
        row = next((row for row in rows if row["name"] == label), None)
        if not equals or not dot or row is None:
            labels = ", ".join(str(row["name"]) for row in rows)
            raise ValueError(f"--settings-of {text!r}: write METHOD.NAME=VALUE; the methods here are {labels}.")
        own = name in settings_of(named_method(row["method"]))
        flag = name.replace("-", "_")
        known = {field for group in to_dict(train_config([])[0]).values() for field in group}
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(getattr(error, "problem", None) or error).split())
            raise ValueError(f"--settings-of {text!r}: {value!r} is not a value as YAML has them: {reason}.") from None
        if own or flag not in known:
            row["settings"] = {**row.get("settings", {}), name: _number(parsed)}
        else:
            row[flag] = _number(parsed)
    return rows


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


_INSTEAD = {
    "method": "--methods names them all",
    "batch_size": "--batch-sizes names them all",
    "seed": "--seeds names them all",
    "runs": "--comparisons is the folder of all comparisons",
}


# ---------------------------------------------------------------------------------------------------------------------
# what `fullbatch compare` and `fullbatch search` have in common


def parsed_options(kind: type[Any], command: str, unit: str, arguments: list[str]) -> tuple[Any, list[str]]:
    """The command's own flags, checked, and those of `fullbatch train`."""
    options, flags = tyro.cli(kind, args=arguments, prog=f"fullbatch {command}", return_unknown_args=True)
    if "RANK" in os.environ:
        raise ValueError(f"`fullbatch {command}` starts its own processes, one a {unit}; start it without torchrun.")
    options.check()
    return options, flags


def names_in(flags: Sequence[str]) -> list[str]:
    return [flag.split("=", 1)[0][2:].replace("-", "_") for flag in flags if flag.startswith("--")]


def refuse_flags(command: str, flags: Sequence[str], instead: Mapping[str, str], settings: str) -> None:
    for name in names_in(flags):
        shown = f"--{name.replace('_', '-')}"
        if name in instead:
            raise ValueError(f"`fullbatch {command}` takes no {shown}: {instead[name]}.")
        if name.startswith("settings."):
            raise ValueError(f"{shown}: settings are a method's own; {settings}.")


def show_folder(kind: str, folder: Path, page: bool) -> None:
    if page:
        from fullbatch.report.page import write_page

        write_page([folder], folder / "report.html")
    say("")
    say(f"{kind} folder: {folder}")


def say(text: str) -> None:
    print_line(Console(highlight=False), text)


def refuse_changes(options: Any, flags: Sequence[str], why: str, *free: str) -> None:
    """A plan that was begun stays; ``free``: what does not touch it, beside the pace."""
    default, pace = vars(type(options)()), ("resume", "jobs", "quiet", "stop_after", "page")
    changed = [name for name, value in vars(options).items() if name not in (*pace, *free) and value != default[name]]
    if changed or flags:
        first = f"--{changed[0].replace('_', '-')}" if changed else flags[0]
        raise ValueError(f"{why}; leave {first} out.")
