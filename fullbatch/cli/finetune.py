"""``fullbatch finetune``: measure a pretrained model, tune it, and say whether it became better;
``fullbatch interpolate``: what the weights between a base and a tuned model are worth."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from fullbatch.cli.evaluate import Measuring
from fullbatch.cli.train import Command, help_asked, train_config
from fullbatch.config.run import RunConfig

if TYPE_CHECKING:
    from fullbatch.finetuning.finetune import Finetuned
    from fullbatch.finetuning.interpolation import Point
    from fullbatch.finetuning.record import Record


@dataclass(frozen=True)
class _Judging:
    """What decides whether the tuned model is better.

    metric      picks the best epoch: "mean" (of the tasks' main metrics) or "TASK METRIC"; None: mean
    tolerance   the base is kept if a task falls by more than this share; None: 0.01
    """

    metric: str | None = None
    tolerance: str | None = None


ABOUT = (
    "Fine-tune a pretrained CLIP-style model (TuneCLIP), and keep the base where tuning did harm. --model takes a run "
    "folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip name with --pretrained."
)
FINETUNE = Command("finetune", ABOUT, "tuneclip", (_Judging(),))
_BRING_DATA = ("--data", "--config", "--resume", "--help-all")  # a recipe names the paper's, which nobody has


def finetune(arguments: list[str]) -> int:
    if help_asked(arguments, FINETUNE):
        return 0
    own = argparse.ArgumentParser(prog="fullbatch finetune", add_help=False, allow_abbrev=False)
    own.add_argument("--metric")
    own.add_argument("--tolerance")
    chosen, _ = own.parse_known_args(arguments)
    if not any(word.split("=", 1)[0] in _BRING_DATA for word in arguments):
        raise ValueError(
            "--data says what to fine-tune on: tar shards, a CSV file, a folder, ...; see docs/reference/data.md."
        )
    config, resume = train_config(arguments, command=FINETUNE)
    from fullbatch.cli.printing import print_lines
    from fullbatch.finetuning import finetune as tuning

    tuned = tuning.finetune(config, chosen.metric, _tolerance(chosen.tolerance), resume)
    if int(os.environ.get("RANK", "0")) == 0:
        print_lines(_finetuned_lines(tuned))
    return 0


def _tolerance(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ValueError(f"--tolerance must be a share such as 0.01, got {text!r}.") from None


def _finetuned_lines(tuned: Finetuned) -> list[str]:
    """What was measured, what it cost, and what to do now."""
    from fullbatch.cli.printing import cost_lines

    run, record = tuned.trained.folder, tuned.record
    lines = [*_record_lines(record), *cost_lines(tuned.trained.results.get("cost", {})), ""]
    best = record.best
    if tuned.verdict.outcome == "tuned":
        assert best is not None and best.score is not None and record.base is not None
        gain = best.score - (record.base.score or 0.0)
        lines.append(f"The tuned model is better by {100 * gain:.2f} points ({record.metric}, epoch {best.epoch:g}).")
        if fell := sum(change.change < 0.0 for change in record.changes):
            numbers = f"{fell} of {len(record.changes)} numbers"
            lines.append(f"{numbers} fell, none by more than the tolerance, {record.tolerance:g}.")
        lines.append(f"Take {tuned.model}.")
    else:
        scores = [None if epoch is None else epoch.score for epoch in (record.base, best)]
        why = "the tuned model is no better"
        if scores[0] is None or scores[1] is None:
            why = "the tuned model could not be compared with it"
        elif scores[1] < scores[0] or any(change.regressed for change in record.changes):
            why = "the tuned model would leave you worse off"
        lines += [f"THE BASE IS KEPT: {why}.", *(f"  {reason}" for reason in tuned.verdict.reasons)]
        lines.append(f"Take {tuned.model}, which is the model as it was.")
        if best is not None:
            lines.append("Weights between the two often keep what was learned and lose less; measure them with")
            lines.append(f"  fullbatch interpolate {run}")
    return [
        *lines,
        "Measure it on other tasks, or write it for open_clip or transformers, with",
        f"  fullbatch evaluate {tuned.model} --tasks TASK ...",
        f"  fullbatch export {tuned.model} FOLDER --format open_clip",
        "",
        f"run folder: {run}",
    ]


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.2%}"


def _record_lines(record: Record) -> list[str]:
    """Epoch by epoch, then task by task."""
    from fullbatch.cli.printing import columns

    lines = [f"epoch      score ({record.metric})"]
    for epoch in record.epochs:
        mark = "  best epoch" if epoch.step == record.best_step else "  base" if epoch.epoch == 0 else ""
        lines.append(f"{epoch.epoch:>5.3g}  {_score(epoch.score):>9}{mark}")
    rows: list[tuple[str, ...]] = [("task", "metric", "base", "tuned", "change", "chance", "")]
    for change in record.changes:
        chance = "" if change.chance is None else f"{change.chance:.2%}"
        numbers = (f"{change.base:.2%}", f"{change.tuned:.2%}", f"{100 * change.change:+.2f}")
        rows.append((change.task, change.metric, *numbers, chance, "REGRESSED" if change.regressed else ""))
    return [*lines, "", *(columns(rows, left=2) if record.changes else [])]


@dataclass(frozen=True, kw_only=True)
class _Interpolate(Measuring):
    """Measure the models (1 - alpha) base + alpha tuned, and keep the best that lets no task fall (WiSE-FT)."""

    # the folder of a `fullbatch finetune` run; or BASE TUNED: run folders, checkpoints, exports
    models: tyro.conf.Positional[tuple[str, ...]]
    alphas: tuple[float, ...] = ()  # from 0, the base, to 1, the tuned model; default: 0 0.1 ... 1
    tasks: tuple[str, ...] = ()  # what to measure; default: the run's, else those of the built-in emoji
    metric: str | None = None  # what the best one is best in: mean, or "TASK METRIC"; default: the run's, else mean
    tolerance: str | None = None  # how far a task may fall below the base, a share; default: the run's, else 0.01
    output: Path | None = None  # the folder for the best model; default: interpolated in the run's folder


@dataclass(frozen=True)
class _Ends:
    base: str
    tuned: str
    config: RunConfig  # the run's; of two models that are of no run, the defaults
    metric: str
    tolerance: float
    run: Path | None  # its folder, if there is one


def interpolate(arguments: list[str]) -> int:
    options = tyro.cli(_Interpolate, args=arguments, prog="fullbatch interpolate")
    from fullbatch import distributed
    from fullbatch.assembly import make_embedder, pick_device
    from fullbatch.cli.printing import print_lines
    from fullbatch.config.model import Model
    from fullbatch.evaluation.tasks import BUILTIN_TASKS, check_tasks, run_tasks
    from fullbatch.finetuning import interpolation
    from fullbatch.finetuning.record import check_tolerance, deciding
    from fullbatch.loading import open_model, write_model
    from fullbatch.training.display import Display
    from fullbatch.training.run_folder import replace_text

    ends = _ends(options)
    config = options.over(ends.config)
    check_tolerance(ends.tolerance)
    for alpha in options.alphas:
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"--alphas must lie in [0, 1], got {alpha}; 0 is the base, 1 the tuned model.")
    alphas = sorted({0.0, *(options.alphas or interpolation.ALPHAS)})  # the others are compared with the base
    tasks = options.tasks or config.evaluation.evaluate or BUILTIN_TASKS["emoji"]
    ends = replace(ends, metric=deciding(ends.metric, tasks))
    if (given := options.output) is not None:
        if given.exists() and not (given.is_dir() and not any(given.iterdir())):  # it may hold something of the user's
            raise ValueError(f"--output {given} exists already; name a new folder.")
        if given.suffix:
            raise ValueError(f"--output {given} is to be a folder; `fullbatch export FOLDER FILE` then writes a file.")
    output = options.output or (None if ends.run is None else ends.run / interpolation.INTERPOLATED)
    with distributed.ranks(device := pick_device(config)) as world:
        first = world.rank == 0
        distributed.together(lambda: check_tasks(tasks))
        opened = [distributed.together(lambda name=name: open_model(Model(name))) for name in (ends.base, ends.tuned)]  # type: ignore[misc]
        between = interpolation.Between(*opened)
        model = between.model.to(device).eval()
        display = Display(first, quiet=False)
        embedder = make_embedder(config, model, model, device, display.measured)

        points: list[Point] = []
        with display.bars():
            measure = partial(run_tasks, tasks, embedder, config.evaluation.templates)
            for point in interpolation.measure_curve(between, alphas, measure, ends.metric, ends.tolerance):
                display.say(f"alpha {point.alpha:g}: {_score(point.score)}")
                points.append(point)
        written: str | None = None
        alpha = interpolation.best_of(points).alpha
        if output is not None and alpha > 0.0:
            best, folder = between.at(alpha), output
            distributed.together(lambda: write_model(best, folder) if first else None)
            written = output.name if ends.run is not None and output.parent == ends.run else str(output)
        elif first and output is not None and options.output is None:
            shutil.rmtree(output, ignore_errors=True)  # an earlier call's, which this curve does not speak of
        place = ends.run or output
        file = None if place is None else place / interpolation.FILE
        if first and file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            judged = {name: getattr(ends, name) for name in ("base", "tuned", "metric", "tolerance")}
            curve = {"points": [asdict(point) for point in points], "best_alpha": alpha, "written": written}
            replace_text(file, json.dumps({**judged, **curve}, indent=1) + "\n")
    if first:
        print_lines(_curve_lines(points, ends, output, written, file))
    return 0


def _ends(options: _Interpolate) -> _Ends:
    from fullbatch.finetuning.finetune import TOLERANCE
    from fullbatch.finetuning.record import BASE, MEAN, TUNED, read_record
    from fullbatch.training.run_folder import Folder

    given = _tolerance(options.tolerance)
    if len(options.models) == 2:
        base, tuned = options.models
        tolerance = TOLERANCE if given is None else given
        return _Ends(base, tuned, RunConfig(), options.metric or MEAN, tolerance, None)
    if len(options.models) != 1:
        raise ValueError(
            f"interpolate takes the folder of a `fullbatch finetune` run, or two models, BASE TUNED; got "
            f"{len(options.models)}."
        )
    run = Path(options.models[0])
    try:
        record = read_record(run)
    except ValueError as error:
        raise ValueError(f"{error} For any two models name both: fullbatch interpolate BASE TUNED.") from None
    if not (run / TUNED).is_dir():
        raise ValueError(
            f"{run} has no tuned model yet: no epoch has been measured. Go on with `fullbatch finetune --resume {run}`."
        )
    metric, tolerance = options.metric or record.metric, record.tolerance if given is None else given
    return _Ends(str(run / BASE), str(run / TUNED), Folder(run).read_config(), metric, tolerance, run)


def _curve_lines(
    points: list[Point], ends: _Ends, output: Path | None, written: str | None, file: Path | None
) -> list[str]:
    from fullbatch.cli.printing import columns
    from fullbatch.finetuning.interpolation import best_of

    names, best = list(points[0].values), best_of(points)
    heads = ("alpha", f"score ({ends.metric})", *(f"[{place + 1}]" for place in range(len(names))), "")
    rows: list[tuple[str, ...]] = [heads]
    for point in points:
        values = [_score(point.values.get(name)) for name in names]
        fallen = [str(place + 1) for place, name in enumerate(names) if name.rsplit(" ", 1)[0] in point.regressed]
        remark = "best" if point is best else f"regressed: {', '.join(fallen)}" if fallen else ""
        rows.append((f"{point.alpha:g}", _score(point.score), *values, remark))
    lines = columns(rows, left=0)
    lines += ["", *(f"[{place + 1}] {name}" for place, name in enumerate(names)), ""]
    if best.alpha == 0.0:
        lines.append(f"Nothing in between is better than the base without letting a task fall: keep {ends.base}.")
    else:
        lines.append(f"The best is alpha {best.alpha:g}: no task falls by more than the tolerance, {ends.tolerance:g}.")
        lines.append(f"written to {output}" if written else "Write it with --output FOLDER.")
    return [*lines, *([f"the curve is in {file}"] if file is not None else [])]
