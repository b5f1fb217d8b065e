"""How similar true pairs are, and how similar the negatives near and far: TuneCLIP Figure 11.

The nearest negatives of a web data set are mostly false ones, captions that would be right too.  A loss that keeps
pushing them away widens their distribution; one that stops at a margin leaves them near the positives.
"""

# N: pairs   A: anchors at hand   D: width   M: negatives of an anchor, N - 1   K: bins

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch.objective.advice import check_shapes, check_unit_rows

BINS = 1600  # over [-1, 1], the same for every model, so that distributions can be laid over each other
NEAREST = 5
FAR = (90, 100)  # ranks, counted from 1: what the paper takes for true negatives
FEWEST_FOR_FAR = 2 * FAR[1] + 1  # with fewer pairs these ranks are in the lower half
FEWEST = 2 * NEAREST + 2
_ENTRIES = 1 << 22  # similarities sorted at a time


@dataclass(frozen=True)
class Distribution:
    count: int  # of similarities
    mean: float
    deviation: float  # as of the whole population
    bins_K: Tensor  # how many fall into each of the bins


class _Tally:
    """Sums and bins, in float64, as blocks of values come in."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self.total = torch.zeros(2, dtype=torch.float64, device=device)
        self.bins_K = torch.zeros(BINS, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        flat = values.flatten().double()
        self.count += len(flat)
        self.total += torch.stack([flat.sum(), flat.square().sum()])
        places = ((flat + 1.0) * (BINS / 2)).long().clamp_(0, BINS - 1)
        self.bins_K += places.bincount(minlength=BINS)

    def distribution(self) -> Distribution:
        mean, square = (self.total / self.count).tolist()
        return Distribution(self.count, mean, max(square - mean * mean, 0.0) ** 0.5, self.bins_K.cpu())


@torch.no_grad()
def similarity_distributions(anchor_ND: Tensor, other_ND: Tensor, chunk: int | None = None) -> dict[str, Distribution]:
    """Row i of both tables is a pair; every other row is a negative, also one that bears the same caption.

    Called with (image, text) each picture looks for captions, with (text, image) each caption for pictures.  Of the
    N x N similarities ``chunk`` rows exist at a time.

    positives   s_ii
    nearest     the 5 most similar negatives of each anchor
    far         those at ranks 90 to 100; absent where there are too few pairs for them to be far
    lower       the less similar half of all negatives

    >>> from torch.nn.functional import normalize
    >>> image, noise = torch.randn(2, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> found = similarity_distributions(normalize(image, dim=1), normalize(image + 0.1 * noise, dim=1))
    >>> found["positives"].mean > found["nearest"].mean > found["lower"].mean
    True
    """
    check_shapes(anchor_ND, other_ND, None)
    for name, rows in (("anchor", anchor_ND), ("other", other_ND)):
        check_unit_rows(name, rows)
    count = len(anchor_ND)
    if count < FEWEST:
        raise ValueError(f"at least {FEWEST} pairs are needed to tell near negatives from far ones, got {count}")
    chunk = chunk or max(1, _ENTRIES // count)
    tallies = {name: _Tally(anchor_ND.device) for name in ("positives", "nearest", "far", "lower")}
    for start in range(0, count, chunk):
        sim_AN = anchor_ND[start : start + chunk] @ other_ND.T
        here_A1 = torch.arange(start, start + len(sim_AN), device=sim_AN.device)[:, None]
        tallies["positives"].add(sim_AN.gather(1, here_A1))
        sim_AN.scatter_(1, here_A1, -torch.inf)
        ranked_AM = sim_AN.sort(dim=1, descending=True).values[:, :-1]
        tallies["nearest"].add(ranked_AM[:, :NEAREST])
        tallies["far"].add(ranked_AM[:, FAR[0] - 1 : FAR[1]])
        tallies["lower"].add(ranked_AM[:, (count - 1) // 2 :])
    if count < FEWEST_FOR_FAR:
        del tallies["far"]
    return {name: tally.distribution() for name, tally in tallies.items()}


@dataclass(frozen=True)
class NearNegatives:
    anchor: int  # the row of a picture
    others: list[int]  # the rows of its nearest captions, by the first model
    similarities: list[list[float]]  # of the picture to each of them, model by model


@torch.no_grad()
def near_negatives(
    models: Sequence[tuple[Tensor, Tensor]], groups_N: Tensor, anchors: int, chunk: int | None = None
) -> list[NearNegatives]:
    """What several models make of the likely false negatives of one of them: TuneCLIP's Table 21.  ``models`` are
    tables of pictures and captions of the same pairs.  By the first: pictures that fit another pair's caption best,
    compared with their own, and their nearest captions.  Rows of one group (equal captions) are no negatives."""
    image_ND, text_ND = models[0]
    groups_N, rows = groups_N.to(image_ND.device), chunk or max(1, _ENTRIES // len(image_ND))

    def others(here_A: Tensor) -> Tensor:
        sim_AN = image_ND[here_A] @ text_ND.T
        return sim_AN.masked_fill_(groups_N[here_A, None] == groups_N, -torch.inf)

    places_N = torch.arange(len(image_ND), device=image_ND.device)
    beyond_N = torch.cat([others(here_A).amax(dim=1) for here_A in torch.split(places_N, rows)])
    beyond_N = beyond_N - (image_ND * text_ND).sum(dim=1)
    near = []
    for anchor in beyond_N.topk(min(anchors, len(beyond_N))).indices:
        nearest = others(anchor[None])[0].topk(NEAREST)
        kept_K = nearest.indices[nearest.values > -torch.inf]
        sims = [(texts[kept_K] @ images[anchor]).tolist() for images, texts in models]
        near.append(NearNegatives(int(anchor), kept_K.tolist(), sims))
    return near


def merged_bins(distributions: list[Distribution], most: int = 80) -> tuple[list[float], list[list[float]]]:
    """The middles of at most ``most`` bins that span all of them, and the share of each distribution in each bin."""
    together_K = torch.stack([distribution.bins_K for distribution in distributions]).sum(dim=0)
    used = together_K.nonzero()[:, 0]
    first, last = int(used[0]), int(used[-1]) + 1
    width = -(-(last - first) // (most - 2))
    first -= width  # an empty bin on either side, so that curves come down to zero
    bins = -(-(last - first) // width) + 1
    rows = []
    for distribution in distributions:
        padded = torch.zeros(bins * width, dtype=torch.float64)
        low, high = max(first, 0), min(first + bins * width, BINS)
        padded[low - first : high - first] = distribution.bins_K[low:high].double()
        rows.append((padded.view(bins, width).sum(dim=1) / distribution.count).tolist())
    middles = [(first + (place + 0.5) * width) * 2.0 / BINS - 1.0 for place in range(bins)]
    return middles, rows
