"""Training batches from a data set that lies decoded in the device's memory: nothing is read or moved in a step.  It is
read and decoded once, and kept in the cache folder: squares of pixels and all captions.  Order, crops and captions are
functions of (seed, epoch, position), as when samples are read from disk, and are drawn for a whole epoch at once, or
for a period that has a plan.  Crops are cut from the middle square at the model's own size, on the device."""

# B: rows on this rank   P: positions of a draw   n: samples   m: captions of all samples   C, S: channels, pixels

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullbatch.config.data import Source
from fullbatch.data.cache_folder import cache_folder, keep_in_cache
from fullbatch.data.images import EVALUATION, EvalTransform, Floats, ViewMaker, cropped, no_tokens, random_boxes
from fullbatch.data.loader import EvaluationBatches, LoadedBatch, SamplePool, Tokenize, tokenized
from fullbatch.data.order import BatchPlan, BatchPlans, Ints, Order, key_of, uniforms
from fullbatch.data.sources import fingerprint_of_samples
from fullbatch.data.workers import read_ahead
from fullbatch.distributed import World

_REPLACEMENTS = 1000  # draws of another sample; when that many in a row are bad, the data set is no data set
_PIECE = 256  # samples a worker decodes at a time
_VERSION = 1

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Decoded:
    pixels_nCHW: Pixels  # the middle square of every image, uint8; zeros where a sample cannot be read
    captions: list[list[str]]  # of each sample; none where it cannot be read
    bad: tuple[str, ...]  # what could not be read


def decoded_key(pool: SamplePool, sources: Sequence[Source | None], transform: EvalTransform) -> str:
    """Changes with the samples, their pictures and how they are decoded; ``sources`` are where the pool's come from."""
    contents = [fingerprint_of_samples(*pair) for pair in zip(pool.sources, sources, strict=True)]
    parts = (contents, len(pool), transform, _VERSION)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def decode_all(pool: SamplePool, key: str, transform: EvalTransform, workers: int) -> Decoded:
    """From the cache folder if it was done before under this key, else by ``workers`` processes."""
    folder = cache_folder()
    name = f"decoded-{key}"
    if folder is not None and (kept := _read(folder / name, len(pool), transform.size)) is not None:
        return kept
    decoded = _decode(pool, transform, workers)
    if folder is not None:
        texts = json.dumps({"captions": decoded.captions, "bad": decoded.bad}).encode()
        pixels, captions = (folder / f"{name}{ending}" for ending in (".npy", ".json"))
        keep_in_cache(pixels, lambda file: np.save(file, decoded.pixels_nCHW), "The decoded data set")
        keep_in_cache(captions, lambda file: file.write(texts), "The captions of the decoded data set")
    return decoded


def _decode(pool: SamplePool, transform: EvalTransform, workers: int) -> Decoded:
    pieces = EvaluationBatches(pool, _PIECE, transform, no_tokens)
    pixels = np.zeros((len(pool), 3, transform.size, transform.size), np.uint8)
    captions: list[list[str]] = [[] for _ in range(len(pool))]
    bad: list[str] = []
    for piece in read_ahead(pieces, [range(len(pieces))], min(workers, len(pieces))):
        pixels[piece.ids.numpy()] = piece.images.numpy()
        for sample, texts in zip(piece.ids.tolist(), piece.captions, strict=True):
            captions[sample] = list(texts)
        bad += map(str, piece.bad)
    return Decoded(pixels, captions, tuple(bad))


def _read(path: Path, count: int, size: int) -> Decoded | None:
    pixels = load_pixels(path.with_suffix(".npy"), (count, 3, size, size))
    with suppress(OSError, ValueError, KeyError, TypeError):
        texts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if pixels is not None and len(texts["captions"]) == count:
            return Decoded(pixels, texts["captions"], tuple(texts["bad"]))
    return None


def load_pixels(path: Path, shape: tuple[int, ...]) -> Pixels | None:
    """A kept array, mapped; None where it is absent or another."""
    try:
        pixels: Pixels = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.shape == shape and pixels.dtype == np.uint8 else None


