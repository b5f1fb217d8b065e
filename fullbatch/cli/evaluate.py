"""``fullbatch evaluate``: a model in, numbers out; ``fullbatch export``: a trained model for other programs."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from fullbatch.config.run import RunConfig

if TYPE_CHECKING:
    from fullbatch.evaluation.result import Gap, Result
    from fullbatch.models.saved import Saved
    from fullbatch.models.two_towers import TwoTowers


@dataclass(frozen=True)
class _Evaluate:
    """Zero-shot, retrieval and DataComp numbers of a model."""

    # a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model's name
    model: tyro.conf.Positional[str]
    # retrieval:SOURCE, zero_shot:SOURCE, imagenet:FOLDER, wds:FOLDER, datacomp:ROOT, views:SOURCE,
    # corrupted_views:SOURCE, knn:TRAIN|TEST, linear:TRAIN|TEST; default: the run's
    tasks: tuple[str, ...] = ()
    pretrained: str | None = None  # an open_clip model's weights: a tag, or a checkpoint file
    output: Path | None = None  # the JSON file to write; default: evaluation.json in the run's folder
    # prompts with {} for the class, or openai or simple; default: the task's own. DataComp keeps its own
    templates: tuple[str, ...] | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # default: the run's, else fp32
    batch_size: int = 256  # images a rank embeds at a time
    workers: int = 2  # processes that read and decode
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute
    cache: str = "auto"  # the folder that keeps embeddings; auto: in the cache folder, none: nowhere
    average: bool = True  # the averaged weights, where the run kept an average


@dataclass(frozen=True)
class _Opened:
    """name     what was evaluated, for the file
    config   the run's; of a model that is of no run the defaults, without tasks
    output   where the numbers go unless the user says; None: nowhere
    """

    model: TwoTowers
    name: dict[str, Any]
    config: RunConfig
    output: Path | None


def evaluate(arguments: list[str]) -> int:
    options = tyro.cli(_Evaluate, args=arguments, prog="fullbatch evaluate")
    from rich.console import Console

    from fullbatch import distributed
    from fullbatch.assembly import pick_device
    from fullbatch.cli.printing import print_measured
    from fullbatch.config.training import check_templates
    from fullbatch.evaluation.embed import Embedder, EmbeddingCache
    from fullbatch.evaluation.result import Result
    from fullbatch.evaluation.tasks import check_tasks, run_tasks, tasks_of
    from fullbatch.training.display import Display, print_line
    from fullbatch.training.run_folder import replace_text

    if options.templates is not None:
        check_templates(options.templates)
    asked = RunConfig.of(device=options.device, eval_batch=options.batch_size, workers=options.workers)
    with distributed.ranks(device := pick_device(asked)) as world:
        opened = distributed.together(lambda: _open(options))
        config = opened.config
        tasks = options.tasks or tasks_of(config)
        if not tasks:
            raise ValueError("--tasks says what to measure, such as retrieval:pairs.csv or imagenet:FOLDER.")
        distributed.together(lambda: check_tasks(tasks, read=False))  # a task that fails is a gap among numbers
        first, output = world.rank == 0, options.output or opened.output
        display = Display(first, quiet=False)
        distributed.together(lambda: _check_output(output) if first and output is not None else None)
        precision = options.precision or config.training.precision
        pick_device(RunConfig.of(device=options.device, precision=precision))
        templates = options.templates or config.evaluation.templates
        model = opened.model.to(device).eval()
        cache = distributed.together(lambda: EmbeddingCache.of(options.cache, model, precision, device.type))
        read = (options.batch_size, options.workers)
        embedder = Embedder(
            model, model.tokenize, model.image_size, device, precision, *read, cache=cache, watch=display.measured
        )
        console = Console(highlight=False)
        started = time.perf_counter()

        def say(answer: Result | Gap) -> None:
            if isinstance(answer, Result) and len(tasks) + sum(task.startswith("datacomp:") for task in tasks) > 1:
                elapsed = time.perf_counter() - started
                display.say(f"{elapsed:7.0f} s  {answer.task}  {answer.main} {answer.value:.1%}")

        with display.bars():
            measured = run_tasks(tasks, embedder, templates, go_on=True, say=say)
    if not first:
        return 0
    numbers = {**opened.name, "precision": precision, **measured.as_dict()}
    unwritten: OSError | None = None
    if output is not None:  # first of all: the terminal may be a pipe that closes
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            replace_text(output, json.dumps(_with_earlier(output, numbers), indent=1))
        except OSError as error:  # the disk may have filled up since; the numbers cost too much to lose
            unwritten = error
    print_measured(numbers, console)
    if unwritten is not None:
        raise ValueError(f"The numbers above are in no file: {output} cannot be written ({unwritten}).")
    if output is not None:
        console.print()
        print_line(console, f"written to {output}")
    return 1 if any(gap.kind == "failed" for gap in measured.gaps) else 0


def _with_earlier(output: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    """What was measured now, and of the same weights before: a task asked for today does not cost yesterday's."""
    try:
        before = json.loads(output.read_text(encoding="utf-8"))
        same = all(before.get(key) == numbers.get(key) for key in ("model", "step", "pretrained", "precision"))
        results, gaps = list(before["results"]), list(before.get("gaps", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return numbers
    if not same:
        return numbers
    measured = {result["task"] for result in numbers["results"]}
    kept = [result for result in results if result["task"] not in measured]
    answered = measured | {result["task"] for result in kept} | {gap["task"] for gap in numbers["gaps"]}
    return {
        **numbers,
        "results": [*kept, *numbers["results"]],
        "gaps": [*(gap for gap in gaps if gap["task"] not in answered), *numbers["gaps"]],
        "averages": numbers["averages"] or before.get("averages", []),
    }


def _check_output(output: Path) -> None:
    """Before the work, by writing beside it what is gone at once: numbers that cannot be kept are work for nothing."""
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


def _open(options: _Evaluate) -> _Opened:
    """By what lies at the path, else by open_clip's name."""
    from fullbatch.config.model import Model
    from fullbatch.loading import load_trained
    from fullbatch.models.build import build_model
    from fullbatch.training import checkpoint
    from fullbatch.training.run_folder import Folder

    path, of_no_run = Path(options.model), RunConfig.of(evaluate=())
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
        return _Opened(build_model(Model(pretrained=str(path))), {"model": options.model}, of_no_run, None)
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
    return _Opened(model, {"model": options.model, "pretrained": options.pretrained}, of_no_run, None)


def _saved_at(path: Path) -> Saved | None:
    from fullbatch.models.saved import find_saved
    from fullbatch.training.run_folder import Folder

    runs = sorted(run for run in path.iterdir() if Folder(run).config.is_file()) if path.is_dir() else []
    if runs:
        raise ValueError(f"{path} is a folder of {len(runs)} run(s); name one, such as {runs[-1]}.")
    try:
        return find_saved(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--pretrained ")) from None


# ---------------------------------------------------------------------------------------------------------------------
# fullbatch export


@dataclass(frozen=True)
class _Export:
    """Write a trained model for other programs."""

    run: tyro.conf.Positional[Path]  # a run folder, one of its checkpoints, or what was exported as safetensors
    output: tyro.conf.Positional[Path]  # the file or folder to write
    # open_clip: FILE.pt or a folder; huggingface: a folder; safetensors: either
    format: Literal["open_clip", "huggingface", "safetensors"] = "open_clip"
    average: bool = True  # the averaged weights, where the run kept an average
    overwrite: bool = False  # replace a file, or an earlier export in the folder


def export(arguments: list[str]) -> int:
    options = tyro.cli(_Export, args=arguments, prog="fullbatch export")
    from fullbatch.config.model import Model
    from fullbatch.finetuning.base import open_model
    from fullbatch.finetuning.record import FILE, result_of
    from fullbatch.loading import export_run
    from fullbatch.models.saved import EXPORTED
    from fullbatch.models.saved import export as write

    if options.run.is_file() or (options.run / EXPORTED).is_file():
        opened = open_model(Model(str(options.run)))
        start = opened.temperature, opened.bias
        print(write(opened.model, options.output, options.format, *start, options.overwrite))
    else:
        if (options.run / FILE).is_file() and (result := result_of(options.run)) is not None:
            note = f"note: this is the last checkpoint of a fine-tuning; what came of it is {result}"
            print(note, file=sys.stderr)
        print(export_run(options.run, options.output, options.format, options.average, options.overwrite))
    return 0
