"""The gradient of a step: towers, objective and back, in one piece or in micro-batches with a gradient cache.

With micro-batches the towers run twice: first without gradient, to embed the whole batch; the objective sees all the
embeddings once, as it would without micro-batches, and gives the gradient at them; then piece by piece with gradient,
to bring it back through the towers (Gao et al. 2021, GradCache, for InfoNCE).  The objective only ever sees
embeddings, so this is exact for every one of them, whatever it remembers.  What dropout draws depends on (seed, step,
rank, piece) alone, so both runs of a piece draw the same and a resumed run draws what the first would have drawn.
"""

# B: rows on this rank   D: width

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config.training import Precision
from fullbatch.data.loader import Batch
from fullbatch.data.order import key_of
from fullbatch.distributed import towers
from fullbatch.models.precision import in_precision
from fullbatch.models.recording import being_recorded
from fullbatch.objective.objective import Objective, Output


@dataclass(frozen=True)
class GradientRule:
    """micro_batch   rows at a time; None: all
    precision     of the towers; the objective works in float32 at least (NeuCLIP's fit in TF32, see its _fit)
    seed          of dropout
    """

    micro_batch: int | None = None
    precision: Precision = "fp32"
    seed: int = 0

    def __call__(
        self, model: nn.Module, objective: Objective, batch: Batch, step: int, scaler: torch.amp.GradScaler
    ) -> Output:
        """Add the step's gradient, times the scaler's scale, to ``.grad`` of what the model and the objective learn."""
        pieces = batch.split(self.micro_batch)
        if len(pieces) == 1:
            image_BD, text_BD = self._embed(model, batch, step, 0)
            output = objective(image_BD, text_BD, batch.ids)
            scaler.scale(output.loss).backward()
            return _finished(output)
        with torch.no_grad():
            embedded = [self._embed(model, piece, step, place) for place, piece in enumerate(pieces)]
        image_BD, text_BD = (torch.cat(rows).requires_grad_() for rows in zip(*embedded, strict=True))
        output = objective(image_BD, text_BD, batch.ids)
        scaler.scale(output.loss).backward()
        assert image_BD.grad is not None and text_BD.grad is not None
        gradients = zip(*(torch.split(rows, len(pieces[0].ids)) for rows in (image_BD.grad, text_BD.grad)), strict=True)
        for place, (piece, gradient) in enumerate(zip(pieces, gradients, strict=True)):
            with towers.gradients_stay_here(model, place < len(pieces) - 1):
                _backward(self._embed(model, piece, step, place), gradient)
        return _finished(output)

    def seed_dropout(self, step: int, place: int = 0) -> None:
        torch.manual_seed(key_of(self.seed, step, distributed.world().rank, place))

    def _embed(self, model: nn.Module, piece: Batch, step: int, place: int) -> tuple[Tensor, Tensor]:
        if not being_recorded(piece.images):
            self.seed_dropout(step, place)
        with in_precision(self.precision, piece.images.device):
            embedded: tuple[Tensor, Tensor] = model(piece.images, piece.tokens)
        return embedded


def _backward(embedded: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
    """A locked tower's embeddings have no way back."""
    live = [(rows, gradient) for rows, gradient in zip(embedded, gradients, strict=True) if rows.requires_grad]
    torch.autograd.backward([rows for rows, _ in live], [gradient for _, gradient in live])


def _finished(output: Output) -> Output:
    return Output(output.loss.detach(), output.metrics)
