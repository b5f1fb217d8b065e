"""Retrieval: for each image the rank of the best of its captions among all captions, and the other way round."""

# N: images   T: captions   S: different things said   E: pairs of an image and what describes it   D: width
# A: anchors   C: anchors at a time   B: gallery   U: its different rows   P: right pairs of anchors and gallery rows

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fullbatch import distributed


@dataclass(frozen=True)
class Gallery:
    """Rows to search in, where equal rows get equal similarities.  A matrix product gives them similarities that differ
    in the last bit, by their place in a block; so each different row is multiplied once.

    place_B   which of rows_UD each row is; None where all differ
    """

    rows_UD: Tensor
    place_B: Tensor | None

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


_ENTRIES = 1 << 24  # similarities held at a time


@dataclass(frozen=True)
class Answers:
    """Which captions are right for which images, without an N x T matrix.

    said_T            the number of what each caption says
    image_E, said_E   image image_E[e] is described by said_E[e]
    """

    said_T: Tensor
    image_E: Tensor
    said_E: Tensor

    @cached_property
    def captions_by_saying(self) -> _Lists:
        return _Lists.of(self.said_T, torch.arange(len(self.said_T)))

    @cached_property
    def images_by_saying(self) -> _Lists:
        return _Lists.of(self.said_E, self.image_E)

    def of_images(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Every right pair of these images: the image, counted from start, and the caption."""
        here_E = (self.image_E >= start) & (self.image_E < stop)
        return self.captions_by_saying.joined(self.image_E[here_E] - start, self.said_E[here_E])

    def of_captions(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Every right pair of these captions: the caption, counted from start, and the image."""
        return self.images_by_saying.joined(torch.arange(stop - start), self.said_T[start:stop])


@dataclass(frozen=True)
class _Lists:
    """For each saying a list of members, one list after the other."""

    members: Tensor
    first_S: Tensor
    count_S: Tensor

    @classmethod
    def of(cls, said: Tensor, members: Tensor) -> _Lists:
        count_S = said.bincount()
        return cls(members[said.argsort(stable=True)], count_S.cumsum(0) - count_S, count_S)

    def joined(self, rows: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """Each row with each member of what it says."""
        count = self.count_S[said]
        within = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
        return rows.repeat_interleave(count), self.members[self.first_S[said].repeat_interleave(count) + within]


def own_captions(counts: Sequence[int]) -> Answers:
    """Right for an image are its own captions and no others, as in CLIP_benchmark; counts[i] of them in a row."""
    images = torch.arange(len(counts))
    return Answers(images.repeat_interleave(torch.tensor(counts)), images, images)


def equal_captions(captions: Sequence[Sequence[str]]) -> Answers:
    """Right for an image is every caption that says what one of its own does."""
    numbers: dict[str, int] = {}
    sayings = [[numbers.setdefault(caption, len(numbers)) for caption in of_image] for of_image in captions]
    pairs = sorted({(image, number) for image, of_image in enumerate(sayings) for number in of_image})
    edges = torch.tensor(pairs)
    return Answers(torch.tensor([number for of_image in sayings for number in of_image]), edges[:, 0], edges[:, 1])


@dataclass(frozen=True)
class Ranks:
    """For each anchor: wrong rows nearer than the best right one, wrong rows as near, and right rows as near as the
    best."""

    ahead_A: Tensor
    level_A: Tensor
    best_A: Tensor

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


def recalls(image_ND: Tensor, text_TD: Tensor, answers: Answers, chunk: int | None = None) -> dict[str, float]:
    """R@1, 5, 10 and the median rank.  text_to_image is "image retrieval", image_to_text "text retrieval"."""
    directions = (
        ("image_to_text", ranks(image_ND, text_TD, answers.of_images, chunk)),
        ("text_to_image", ranks(text_TD, image_ND, answers.of_captions, chunk)),
    )
    results = {}
    for name, places in directions:
        for k in (1, 5, 10):
            results[f"{name}_r{k}"] = places.hits(k).mean().item()
        results[f"{name}_median_rank"] = places.median()
    results["mean_r1"] = 0.5 * (results["image_to_text_r1"] + results["text_to_image_r1"])
    return results


def chance_of_first(answers: Answers) -> float:
    """What mean_r1 is when all similarities are equal, in either direction."""
    times_S, images = answers.said_T.bincount(), int(answers.image_E.max()) + 1
    return int(times_S[answers.said_E].sum()) / (images * len(answers.said_T))
