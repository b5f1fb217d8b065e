"""A model and a source in, tables of embeddings out; the work is spread over the ranks."""

# N: samples of the source   D: width

from __future__ import annotations

from collections.abc import Callable
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

    @torch.no_grad()
    def pairs(self, source: Source) -> tuple[Tensor, Tensor, Tensor]:
        """ids, image and text embeddings of a source's samples in its order, on every rank; float32 on the host."""
        pool = Pool([open_source(source)])
        transform = EvalTransform(self.image_size)
        batches = EvaluationBatches(pool, self.batch_size, transform, self.tokenize, distributed.world())
        ids, images, texts = [], [], []
        with _evaluating(self.model):
            for batch in load(batches, range(len(batches)), self.workers, self.device):
                rows = len(batch.ids)
                image_BD, text_BD = self._embed(batch.images, batch.tokens) if rows else self._embed(*self._filler())
                ids.append(batch.ids)
                images.append(image_BD[:rows])
                texts.append(text_BD[:rows])
        found = [distributed.gather_uneven(torch.cat(rows)).cpu() for rows in (ids, images, texts)]
        order = found[0].argsort()
        return found[0][order], found[1][order], found[2][order]

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


class _evaluating:
    """A context in which the model is in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mode = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        self.model.train(self.mode)
