"""Training batches from a data set that lies decoded in the device's memory: nothing is read or moved in a step.

Order, crops and captions are functions of (seed, epoch, position), as when samples are read from disk, and are drawn
for a whole epoch at once.  Crops are cut from the middle square at the model's own size, on the device.
"""

# B: rows on this rank   P: positions of an epoch   n: samples   m: captions of all samples   C, S: channels, pixels

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fullbatch.data.decoded import Decoded, Pixels
from fullbatch.data.loader import Batch, Pool, Tokenize
from fullbatch.data.order import Ints, Order, key_of, uniforms
from fullbatch.data.transforms import ASPECT
from fullbatch.distributed import World

_TRIES = 10  # as for crops of images on disk
_REPLACEMENTS = 1000  # draws of another sample; when that many in a row are bad, the data set is no data set
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Resident:
    """A decoded data set on a device.  Sample i's captions are rows firsts_n[i] ... firsts_n[i] + counts_n[i] - 1; it
    has none if it cannot be read."""

    images_nCSS: Tensor
    tokens_mL: Tensor
    firsts_n: Ints
    counts_n: Ints


_kept: dict[str, Resident] = {}


def resident(key: str, decoded: Decoded, tokenize: Tokenize, device: torch.device) -> Resident:
    """Runs of one process that follow each other on the same data share it; ``key`` names the data."""
    key = f"{key} {device} {hashlib.blake2b(pickle.dumps(tokenize), digest_size=16).hexdigest()}"
    if key not in _kept:
        _kept.clear()  # before the next is made: two may not fit
        _require_room(decoded.pixels_nCHW, device)
        counts_n = np.array([len(captions) for captions in decoded.captions], np.int64)
        said = [caption for captions in decoded.captions for caption in captions]
        pieces = [tokenize(said[start : start + 4096]) for start in range(0, len(said), 4096)]
        images_nCSS = torch.from_numpy(np.ascontiguousarray(decoded.pixels_nCHW)).to(device)
        _kept[key] = Resident(images_nCSS, torch.cat(pieces).to(device), np.cumsum(counts_n) - counts_n, counts_n)
    return _kept[key]


