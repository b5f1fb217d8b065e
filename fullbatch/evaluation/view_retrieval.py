"""Retrieval of the other augmented view (Cho et al. 2023, section 6.2 and Appendix D.3, Tables 1 and 2).

Every image is corrupted in 19 ways at severity 1, and of each of the 19 two views are made.  A view looks for its
partner among the partners of the 19, so the clean image takes no part; chance is 1 / 19.  That is what the authors'
code does; the paper leaves it open whether the clean image is one of the candidates.

Views are made with the default settings of ``Views``, whatever a run was trained with, from a fixed seed and the
sample's number, so that all models see the same ones.
"""

# B: images of a batch   K: corruptions   D: width   C, S: channels, pixels   A: anchors

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullbatch import distributed
from fullbatch.config.data import Source, Views
from fullbatch.data.cache_folder import cache_folder, keep_in_cache
from fullbatch.data.images import EVALUATION, ViewMaker
from fullbatch.data.in_memory import load_pixels
from fullbatch.data.loader import LoadedBatch
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.data.sources import open_source
from fullbatch.evaluation.corruptions import CORRUPTION_NAMES, CORRUPTIONS, Pixels, corrupted
from fullbatch.evaluation.embed import Embedder, SourceRows
from fullbatch.evaluation.measure import left_out_note
from fullbatch.evaluation.result import Result
from fullbatch.evaluation.retrieval import Ranks, own_captions, recalls

SEED = 0  # of the views and corruptions that all models are measured on
_MAKER = ViewMaker(Views(), SEED)
_EPOCHS = [EVALUATION - 1 - kind for kind in range(len(CORRUPTIONS))]  # a corruption's views are drawn apart
SEVERITIES = 5  # a file of CIFAR-C holds all of them, one after the other; what is measured here is the first
_KEPT = 1 << 30  # bytes of corrupted images of a source that are kept in the cache folder
_VERSION = 2  # raise it when corruptions change


def other_view(task: str, source: Source, embedder: Embedder) -> Result:
    walked = embedder.walk(source, partial(_views, embedder, EVALUATION))
    first_ND, second_ND = (table.to(embedder.device) for table in walked.tables)
    count = len(first_ND)
    if count == 1:
        raise ValueError(f"The task {task!r} has one image: any model would be right.")
    names, partners = ("first_to_second", "second_to_first"), own_captions([1] * count)
    return _result(task, recalls(first_ND, second_ND, partners, names=names, tops=(1, 5)), count, walked)


def _views(embedder: Embedder, epoch: int, batch: LoadedBatch) -> tuple[Tensor, Tensor]:
    """Both views of each image, embedded."""
    first, second = _MAKER(batch.images, epoch, batch.ids.cpu().numpy())
    return embedder.image_rows(first), embedder.image_rows(second)


def corrupted_views(task: str, source: Source, embedder: Embedder) -> Result:
    """Of images that are corrupted here, or of a folder of CIFAR-10-C's or Tiny-ImageNet-C's layout."""
    published = distributed.together(lambda: published_corruptions(source.path))
    if published:
        return _published_views(task, published, embedder)
    samples = distributed.together(lambda: open_source(source))
    keep = len(samples) * len(CORRUPTIONS) * 3 * embedder.image_size**2 <= _KEPT

    def rows(batch: LoadedBatch) -> tuple[Tensor, Tensor]:
        kinds = zip(_EPOCHS, every_corruption(batch, keep), strict=True)
        return _hits([_views(embedder, epoch, replace(batch, images=images)) for epoch, images in kinds])

    return _corrupted_result(task, embedder.walk(samples, rows), CORRUPTION_NAMES)


def _published_views(task: str, published: Mapping[str, Samples], embedder: Embedder) -> Result:
    """A pass for each corruption; an image that cannot be read in one of them is left out of all."""
    walks = []
    for name, samples in published.items():
        rows = partial(_views, embedder, _EPOCHS[CORRUPTION_NAMES.index(name)])
        walks.append(embedder.walk(samples, rows))
    ids_N = (torch.cat([walked.ids for walked in walks]).bincount() == len(walks)).nonzero()[:, 0]
    read = [torch.isin(walked.ids, ids_N) for walked in walks]
    views = [(walked.tables[0][here], walked.tables[1][here]) for walked, here in zip(walks, read, strict=True)]
    left_out = tuple(why for walked in walks for why in walked.left_out)
    return _corrupted_result(task, SourceRows(ids_N, _hits(views), [], left_out), tuple(published))


