"""A part of a data set that stands for the whole: the same samples for every seed, method and rank."""

from __future__ import annotations

import numpy as np

from fullbatch.data.order import Ints, key_of, shuffled
from fullbatch.data.reading import check_index, fingerprint_of
from fullbatch.data.sample import RawSample, Samples

_KEY = key_of(0x5A4E)


class Share:
    """``count`` samples of a source in their order, under numbers of their own: a data set to everything behind it.

    They are the first ones of a shuffle that depends on the source's length alone, so a smaller share of a source is a
    part of a larger one.  Its fingerprint is its own, since a memory per sample goes by these numbers.
    """

    def __init__(self, whole: Samples, count: int) -> None:
        self.whole, self.name = whole, whole.name
        self.ids: Ints = np.sort(shuffled(np.arange(count), len(whole), _KEY))
        self.fingerprint = fingerprint_of("share", whole.fingerprint, count)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> RawSample:
        check_index(index, len(self), self.name)
        return self.whole.read(int(self.ids[index]))


def share_of(samples: Samples, share: float) -> Samples:
    """All of them for 1; ValueError where nothing is left."""
    if share == 1.0 or not len(samples):
        return samples
    count = round(share * len(samples))
    if count == len(samples):
        return samples
    if count == 0:
        raise ValueError(
            f"--data-share {share:g} leaves none of the {len(samples)} samples of {samples.name!r}; take a larger one."
        )
    return Share(samples, count)
