"""What can be measured, as it is written on the command line: ``KIND:WHERE``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullbatch.config.data import Source
from fullbatch.config.words import nearest

TASK_RULE = "name tasks as retrieval:SOURCE or zero_shot:SOURCE, imagenet:FOLDER, wds:FOLDER or datacomp:ROOT"
_KINDS = ("retrieval", "zero_shot", "imagenet", "wds", "datacomp")


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


Task = Retrieval | ZeroShot | ImageNetFolder | BenchmarkFolder | DataCompSuite


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
        case _:
            return DataCompSuite(Path(where).expanduser())
