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


@dataclass(frozen=True)
class _OfSource:
    source: Source


@dataclass(frozen=True)
class _OfFolder:
    path: Path


@dataclass(frozen=True)
class _OfTwoSources:
    train: Source
    test: Source


class Retrieval(_OfSource):
    """Captions find their images and images their captions; equal captions, of whatever image, count as one.  All
    captions of an image take part; of a built-in set the first, for the others are keywords."""


class ZeroShot(_OfSource):
    """The first caption of an image names its class."""


class OtherView(_OfSource):
    """Of two augmented views of each image, one finds the other among those of all images."""


class CorruptedViews(_OfSource):
    """A view of a corrupted image finds the other view of it among those of the same image, corrupted otherwise."""


class ImageNetFolder(_OfFolder):
    """Folders named by WordNet ids or class numbers, with open_clip's names and prompts."""


class BenchmarkFolder(_OfFolder):
    """A folder of CLIP_benchmark's ``wds`` layout, which says itself whether it is classified or retrieved."""


class DataCompSuite(_OfFolder):
    """The folder that holds DataComp's evaluation sets."""


class Neighbours(_OfTwoSources):
    """The nearest training images say what class a test image is of; an image's first caption is its class."""


class LinearProbe(_OfTwoSources):
    """A linear classifier on frozen features; an image's first caption is its class."""


SourceTask = Retrieval | ZeroShot | OtherView | CorruptedViews
FolderTask = ImageNetFolder | BenchmarkFolder | DataCompSuite
ProbeTask = Neighbours | LinearProbe
Task = SourceTask | FolderTask | ProbeTask

_KINDS: dict[str, type[Task]] = {
    **{"retrieval": Retrieval, "zero_shot": ZeroShot, "views": OtherView, "corrupted_views": CorruptedViews},
    **{"imagenet": ImageNetFolder, "wds": BenchmarkFolder, "datacomp": DataCompSuite},
    **{"knn": Neighbours, "linear": LinearProbe},
}


def parse_task(text: str) -> Task:
    """
    >>> parse_task("zero_shot:photos?captions=folder").source.path
    'photos'
    """
    kind, _, where = text.partition(":")
    if kind not in _KINDS or not where:
        guess = nearest(kind, _KINDS) if kind not in _KINDS else "."
        raise ValueError(f"There is no task {text!r}{guess} One must {TASK_RULE}.")
    made = _KINDS[kind]
    if issubclass(made, _OfSource):
        return made(Source.parse(where))
    if issubclass(made, _OfFolder):
        return made(Path(where).expanduser())
    train, bar, test = (part.strip() for part in where.partition("|"))
    if not (train and bar and test):
        raise ValueError(f"The task {text!r} must name two sources, KIND:TRAIN|TEST (in quotes, for the shell).")
    return made(Source.parse(train), Source.parse(test))
