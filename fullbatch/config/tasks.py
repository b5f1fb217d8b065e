"""What can be measured, as it is written on the command line: ``KIND:WHERE``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullbatch.config.data import Source
from fullbatch.config.messages import nearest

TASK_RULE = (
    "name tasks as retrieval:SOURCE or zero_shot:SOURCE, imagenet:FOLDER, wds:FOLDER or datacomp:ROOT, "
    "views:SOURCE or corrupted_views:SOURCE, knn:TRAIN|TEST or linear:TRAIN|TEST"
)
_KINDS = ("retrieval", "zero_shot", "imagenet", "wds", "datacomp", "views", "corrupted_views", "knn", "linear")


@dataclass(frozen=True)
class Retrieval:
    """Captions find their images and images their captions; equal captions, of whatever image, count as one.

    All captions of an image take part; of a built-in set the first, for the others are keywords.
    """

    source: Source


@dataclass(frozen=True)
class ZeroShot:
    """The first caption of an image names its class."""

    source: Source


@dataclass(frozen=True)
class ImageNetFolder:
    """Folders named by WordNet ids or class numbers, with open_clip's names and prompts."""

    path: Path


@dataclass(frozen=True)
class BenchmarkFolder:
    """A folder of CLIP_benchmark's ``wds`` layout, which says itself whether it is classified or retrieved."""

    path: Path


@dataclass(frozen=True)
class DataCompSuite:
    """The folder that holds DataComp's evaluation sets."""

    root: Path


@dataclass(frozen=True)
class OtherView:
    """Of two augmented views of each image, one finds the other among those of all images."""

    source: Source


@dataclass(frozen=True)
class CorruptedViews:
    """A view of a corrupted image finds the other view of it among those of the same image, corrupted otherwise."""

    source: Source


@dataclass(frozen=True)
class Neighbours:
    """The nearest training images say what class a test image is of; an image's first caption is its class."""

    train: Source
    test: Source


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier on frozen features; an image's first caption is its class."""

    train: Source
    test: Source


Task = (
    Retrieval
    | ZeroShot
    | ImageNetFolder
    | BenchmarkFolder
    | DataCompSuite
    | OtherView
    | CorruptedViews
    | Neighbours
    | LinearProbe
)


def parse_task(text: str) -> Task:
    """
    >>> parse_task("zero_shot:photos?captions=folder").source.path
    'photos'
    """
    kind, _, where = text.partition(":")
    if kind not in _KINDS or not where:
        guess = nearest(kind, _KINDS) if kind not in _KINDS else "."
        raise ValueError(f"There is no task {text!r}{guess} One must {TASK_RULE}.")
    match kind:
        case "retrieval":
            return Retrieval(Source.parse(where))
        case "zero_shot":
            return ZeroShot(Source.parse(where))
        case "imagenet":
            return ImageNetFolder(Path(where).expanduser())
        case "wds":
            return BenchmarkFolder(Path(where).expanduser())
        case "views":
            return OtherView(Source.parse(where))
        case "corrupted_views":
            return CorruptedViews(Source.parse(where))
        case "knn":
            return Neighbours(*_train_and_test(text, where))
        case "linear":
            return LinearProbe(*_train_and_test(text, where))
        case _:
            return DataCompSuite(Path(where).expanduser())


def _train_and_test(text: str, where: str) -> tuple[Source, Source]:
    train, bar, test = (part.strip() for part in where.partition("|"))
    if not (train and bar and test):
        raise ValueError(f"The task {text!r} must name two sources, KIND:TRAIN|TEST (in quotes, for the shell).")
    return Source.parse(train), Source.parse(test)
