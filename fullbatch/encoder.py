"""A trained model as a function: pictures and words in, unit embeddings out."""

# N: pictures or captions   D: width of the embedding   S: pixels of a side

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fullbatch.assembly import pick_device
from fullbatch.config.checks import is_whole
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Precision
from fullbatch.data.images import EvalTransform
from fullbatch.data.sample import MAX_IMAGE_BYTES, BadSample, read_file
from fullbatch.evaluation.embed import Embedder
from fullbatch.loading import open_model
from fullbatch.models.tokenizers import NoText
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training.display import progress_bar

# a file, or pixels: a PIL image, an array (H, W) or (H, W, 3), a tensor (3, H, W), of whole numbers from 0 to 255
Picture: TypeAlias = str | os.PathLike[str] | Image.Image | npt.NDArray[Any] | Tensor
MAX_PIXELS = 200_000_000  # of a picture; a larger one is refused
_FULL_PIXELS = 50_000_000  # a larger JPEG is decoded at reduced size: in full, it would take 600 MB
Item = TypeVar("Item")
Result = TypeVar("Result")


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

    @property
    def reads_text(self) -> bool:
        """A model of two views does not."""
        return not isinstance(self.model.tokenize, NoText)

    @property
    def embedder(self) -> Embedder:
        """What evaluation measures a model with."""
        model, settings = self.model, (self.device, self.precision, self.batch_size)
        return Embedder(model, model.tokenize, model.image_size, *settings)

    @property
    def transform(self) -> EvalTransform:
        """From a file's bytes to the square that the image tower takes, uint8, (3, S, S)."""
        return EvalTransform(self.model.image_size, MAX_PIXELS, _FULL_PIXELS)

    def encode_image(self, images: Picture | Sequence[Picture], progress: bool = False) -> Tensor:
        """Unit rows on the CPU, (N, D), in float32; of one picture, (D,).  ``.numpy()`` makes arrays of them.  Files
        are decoded in threads meanwhile."""
        is_one = not isinstance(images, (list, tuple))
        pictures: list[Any] = [images] if is_one else list(images)  # type: ignore[arg-type]
        read = partial(_square_of, transform=self.transform)
        squares = read_in_threads(read, enumerate(pictures), 2 * self.batch_size)
        rows = self._rows(squares, len(pictures), "pictures", progress, self.embed_squares)
        return rows[0] if is_one else rows

    def encode_text(self, texts: str | Sequence[str], progress: bool = False) -> Tensor:
        """Unit rows on the CPU, (N, D), in float32; of one string, (D,)."""
        captions = [texts] if isinstance(texts, str) else list(texts)
        for place, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise TypeError(f"encode_text takes strings, got {type(caption).__name__} at place {place}.")
        rows = self._rows(captions, len(captions), "captions", progress, self._embed_captions)
        return rows[0] if isinstance(texts, str) else rows

    @staticmethod
    def similarity(one: Tensor, other: Tensor) -> Tensor:
        """Cosines of embeddings: (N, D) and (M, D) to (N, M); a single row, (D,), takes its dimension away."""
        return one @ other.T if other.ndim > 1 else one @ other

    @torch.no_grad()
    def embed_squares(self, squares: Sequence[Tensor]) -> Tensor:
        return self.embedder.image_rows(torch.stack(list(squares)).to(self.device)).float().cpu()

    @torch.no_grad()
    def _embed_captions(self, captions: list[str]) -> Tensor:
        return self.embedder.text_rows(captions).float().cpu()

    def _rows(
        self, items: Iterable[Any], total: int, what: str, progress: bool, embed: Callable[[list[Any]], Tensor]
    ) -> Tensor:
        parts, done = [torch.empty(0, self.width)], 0
        with progress_bar(what, progress) as tell:
            for batch in batched(items, self.batch_size):
                parts.append(embed(batch))
                done += len(batch)
                tell(done, total)
        return torch.cat(parts)


# -- pictures ----------------------------------------------------------------------------------------------------------


def read_in_threads(read: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """What ``read`` makes of each item, in order, so many being read in threads meanwhile."""
    threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(threads.submit(read, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """
    >>> list(batched("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _square_of(numbered: tuple[int, Picture], transform: EvalTransform) -> Tensor:
    number, picture = numbered
    try:
        if isinstance(picture, (str, os.PathLike)):
            path = Path(picture)
            return transform(read_file(path.name, str(path), MAX_IMAGE_BYTES), str(path))
        name = f"picture {number}"
        return transform.picture(picture if isinstance(picture, Image.Image) else _as_image(picture, name), name)
    except BadSample as bad:
        raise ValueError(f"{bad}.") from None


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


# -- loading -----------------------------------------------------------------------------------------------------------


def load(
    model: str | os.PathLike[str],
    pretrained: str | None = None,
    *,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
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
    if not is_whole(batch_size, 1):
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
    place = _apple_gpu() if device == "mps" else pick_device(RunConfig.of(device=device, precision=precision))
    opened = open_model(Model(os.fspath(model), pretrained), temperature=math.nan, average=average)
    known = None if math.isnan(opened.temperature) else opened.temperature
    return Encoder(opened.model.to(place).eval(), known, opened.bias, place, precision, batch_size)


def _apple_gpu() -> torch.device:
    if not torch.backends.mps.is_available():
        raise ValueError("PyTorch sees no Apple GPU here, so device mps cannot be used; take cpu.")
    return torch.device("mps")
