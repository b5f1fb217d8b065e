"""The nearest pictures to words and pictures, exactly: every row is compared, and the answer is float64's."""

# R: rows of the index   P: pictures, each with its row   K: candidates   D: width

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fullbatch.encoder import Encoder
from fullbatch.find.index import IndexedFile, PictureIndex

Copy = Literal["fp32", "bf16"]
_CHUNK = 65_536  # rows compared at a time
_BF16 = 2.0**-8  # the greatest relative error of rounding to bf16
_FP32 = 2.0**-24
_NOTHING = 1e-6  # the length of a sum of unit vectors that cancel


# -- what is asked -----------------------------------------------------------------------------------------------------


def terms_of(words: str) -> list[tuple[float, str]]:
    """Texts to add and to subtract; the signs stand between blanks.

    >>> terms_of("a beach - people + a t-shirt")
    [(1.0, 'a beach'), (-1.0, 'people'), (1.0, 'a t-shirt')]
    >>> terms_of("- people"), terms_of(" ")
    ([(-1.0, 'people')], [])
    """
    first, *others = re.split(r"(?:^|\s)([+-])(?=\s|$)", words)
    signed = [
        (1.0 if sign == "+" else -1.0, text.strip()) for sign, text in zip(others[::2], others[1::2], strict=True)
    ]
    for sign, text in signed:
        if not text:
            raise ValueError(f"The query {words!r} says nothing after a {'+' if sign > 0 else '-'}.")
    return [(1.0, first.strip()), *signed] if first.strip() else signed


def combined(parts: Iterable[tuple[float, Tensor]]) -> Tensor:
    """The unit vector along the sum of unit vectors, each with its sign, (D,)."""
    sum_D = torch.stack([sign * unit_D.double() for sign, unit_D in parts]).sum(dim=0)
    length = float(sum_D.norm())
    if length < _NOTHING:
        raise ValueError("The parts of the query cancel each other; leave one out.")
    return (sum_D / length).float()


def query_of(encoder: Encoder, words: str, likes: Sequence[tuple[float, Tensor]] = ()) -> Tensor | None:
    """Words and embeddings of pictures, added and subtracted, (D,); None where nothing is asked for."""
    asked = terms_of(words)
    if asked and not encoder.reads_text:
        raise ValueError("This model was trained on views of pictures and reads no words; use --like PICTURE.")
    units = encoder.encode_text([text for _, text in asked])
    parts = [*((sign, unit_D) for (sign, _), unit_D in zip(asked, units, strict=True)), *likes]
    return combined(parts) if parts else None


# -- the nearest rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Pictures by their places in the list, best first; of equal scores the first in the list comes first."""

    places: list[int]
    scores: list[float]


