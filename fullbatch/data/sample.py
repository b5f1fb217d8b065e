"""A sample on its way from a source to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fullbatch.config.messages import plain


class BadSample(Exception):
    """A sample that cannot be used; the loader skips it, counts it, logs it and takes another in its place."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = plain(name), plain(reason)
        super().__init__(f"{self.name}: {self.reason}")

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (self.name, self.reason)


@dataclass(frozen=True)
class RawSample:
    """name      where it lies, for logs: "cc3m/00003.tar:000030017"
    image     the encoded image
    captions  one or more, stripped, none empty
    """

    name: str
    image: bytes
    captions: tuple[str, ...]


class Samples(Protocol):
    """An ordered, finite list of samples with random access; the position of a sample is stable.

    ``fingerprint`` changes when the samples or their order do; ``read`` raises BadSample.  Must pickle and survive a
    fork: workers hold copies.
    """

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> RawSample: ...
