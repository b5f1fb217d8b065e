"""``fullbatch search``: which method, which optimizer, which settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import arg

from fullbatch.cli.compare import names_in, parsed_options, refuse_changes, refuse_flags, say, show_folder
from fullbatch.cli.train import Command, train_config
from fullbatch.config.checks import require
from fullbatch.config.data import BUILTIN
from fullbatch.config.messages import nearest
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import parse_task
from fullbatch.config.tree import to_dict
from fullbatch.recipes import search_recipe

DEFAULT = "quick"
_ELSEWHERE = ("study", "searches", "lost_after")  # where and how a search is kept, not what it tries
LEAST_LOST_AFTER = 30.0  # a machine that is busy, or a disk that hangs, is silent for longer than one thinks


@dataclass(frozen=True)
class Search:
    """Find the method, the optimizer and the settings for your data: Bayesian search, a grid, a finer search, and
    finals over seeds, on Optuna.

    Every flag of `fullbatch train` that is not named here is part of the config that all trials start from: --data,
    --model, --batch-size, ...
    """

    recipe: Annotated[str | None, arg(help="a search recipe; see `fullbatch recipes`")] = None
    plan: Annotated[Path | None, arg(help="a YAML file in place of a recipe; see docs/how-to/search.md")] = None
    resume: Annotated[Path | None, arg(help="go on with the search in this folder")] = None
    study: Annotated[
        str | None,
        arg(help="the storage: an SQLite file, or an RDB URL; without a plan: join the search there"),
    ] = None
    name: Annotated[str | None, arg(help="of the search and of its folder; None: the plan's")] = None
    searches: Annotated[Path, arg(help="the folder of all searches on this machine")] = Path("searches")
    methods: Annotated[tuple[str, ...] | None, arg(help="None: the plan's")] = None
    optimizers: Annotated[tuple[str, ...] | None, arg(help="None: the plan's")] = None
    metrics: Annotated[
        tuple[str, ...] | None,
        arg(help="METRIC, 'TASK METRIC', 'mean(A, B)' or seconds; several: a Pareto front; None: the plan's"),
    ] = None
    pruner: Annotated[Literal["asha", "hyperband", "median", "none"] | None, arg(help="None: the plan's")] = None
    patience: Annotated[int | None, arg(help="evaluations without improvement that end a trial; None: the plan's")] = (
        None
    )
    jobs: Annotated[int, arg(help="trials side by side, a process each, on the GPUs in turn")] = 1
    stop_after: Annotated[float | None, arg(help="minutes after which no further trial is begun")] = None
    lost_after: Annotated[
        float, arg(help="seconds without a sign of life after which a worker on another machine counts as dead")
    ] = 180.0
    quiet: Annotated[bool, arg(help="a line a trial in place of bars")] = False
    page: Annotated[bool, arg(help="write report.html at the end")] = True

    def check(self) -> None:
        """Not at once: tyro would make a box of an error."""
        require(self.jobs >= 1, self, "jobs", "be a whole number of at least 1")
        require(self.lost_after >= LEAST_LOST_AFTER, self, "lost_after", f"be at least {LEAST_LOST_AFTER:g} seconds")
        require(self.stop_after is None or 0 < self.stop_after < math.inf, self, "stop_after", "be positive and finite")
        given = [name for name in ("recipe", "plan", "resume") if getattr(self, name) is not None]
        require(len(given) < 2, self, given[-1] if given else "plan", f"be left out with --{given[0] if given else ''}")


def search(arguments: list[str]) -> int:
    options: Search
    options, flags = parsed_options(Search, "search", "trial", arguments)
    _refuse(flags)
    from fullbatch.trials.processes import Pace
    from fullbatch.trials.progress import print_search
    from fullbatch.trials.search import resume_command
    from fullbatch.trials.search import search as run_search

    plan, folder, storage = _found(options, flags)
    pace = Pace(options.jobs, options.quiet, options.stop_after, lost_after=options.lost_after)

    def tell(summary: Mapping[str, Any]) -> None:
        print_search(summary, Console(highlight=False))
        show_folder("search", folder, options.page)

    summary = run_search(plan, folder, storage, pace, tell)
    tell(summary)
    if summary["cost"]["trials_done"] < summary["cost"]["trials_owed"]:
        say(f"go on with: {resume_command(folder, options.jobs)}")
    elif summary["winner"] is not None:
        say(f"train it: fullbatch train --config {shlex.quote(str(folder / 'best.yaml'))}")
    return 0


def _found(options: Search, flags: Sequence[str]) -> tuple[Any, Path, str]:
    """The plan, its folder here, and where the storage is: begun, gone on with, or joined."""
    from fullbatch.trials.search_plan import search_from
    from fullbatch.trials.storage import PLAN_FILE, kept_plan, naming, open_storage, plan_to_go_on_with, storage_of

    if options.resume is not None:
        refuse_changes(options, flags, "--resume goes on with the plan in the folder", *_ELSEWHERE)
        if not (options.resume / PLAN_FILE).is_file():
            raise ValueError(f"{options.resume} is not the folder of a search: there is no {PLAN_FILE} in it.")
        storage = storage_of(options.resume, options.study)
        with naming(storage):
            return plan_to_go_on_with(options.resume, storage), options.resume, storage
    if options.study is not None and options.plan is None and options.recipe is None:
        refuse_changes(options, flags, "--study without a plan joins the search there", *_ELSEWHERE, "name")
        with naming(options.study):
            plan = kept_plan(open_storage(options.study), options.name)
    else:
        plan = search_from(plan_values(options, flags))
    folder = options.searches / plan.name
    return plan, folder, storage_of(folder, options.study)


def plan_values(options: Search, flags: Sequence[str]) -> dict[str, Any]:
    """The plan's values: the file's or the recipe's, under what the command line says, with the base config whole."""
    from fullbatch.trials.comparison_plan import read_plan
    from fullbatch.trials.search_plan import SearchPlan

    file = read_plan(options.plan, SearchPlan) if options.plan is not None else search_recipe(options.recipe or DEFAULT)
    recipe = ["--recipe", str(file["recipe"])] if file.get("recipe") is not None else []
    base, _ = train_config([*recipe, *flags], file.get("base") or {}, Command("search"))
    if options.plan is None:
        _check_measured(base, options.recipe, flags)
    names = ("name", "methods", "optimizers", "metrics", "pruner", "patience")
    over = {name: value for name in names if (value := getattr(options, name)) is not None}
    named = options.plan.stem if options.plan is not None else options.recipe or DEFAULT
    return {"name": named, **file, "base": to_dict(base), **over}


