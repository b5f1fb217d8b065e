"""``fullbatch evaluate``: a model in, numbers out."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from fullbatch.config.run import RunConfig

if TYPE_CHECKING:
    from fullbatch.evaluation.result import Gap, Result
    from fullbatch.models.two_towers import TwoTowers


@dataclass(frozen=True)
class Measuring:
    """How to measure a model."""

    # prompts with {} for the class, or openai or simple; default: the run's, or the task's own. DataComp has its own
    templates: tuple[str, ...] | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # default: the run's, else fp32
    batch_size: int = 256  # images a rank embeds at a time
    workers: int = 2  # processes that read and decode
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute

    def over(self, run: RunConfig) -> RunConfig:
        """The run's settings, where these flags do not say otherwise."""
        from fullbatch.assembly import changed

        return changed(
            run,
            device=self.device,
            eval_batch=self.batch_size,
            workers=self.workers,
            precision=self.precision or run.training.precision,
            graphs=False,  # nothing is trained
            compile=False,
            templates=run.evaluation.templates if self.templates is None else self.templates,
        )


@dataclass(frozen=True, kw_only=True)
class _Evaluate(Measuring):
    """Zero-shot, retrieval and DataComp numbers of a model."""

    # a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model's name
    model: tyro.conf.Positional[str]
    # retrieval:SOURCE, zero_shot:SOURCE, imagenet:FOLDER, wds:FOLDER, datacomp:ROOT, views:SOURCE,
    # corrupted_views:SOURCE, knn:TRAIN|TEST, linear:TRAIN|TEST; default: the run's
    tasks: tuple[str, ...] = ()
    pretrained: str | None = None  # an open_clip model's weights: a tag, or a checkpoint file
    output: Path | None = None  # the JSON file to write; default: evaluation.json in the run's folder
    cache: str = "auto"  # the folder that keeps embeddings; auto: in the cache folder, none: nowhere
    average: bool = True  # the averaged weights, where the run kept an average
    compile: bool = False  # compile the towers: some minutes that large tasks on a GPU win back


@dataclass(frozen=True)
class _Opened:
    model: TwoTowers
    name: dict[str, Any]  # what was evaluated, for the file
    config: RunConfig  # the run's; of a model that is of no run the defaults, without tasks
    output: Path | None  # where the numbers go unless the user says; None: nowhere


def evaluate(arguments: list[str]) -> int:
    options = tyro.cli(_Evaluate, args=arguments, prog="fullbatch evaluate")
    from fullbatch import distributed
    from fullbatch.assembly import make_embedder, pick_device
    from fullbatch.cli.printing import measured_lines, print_lines
    from fullbatch.evaluation.embed import EmbeddingCache
    from fullbatch.evaluation.result import Result
    from fullbatch.evaluation.tasks import check_tasks, run_tasks, tasks_of
    from fullbatch.training.display import Display
    from fullbatch.training.run_folder import replace_text

    with distributed.ranks(device := pick_device(options.over(RunConfig()))) as world:
        opened = distributed.together(lambda: _open(options))
        config = options.over(opened.config)
        tasks = options.tasks or tasks_of(config)
        if not tasks:
            raise ValueError("--tasks says what to measure, such as retrieval:pairs.csv or imagenet:FOLDER.")
        distributed.together(lambda: check_tasks(tasks, read=False))  # a task that fails is a gap among numbers
        first, output = world.rank == 0, options.output or opened.output
        display = Display(first, quiet=False)
        distributed.together(lambda: _check_output(output) if first and output is not None else None)
        pick_device(config)  # is there the run's precision on it?
        model, precision = opened.model.to(device).eval(), config.training.precision
        if options.compile:
            model.compile()
        cache = distributed.together(lambda: EmbeddingCache.of(options.cache, model, precision, device.type))
        embedder = replace(make_embedder(config, model, model, device, display.measured), cache=cache)
        started = time.perf_counter()

        def say(answer: Result | Gap) -> None:
            if isinstance(answer, Result) and len(tasks) + sum(task.startswith("datacomp:") for task in tasks) > 1:
                elapsed = time.perf_counter() - started
                display.say(f"{elapsed:7.0f} s  {answer.task}  {answer.main} {answer.value:.1%}")

        with display.bars():
            measured = run_tasks(tasks, embedder, config.evaluation.templates, go_on=True, say=say)
    if not first:
        return 0
    numbers = {**opened.name, "precision": precision, **measured.as_dict()}
    numbers["times"] = dict.fromkeys((result.task for result in measured.results), time.time())
    unwritten: OSError | None = None
    if output is not None:  # first of all: the terminal may be a pipe that closes
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            replace_text(output, json.dumps(_with_earlier(output, numbers), indent=1))
        except OSError as error:  # the disk may have filled up since; the numbers cost too much to lose
            unwritten = error
    print_lines(measured_lines(numbers))
    if unwritten is not None:
        raise ValueError(f"The numbers above are in no file: {output} cannot be written ({unwritten}).")
    if output is not None:
        print_lines(["", f"written to {output}"])
    return 1 if any(gap.kind == "failed" for gap in measured.gaps) else 0


def _with_earlier(output: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    """What was measured now, and of the same weights before: a task asked for today does not cost yesterday's."""
    try:
        before = json.loads(output.read_text(encoding="utf-8"))
        weights = ("model", "step", "average", "pretrained", "precision")
        same = all(before.get(key) == numbers.get(key) for key in weights)
        times = dict(before.get("times", {}))
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
        "times": times | numbers["times"],
    }


def _check_output(output: Path) -> None:
    """Before the work, by writing beside it what is gone at once: numbers that cannot be kept are work for nothing."""
    if output.exists() and not output.is_file():
        inside = f"a folder; name a JSON file in it, such as {output / 'evaluation.json'}"
        hint = inside if output.is_dir() else "no file"
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
    from fullbatch.loading import Loaded, open_model
    from fullbatch.training import checkpoint

    named = Model(options.model, options.pretrained)
    opened = open_model(named, temperature=1.0, average=options.average)  # no task asks for the temperature
    path, name = Path(options.model), {"model": options.model}
    if isinstance(opened, Loaded):
        output = path / "evaluation.json"
        if (path / checkpoint.MANIFEST).is_file():
            output = path.absolute().parent.parent / f"evaluation-{path.name}.json"
        kept = {"average": options.average} if opened.config.training.ema is not None else {}
        return _Opened(opened.model, {**name, "step": opened.step, **kept}, opened.config, output)
    if options.pretrained is not None:
        name["pretrained"] = options.pretrained
    return _Opened(opened.model, name, RunConfig.of(evaluate=()), None)