def _hits(views: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Of both directions, from the two views of each corruption."""
    first_NKD, second_NKD = (torch.stack(made, dim=1) for made in zip(*views, strict=True))
    return own_hits(first_NKD, second_NKD), own_hits(second_NKD, first_NKD)


def _corrupted_result(task: str, walked: SourceRows, kinds: Sequence[str]) -> Result:
    by_kind = torch.stack(walked.tables).mean(dim=(0, 1)).tolist()
    first, second = (table.mean().item() for table in walked.tables)
    metrics = {"mean_r1": 0.5 * (first + second), "first_to_second_r1": first, "second_to_first_r1": second}
    metrics |= {f"r1_{name}": value for name, value in zip(kinds, by_kind, strict=True)}
    return _result(task, metrics, len(kinds), walked)


def own_hits(anchor_BKD: Tensor, gallery_BKD: Tensor) -> Tensor:
    """(B, K): whether gallery row k of image b is the nearest of its K to anchor k; equally near ones share a hit.  NaN
    where the embeddings are not finite, which the caller is to refuse."""
    sim_BKK = (anchor_BKD @ gallery_BKD.transpose(1, 2)).float()
    own_BK1 = sim_BKK.diagonal(dim1=1, dim2=2)[..., None]
    ahead_BK, level_BK = (sim_BKK > own_BK1).sum(dim=2), (sim_BKK == own_BK1).sum(dim=2)
    hits_BK = Ranks(ahead_BK.flatten().cpu(), level_BK.flatten().cpu() - 1, torch.ones(ahead_BK.numel())).hits(1)
    hits_BK = hits_BK.view(ahead_BK.shape).to(sim_BKK)
    return torch.where(sim_BKK.isfinite().all(dim=2), hits_BK, torch.nan)


def _result(task: str, metrics: dict[str, float], size: int, walked: SourceRows) -> Result:
    counts = {"images": len(walked.ids), "left_out": len(walked.left_out)}
    return Result(task, metrics, "mean_r1", 1.0 / size, size, counts=counts, notes=left_out_note(walked.left_out))


def every_corruption(batch: LoadedBatch, keep: bool) -> list[Tensor]:
    """The batch's images after each corruption, on their device; K of (B, C, S, S)."""
    images_NHWC = np.ascontiguousarray(batch.images.cpu().permute(0, 2, 3, 1).numpy())
    every_KNHWC = corrupted_squares(images_NHWC, batch.ids.tolist(), keep)
    device = batch.images.device
    return [torch.from_numpy(images).to(device).permute(0, 3, 1, 2).contiguous() for images in every_KNHWC]


def corrupted_squares(images_NHWC: Pixels, ids: list[int], keep: bool) -> Pixels:
    """Making them takes longer than embedding them, so they are kept under a name made of what they come from."""
    digest = hashlib.blake2b(repr((_VERSION, SEED, images_NHWC.shape, ids)).encode(), digest_size=16)
    digest.update(images_NHWC.tobytes())
    folder = cache_folder() if keep else None
    path = None if folder is None else folder / f"corrupted-{digest.hexdigest()}.npy"
    if path is not None and (kept := load_pixels(path, (len(CORRUPTIONS), *images_NHWC.shape))) is not None:
        return kept
    every_KNHWC = np.stack([corrupted(images_NHWC, ids, kind, SEED) for kind in range(len(CORRUPTIONS))])
    if path is not None:
        keep_in_cache(path, lambda file: np.save(file, every_KNHWC), "The corrupted images")
    return every_KNHWC


class ArrayImages(Samples):
    """The images of one array file at severity 1; their captions are their numbers."""

    def __init__(self, path: Path) -> None:
        try:
            images = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no array of images: {error}") from None
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or len(images) % SEVERITIES:
            raise ValueError(
                f"{str(path)!r} must hold {SEVERITIES} severities of images, bytes of the shape (N, height, width, 3), "
                f"as CIFAR-10-C has them, got {images.dtype} {images.shape}."
            )
        self.name, self.count = str(path), len(images) // SEVERITIES
        self.fingerprint = f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}"

    def _read(self, index: int) -> RawSample:
        where = f"{self.name}:{index}"
        try:
            pixels_HWC = np.load(self.name, mmap_mode="r", allow_pickle=False)[index]
        except (OSError, ValueError) as error:
            raise BadSample(where, str(error)) from None
        encoded = io.BytesIO()
        Image.fromarray(np.asarray(pixels_HWC)).save(encoded, "PNG")
        return RawSample(where, encoded.getvalue(), (str(index),))


def published_corruptions(root: str) -> dict[str, Samples]:
    """What a folder of CIFAR-10-C's, CIFAR-100-C's or Tiny-ImageNet-C's layout holds of each corruption, image by image
    the same; nothing: it is no such folder."""
    folder = Path(root).expanduser()
    samples_of: dict[str, Samples] = {}
    for name in CORRUPTION_NAMES:
        if (file := folder / f"{name}.npy").is_file():
            samples_of[name] = ArrayImages(file)
        elif (images := folder / name / "1").is_dir():
            samples_of[name] = open_source(Source(str(images), kind="folder", captions=("folder",)))
    sizes = {name: len(samples) for name, samples in samples_of.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{root!r} has different numbers of images for different corruptions: {sizes}.")
    if len(samples_of) == 1:
        raise ValueError(f"{root!r} has one corruption ({next(iter(samples_of))}): any model would be right.")
    return samples_of