def _check_measured(base: RunConfig, recipe: str | None, flags: Sequence[str]) -> None:
    """A recipe's tasks go with its data."""
    given = names_in(flags)
    own = [source.path for source in base.data.sources if source.path not in BUILTIN]
    measured = [parse_task(task).source.path for task in base.evaluation.evaluate or ()]
    builtin = [path for path in measured if path in BUILTIN]
    if "data" in given and "evaluate" not in given and own and builtin:
        usual = f"Without --recipe and --plan the recipe is {DEFAULT!r}, which"
        opening = f"The search recipe {recipe!r}" if recipe else usual
        raise ValueError(
            f"{opening} measures on the built-in {builtin[0]}, and that says nothing about {own[0]}. Say what to "
            f"measure on, such as --evaluate retrieval:HELD_OUT --metrics mean_r1 (and --image-size, which is "
            f"{base.data.image_size} there), or bring a plan with --plan; see docs/how-to/search.md."
        )


_OWN = {
    "method": "--methods names them all",
    "optimizer": "--optimizers names them all",
    "seed": "the plan has its seeds",
    "runs": "--searches is the folder of all searches",
    "resume": "--resume FOLDER stands alone",
    "config": "put it under `base` of a plan",
}


def _refuse(flags: Sequence[str]) -> None:
    refuse_flags("search", flags, _OWN, "give them in a plan, under `space` or `changes`")
    known = [*vars(Search()), *(name for group in to_dict(RunConfig()).values() for name in group)]
    for name in names_in(flags):
        if name.removeprefix("no_") not in known:
            guess = nearest(name, known).replace("_", "-")
            shown = name.replace("_", "-")
            raise ValueError(f"`fullbatch search` has no --{shown}{guess} `fullbatch search --help` shows its flags.")
