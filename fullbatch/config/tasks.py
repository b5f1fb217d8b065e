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
_OF_SOURCE, _OF_FOLDER = ("retrieval", "zero_shot", "views", "corrupted_views"), ("imagenet", "wds", "datacomp")
PROBES = ("knn", "linear")
_KINDS = (*_OF_SOURCE, *_OF_FOLDER, *PROBES)


@dataclass(frozen=True)
class EvaluationTask:
    """``source`` of a folder: the names of the folders in it are captions.  ``test``: the second source of a probe.

    retrieval         captions find their images and images their captions; equal captions, of whatever image, count as
                      one.  All captions of an image take part; of a built-in set the first, the others are keywords
    zero_shot         the first caption of an image names its class
    views             of two augmented views of each image, one finds the other among those of all images
    corrupted_views   a view of a corrupted image finds the other one among those of the image's other corruptions
    imagenet          folders named by WordNet ids or class numbers, with open_clip's names and prompts
    wds               a folder of CLIP_benchmark's layout, which says itself whether it is classified or retrieved
    datacomp          the folder that holds DataComp's evaluation sets
    knn               the nearest training images say what class a test image is of; its first caption is its class
    linear            a linear classifier on frozen features; an image's first caption is its class
    """

    kind: str
    source: Source
    test: Source | None = None

    @property
    def folder(self) -> Path:
        return Path(self.source.path)


def parse_task(text: str) -> EvaluationTask:
    """
    >>> parse_task("zero_shot:photos?captions=folder").source.path
    'photos'
    """
    kind, _, where = text.partition(":")
    if kind not in _KINDS or not where:
        guess = nearest(kind, _KINDS) if kind not in _KINDS else "."
        raise ValueError(f"There is no task {text!r}{guess} One must {TASK_RULE}.")
    if kind in _OF_FOLDER:
        return EvaluationTask(kind, Source(str(Path(where).expanduser()), kind="folder", captions=("folder",)))
    if kind in _OF_SOURCE:
        return EvaluationTask(kind, Source.parse(where))
    train, bar, test = (part.strip() for part in where.partition("|"))
    if not (train and bar and test):
        raise ValueError(f"The task {text!r} must name two sources, KIND:TRAIN|TEST (in quotes, for the shell).")
    return EvaluationTask(kind, Source.parse(train), Source.parse(test))