@dataclass(frozen=True)
class Resident:
    """A decoded data set on a device.  Sample i's captions are rows firsts_n[i] ... firsts_n[i] + counts_n[i] - 1; it
    has none if it cannot be read."""

    images_nCSS: Tensor
    tokens_mL: Tensor
    firsts_n: Ints
    counts_n: Ints
    lengths_m: Ints | None = None  # how many tokens of each caption are no padding, where that is known

    def lengths(self, captions: Ints) -> tuple[int, ...]:
        return () if self.lengths_m is None else tuple(self.lengths_m[captions].tolist())


_kept: dict[str, Resident] = {}


def resident(key: str, decoded: Decoded, tokenize: Tokenize, device: torch.device) -> Resident:
    """Runs of one process that follow each other on the same data share it; ``key`` names the data."""
    key = f"{key} {device} {hashlib.blake2b(pickle.dumps(tokenize), digest_size=16).hexdigest()}"
    if key not in _kept:
        _kept.clear()  # before the next is made: two may not fit
        _require_room(decoded.pixels_nCHW, device)
        counts_n = np.array([len(captions) for captions in decoded.captions], np.int64)
        texts = [caption for captions in decoded.captions for caption in captions]
        pieces = [tokenized(tokenize, texts[start : start + 4096]) for start in range(0, len(texts), 4096)]
        tokens_mL = torch.cat([tokens for tokens, _ in pieces]).to(device)
        lengths_m = np.array([length for _, lengths in pieces for length in lengths], np.int64)
        known = len(lengths_m) == len(texts) > 0
        images_nCSS = torch.from_numpy(np.ascontiguousarray(decoded.pixels_nCHW)).to(device)
        firsts_n = np.cumsum(counts_n) - counts_n
        _kept[key] = Resident(images_nCSS, tokens_mL, firsts_n, counts_n, lengths_m if known else None)
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
class _Drawn:
    """What happens at some positions of an epoch, on the device: at all of them, or at those of a plan."""

    batches: range  # of the run
    ids_P: Tensor
    captions_P: Tensor
    boxes_P4: Tensor
    mirrored_P: Tensor
    lengths_P: tuple[int, ...]  # of the captions, on the host
    views_2PK: Tensor | None = None  # what makes the two views, where there are two
    log_c_P2: Tensor | None = None  # corrections of the plan


