"""What travels through one call of an objective: where training stands, the batch on all ranks, its directions."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.data.order import key_of

DIRECTIONS = ("image", "text")  # a direction is named after its anchors


@dataclass(frozen=True)
class Progress:
    """Where training stands.  ``epoch`` counts whole passes; ``training`` False leaves every state untouched.  What is
    drawn depends on the step alone, so it is the same on every rank and after a resume."""

    step: int
    epoch: int
    seed: int
    training: bool
    clock: Tensor  # the step as the device counts it: a recorded step moves it on

    def generator(self, *tags: int) -> torch.Generator:
        """For draws on the host."""
        seed = self.seed
        for tag in (self.step, *tags):
            seed = (seed * 6364136223846793005 + tag + 1442695040888963407) % 2**63
        return torch.Generator().manual_seed(seed)

    def uniform(self, count: int, *tags: int) -> Tensor:
        """Numbers in [0, 1), in steps of 2^-24, on the clock's device; a recorded step draws new ones."""
        key = _mix(self.clock ^ (key_of(self.seed, *tags) & 0x7FFFFFFF))
        words = _mix(torch.arange(count, dtype=torch.int32, device=key.device) ^ key)
        return (words >> 8).bitwise_and_(0xFFFFFF).to(torch.float32) * 2.0**-24


def _mix(words: Tensor) -> Tensor:
    """In place: all bits of each int32 go into all of them.  What >> brings in is the sign, which is masked out."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - 2**32)):
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 15).bitwise_and_(2**17 - 1))


@dataclass(frozen=True)
class Ids:
    """Which samples the rows of all ranks are."""

    all_N: Tensor

    @cached_property
    def group_N(self) -> Tensor:
        """A number in [0, N) for each row, equal for equal ids; no sizes are read, so the host need not wait."""
        return torch.searchsorted(self.all_N.sort().values, self.all_N)

    @cached_property
    def count_N(self) -> Tensor:
        """How many rows have each row's id."""
        ones_N = torch.ones_like(self.group_N)
        return torch.zeros_like(ones_N).index_add_(0, self.group_N, ones_N)[self.group_N]


@dataclass(frozen=True)
class Rows:
    """One modality of the batch: this rank's rows with gradient, all ranks' without, and all ranks' ids."""

    local_BD: Tensor
    all_ND: Tensor
    known_ids: Ids | None

    @property
    def ids(self) -> Ids:
        assert self.known_ids is not None, "a method that remembers samples is given their ids"
        return self.known_ids


@dataclass(frozen=True)
class Batch:
    image: Rows
    text: Rows
    positive_B: Tensor
    positive_N: Tensor
    rows: slice
    log_correction_N2: Tensor | None = None  # of a selected batch, for images and for texts as anchors

    @property
    def size(self) -> int:
        return self.image.all_ND.shape[0]

    def directions(self) -> tuple[tuple[str, Rows, Rows], ...]:
        """Both directions as (name, anchors, others): the same code, called with the two tables swapped."""
        return (DIRECTIONS[0], self.image, self.text), (DIRECTIONS[1], self.text, self.image)


def gather_batch(
    image_BD: Tensor,
    text_BD: Tensor,
    ids_BK: Tensor | None,
    log_correction_B2: Tensor | None = None,
) -> Batch:
    """Bring the batch of all ranks here: the embeddings travel once, together.  ``ids_BK`` has one column, or two where
    images and texts have ids of their own."""
    positive_B = (image_BD * text_BD).sum(1)
    more = () if log_correction_B2 is None else (log_correction_B2,)
    image_ND, text_ND, positive_N, *more_N2 = distributed.gather_together(image_BD, text_BD, positive_B, *more)
    columns = () if ids_BK is None else distributed.gather_rows(ids_BK).unbind(1)
    ids = [Ids(column_N.contiguous()) for column_N in columns]
    return Batch(
        image=Rows(image_BD, image_ND, ids[0] if ids else None),
        text=Rows(text_BD, text_ND, ids[-1] if ids else None),
        positive_B=positive_B,
        positive_N=positive_N,
        rows=distributed.world().rows(image_BD.shape[0]),
        log_correction_N2=more_N2[0] if more_N2 else None,
    )


@dataclass(frozen=True)
class Direction:
    """One direction of a step: anchors of one modality against the other, and what is known of their negatives."""

    name: str  # the anchors' modality
    anchor: Rows
    other: Rows
    rows: slice
    positive_B: Tensor
    positive_N: Tensor
    reference_B: Tensor  # s_ii, or 0 where raw similarities are used
    reference_N: Tensor
    tau_B: Tensor
    factor_B: Tensor  # tau where it multiplies the loss; of the same value
    tau_N: Tensor
    log_g_B: Tensor
    log_g_N: Tensor
    other_log_g_N: Tensor  # of the same pairs in the other direction
    mean_exponent_N: Tensor | None
    negatives: int
    guard: float  # the log of the largest weight an anchor may have


@dataclass(frozen=True)
class Estimate:
    """A normalizer's answer for this rank's anchors.

    alpha_B        estimate of log(epsilon + g_i(data set)), with or without gradient as the method has it
    log_total_B    log(epsilon + g_i(batch)), with gradient
    tau_on_ratio   whether the factor tau of the ratio (epsilon + g) / exp(alpha) carries gradient
    tau_on_alpha   whether the factor tau of alpha does
    negatives      how many the mean is over; None: the batch's
    fresh          alpha_B is log_total_B itself, so it cannot be stale
    """

    alpha_B: Tensor
    log_total_B: Tensor
    tau_on_ratio: bool
    tau_on_alpha: bool
    negatives: int | None = None
    fresh: bool = False