class ExactSearch:
    """Scores in float32, or of a copy in bf16, which is half as large, leave out what cannot be among the best;
    the rest is scored in float64.  So the answer is that of float64 over all rows, whichever copy is read."""

    def __init__(self, rows_RD: Tensor, row_of_P: Tensor, copy: Copy = "fp32") -> None:
        self.rows_RD, self.row_of_P = rows_RD, row_of_P
        self.half_RD: Tensor | None = None
        self.error, self.relative = rows_RD.shape[1] * _FP32, 0.0  # a sum's rounding, in any order, of unit vectors
        if copy == "bf16" and len(rows_RD):
            self.half_RD = torch.empty_like(rows_RD, dtype=torch.bfloat16)
            lost = 0.0  # the length of the greatest difference: with a unit vector, no product differs by more
            for start in range(0, len(rows_RD), _CHUNK):
                part = rows_RD[start : start + _CHUNK]
                self.half_RD[start : start + _CHUNK] = part
                lost = max(lost, float((part - self.half_RD[start : start + _CHUNK].float()).norm(dim=1).max()))
            self.error += lost + 4.0 * _BF16**2  # and what is lost of the query's second half, and beyond it
            self.relative = 1.01 * _BF16  # products are rounded too

    def nearest(self, query_D: Tensor, most: int, among_P: Tensor | None = None) -> Scored:
        """The best ``most`` for a unit vector; ``among_P``: only of these places, ascending."""
        row_of_P = self.row_of_P if among_P is None else self.row_of_P[among_P]
        most = min(most, len(row_of_P))
        if most < 1:
            return Scored([], [])
        rough_P = self._rough(query_D)[row_of_P]
        worst = rough_P.topk(most, sorted=False).values.min()
        # out is what cannot be as good as the worst of these is for certain
        lowest = worst - self.error - self.relative * worst.abs()
        candidates_K = (rough_P + self.error + self.relative * rough_P.abs() >= lowest).nonzero().squeeze(1)
        score_K = torch.cat([self._score(row_of_P[part_K], query_D) for part_K in torch.split(candidates_K, _CHUNK)])
        best = score_K.sort(descending=True, stable=True)
        places = candidates_K[best.indices[:most]]
        return Scored((places if among_P is None else among_P[places]).tolist(), best.values[:most].tolist())

    def _score(self, rows_K: Tensor, query_D: Tensor) -> Tensor:
        return self.rows_RD[rows_K].double() @ query_D.double()

    def _rough(self, query_D: Tensor) -> Tensor:
        """All scores, (R,), each at most ``error`` and its share ``relative`` away."""
        score_R, halves_2D = torch.empty(len(self.rows_RD)), _halves(query_D)
        for start in range(0, len(score_R), _CHUNK):
            here = slice(start, start + _CHUNK)
            if self.half_RD is None:
                torch.mv(self.rows_RD[here], query_D, out=score_R[here])
            else:  # rows first took longer where it was tried, on two cores with AVX-512
                score_R[here] = (halves_2D @ self.half_RD[here].T).float().sum(dim=0)
        return score_R


def _halves(query_D: Tensor) -> Tensor:
    """Two rows in bf16, (2, D), whose sum is the query but for 2^-16 of it."""
    high_D = query_D.bfloat16()
    return torch.stack([high_D, (query_D - high_D.float()).bfloat16()])


# -- a folder that answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hit:
    number: int  # of the picture in the finder's list
    score: float | None  # None where nothing was asked for
    entry: IndexedFile


class Finder:
    """Answers from an index as it is now."""

    def __init__(self, index: PictureIndex, copy: Copy = "fp32") -> None:
        self.index = index
        self.pictures = index.pictures
        rows = torch.tensor([entry.row for entry in self.pictures], dtype=torch.int64)
        self.search = ExactSearch(index.embeddings, rows, copy)

    def row(self, number: int) -> Tensor:
        """The embedding of a picture of the index, (D,)."""
        return self.search.rows_RD[int(self.search.row_of_P[number])]

    def query(self, words: str, likes: Sequence[tuple[float, Tensor]] = ()) -> Tensor | None:
        return query_of(self.index.encoder, words, likes)

    def find(self, query_D: Tensor | None, most: int, within: str = "") -> list[Hit]:
        """The nearest of the pictures in the folder ``within``; without a query the first ones, by path."""
        among = self.places(within) if within else None
        if query_D is None:
            first = (range(len(self.pictures)) if among is None else among.tolist())[:most]
            return [Hit(number, None, self.pictures[number]) for number in first]
        found = self.search.nearest(query_D, most, among)
        return [
            Hit(place, score, self.pictures[place]) for place, score in zip(found.places, found.scores, strict=True)
        ]

    def places(self, within: str) -> Tensor:
        """Of the pictures in a folder, which follow each other: what sorts between "a/" and "a0" begins with "a/"."""
        start, end = (bisect_left(self.pictures, f"{within}{last}", key=lambda entry: entry.path) for last in "/0")
        return torch.arange(start, end)

    @cached_property
    def folders(self) -> dict[str, int]:
        """Folders that hold pictures, at any depth, and how many."""
        counts: dict[str, int] = {}
        for entry in self.pictures:
            parts = entry.path.split("/")[:-1]
            for depth in range(len(parts)):
                inside = "/".join(parts[: depth + 1])
                counts[inside] = counts.get(inside, 0) + 1
        return dict(sorted(counts.items()))
