"""``fullbatch evaluate``: a model in, numbers out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from fullbatch.config.run import RunConfig
    from fullbatch.evaluation.result import Gap, Result
    from fullbatch.models.load import Saved
    from fullbatch.models.towers import TwoTowers

Flag = tyro.conf.arg


@dataclass(frozen=True)
class _Evaluate:
    """Zero-shot, retrieval and DataComp numbers of a model."""

    model: Annotated[
        tyro.conf.Positional[str],
        Flag(help="a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model's name"),
    ]
    tasks: Annotated[
        tuple[str, ...],
        Flag(
            help="retrieval:SOURCE, zero_shot:SOURCE, imagenet:FOLDER, wds:FOLDER, datacomp:ROOT, views:SOURCE, "
            "corrupted_views:SOURCE, knn:TRAIN|TEST, linear:TRAIN|TEST; default: the run's"
        ),
    ] = ()
    pretrained: Annotated[str | None, Flag(help="an open_clip model's weights: a tag, or a checkpoint file")] = None
    output: Annotated[
        Path | None, Flag(help="the JSON file to write; default: evaluation.json in the run's folder")
    ] = None
    templates: Annotated[
        tuple[str, ...] | None,
        Flag(
            help="prompts with {} for the class, or openai or simple; default: the task's own. DataComp keeps its own"
        ),
    ] = None
    precision: Annotated[Literal["fp32", "bf16", "fp16"] | None, Flag(help="default: the run's, else fp32")] = None
    batch_size: Annotated[int, Flag(help="images a rank embeds at a time")] = 256
    workers: Annotated[int, Flag(help="processes that read and decode")] = 2
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag(help="where to compute")] = "auto"
    cache: Annotated[str, Flag(help="the folder that keeps embeddings; auto: in the cache folder, none: nowhere")] = (
        "auto"
    )
    average: Annotated[bool, Flag(help="the averaged weights, where the run kept an average")] = True


@dataclass(frozen=True)
class _Opened:
    """name     what was evaluated, for the file
    config   the run's; None where the model is of no run
    output   where the numbers go unless the user says; None: nowhere
    """

    model: TwoTowers
    name: dict[str, Any]
    config: RunConfig | None
    output: Path | None


def evaluate(arguments: list[str]) -> int:
    options = tyro.cli(_Evaluate, args=arguments, prog="fullbatch evaluate")
    from rich.console import Console

    from fullbatch import distributed
    from fullbatch.assembly import pick_device
    from fullbatch.config.run import RunConfig
    from fullbatch.config.training import check_templates
    from fullbatch.evaluation.cache import EmbeddingCache
    from fullbatch.evaluation.embed import Embedder
    from fullbatch.evaluation.result import Result
    from fullbatch.evaluation.tasks import check_tasks, run_tasks, tasks_of
    from fullbatch.results import print_measured
    from fullbatch.training.display import Display, print_line
    from fullbatch.training.run_folder import replace_text

    if options.templates is not None:
        check_templates(options.templates)
    asked = RunConfig.of(device=options.device, eval_batch=options.batch_size, workers=options.workers)
    with distributed.ranks(device := pick_device(asked)) as world:
        opened = distributed.together(lambda: _open(options))
        config = opened.config
        tasks = options.tasks or (tasks_of(config) if config is not None else ())
        if not tasks:
            raise ValueError("--tasks says what to measure, such as retrieval:pairs.csv or imagenet:FOLDER.")
        distributed.together(lambda: check_tasks(tasks, read=False))  # a task that fails is a gap among numbers
        first, output = world.rank == 0, options.output or opened.output
        display = Display(first, quiet=False)
        distributed.together(lambda: _check_output(output) if first and output is not None else None)
        precision = options.precision or ("fp32" if config is None else config.training.precision)
        pick_device(RunConfig.of(device=options.device, precision=precision))
        templates = options.templates or (None if config is None else config.evaluation.templates)
        model = opened.model.to(device).eval()
        cache = distributed.together(lambda: EmbeddingCache.of(options.cache, model, precision, device.type))
        embedder = Embedder(
            model,
            model.tokenize,
            model.image_size,
            device,
            precision,
            options.batch_size,
            options.workers,
            cache=cache,
            watch=display.measured,
        )
        console = Console(highlight=False)
        started = time.perf_counter()

        def say(answer: Result | Gap) -> None:
            if isinstance(answer, Result) and len(tasks) + sum(task.startswith("datacomp:") for task in tasks) > 1:
                display.say(_progress(answer, time.perf_counter() - started))

        with display.bars():
            measured = run_tasks(tasks, embedder, templates, go_on=True, say=say)
    if not first:
        return 0
    said = {**opened.name, "precision": precision, **measured.as_dict()}
    unwritten: OSError | None = None
    if output is not None:  # first of all: the terminal may be a pipe that closes
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            replace_text(output, json.dumps(_with_earlier(output, said), indent=1))
        except OSError as error:  # the disk may have filled up since; the numbers cost too much to lose
            unwritten = error
    print_measured(said, console)
    if unwritten is not None:
        raise ValueError(f"The numbers above are in no file: {output} cannot be written ({unwritten}).")
    if output is not None:
        console.print()
        print_line(console, f"written to {output}")
    return 1 if any(gap.kind == "failed" for gap in measured.gaps) else 0


def _with_earlier(output: Path, said: dict[str, Any]) -> dict[str, Any]:
    """What was measured now, and of the same weights before: a task asked for today does not cost yesterday's."""
    try:
        before = json.loads(output.read_text(encoding="utf-8"))
        same = all(before.get(key) == said.get(key) for key in ("model", "step", "pretrained", "precision"))
        results, gaps = list(before["results"]), list(before.get("gaps", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return said
    if not same:
        return said
    measured = {result["task"] for result in said["results"]}
    kept = [result for result in results if result["task"] not in measured]
    answered = measured | {result["task"] for result in kept} | {gap["task"] for gap in said["gaps"]}
    return {
        **said,
        "results": [*kept, *said["results"]],
        "gaps": [*(gap for gap in gaps if gap["task"] not in answered), *said["gaps"]],
        "averages": said["averages"] or before.get("averages", []),
    }


def _check_output(output: Path) -> None:
    """Before the work, by writing beside it what is gone at once: numbers that cannot be kept are work for nothing."""
    import tempfile

    if output.exists() and not output.is_file():
        hint = (
            f"a folder; name a JSON file in it, such as {output / 'evaluation.json'}" if output.is_dir() else "no file"
        )
        raise ValueError(f"--output: {output} is {hint}.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{output.name}.", dir=output.parent):
            pass
    except OSError as error:
        raise ValueError(f"{output} cannot be written ({error}); name another file with --output.") from None


def _progress(answer: Result, seconds: float) -> str:
    return f"{seconds:7.0f} s  {answer.task}  {answer.main} {answer.value:.1%}"


def _open(options: _Evaluate) -> _Opened:
    """By what lies at the path, else by open_clip's name."""
    from fullbatch.config.model import Model
    from fullbatch.loading import load_trained
    from fullbatch.models.build import build_model
    from fullbatch.training import checkpoint
    from fullbatch.training.run_folder import Folder

    path = Path(options.model)
    is_checkpoint, is_run = (path / checkpoint.MANIFEST).is_file(), Folder(path).config.is_file()
    if (is_checkpoint or is_run or path.exists()) and options.pretrained is not None:
        raise ValueError(f"{options.model} brings its weights; --pretrained belongs to an open_clip model's name.")
    if is_checkpoint or is_run:
        loaded = load_trained(path, options.average)
        run = path.absolute().parent.parent if is_checkpoint else path
        file = f"evaluation-{path.name}.json" if is_checkpoint else "evaluation.json"
        return _Opened(loaded.model, {"model": options.model, "step": loaded.step}, loaded.config, run / file)
    if path.exists():
        saved = _saved_at(path)
        if saved is None or saved.design is None:
            raise ValueError(
                f"{options.model} holds weights without their design; "
                f"name the model it belongs to: fullbatch evaluate ViT-B-32 --pretrained {options.model}."
            )
        return _Opened(build_model(Model(pretrained=str(path))), {"model": options.model}, None, None)
    if "/" in options.model and not options.model.startswith("ViT-"):
        raise ValueError(f"There is no run folder, checkpoint or exported model at {options.model!r}.")
    if options.pretrained is None:
        from fullbatch.models.open_clip_towers import design_named

        try:
            design_named(options.model)
        except ValueError as error:
            raise ValueError(f"There is no such path, and {str(error).removeprefix('--model ')}") from None
        raise ValueError(
            f"{options.model!r} has no weights: add --pretrained with an open_clip tag or a checkpoint file."
        )
    model = build_model(Model(model=options.model, pretrained=options.pretrained))
    return _Opened(model, {"model": options.model, "pretrained": options.pretrained}, None, None)


def _saved_at(path: Path) -> Saved | None:
    from fullbatch.models.load import find_saved
    from fullbatch.training.run_folder import Folder

    runs = sorted(run for run in path.iterdir() if Folder(run).config.is_file()) if path.is_dir() else []
    if runs:
        raise ValueError(f"{path} is a folder of {len(runs)} run(s); name one, such as {runs[-1]}.")
    try:
        return find_saved(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--pretrained ")) from None
