"""A trained model as a function: pictures and words in, unit embeddings out."""

# N: pictures or captions   D: width of the embedding   S: pixels of a side

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fullbatch.assembly import pick_device
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Precision
from fullbatch.data.images import EvalTransform
from fullbatch.data.loader import known_size, tokenized
from fullbatch.data.sample import BadSample
from fullbatch.loading import Opened, is_run, load_trained, open_model
from fullbatch.models.two_towers import TwoTowers, in_precision

# a file, or pixels: a PIL image, an array (H, W) or (H, W, 3), a tensor (3, H, W), of whole numbers from 0 to 255
Picture: TypeAlias = str | os.PathLike[str] | Image.Image | npt.NDArray[Any] | Tensor
PIXELS = 50_000_000  # that a picture may have


@dataclass(frozen=True)
class Encoder:
    """Two towers, ready to use.  ``temperature`` and ``bias`` are those they were trained with: CLIP's probabilities
    are the softmax of similarities over ``temperature``, SigLIP's the sigmoid of that plus ``bias``; None: unknown."""

    model: TwoTowers
    temperature: float | None
    bias: float | None
    device: torch.device
    precision: Precision = "fp32"
    batch_size: int = 64

    @property
    def width(self) -> int:
        """Of an embedding."""
        return self.model.width

    def encode_image(self, images: Picture | Sequence[Picture], progress: bool = False) -> Tensor:
        """Unit rows on the CPU, (N, D), in float32; of one picture, (D,).  Files are decoded in threads meanwhile."""
        one = not isinstance(images, (list, tuple))
        pictures: list[Any] = [images] if one else list(images)  # type: ignore[arg-type]
        rows = self._rows(self.squares(pictures), len(pictures), "pictures", progress, self.embed_squares)
        return rows[0] if one else rows

    def encode_text(self, texts: str | Sequence[str], progress: bool = False) -> Tensor:
        """Unit rows on the CPU, (N, D), in float32; of one string, (D,)."""
        one = isinstance(texts, str)
        captions = [texts] if isinstance(texts, str) else list(texts)
        for place, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise TypeError(f"encode_text takes strings, got {type(caption).__name__} at place {place}.")
        rows = self._rows(iter(captions), len(captions), "captions", progress, self._embed_captions)
        return rows[0] if one else rows

    @staticmethod
    def similarity(one: Tensor, other: Tensor) -> Tensor:
        """Cosines of embeddings: (N, D) and (M, D) to (N, M); a single row, (D,), takes its dimension away."""
        return one @ other.T if other.ndim > 1 else one @ other

    # -- batches ------------------------------------------------------------------------------------------------------

    def squares(self, pictures: Iterable[Picture]) -> Iterator[Tensor]:
        """Pictures as the image tower takes them, uint8, (3, S, S), in order, two batches ahead."""
        transform = EvalTransform(self.model.image_size, PIXELS)
        waiting: deque[Any] = deque()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for number, picture in enumerate(pictures):
                waiting.append(threads.submit(square_of, picture, transform, number))
                if len(waiting) > 2 * self.batch_size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    @torch.no_grad()
    def embed_squares(self, squares: list[Tensor]) -> Tensor:
        with in_precision(self.precision, self.device):
            rows: Tensor = self.model.encode_image(torch.stack(squares).to(self.device, non_blocking=True))
        return rows.float().cpu()

    @torch.no_grad()
    def _embed_captions(self, captions: list[str]) -> Tensor:
        tokens, lengths = tokenized(self.model.tokenize, captions)
        there = tokens.to(self.device)
        with in_precision(self.precision, self.device):
            rows: Tensor = self.model.encode_text(there, *known_size(there, lengths))
        return rows.float().cpu()

    def _rows(
        self, given: Iterator[Any], total: int, what: str, progress: bool, embed: Callable[[list[Any]], Tensor]
    ) -> Tensor:
        parts, batch = [torch.empty(0, self.width)], []
        with _bar(what, total) if progress else nullcontext(lambda count: None) as advance:
            for number, each in enumerate(given, start=1):
                batch.append(each)
                if len(batch) == self.batch_size or number == total:
                    parts.append(embed(batch))
                    advance(len(batch))
                    batch = []
        return torch.cat(parts)


def square_of(picture: Picture, transform: EvalTransform, number: int = 0) -> Tensor:
    """One picture, cropped and resized as for evaluation."""
    if isinstance(picture, (str, os.PathLike)):
        path = Path(picture)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
        try:
            return transform(raw, str(path))
        except BadSample as bad:
            raise ValueError(str(bad)) from None
    name = f"picture {number}"
    try:
        return transform.picture(picture if isinstance(picture, Image.Image) else _as_image(picture, name), name)
    except BadSample as bad:
        raise ValueError(str(bad)) from None


def _as_image(pixels: Any, name: str) -> Image.Image:
    if isinstance(pixels, Tensor):
        values = pixels.detach().cpu().numpy()
        values = values.transpose(1, 2, 0) if values.ndim == 3 else values
    elif isinstance(pixels, np.ndarray):
        values = pixels
    else:
        raise TypeError(
            f"{name} is a {type(pixels).__name__}; encode_image takes paths, PIL images, arrays (H, W, 3) and tensors "
            "(3, H, W)."
        )
    fits = values.dtype == np.uint8 and (values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3))
    if not fits or 0 in values.shape:
        kind = "tensor, (3, H, W)," if isinstance(pixels, Tensor) else "array, (H, W) or (H, W, 3),"
        raise ValueError(
            f"{name} has {pixels.dtype} of shape {tuple(pixels.shape)}; give a uint8 {kind} with numbers from 0 to 255."
        )
    return Image.fromarray(np.ascontiguousarray(values)).convert("RGB")


class _bar:
    """A progress bar of so many."""

    def __init__(self, what: str, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task(what, total=total)

    def __enter__(self) -> Callable[[int], None]:
        self.bar.start()
        return lambda count: self.bar.advance(self.task, count)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def load(
    model: str | os.PathLike[str],
    pretrained: str | None = None,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Precision = "fp32",
    batch_size: int = 64,
    average: bool = True,
) -> Encoder:
    """A model to use, from whatever names it: a run folder, one of its checkpoints, what ``fullbatch export`` wrote, or
    an open_clip name with ``pretrained``, a tag or a file.  ``average``: the averaged weights, where the run kept an
    average.

    >>> model = fb.load("runs/demo")  # doctest: +SKIP
    >>> rows = model.encode_image(["cat.jpg", "dog.jpg"])  # doctest: +SKIP
    >>> model.similarity(rows, model.encode_text("a photo of a cat"))  # doctest: +SKIP
    """
    path, place = Path(model), pick_device(RunConfig.of(device=device, precision=precision))
    opened: Opened
    if pretrained is None and is_run(path):
        opened = load_trained(path, average)
    else:
        opened = open_model(Model(os.fspath(model), pretrained), temperature=math.nan)
    known = None if math.isnan(opened.temperature) else opened.temperature
    return Encoder(opened.model.to(place).eval(), known, opened.bias, place, precision, batch_size)
