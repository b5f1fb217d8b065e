"""A whole data set, read and decoded once: squares of pixels and all captions, kept in the cache folder."""

# n: samples   C: channels   H, W: pixels

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fullbatch.config.data import Source
from fullbatch.data.images import EvalTransform
from fullbatch.data.loader import SamplePool
from fullbatch.data.sample import BadSample
from fullbatch.data.sources import fingerprint_of_samples
from fullbatch.data.tar_index import cache_folder, write_atomically
from fullbatch.data.workers import read_ahead

log = logging.getLogger("fullbatch")

_PIECE = 256  # samples a worker decodes at a time
_VERSION = 1

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Decoded:
    """pixels_nCHW   the middle square of every image, uint8; zeros where a sample cannot be read
    captions      of each sample; none where it cannot be read
    bad           what could not be read
    """

    pixels_nCHW: Pixels
    captions: list[list[str]]
    bad: tuple[str, ...]


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
        try:
            _write(folder / name, decoded)
        except OSError as error:
            log.warning("the decoded data set is not kept for the next run in %s: %s", folder, error.strerror)
    return decoded


@dataclass(frozen=True)
class _Pieces(Dataset[tuple[Tensor, list[list[str]], list[str]]]):
    pool: SamplePool
    transform: EvalTransform

    def __len__(self) -> int:
        return -(-len(self.pool) // _PIECE)

    def __getitem__(self, piece: int) -> tuple[Tensor, list[list[str]], list[str]]:
        samples = range(piece * _PIECE, min((piece + 1) * _PIECE, len(self.pool)))
        size = self.transform.size
        pixels = torch.zeros((len(samples), 3, size, size), dtype=torch.uint8)
        captions: list[list[str]] = []
        bad = []
        for row, sample in enumerate(samples):
            try:
                raw = self.pool.read(sample)
                pixels[row] = self.transform(raw.image, raw.name)
                captions.append(list(raw.captions))
            except BadSample as error:
                captions.append([])
                bad.append(str(error))
        return pixels, captions, bad


def _decode(pool: SamplePool, transform: EvalTransform, workers: int) -> Decoded:
    pieces = _Pieces(pool, transform)
    size = transform.size
    pixels = np.empty((len(pool), 3, size, size), np.uint8)
    captions: list[list[str]] = []
    bad: list[str] = []
    for rows, captions_of_piece, errors in read_ahead(pieces, [range(len(pieces))], min(workers, len(pieces))):
        pixels[len(captions) : len(captions) + len(captions_of_piece)] = rows.numpy()
        captions += captions_of_piece
        bad += errors
    return Decoded(pixels, captions, tuple(bad))


def _write(path: Path, decoded: Decoded) -> None:
    """The pixels first: where the captions lie, the pixels lie too."""
    write_atomically(path.with_suffix(".npy"), lambda file: np.save(file, decoded.pixels_nCHW))
    texts = json.dumps({"captions": decoded.captions, "bad": decoded.bad}).encode()
    write_atomically(path.with_suffix(".json"), lambda file: file.write(texts))


def _read(path: Path, count: int, size: int) -> Decoded | None:
    try:
        texts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        pixels = np.load(path.with_suffix(".npy"), mmap_mode="c", allow_pickle=False)
        if pixels.shape == (count, 3, size, size) and pixels.dtype == np.uint8 and len(texts["captions"]) == count:
            return Decoded(pixels, texts["captions"], tuple(texts["bad"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
