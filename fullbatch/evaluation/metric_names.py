"""A number that is looked at, a task and one of its metrics, is written "TASK METRIC".

A search is after such a number, or a training is judged by it; or by the mean of several, or the seconds of training.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fullbatch.config.messages import listed, nearest
from fullbatch.config.tasks import parse_task
from fullbatch.data.sample import BadSample, Samples
from fullbatch.data.sources import open_source
from fullbatch.evaluation.benchmark_folders import Classified, open_benchmark
from fullbatch.evaluation.corruptions import CORRUPTION_NAMES
from fullbatch.evaluation.datacomp import ENTRIES, averages
from fullbatch.evaluation.measure import FEWEST_FOR_TOP5

MOST_READ = 10_000  # samples
SECONDS = "seconds"
_FIELD = "metrics"
_MEAN = re.compile(r"mean\s*\((?P<names>.*)\)", re.DOTALL)

log = logging.getLogger("fullbatch")


class Counted(NamedTuple):
    classes: int
    whole: bool  # there are no others; counting ends early where enough are found, or samples are too many
    problem: str = ""  # with the first sample that could not be read


def count_classes(text: str, enough: int) -> Counted:
    """The classes of a task of zero-shot classification; ``enough``: there is no need to count further."""
    task = parse_task(text)
    if task.kind != "wds":
        return count(open_source(task.source), enough)
    opened = open_benchmark(task.folder)
    return Counted(len(opened.classes) if isinstance(opened, Classified) else 0, whole=True)


def count(samples: Samples, enough: int, retrieved: bool = False) -> Counted:
    """How many classes there are, by first captions; of what is ``retrieved``, how many different lists of captions.
    It reads evenly over the samples, since those of one class often lie together."""
    names: set[object] = set()
    problem = ""
    most = min(len(samples), MOST_READ)
    stride = max(1, most // (4 * enough))
    for place in (place for start in range(stride) for place in range(start, most, stride)):
        try:
            captions = samples.read(place * len(samples) // most).captions
            names.add(captions if retrieved else captions[0])
        except BadSample as error:
            problem = problem or str(error)
        if len(names) >= enough:
            return Counted(len(names), False, problem)
    return Counted(len(names), most == len(samples), problem)


# What a kind of task gives, the main number first; a test holds it against what the tasks do give.
_RANKED = ("r1", "r5", "r10", "median_rank")
RETRIEVAL = ("mean_r1", *(f"{way}_{name}" for way in ("image_to_text", "text_to_image") for name in _RANKED))
CLASSIFICATION = ("accuracy", "accuracy_top5", "mean_per_class", "f1_macro")
_FOUND = ("r1", "r5", "median_rank")
VIEWS = ("mean_r1", *(f"{way}_{name}" for way in ("first_to_second", "second_to_first") for name in _FOUND))
CORRUPTED = ("mean_r1", "first_to_second_r1", "second_to_first_r1", *(f"r1_{name}" for name in CORRUPTION_NAMES))
LINEAR = ("accuracy", "mean_per_class")
_METRICS = {
    "retrieval": RETRIEVAL,
    "zero_shot": CLASSIFICATION,
    "imagenet": CLASSIFICATION,
    "views": VIEWS,
    "corrupted_views": CORRUPTED,
    "knn": ("accuracy", "accuracy_20", "mean_per_class"),
    "linear": LINEAR,
}


def metric_named(asked: str | None, tasks: Sequence[str], flag: str = "--metric") -> str:
    """The "TASK METRIC" that ``asked`` means.  A METRIC is that of the first task that has it; None is the main one of
    the first task.  ``flag`` is where the user asked."""
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
    counted = count_classes(task, FEWEST_FOR_TOP5)
    if counted.classes < FEWEST_FOR_TOP5 and not counted.whole:
        words = "%s: a part of its samples has %d classes only; with fewer than %d in all there will be no %s"
        log.warning(words, task, counted.classes, FEWEST_FOR_TOP5, name)
    return counted.classes >= FEWEST_FOR_TOP5 or not counted.whole


def _names(text: str) -> Iterator[str]:
    task = parse_task(text)
    if task.kind == "datacomp":
        there = [entry for entry in ENTRIES if entry.find(task.folder)]
        made = [average for average in averages(dict.fromkeys([entry.key for entry in there], 0.0)) if average.found]
        made.sort(key=lambda average: average.name != "DataComp average")
        yield from (average_name(average.name, average.found, average.of) for average in made)
        yield from (f"datacomp:{entry.key} {entry.main}" for entry in there)
        return
    names = _METRICS.get(task.kind, CLASSIFICATION)
    if task.kind == "wds" and not isinstance(open_benchmark(task.folder), Classified):
        names = RETRIEVAL
    yield from (f"{text} {name}" for name in names)


def average_name(name: str, found: int, of: int) -> str:
    """An average over fewer tasks than belong to it says so in its name.

    >>> average_name("ImageNet and variants", 7, 7), average_name("VTAB", 3, 13)
    ('datacomp ImageNet_and_variants', 'datacomp VTAB_(3_of_13_tasks)')
    """
    short = f" ({found} of {of} tasks)" if found < of else ""
    return f"datacomp {(name + short).replace(' ', '_')}"


def named_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Every number of an evaluation, as results.json has it, under "TASK METRIC"."""
    numbers = {
        f"{result['task']} {name}": float(value)
        for result in results.get("results", ())
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("chance", "size")
    }
    for average in results.get("averages", ()):
        if average["value"] is not None:
            numbers[average_name(average["name"], average["found"], average["of"])] = average["value"]
    return numbers


