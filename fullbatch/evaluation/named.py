"""A number that is looked at: a task and one of its metrics, written "TASK METRIC"."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import assert_never

from fullbatch.config.messages import listed, nearest
from fullbatch.config.tasks import (
    BenchmarkFolder,
    CorruptedViews,
    DataCompSuite,
    ImageNetFolder,
    LinearProbe,
    Neighbours,
    OtherView,
    Retrieval,
    ZeroShot,
    parse_task,
)
from fullbatch.evaluation.benchmark_folders import Captioned, open_benchmark
from fullbatch.evaluation.class_count import count_classes
from fullbatch.evaluation.corruptions import CORRUPTION_NAMES
from fullbatch.evaluation.datacomp import ENTRIES, averages
from fullbatch.evaluation.measure import FEWEST_FOR_TOP5

log = logging.getLogger("fullbatch")

# What a kind of task gives, the main number first; a test holds it against what the tasks do give.
RETRIEVAL = (
    "mean_r1", "image_to_text_r1", "image_to_text_r5", "image_to_text_r10", "image_to_text_median_rank",
    "text_to_image_r1", "text_to_image_r5", "text_to_image_r10", "text_to_image_median_rank",
)  # fmt: skip
CLASSIFICATION = ("accuracy", "accuracy_top5", "mean_per_class", "f1_macro")
VIEWS = (
    "mean_r1", "first_to_second_r1", "first_to_second_r5", "first_to_second_median_rank",
    "second_to_first_r1", "second_to_first_r5", "second_to_first_median_rank",
)  # fmt: skip
CORRUPTED = ("mean_r1", "first_to_second_r1", "second_to_first_r1", *(f"r1_{name}" for name in CORRUPTION_NAMES))
NEIGHBOURS = ("accuracy", "accuracy_20", "mean_per_class")
LINEAR = ("accuracy", "mean_per_class")
NOT_METRICS = ("chance", "size")  # numbers of a result that are not


def metric_named(asked: str | None, tasks: Sequence[str], flag: str = "--metric") -> str:
    """The "TASK METRIC" that ``asked`` means: itself, a METRIC (of the first task that has it), or None, the main one
    of the first task.  ``flag`` is where the user asked."""
    if not tasks:
        raise ValueError("This needs something to measure: name tasks with --evaluate retrieval:SOURCE ...")
    known = [name for task in tasks for name in _names(task)]
    if asked is None:
        return known[0]
    meant = [full for full in known if asked in (full, full.rpartition(" ")[2])]
    for full in meant:
        if _has_enough_classes(full):
            return full
    if meant:
        raise ValueError(
            f"{flag} {asked!r}: {listed(full.rpartition(' ')[0] for full in meant)} has fewer than "
            f"{FEWEST_FOR_TOP5} classes, where it is not taken; use accuracy."
        )
    short = list(dict.fromkeys(full.rpartition(" ")[2] for full in known))
    raise ValueError(
        f"{flag} {asked!r}: none of the tasks gives it{nearest(asked, [*short, *known])} The tasks are "
        f"{listed(tasks)}; the metrics {listed(short)}. Write METRIC or 'TASK METRIC'."
    )


def _has_enough_classes(metric: str) -> bool:
    """Of few classes no top 5 is taken.  Said now, not when all runs are trained and have no such number."""
    task, _, name = metric.rpartition(" ")
    if name != "accuracy_top5":
        return True
    found = count_classes(task, FEWEST_FOR_TOP5)
    if found.classes < FEWEST_FOR_TOP5 and not found.whole:
        words = "%s: a part of its samples has %d classes only; with fewer than %d in all there will be no %s"
        log.warning(words, task, found.classes, FEWEST_FOR_TOP5, name)
    return found.classes >= FEWEST_FOR_TOP5 or not found.whole


def _names(text: str) -> Iterator[str]:
    match task := parse_task(text):
        case Retrieval():
            yield from (f"{text} {name}" for name in RETRIEVAL)
        case ZeroShot() | ImageNetFolder():
            yield from (f"{text} {name}" for name in CLASSIFICATION)
        case OtherView():
            yield from (f"{text} {name}" for name in VIEWS)
        case CorruptedViews():
            yield from (f"{text} {name}" for name in CORRUPTED)
        case Neighbours():
            yield from (f"{text} {name}" for name in NEIGHBOURS)
        case LinearProbe():
            yield from (f"{text} {name}" for name in LINEAR)
        case BenchmarkFolder(path):
            names = RETRIEVAL if isinstance(open_benchmark(path), Captioned) else CLASSIFICATION
            yield from (f"{text} {name}" for name in names)
        case DataCompSuite(root):
            there = [entry for entry in ENTRIES if entry.find(root)]
            made = [one for one in averages(dict.fromkeys([entry.key for entry in there], 0.0)) if one.found]
            made.sort(key=lambda one: one.name != "DataComp average")
            yield from (average_name(one.name, one.found, one.of) for one in made)
            yield from (f"datacomp:{entry.key} {entry.main}" for entry in there)
        case _:
            assert_never(task)


def average_name(name: str, found: int, of: int) -> str:
    """An average over fewer tasks than belong to it says so in its name.

    >>> average_name("ImageNet and variants", 7, 7), average_name("VTAB", 3, 13)
    ('datacomp ImageNet_and_variants', 'datacomp VTAB_(3_of_13_tasks)')
    """
    short = f" ({found} of {of} tasks)" if found < of else ""
    return f"datacomp {(name + short).replace(' ', '_')}"


def named_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Every number of an evaluation, as results.json has it, under "TASK METRIC"."""
    found = {
        f"{result['task']} {name}": float(value)
        for result in results.get("results", ())
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NOT_METRICS
    }
    for one in results.get("averages", ()):
        if one["value"] is not None:
            found[average_name(one["name"], one["found"], one["of"])] = one["value"]
    return found


def is_share(metric: str) -> bool:
    """Shares are shown as per cent; ranks as they are."""
    return not metric.endswith("_rank")


def more_is_better(metric: str) -> bool:
    return not metric.endswith("_rank")
