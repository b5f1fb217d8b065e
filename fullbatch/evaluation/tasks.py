"""From tasks by name to numbers: what is measured, on which data, and what chance would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from typing_extensions import assert_never

from fullbatch import distributed
from fullbatch.config import tasks as kinds
from fullbatch.config.data import BUILTIN, Source
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import parse_task
from fullbatch.data.sample import ImageFolder, Samples, images_below
from fullbatch.data.sources import open_source
from fullbatch.data.table_files import ByPicture, CsvTable
from fullbatch.evaluation import measure
from fullbatch.evaluation.benchmark_folders import open_benchmark
from fullbatch.evaluation.datacomp import ENTRIES, ArrowPairs, Entry, associations, averages
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.frozen_features import labelled_features, linear_probe, neighbours
from fullbatch.evaluation.metric_names import MOST_READ, count
from fullbatch.evaluation.result import Gap, Measured, Result
from fullbatch.evaluation.retrieval import equal_captions, own_captions
from fullbatch.evaluation.view_retrieval import corrupted_views, other_view, published_corruptions

VIEW_TASKS = "take views:SOURCE, corrupted_views:SOURCE, knn:TRAIN|TEST or linear:TRAIN|TEST"
# What is measured after training on a built-in set, unless the user says otherwise.
BUILTIN_TASKS = {
    "emoji": (
        "retrieval:emoji?split=new_style",
        "retrieval:emoji?split=new_concept",
        "zero_shot:emoji?split=new_style&captions=group",
        "zero_shot:emoji?split=new_style&captions=subgroup",
        "zero_shot:emoji?split=new_concept&captions=group",
        "zero_shot:emoji?split=new_concept&captions=subgroup",
    )
}


def tasks_of(config: RunConfig) -> tuple[str, ...]:
    if config.evaluation.evaluate is not None:
        return config.evaluation.evaluate
    if config.model.view_tower is not None:  # those of the built-in set need captions
        return ()
    trained_on = {source.path for source in config.data.sources}
    return tuple(task for name, tasks in BUILTIN_TASKS.items() if name in trained_on for task in tasks)


def check_tasks(tasks: Sequence[str], read: bool = True) -> None:
    """Say now, not after hours of training, that a source is not there, or, if ``read``, that it tells nothing."""
    for text in tasks:
        match task := parse_task(text):
            case kinds.Retrieval(source):
                _require(text, source, 2 * read, "the same caption for every image", lambda captions: captions)
            case kinds.ZeroShot(source):
                _require(text, source, 2 * read)
            case kinds.CorruptedViews(source) if published_corruptions(source.path):
                pass
            case kinds.OtherView(source) | kinds.CorruptedViews(source):
                _require(text, source, 1 * read)
            case kinds.Neighbours(train, test) | kinds.LinearProbe(train, test):
                _require(text, train, 2 * read)
                _require(text, test, 1 * read)
            case kinds.ImageNetFolder(path):
                folder = _require(text, measure.class_folders(path), 2 * read)
                if read and isinstance(folder, ImageFolder):
                    measure.require_imagenet(path, folder.kinds)
            case kinds.BenchmarkFolder(path):
                open_benchmark(path)
            case kinds.DataCompSuite(root):
                _require_suite(root)
            case _:
                assert_never(task)


def _require(
    text: str,
    source: Source,
    least: int,
    fewer: str = "one class",
    of: Callable[[tuple[str, ...]], object] = lambda captions: captions[0],
) -> Samples:
    """The source's samples: there are some, and ``of`` makes at least so many different things of their captions."""
    samples = open_source(source)
    if len(samples) == 0:
        raise ValueError(f"The task {text!r} has no sample in {source}.")
    counted = count(samples, least, of) if least else None
    if counted is not None and counted.classes == 0:
        tried = min(len(samples), MOST_READ)
        raise ValueError(
            f"The task {text!r}: none of {tried:,} samples can be read (first: {counted.problem}). If its images lie "
            "elsewhere, add ?root=FOLDER."
        )
    if counted is not None and counted.classes < least and counted.whole:
        raise ValueError(f"The task {text!r} has {fewer}: any model would be right.")
    return samples


def check_captions_unneeded(tasks: Sequence[str]) -> None:
    """For a model of two views, which reads no text: likewise before hours of training."""
    for text in tasks:
        if not isinstance(parse_task(text), kinds.OtherView | kinds.CorruptedViews | kinds.ProbeTask):
            raise ValueError(f"The task {text!r} needs captions, and a model of two views reads none; {VIEW_TASKS}.")


