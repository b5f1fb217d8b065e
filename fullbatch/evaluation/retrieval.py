"""Retrieval: for each image the rank of the best of its captions among all captions, and the other way round."""

# N: images   T: captions   D: width
# A: anchors   C: anchors at a time   B: gallery   U: its different rows   P: right pairs of anchors and gallery rows
# E: things said, row by row   e: those of some rows

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullbatch import distributed

Ints = npt.NDArray[np.int64]
_ENTRIES = 1 << 24  # similarities held at a time


@dataclass(frozen=True)
class Gallery:
    """Rows to search in, where equal rows get equal similarities.  A matrix product gives them similarities that differ
    in the last bit, by their place in a block; so each different row is multiplied once."""

    rows_UD: Tensor
    place_B: Tensor | None  # which of rows_UD each row is; None where all differ

    @classmethod
    def of(cls, rows_BD: Tensor) -> Gallery:
        table = np.ascontiguousarray(rows_BD.cpu().numpy())
        as_bytes = table.view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel()
        _, first_U, place_B = np.unique(as_bytes, return_index=True, return_inverse=True)
        if len(first_U) == len(rows_BD):
            return cls(rows_BD, None)
        chosen, place = (torch.from_numpy(numbers).to(rows_BD.device) for numbers in (first_U, place_B.reshape(-1)))
        return cls(rows_BD[chosen], place)

    def similarities(self, anchors_CD: Tensor) -> Tensor:
        sim_CU = anchors_CD @ self.rows_UD.T
        return sim_CU if self.place_B is None else sim_CU[:, self.place_B]


@dataclass(frozen=True)
class Sayings:
    """Who says what, as numbers; a row says a thing once."""

    row_E: Ints
    said_E: Ints

    @cached_property
    def by_thing(self) -> Sayings:
        """The same sorted by what is said; of the rows that say the same, the last first."""
        order_E = np.lexsort((-self.row_E, self.said_E))
        return Sayings(self.row_E[order_E], self.said_E[order_E])

    def heard(self, said_e: Ints) -> tuple[Ints, Ints]:
        """Where in ``by_thing`` the rows that say each of these things end, and how many they are."""
        begin_e, end_e = (np.searchsorted(self.by_thing.said_E, said_e, side) for side in ("left", "right"))
        return end_e, end_e - begin_e