def is_share(metric: str) -> bool:
    """Of shares, which are shown as per cent, more is better; of ranks less."""
    return not metric.endswith("_rank")


@dataclass(frozen=True)
class Metric:
    name: str  # as the plan has it
    parts: tuple[str, ...]  # the "TASK METRIC" names whose mean it is; (): the seconds of training

    @classmethod
    def parse(cls, text: str, tasks: Sequence[str], where: str = _FIELD) -> Metric:
        """``METRIC``, ``TASK METRIC``, ``mean(A, B, ...)`` or ``seconds``; ValueError where the tasks do not give it.
        Where a name has a comma of its own, a space must follow the others.  ``where`` is the field or flag."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: a metric must be a name such as accuracy, got {text!r}.")
        text = text.strip()
        if text == SECONDS:
            return cls(text, ())
        names = [text]
        if mean := _MEAN.fullmatch(text):
            spaced = re.search(r",\s", mean["names"])  # a task may have commas without a space: ?captions=title,alt
            names = [name.strip() for name in re.split(r",\s+" if spaced else ",", mean["names"])]
        if not all(names):
            raise ValueError(f"{where}: {text!r} has an empty name in it; write mean(A, B).")
        if SECONDS in names:
            raise ValueError(f"{where}: {text!r} mixes seconds with what is measured; name it as a metric of its own.")
        parts = tuple(metric_named(name, tasks, where) for name in names)
        if len(set(map(is_share, parts))) > 1:
            raise ValueError(f"{where}: {text!r} mixes ranks, where less is better, with shares, where more is.")
        return cls(text, parts)

    def of(self, results: Mapping[str, Any], seconds: float) -> float:
        """Its value by an evaluation, as results.json has it, after so many seconds of training."""
        if not self.parts:
            return seconds
        numbers = named_numbers(results)
        for part in self.parts:
            if not math.isfinite(numbers.get(part, math.nan)):
                gaps = {gap["task"]: gap["reason"] for gap in results.get("gaps", ())}
                why = gaps.get(part.rpartition(" ")[0], "it is not among the numbers")
                raise ValueError(f"The evaluation gave no {part}: {why.rstrip('.')}.")
        return sum(numbers[part] for part in self.parts) / len(self.parts)

    @property
    def is_share(self) -> bool:
        return bool(self.parts) and all(map(is_share, self.parts))

    maximise = is_share

    @property
    def short(self) -> str:
        """For tables: without the tasks.

        >>> Metric("retrieval:x mean_r1", ("retrieval:x mean_r1",)).short
        'mean_r1'
        >>> Metric("m", ("retrieval:x text_to_image_r1", "zero_shot:y accuracy")).short
        'mean(text_to_image_r1, accuracy)'
        """
        names = [part.rpartition(" ")[2] for part in self.parts]
        if not names:
            return SECONDS
        return names[0] if len(names) == 1 else f"mean({', '.join(names)})"


def parse_metrics(texts: Sequence[str], tasks: Sequence[str]) -> tuple[Metric, ...]:
    """At least one, none twice."""
    if isinstance(texts, str) or not texts:
        raise ValueError(f"{_FIELD} must be a list of at least one metric, got {texts!r}.")
    metrics = tuple(Metric.parse(text, tasks) for text in texts)
    for place, metric in enumerate(metrics):
        if any(sorted(metric.parts) == sorted(other.parts) for other in metrics[:place]):
            raise ValueError(f"{_FIELD}: {metric.name!r} is there twice.")
    return metrics


def worst_of(metrics: Sequence[Metric]) -> tuple[float, ...] | None:
    """The values of a run that ran away; None where a metric is no share, which alone has a worst value."""
    return (0.0,) * len(metrics) if all(metric.is_share for metric in metrics) else None