def run_tasks(
    tasks: Sequence[str],
    embedder: Embedder,
    templates: tuple[str, ...] | None = None,
    *,
    go_on: bool = False,
    say: Callable[[Result | Gap], None] = lambda answer: None,
) -> Measured:
    """All of them.  A task of a suite that fails is a gap and the others go on; with ``go_on`` so is any task.
    ``templates`` None is each task's own; a suite always has its own.  ``say`` hears each answer when it is there."""
    answers: list[Result | Gap] = []

    def keep(answer: Result | Gap) -> None:
        answers.append(answer)
        say(answer)

    main_of_key: dict[str, float] = {}
    suites = 0
    for text in tasks:
        task = parse_task(text)
        if isinstance(task, kinds.DataCompSuite):
            suites += 1
            distributed.together(lambda root=task.path: _require_suite(root))  # type: ignore[misc]
            for entry in ENTRIES:
                answer = _entry(entry, task.path, embedder)
                keep(answer)
                if isinstance(answer, Result):
                    main_of_key[entry.key] = answer.value
        else:
            keep(_attempted(text, lambda t=text: run_task(t, embedder, templates), go_on))  # type: ignore[misc]
    results = tuple(answer for answer in answers if isinstance(answer, Result))
    gaps = tuple(answer for answer in answers if isinstance(answer, Gap))
    return Measured(results, gaps, averages(main_of_key) if suites else ())


def _attempted(task: str, run: Callable[[], Result], go_on: bool) -> Result | Gap:
    try:
        return run()
    except (ValueError, OSError) as error:
        if not go_on:
            raise
        return Gap(task, "failed", str(error))


def run_task(text: str, embedder: Embedder, templates: tuple[str, ...] | None = None) -> Result:
    """One task that is no suite."""
    match task := parse_task(text):
        case kinds.Retrieval(source):
            images = embedder.images(distributed.together(lambda: _pictures(source)))
            if source.path in BUILTIN:  # only the first names what is shown, the others are keywords
                images = replace(images, captions=[of_image[:1] for of_image in images.captions])
            return measure.retrieved(text, images, equal_captions(images.captions), embedder)
        case kinds.ZeroShot(source):
            images = embedder.images(source)
            names = [of_image[0] for of_image in images.captions]
            classes = sorted(set(names))
            number = {name: place for place, name in enumerate(classes)}
            labels_N = torch.tensor([number[name] for name in names])
            result = measure.classified(text, images, labels_N, classes, templates or measure.PLAIN_TEMPLATES, embedder)
            return replace(result, notes=(*result.notes, *_empty_classes(source)))
        case kinds.ImageNetFolder(path):
            return measure.imagenet(text, path, templates or ("openai",), embedder)
        case kinds.BenchmarkFolder(path):
            return measure.benchmark(text, path, templates, embedder)
        case kinds.OtherView(source):
            return other_view(text, source, embedder)
        case kinds.CorruptedViews(source):
            return corrupted_views(text, source, embedder)
        case kinds.Neighbours(train, test):
            return neighbours(text, *labelled_features(text, train, test, embedder))
        case kinds.LinearProbe(train, test):
            return linear_probe(text, *labelled_features(text, train, test, embedder))
        case kinds.DataCompSuite():
            raise AssertionError("a suite is many tasks")
        case _:
            assert_never(task)


def _pictures(source: Source) -> Source | Samples:
    """A CSV file often has a row a caption: pictures are what is retrieved, so its rows are brought together."""
    samples = open_source(source)
    if isinstance(samples, CsvTable) and len(by_picture := ByPicture(samples)) < len(samples):
        return by_picture
    return source


def _empty_classes(source: Source) -> tuple[str, ...]:
    """Folders that would be classes if they held a picture."""
    root = Path(source.path)
    if source.captions != ("folder",) or not root.is_dir():
        return ()
    held = {Path(name).parts[0] for name in images_below(str(root))}
    empty = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in held)
    empty = [name for name in empty if not name.startswith(".")]
    if not empty:
        return ()
    return (f"{len(empty)} class folder(s) hold no picture and are no candidates (first: {empty[0]})",)


# ---------------------------------------------------------------------------------------------------------------------
# DataComp


def _require_suite(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"There is no folder {str(root)!r}, where DataComp's evaluation sets should lie.")
    if not any(entry.find(root) for entry in ENTRIES):
        expected = ", ".join(entry.expected for entry in ENTRIES[:3])
        raise ValueError(f"None of DataComp's {len(ENTRIES)} tasks lies in {str(root)!r}: no {expected}, ...")


def _entry(entry: Entry, root: Path, embedder: Embedder) -> Result | Gap:
    task, folder = f"datacomp:{entry.key}", entry.find(root)
    if folder is None:
        return Gap(task, "missing", f"there is no {entry.expected} in {root}")
    return _attempted(task, lambda: _entry_result(task, entry, folder, embedder), go_on=True)


def _entry_result(task: str, entry: Entry, folder: Path, embedder: Embedder) -> Result:
    counted = "images"
    match entry.main:
        case "jaccard_10_12":
            result, counted = associations(task, folder, embedder), "questions"
        case "mean_r1" if next(folder.rglob("*.arrow"), None) is not None:
            images = embedder.images(distributed.together(lambda: ArrowPairs(folder)))
            result = measure.retrieved(task, images, own_captions([len(of) for of in images.captions]), embedder)
        case "mean_r1":
            result = measure.benchmark(task, folder, None, embedder, "retrieval")
        case _:
            result = measure.benchmark(task, folder, None, embedder, "classification", entry.main)
    if result.counts[counted] == entry.size:
        return result
    note = f"{result.counts[counted]:,} {counted}, where DataComp has {entry.size:,}"
    return replace(result, notes=(*result.notes, note))
