"""``fullbatch interpolate``: what the weights between a base and a tuned model are worth."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fullbatch.config.run import RunConfig

if TYPE_CHECKING:
    from fullbatch.finetuning.interpolation import Curve, Point

Flag = tyro.conf.arg


@dataclass(frozen=True)
class _Interpolate:
    """Measure the models (1 - alpha) base + alpha tuned, and keep the best that lets no task fall (WiSE-FT)."""

    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        Flag(help="the folder of a `fullbatch finetune` run; or BASE TUNED: run folders, checkpoints, exports"),
    ]
    alphas: Annotated[
        tuple[float, ...], Flag(help="from 0, the base, to 1, the tuned model; default: 0 0.1 ... 1")
    ] = ()
    tasks: Annotated[
        tuple[str, ...], Flag(help="what to measure; default: the run's, else those of the built-in emoji")
    ] = ()
    metric: Annotated[
        str | None, Flag(help='what the best one is best in: mean, or "TASK METRIC"; default: the run\'s, else mean')
    ] = None
    tolerance: Annotated[
        str | None, Flag(help="how far a task may fall below the base, a share; default: the run's, else 0.01")
    ] = None
    output: Annotated[
        Path | None, Flag(help="the folder for the best model; default: interpolated in the run's folder")
    ] = None
    templates: Annotated[tuple[str, ...] | None, Flag(help="prompts with {} for the class; default: the run's")] = None
    precision: Annotated[Literal["fp32", "bf16", "fp16"] | None, Flag(help="default: the run's, else fp32")] = None
    batch_size: Annotated[int, Flag(help="images a rank embeds at a time")] = 256
    workers: Annotated[int, Flag(help="processes that read and decode")] = 2
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag(help="where to compute")] = "auto"


@dataclass(frozen=True)
class _Ends:
    """config   the run's; of two models that are of no run, the defaults
    run      its folder, if there is one
    """

    base: str
    tuned: str
    config: RunConfig
    metric: str
    tolerance: float
    run: Path | None


def interpolate(arguments: list[str]) -> int:
    options = tyro.cli(_Interpolate, args=arguments, prog="fullbatch interpolate")
    from rich.console import Console

    from fullbatch import distributed
    from fullbatch.assembly import pick_device
    from fullbatch.commands.finetune import deciding
    from fullbatch.config.model import Model
    from fullbatch.config.training import check_templates
    from fullbatch.evaluation.embed import Embedder
    from fullbatch.evaluation.tasks import BUILTIN_TASKS, check_tasks
    from fullbatch.finetuning.base import open_model, write_model
    from fullbatch.finetuning.interpolation import (
        ALPHAS,
        FILE,
        INTERPOLATED,
        Between,
        check_alphas,
        measure_curve,
        write_curve,
    )
    from fullbatch.finetuning.record import check_tolerance
    from fullbatch.training.display import Display, print_line

    if options.templates is not None:
        check_templates(options.templates)
    ends = _ends(options)
    evaluation = ends.config.evaluation
    check_tolerance(ends.tolerance)
    alphas = check_alphas(options.alphas or ALPHAS)
    tasks = options.tasks or evaluation.evaluate or BUILTIN_TASKS["emoji"]
    ends = replace(ends, metric=deciding(ends.metric, tasks))
    precision = options.precision or ends.config.training.precision
    if options.output is not None:
        _require_new(options.output)
    output = options.output or (None if ends.run is None else ends.run / INTERPOLATED)
    device = pick_device(RunConfig.of(device=options.device, precision=precision))
    console = Console(highlight=False)
    with distributed.ranks(device) as world:
        first = world.rank == 0
        distributed.together(lambda: check_tasks(tasks))
        opened = [distributed.together(lambda name=name: open_model(Model(name))) for name in (ends.base, ends.tuned)]  # type: ignore[misc]
        between = Between(*opened)
        model = between.model.to(device).eval()
        size, pixels = model.image_size, ends.config.data.max_pixels
        display = Display(first, quiet=False)
        read = (options.batch_size, options.workers, pixels)
        embedder = Embedder(model, model.tokenize, size, device, precision, *read, watch=display.measured)

        def say(point: Point) -> None:
            display.say(f"alpha {point.alpha:g}: {'none' if point.score is None else f'{point.score:.2%}'}")

        templates = options.templates or evaluation.templates
        with display.bars():
            curve = measure_curve(between, alphas, embedder, tasks, templates, ends.metric, ends.tolerance, say)
        written: str | None = None
        if output is not None and curve.best.alpha > 0.0:
            best, folder = between.at(curve.best.alpha), output
            distributed.together(lambda: write_model(best, folder) if first else None)
            written = output.name if ends.run is not None and output.parent == ends.run else str(output)
        elif first and output is not None and options.output is None:
            shutil.rmtree(output, ignore_errors=True)  # an earlier call's, which this curve does not speak of
        file = ends.run / FILE if ends.run is not None else None if output is None else output / FILE
        if first and file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_curve(file, curve, ends.base, ends.tuned, ends.metric, ends.tolerance, written)
    if first:
        for line in _lines(curve, ends, output, written, file):
            print_line(console, line)
    return 0


def _require_new(output: Path) -> None:
    """Before the work: a folder that is there may hold something of the user's."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--output {output} exists already; name a new folder.")
    if output.suffix:
        raise ValueError(f"--output {output} is to be a folder; `fullbatch export FOLDER FILE` then writes a file.")


def _ends(options: _Interpolate) -> _Ends:
    from fullbatch.commands.finetune import number_of
    from fullbatch.finetuning.finetune import TOLERANCE
    from fullbatch.finetuning.record import BASE, MEAN, TUNED, read_record
    from fullbatch.training.run_folder import Folder

    tolerance = number_of(options.tolerance)
    if len(options.models) == 2:
        base, tuned = options.models
        return _Ends(
            base, tuned, RunConfig(), options.metric or MEAN, TOLERANCE if tolerance is None else tolerance, None
        )
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
    metric, allowed = options.metric or record.metric, record.tolerance if tolerance is None else tolerance
    return _Ends(str(run / BASE), str(run / TUNED), Folder(run).read_config(), metric, allowed, run)


def _lines(curve: Curve, ends: _Ends, output: Path | None, written: str | None, file: Path | None) -> list[str]:
    from fullbatch.commands.finetune import columns

    names = list(curve.points[0].values)
    heads = ("alpha", f"score ({ends.metric})", *(f"[{place + 1}]" for place in range(len(names))), "")
    rows: list[tuple[str, ...]] = [heads]
    for point in curve.points:
        score = "none" if point.score is None else f"{point.score:.2%}"
        values = [f"{point.values[name]:.2%}" if name in point.values else "none" for name in names]
        fallen = [str(place + 1) for place, name in enumerate(names) if name.rsplit(" ", 1)[0] in point.regressed]
        remark = "best" if point is curve.best else f"regressed: {', '.join(fallen)}" if fallen else ""
        rows.append((f"{point.alpha:g}", score, *values, remark))
    lines = columns(rows, left=0)
    lines += ["", *(f"[{place + 1}] {name}" for place, name in enumerate(names)), ""]
    best = curve.best
    if best.alpha == 0.0:
        lines.append(f"Nothing in between is better than the base without letting a task fall: keep {ends.base}.")
    else:
        lines.append(f"The best is alpha {best.alpha:g}: no task falls by more than the tolerance, {ends.tolerance:g}.")
        lines.append(f"written to {output}" if written else "Write it with --output FOLDER.")
    return [*lines, *([f"the curve is in {file}"] if file is not None else [])]