@dataclass
class InMemoryBatches:
    """Batch number ``step`` of a run, or rather this rank's share of it; stands where ``TrainingBatches`` stands."""

    pool: SamplePool
    order: Order
    batch_size: int
    resident: Resident
    crop: tuple[float, float] = (0.9, 1.0)
    flip: bool = False
    world: World = World()
    plans: BatchPlans | None = None
    views: ViewMaker | None = None
    _drawn: _Drawn | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.epoch_size // self.batch_size

    def stream(
        self, ranges: Iterable[range], workers: int, device: torch.device, stop: int | None = None
    ) -> Generator[LoadedBatch, None, None]:
        """These batches in this order, as ``TrainingBatches`` has them; there is nothing for workers to do."""
        for numbers in ranges:
            for step in numbers:
                yield self._batch(step, numbers.stop)

    def chosen(self, ids: Ints | Sequence[int], rows: int) -> Iterator[LoadedBatch]:
        """These samples as evaluation sees them, uncropped and with their first captions, but for the bad ones.  The
        batches' ids are places in ``ids``; ranks take turns, and have equally many batches."""
        data, device = self.resident, self.resident.images_nCSS.device
        all_ids = np.asarray(ids, np.int64)
        for start in range(0, len(all_ids), rows * self.world.size):
            first = start + self.world.rank * rows
            places = np.arange(first, max(first, min(first + rows, len(all_ids))))
            places = places[data.counts_n[all_ids[places]] > 0]
            samples = all_ids[places]
            captions = data.firsts_n[samples]
            tokens, lengths = data.tokens_mL[torch.from_numpy(captions).to(device)], data.lengths(captions)
            images = data.images_nCSS[torch.from_numpy(samples).to(device)]
            if self.views is not None:
                images, tokens = self.views(images, EVALUATION, places)
            yield LoadedBatch(torch.from_numpy(places).to(device), images, tokens, lengths=lengths)

    def __getitem__(self, step: int) -> LoadedBatch:
        return self._batch(step, step + 1)

    @torch.no_grad()
    def _batch(self, step: int, stop: int) -> LoadedBatch:
        """``stop``: up to where batches may be drawn along with it."""
        if self._drawn is None or step not in self._drawn.batches:
            self._drawn = self._draw(self.plans.of(step, stop) if self.plans is not None else self._epoch(step))
        drawn, rows = self._drawn, self.batch_size // self.world.size
        first = (step - drawn.batches.start) * self.batch_size + self.world.rank * rows
        here = slice(first, first + rows)
        ids, log_c = drawn.ids_P[here], None if drawn.log_c_P2 is None else drawn.log_c_P2[here]
        if self.views is not None and drawn.views_2PK is not None:
            views = self.views.made(self.resident.images_nCSS[ids], drawn.views_2PK[:, here])
            return LoadedBatch(ids, *views, log_correction=log_c)
        images = cropped(self.resident.images_nCSS[ids], drawn.boxes_P4[here], drawn.mirrored_P[here])
        tokens = self.resident.tokens_mL[drawn.captions_P[here]]
        return LoadedBatch(ids, images, tokens, lengths=drawn.lengths_P[here], log_correction=log_c)

    def _epoch(self, step: int) -> BatchPlan:
        """Where nothing is planned, in the epoch's own order."""
        epoch = step // self.steps_per_epoch
        return BatchPlan(
            range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch), epoch, self._places_LB
        )

    @cached_property
    def _places_LB(self) -> Ints:
        return np.arange(self.steps_per_epoch * self.batch_size).reshape(-1, self.batch_size)

    def _draw(self, plan: BatchPlan) -> _Drawn:
        epoch, positions_P = plan.epoch, np.array(plan.places_LB).reshape(-1)

        def draw(*tags: int) -> Floats:
            return uniforms(positions_P, key_of(self.order.seed, epoch, 3, *tags))

        data, device = self.resident, self.resident.images_nCSS.device
        planned_P = self.order.ids(epoch, positions_P)
        ids_P = self._readable(planned_P.copy(), epoch, positions_P)
        captions_P = data.firsts_n[ids_P] + (draw(0) * data.counts_n[ids_P]).astype(np.int64)
        boxes_P4 = random_boxes(data.images_nCSS.shape[-1], self.crop, lambda tries, what: draw(1, tries, what))
        mirrored_P = draw(2) < (0.5 if self.flip else 0.0)
        ids, captions, boxes, mirrored = (
            torch.from_numpy(array).to(device) for array in (ids_P, captions_P, boxes_P4, mirrored_P)
        )
        views = None
        if self.views is not None:
            views = torch.from_numpy(self.views.drawn(epoch, positions_P, data.images_nCSS.shape[-1])).to(device)
        log_c = None
        if plan.log_c_LB2 is not None:  # a sample that stands in for another has none
            kept_P1 = (ids_P == planned_P)[:, None]
            log_c = torch.from_numpy(plan.log_c_LB2.reshape(-1, 2) * kept_P1).to(device)
        return _Drawn(plan.batches, ids, captions, boxes.float(), mirrored, data.lengths(captions_P), views, log_c)

    def _readable(self, ids_P: Ints, epoch: int, positions_P: Ints) -> Ints:
        """In place of samples that cannot be read, others of the epoch."""
        turn = 0
        while (spoilt := self.resident.counts_n[ids_P] == 0).any():
            if turn == _REPLACEMENTS:
                raise ValueError("Hardly a sample of the epoch can be read; repair the data, or lower --max-bad.")
            places = np.flatnonzero(spoilt)
            drawn = uniforms(positions_P[places], key_of(self.order.seed, epoch, 4, turn)) * self.order.epoch_size
            ids_P[places] = self.order.ids(epoch, drawn.astype(np.int64))
            turn += 1
        return ids_P
