"""How many classes a task has, as far as that can be told without reading all its images, and whether it has any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import assert_never

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
from fullbatch.data.sample import BadSample, Samples
from fullbatch.data.sources import open_source
from fullbatch.evaluation.benchmark_folders import Classified, open_benchmark
from fullbatch.evaluation.measure import class_folders

MOST_READ = 10_000  # samples


@dataclass(frozen=True)
class Counted:
    """classes   found
    whole     whether there are no others; counting ends early where enough are found, or samples are too many
    problem   what was wrong with the first sample that could not be read
    """

    classes: int
    whole: bool
    problem: str = ""


def count_classes(text: str, enough: int) -> Counted:
    """The classes of a task of classification; ``enough``: there is no need to count further."""
    match task := parse_task(text):
        case ZeroShot(source) | Neighbours(source) | LinearProbe(source):
            return count(open_source(source), enough)
        case ImageNetFolder(path):
            return count(open_source(class_folders(path)), enough)
        case BenchmarkFolder(path):
            found = open_benchmark(path)
            return Counted(len(found.classes) if isinstance(found, Classified) else 0, whole=True)
        case Retrieval() | DataCompSuite() | OtherView() | CorruptedViews():
            return Counted(0, whole=True)
        case _:
            assert_never(task)


def count(
    samples: Samples, enough: int, of: Callable[[tuple[str, ...]], object] = lambda captions: captions[0]
) -> Counted:
    """The different things that ``of`` makes of a sample's captions, its class unless told.

    Evenly over the samples, for those of a class often lie together.
    """
    names: set[object] = set()
    problem = ""
    most = min(len(samples), MOST_READ)
    stride = max(1, most // (4 * enough))
    for place in (place for start in range(stride) for place in range(start, most, stride)):
        try:
            names.add(of(samples.read(place * len(samples) // most).captions))
        except BadSample as error:
            problem = problem or str(error)
            continue
        if len(names) >= enough:
            return Counted(len(names), False, problem)
    return Counted(len(names), most == len(samples), problem)