@dataclass(frozen=True)
class Answers:
    """Which captions are right for which images, without an N x T matrix: those that say the same."""

    images: Sayings
    captions: Sayings
    count: int  # of images

    @classmethod
    def of(cls, said_by_images: Sequence[Sequence[int]], said_T: Sequence[int]) -> Answers:
        said = [sorted(set(of_image), reverse=True) for of_image in said_by_images]
        row_E = np.repeat(np.arange(len(said)), [len(of_image) for of_image in said])
        images = Sayings(row_E, np.fromiter(chain.from_iterable(said), np.int64, len(row_E)))
        return cls(images, Sayings(np.arange(len(said_T)), np.array(said_T, np.int64)), len(said))

    def of_images(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Every right pair of these images: the image, counted from start, and the caption."""
        return _pairs(self.images, self.captions, start, stop)

    def of_captions(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Every right pair of these captions: the caption, counted from start, and the image."""
        return _pairs(self.captions, self.images, start, stop)


def _pairs(asking: Sayings, answering: Sayings, start: int, stop: int) -> tuple[Tensor, Tensor]:
    here = slice(*np.searchsorted(asking.row_E, (start, stop)))
    end_e, count_e = answering.heard(asking.said_E[here])
    row_P = np.repeat(asking.row_E[here] - start, count_e)
    place_P = np.arange(len(row_P)) + np.repeat(end_e - count_e.cumsum(), count_e)
    return torch.from_numpy(row_P), torch.from_numpy(answering.by_thing.row_E[place_P])


def own_captions(counts: Sequence[int]) -> Answers:
    """Right for an image are its own captions and no others, as in CLIP_benchmark; counts[i] of them in a row."""
    images = range(len(counts))
    return Answers.of([[image] for image in images], np.repeat(images, counts).tolist())


def equal_captions(captions: Sequence[Sequence[str]]) -> Answers:
    """Right for an image is every caption that says what one of its own does."""
    numbers: dict[str, int] = {}
    sayings = [[numbers.setdefault(caption, len(numbers)) for caption in of_image] for of_image in captions]
    return Answers.of(sayings, list(chain(*sayings)))


@dataclass(frozen=True)
class Ranks:
    """For each anchor how many ..."""

    ahead_A: Tensor  # wrong rows are nearer than the best right one
    level_A: Tensor  # wrong rows are as near
    best_A: Tensor  # right rows are as near

    def hits(self, k: int) -> Tensor:
        """How likely a right row is among the first k when rows that are as near come in random order."""
        room_A = k - self.ahead_A
        miss_A = torch.ones(len(room_A), dtype=torch.float64)
        for place in range(k):
            wrong_A = (self.level_A - place).clamp(min=0).double()
            left_A = (self.level_A + self.best_A - place).clamp(min=1).double()
            miss_A = torch.where(room_A > place, miss_A * wrong_A / left_A, miss_A)
        return 1.0 - miss_A

    def median(self) -> float:
        """Of the ranks to be expected, counted from 1."""
        return float(np.median((self.ahead_A + self.level_A / (self.best_A + 1.0)).numpy())) + 1.0


def ranks(
    anchors_AD: Tensor,
    gallery_BD: Tensor,
    right: Callable[[int, int], tuple[Tensor, Tensor]],
    chunk: int | None = None,
) -> Ranks:
    """``right(start, stop)`` gives the right pairs of these anchors and gallery rows.  The ranks share the anchors."""
    world, count, device = distributed.world(), len(anchors_AD), anchors_AD.device
    chunk = chunk or max(1, min(1024, _ENTRIES // len(gallery_BD)))
    first, last = count * world.rank // world.size, count * (world.rank + 1) // world.size
    gallery = Gallery.of(gallery_BD)
    places = [torch.empty((0, 3), dtype=torch.int64, device=device)]
    for start in range(first, last, chunk):
        stop = min(start + chunk, last)
        sim_CB = gallery.similarities(anchors_AD[start:stop])
        row_P, column_P = (numbers.to(device) for numbers in right(start, stop))
        right_P = sim_CB[row_P, column_P]
        best_C = sim_CB.new_full((stop - start,), -torch.inf).scatter_reduce(0, row_P, right_P, "amax")
        right_level_C = torch.zeros(stop - start, dtype=torch.int64, device=device)
        right_level_C.index_add_(0, row_P, (right_P == best_C[row_P]).long())
        ahead_C = (sim_CB > best_C[:, None]).sum(dim=1)  # no right row among them
        level_C = (sim_CB == best_C[:, None]).sum(dim=1) - right_level_C
        places.append(torch.stack([ahead_C, level_C, right_level_C], dim=1))
    return Ranks(*distributed.gather_uneven(torch.cat(places)).cpu().unbind(dim=1))


def recalls(
    image_ND: Tensor,
    text_TD: Tensor,
    answers: Answers,
    chunk: int | None = None,
    names: tuple[str, str] = ("image_to_text", "text_to_image"),
    tops: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """R@1, 5, 10 and the median rank.  text_to_image is "image retrieval", image_to_text "text retrieval"."""
    both = ranks(image_ND, text_TD, answers.of_images, chunk), ranks(text_TD, image_ND, answers.of_captions, chunk)
    results: dict[str, float] = {}
    for name, places in zip(names, both, strict=True):
        results |= {f"{name}_r{top}": places.hits(top).mean().item() for top in tops}
        results[f"{name}_median_rank"] = places.median()
    results["mean_r1"] = 0.5 * (results[f"{names[0]}_r1"] + results[f"{names[1]}_r1"])
    return results


def chance_of_first(answers: Answers) -> float:
    """What mean_r1 is when all similarities are equal, in either direction: the share of pairs that are right."""
    _, right_E = answers.captions.heard(answers.images.said_E)
    return int(right_E.sum()) / (answers.count * len(answers.captions.row_E))
