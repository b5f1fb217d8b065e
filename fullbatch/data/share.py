"""A part of a data set that stands for the whole: the same samples for every seed, method and rank."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fullbatch.data.order import Ints, key_of, shuffled
from fullbatch.data.sample import RawSample, Samples, check_index, fingerprint_of
from fullbatch.data.table_files import ByPicture, CsvTable

_KEY, _HELD_OUT_KEY = key_of(0x5A4E), key_of(0x4E1D)
HELD_OUT = 0.1  # of the pictures
FEWEST, MOST_HELD_OUT = 50, 1000  # pictures a source must have; pictures it gives
LARGE = 1_000_000  # samples; nobody splits a larger source without being asked: the list of its parts takes memory


class Share:
    """Some samples of a source in their order, under numbers of their own: a data set to everything behind it.

    Its fingerprint is its own, since a memory per sample goes by these numbers; ``described`` says which they are.
    """

    def __init__(self, whole: Samples, ids: Ints, *described: object) -> None:
        self.whole, self.name, self.ids = whole, whole.name, np.sort(ids)
        self.fingerprint = fingerprint_of("share", whole.fingerprint, *described)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> RawSample:
        check_index(index, len(self), self.name)
        return self.whole.read(int(self.ids[index]))


def share_of(samples: Samples, share: float) -> Samples:
    """All of them for 1; ValueError where nothing is left.

    They are the first ones of a shuffle that depends on the source's length alone, so a smaller share of a source is a
    part of a larger one.
    """
    if share == 1.0 or not len(samples):
        return samples
    count = round(share * len(samples))
    if count == len(samples):
        return samples
    if count == 0:
        raise ValueError(
            f"--data-share {share:g} leaves none of the {len(samples)} samples of {samples.name!r}; take a larger one."
        )
    return Share(samples, shuffled(np.arange(count), len(samples), _KEY), count)


def part_of(samples: Samples, part: Literal["all", "train", "held_out"]) -> Samples:
    return samples if part == "all" else parts_of(samples)[part == "held_out"]


def parts_of(samples: Samples) -> tuple[Share, Share]:
    """What is trained on, and what is held out: whole pictures.  Of a table with a row a caption, no picture is in
    both, and rows that are held out are joined."""
    pictures = ByPicture(samples) if isinstance(samples, CsvTable) else samples
    count = len(pictures)
    held = min(round(HELD_OUT * count), MOST_HELD_OUT) if count >= FEWEST else 0
    ids = shuffled(np.arange(count), count, _HELD_OUT_KEY)
    rows = pictures.rows_of(ids[held:]) if isinstance(pictures, ByPicture) else ids[held:]
    return Share(samples, rows, "train"), Share(pictures, ids[:held], "held_out")