def _require_room(pixels_nCHW: Pixels, device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, (count, _, _, size) = torch.cuda.mem_get_info(device)[0], pixels_nCHW.shape
    if pixels_nCHW.nbytes > 0.8 * free:
        raise ValueError(
            f"--in-memory: {count:,} images of {size} x {size} pixels need {pixels_nCHW.nbytes / 2**30:.1f} GiB, and "
            f"the GPU has {free / 2**30:.1f} GiB free; leave it out, and the samples are read from disk."
        )


@dataclass(frozen=True)
class _EpochPlan:
    """What happens at every position of an epoch, on the device."""

    epoch: int
    ids_P: Tensor
    captions_P: Tensor
    boxes_P4: Tensor
    mirrored_P: Tensor


@dataclass
class InMemoryBatches:
    """Batch number ``step`` of a run, or rather this rank's share of it; stands where ``TrainingBatches`` stands."""

    pool: Pool
    order: Order
    batch_size: int
    resident: Resident
    crop: tuple[float, float] = (0.9, 1.0)
    flip: bool = False
    world: World = World()
    _plan: _EpochPlan | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.epoch_size // self.batch_size

    def stream(self, steps: Sequence[int], workers: int, device: torch.device) -> Generator[Batch, None, None]:
        """These batches in this order; there is nothing for workers to do."""
        for step in steps:
            yield self[step]

    def chosen(self, ids: Sequence[int], rows: int) -> Iterator[Batch]:
        """These samples as evaluation sees them, uncropped and with their first captions, but for the bad ones.

        The batches' ids are places in ``ids``; ranks take turns, and have equally many batches.
        """
        data, device = self.resident, self.resident.images_nCSS.device
        all_ids = np.asarray(ids, np.int64)
        for start in range(0, len(all_ids), rows * self.world.size):
            first = start + self.world.rank * rows
            places = np.arange(first, max(first, min(first + rows, len(all_ids))))
            places = places[data.counts_n[all_ids[places]] > 0]
            samples = all_ids[places]
            tokens = data.tokens_mL[torch.from_numpy(data.firsts_n[samples]).to(device)]
            images = data.images_nCSS[torch.from_numpy(samples).to(device)]
            yield Batch(torch.from_numpy(places).to(device), images, tokens)

    @torch.no_grad()
    def __getitem__(self, step: int) -> Batch:
        epoch = step // self.steps_per_epoch
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self._planned(epoch)
        plan = self._plan
        rows = self.batch_size // self.world.size
        first = step % self.steps_per_epoch * self.batch_size + self.world.rank * rows
        here = slice(first, first + rows)
        ids = plan.ids_P[here]
        images = cropped(self.resident.images_nCSS[ids], plan.boxes_P4[here], plan.mirrored_P[here])
        return Batch(ids, images, self.resident.tokens_mL[plan.captions_P[here]])

    def _planned(self, epoch: int) -> _EpochPlan:
        positions_P = np.arange(self.order.epoch_size)

        def draw(*tags: int) -> Floats:
            return uniforms(positions_P, key_of(self.order.seed, epoch, 3, *tags))

        data, device = self.resident, self.resident.images_nCSS.device
        ids_P = self._readable(self.order.ids(epoch, positions_P), epoch)
        captions_P = data.firsts_n[ids_P] + (draw(0) * data.counts_n[ids_P]).astype(np.int64)
        boxes_P4 = random_boxes(data.images_nCSS.shape[-1], self.crop, lambda tries, what: draw(1, tries, what))
        mirrored_P = draw(2) < (0.5 if self.flip else 0.0)
        ids, captions, boxes, mirrored = (
            torch.from_numpy(array).to(device) for array in (ids_P, captions_P, boxes_P4, mirrored_P)
        )
        return _EpochPlan(epoch, ids, captions, boxes.float(), mirrored)

    def _readable(self, ids_P: Ints, epoch: int) -> Ints:
        """In place of samples that cannot be read, others of the epoch."""
        turn = 0
        while (spoilt := self.resident.counts_n[ids_P] == 0).any():
            if turn == _REPLACEMENTS:
                raise ValueError("Hardly a sample of the epoch can be read; repair the data, or lower --max-bad.")
            places = np.flatnonzero(spoilt)
            drawn = uniforms(places, key_of(self.order.seed, epoch, 4, turn)) * self.order.epoch_size
            ids_P[places] = self.order.ids(epoch, drawn.astype(np.int64))
            turn += 1
        return ids_P


def random_boxes(size: int, share: tuple[float, float], draw: Callable[[int, int], Floats]) -> Floats:
    """(left, top, width, height) in pixels of a square image, drawn as ``transforms.random_crop`` draws one.

    ``draw(try, what)`` gives a number in [0, 1) for every box.
    """
    low, high = share
    boxes_P4: Floats | None = None
    for turn in range(_TRIES):
        area_P = size * size * (low + (high - low) * draw(turn, 0))
        aspect_P = np.exp(math.log(ASPECT[0]) + math.log(ASPECT[1] / ASPECT[0]) * draw(turn, 1))
        width_P, height_P = np.round(np.sqrt(area_P * aspect_P)), np.round(np.sqrt(area_P / aspect_P))
        left_P = np.floor(draw(turn, 2) * (size - width_P + 1))
        top_P = np.floor(draw(turn, 3) * (size - height_P + 1))
        tried_P4 = np.stack([left_P, top_P, width_P, height_P], axis=1)
        fits_P = (width_P <= size) & (height_P <= size) & (width_P > 0) & (height_P > 0)
        if boxes_P4 is None:
            boxes_P4 = np.broadcast_to(np.array([0.0, 0.0, size, size]), tried_P4.shape).copy()
            waiting_P = np.ones(len(tried_P4), bool)
        taken_P = waiting_P & fits_P
        boxes_P4[taken_P] = tried_P4[taken_P]
        waiting_P &= ~fits_P
        if not waiting_P.any():
            break
    assert boxes_P4 is not None
    return boxes_P4


def cropped(images_BCSS: Tensor, boxes_B4: Tensor, mirrored_B: Tensor) -> Tensor:
    """The boxes of the images, resized to the images' size; uint8."""
    size = images_BCSS.shape[-1]
    left_B, top_B, width_B, height_B = boxes_B4.unbind(1)
    across_B = width_B / size * torch.where(mirrored_B, -1.0, 1.0)
    zero_B = torch.zeros_like(left_B)
    theta_B23 = torch.stack(
        [
            torch.stack([across_B, zero_B, (2.0 * left_B + width_B) / size - 1.0], dim=1),
            torch.stack([zero_B, height_B / size, (2.0 * top_B + height_B) / size - 1.0], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta_B23, list(images_BCSS.shape), align_corners=False)
    pixels = F.grid_sample(images_BCSS.float(), grid, mode="bicubic", padding_mode="border", align_corners=False)
    return pixels.round_().clamp_(0.0, 255.0).to(torch.uint8)
