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

from fullbatch.config.data import Source
from fullbatch.data.images import EvalTransform
from fullbatch.data.loader import EvaluationBatches, SamplePool
from fullbatch.data.sources import fingerprint_of_samples
from fullbatch.data.tar_index import cache_folder, write_atomically
from fullbatch.data.two_views import no_tokens
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


def _decode(pool: SamplePool, transform: EvalTransform, workers: int) -> Decoded:
    pieces = EvaluationBatches(pool, _PIECE, transform, no_tokens)
    pixels = np.zeros((len(pool), 3, transform.size, transform.size), np.uint8)
    captions: list[list[str]] = [[] for _ in range(len(pool))]
    bad: list[str] = []
    for piece in read_ahead(pieces, [range(len(pieces))], min(workers, len(pieces))):
        pixels[piece.ids.numpy()] = piece.images.numpy()
        for sample, texts in zip(piece.ids.tolist(), piece.every_caption, strict=True):
            captions[sample] = list(texts)
        bad += map(str, piece.bad)
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
