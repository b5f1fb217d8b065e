"""A model and a source in, tables of embeddings out; the work is spread over the ranks."""

# N: samples of the source   D: width

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config.data import Source
from fullbatch.config.training import Precision
from fullbatch.data.loader import EvaluationBatches, Pool, load
from fullbatch.data.sources import open_source
from fullbatch.data.transforms import EvalTransform
from fullbatch.models.precision import in_precision

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Pairs:
    """The embedded samples of a source, in its order; float32 on the host."""

    ids: Tensor
    image_ND: Tensor
    text_ND: Tensor
    captions: list[str]


@dataclass(frozen=True)
class Embedder:
    """How to embed: the model (as wrapped for training), its input, the device."""

    model: nn.Module
    tokenize: Callable[[list[str]], Tensor]
    image_size: int
    device: torch.device
    precision: Precision = "fp32"
    batch_size: int = 256
    workers: int = 0
    max_pixels: int = 50_000_000

    @torch.no_grad()
    def pairs(self, source: Source) -> Pairs:
        """Every sample of a source with its first caption, on every rank; bad samples are named in the log."""
        pool = Pool([open_source(source)])
        transform = EvalTransform(self.image_size, self.max_pixels)
        batches = EvaluationBatches(pool, self.batch_size, transform, self.tokenize, distributed.world())
        ids, images, texts = [], [], []
        captions: dict[int, str] = {}
        bad: list[str] = []
        with _evaluating(self.model):
            for batch in load(batches, range(len(batches)), self.workers, self.device):
                rows = len(batch.ids)
                image_BD, text_BD = self._embed(batch.images, batch.tokens) if rows else self._embed(*self._filler())
                ids.append(batch.ids)
                captions.update(zip(batch.ids.tolist(), batch.captions, strict=True))
                bad += [str(error) for error in batch.bad]
                images.append(image_BD[:rows])
                texts.append(text_BD[:rows])
        found = [distributed.gather_uneven(torch.cat(rows)).cpu() for rows in (ids, images, texts)]
        said, spoilt = {}, []
        for theirs, broken in distributed.gather_objects((captions, bad)):
            said.update(theirs)
            spoilt += broken
        for error in spoilt:
            log.info("left a bad sample out of the evaluation: %s", error)
        if not said:
            raise ValueError(f"No sample of {source} can be evaluated ({spoilt[0] if spoilt else 'it is empty'}).")
        order = found[0].argsort()
        ids_N, image_ND, text_ND = (rows[order] for rows in found)
        return Pairs(ids_N, image_ND, text_ND, [said[sample] for sample in ids_N.tolist()])

    @torch.no_grad()
    def captions(self, captions: list[str]) -> Tensor:
        """Text embeddings, on every rank the same."""
        with _evaluating(self.model):
            pieces = [captions[start : start + self.batch_size] for start in range(0, len(captions), self.batch_size)]
            return torch.cat([self._embed(None, self.tokenize(piece).to(self.device))[1].cpu() for piece in pieces])

    def _filler(self) -> tuple[Tensor, Tensor]:
        """Sharded towers need every rank's presence at every batch, also when its share is used up."""
        image = torch.zeros((1, 3, self.image_size, self.image_size), dtype=torch.uint8, device=self.device)
        return image, self.tokenize([""]).to(self.device)

    def _embed(self, images: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        with in_precision(self.precision, self.device):
            embedded: tuple[Tensor, Tensor] = self.model(images, tokens)
        return embedded


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)
