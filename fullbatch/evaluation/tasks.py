"""From tasks by name to numbers: what is measured, on which data, and what chance would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fullbatch import distributed
from fullbatch.config.data import BUILTIN, Source
from fullbatch.config.extras import require_extra
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import PROBES, parse_task
from fullbatch.data.sample import ImageFolder, Samples, images_below
from fullbatch.data.sources import open_source
from fullbatch.data.table_files import ByPicture, CsvTable
from fullbatch.evaluation import measure
from fullbatch.evaluation.benchmark_folders import open_benchmark
from fullbatch.evaluation.datacomp import ENTRIES, ArrowPairs, Entry, associations, averages
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.metric_names import MOST_READ, count
from fullbatch.evaluation.result import Gap, Measured, Result
from fullbatch.evaluation.retrieval import equal_captions, own_captions
from fullbatch.evaluation.view_retrieval import corrupted_views, other_view, published_corruptions

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
        task = parse_task(text)
        match task.kind:
            case "wds":
                open_benchmark(task.folder)
            case "datacomp":
                _require_suite(task.folder)
            case "corrupted_views" if published_corruptions(task.source.path):
                pass
            case kind:
                if kind == "corrupted_views":
                    require_extra("scipy", "corruptions", f"The task {text!r}")
                least = 1 if kind in ("views", "corrupted_views") else 2
                samples = _require(text, task.source, least * read, kind == "retrieval")
                if task.test is not None:
                    _require(text, task.test, 1 * read)
                if kind == "imagenet" and read and isinstance(samples, ImageFolder):
                    measure.require_imagenet(task.folder, samples.kinds)


def _require(text: str, source: Source, least: int, retrieved: bool = False) -> Samples:
    """The source's samples: some, of at least so many classes, or where they are retrieved with so many captions."""
    samples = open_source(source)
    if len(samples) == 0:
        raise ValueError(f"The task {text!r} has no sample in {source}.")
    if not least:
        return samples
    counted = count(samples, least, retrieved)
    if counted.classes == 0:
        tried = min(len(samples), MOST_READ)
        raise ValueError(
            f"The task {text!r}: none of {tried:,} samples can be read (first: {counted.problem}). If its images lie "
            "elsewhere, add ?root=FOLDER."
        )
    if counted.classes < least and counted.whole:
        fewer = "the same caption for every image" if retrieved else "one class"
        raise ValueError(f"The task {text!r} has {fewer}: any model would be right.")
    return samples


def check_captions_unneeded(tasks: Sequence[str]) -> None:
    """For a model of two views, which reads no text: likewise before hours of training."""
    for text in tasks:
        if parse_task(text).kind not in ("views", "corrupted_views", *PROBES):
            others = "take views:SOURCE, corrupted_views:SOURCE, knn:TRAIN|TEST or linear:TRAIN|TEST"
            raise ValueError(f"The task {text!r} needs captions, and a model of two views reads none; {others}.")


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
    for answer in _answers(tasks, embedder, templates, go_on):
        answers.append(answer)
        say(answer)
    results = tuple(answer for answer in answers if isinstance(answer, Result))
    gaps = tuple(answer for answer in answers if isinstance(answer, Gap))
    of_suite = any(parse_task(text).kind == "datacomp" for text in tasks)
    main_of_key = {result.task.removeprefix("datacomp:"): result.value for result in results}
    return Measured(results, gaps, averages(main_of_key) if of_suite else ())


def _answers(
    tasks: Sequence[str], embedder: Embedder, templates: tuple[str, ...] | None, go_on: bool
) -> Iterator[Result | Gap]:
    for text in tasks:
        task = parse_task(text)
        if task.kind == "datacomp":
            distributed.together(partial(_require_suite, task.folder))
            yield from (_entry(entry, task.folder, embedder) for entry in ENTRIES)
        else:
            yield _attempted(text, partial(run_task, text, embedder, templates), go_on)


def _attempted(task: str, run: Callable[[], Result], go_on: bool) -> Result | Gap:
    try:
        return run()
    except (ValueError, OSError) as error:
        if not go_on:
            raise
        return Gap(task, "failed", str(error))


def run_task(text: str, embedder: Embedder, templates: tuple[str, ...] | None = None) -> Result:
    """One task that is no suite."""
    task = parse_task(text)
    source = task.source
    match task.kind:
        case "retrieval":
            images = embedder.images(distributed.together(lambda: _pictures(source)))
            if source.path in BUILTIN:  # only the first names what is shown, the others are keywords
                images = replace(images, captions=[of_image[:1] for of_image in images.captions])
            return measure.retrieved(text, images, equal_captions(images.captions), embedder)
        case "zero_shot":
            images = embedder.images(source)
            classes, labels_N = measure.numbered([of_image[0] for of_image in images.captions])
            result = measure.classified(text, images, labels_N, classes, templates or measure.PLAIN_TEMPLATES, embedder)
            return replace(result, notes=(*result.notes, *_empty_classes(source)))
        case "imagenet":
            return measure.imagenet(text, source, templates or ("openai",), embedder)
        case "wds":
            return measure.benchmark(text, task.folder, templates, embedder)
        case "views":
            return other_view(text, source, embedder)
        case "corrupted_views":
            return corrupted_views(text, source, embedder)
        case kind:
            assert task.test is not None, "a suite is many tasks"
            probe = measure.neighbours if kind == "knn" else measure.linear_probe
            return probe(text, *measure.labelled_features(text, source, task.test, embedder))


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
    empty = sorted(path.name for path in root.glob("[!.]*") if path.is_dir() and path.name not in held)
    if not empty:
        return ()
    return (f"{len(empty)} class folder(s) hold no picture and are no candidates (first: {empty[0]})",)


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
        case main:
            result = measure.benchmark(task, folder, None, embedder, main)
    if result.counts[counted] == entry.size:
        return result
    note = f"{result.counts[counted]:,} {counted}, where DataComp has {entry.size:,}"
    return replace(result, notes=(*result.notes, note))
