"""The gradient of a step: towers, objective and back, in one piece or in micro-batches with a gradient cache.

With micro-batches the towers run twice: first without gradient, to embed the whole batch; the objective sees all the
embeddings once, as it would without micro-batches, and gives the gradient at them; then piece by piece with gradient,
to bring it back through the towers (Gao et al. 2021, GradCache, for InfoNCE).  The objective only ever sees
embeddings, so this is exact for every one of them, whatever it remembers.  What dropout draws depends on (seed, step,
rank, piece) alone, so both runs of a piece draw the same and a resumed run draws what the first would have drawn.

Batches that stand ``apart`` each have a loss of their own; the gradient of the step is the mean of theirs.
"""

# B: rows on this rank   D: width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config.training import Precision
from fullbatch.data.loader import LoadedBatch
from fullbatch.data.order import key_of
from fullbatch.distributed import towers
from fullbatch.models.two_towers import being_recorded, in_precision
from fullbatch.objective.objective import Objective, Output
from fullbatch.selection.selector import EmbeddingTable
from fullbatch.training.stages import statistics_kept


@dataclass(frozen=True)
class GradientRule:
    """micro_batch   rows at a time; None: all
    precision     of the towers; the objective works in float32 at least; its products may take less (--loss-operands)
    seed          of dropout
    apart         batches that a step's rows are, one after the other
    table         that keeps what is embedded; None: nobody asks for it
    """

    micro_batch: int | None = None
    precision: Precision = "fp32"
    seed: int = 0
    apart: int = 1
    table: EmbeddingTable | None = None

    def __call__(
        self, model: nn.Module, objective: Objective, batch: LoadedBatch, step: int, scaler: torch.amp.GradScaler
    ) -> Output:
        """Add the step's gradient, times the scaler's scale, to ``.grad`` of what the model and the objective learn."""
        if self.apart == 1:
            return self._of_batch(model, objective, batch, step, scaler)
        outputs = []
        for number, one in enumerate(batch.split(len(batch.ids) // self.apart)):
            with towers.gradients_stay_here(model, number < self.apart - 1):
                outputs.append(self._of_batch(model, objective, one, step, scaler, number))
        return _mean(outputs)

    def rehearse(self, model: nn.Module, batch: LoadedBatch, step: int) -> None:
        """A pass whose gradient nobody takes.  By their first one copied towers lay out what they send, and the layout
        decides in which order more than two ranks are added up: so a resumed run adds as the undisturbed one does."""
        if towers.lays_out_gradients(model):
            with statistics_kept(model):
                one = batch.split(len(batch.ids) // self.apart)[0]
                rows = self._embed(model, one.split(self.micro_batch)[0], step, 0)
            _backward(rows, (torch.zeros_like(rows[0]), torch.zeros_like(rows[1])))
            model.zero_grad(set_to_none=True)

    def _of_batch(
        self,
        model: nn.Module,
        objective: Objective,
        batch: LoadedBatch,
        step: int,
        scaler: torch.amp.GradScaler,
        number: int = 0,
    ) -> Output:
        """Of batch ``number`` of those that stand apart, by its share."""
        pieces = batch.split(self.micro_batch)
        first = number * len(pieces)
        if len(pieces) == 1:
            image_BD, text_BD = self._embed(model, batch, step, first)
            output = self._judged(objective, image_BD, text_BD, batch)
            _descend(output.loss / self.apart, scaler)
            return _finished(output)
        with torch.no_grad():
            embedded = [self._embed(model, piece, step, first + place) for place, piece in enumerate(pieces)]
        image_BD, text_BD = (torch.cat(rows).requires_grad_() for rows in zip(*embedded, strict=True))
        output = self._judged(objective, image_BD, text_BD, batch)
        _descend(output.loss / self.apart, scaler)
        assert image_BD.grad is not None and text_BD.grad is not None
        gradients = zip(*(torch.split(rows, len(pieces[0].ids)) for rows in (image_BD.grad, text_BD.grad)), strict=True)
        last = number == self.apart - 1
        for place, (piece, gradient) in enumerate(zip(pieces, gradients, strict=True)):
            with towers.gradients_stay_here(model, place < len(pieces) - 1 or not last):
                _backward(self._embed(model, piece, step, first + place), gradient)
        return _finished(output)

    def _judged(self, objective: Objective, image_BD: Tensor, text_BD: Tensor, batch: LoadedBatch) -> Output:
        if self.table is not None:
            self.table.put(batch.ids, image_BD, text_BD, batch.tokens)
        output: Output = objective(image_BD, text_BD, batch.ids, batch.log_correction)
        return output

    def seed_dropout(self, step: int, place: int = 0) -> None:
        torch.manual_seed(key_of(self.seed, step, distributed.world().rank, place))

    def _embed(self, model: nn.Module, piece: LoadedBatch, step: int, place: int) -> tuple[Tensor, Tensor]:
        if not being_recorded(piece.images):
            self.seed_dropout(step, place)
        with in_precision(self.precision, piece.images.device):
            embedded: tuple[Tensor, Tensor] = model(*piece.inputs)
        return embedded


def _descend(loss: Tensor, scaler: torch.amp.GradScaler) -> None:
    scaled: Tensor = scaler.scale(loss)
    scaled.backward()  # type: ignore[no-untyped-call]


def _backward(embedded: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
    """A locked tower's embeddings have no way back."""
    live = [(rows, gradient) for rows, gradient in zip(embedded, gradients, strict=True) if rows.requires_grad]
    torch.autograd.backward([rows for rows, _ in live], [gradient for _, gradient in live])


def _mean(outputs: Sequence[Output]) -> Output:
    """The last one's metrics: what the objective remembers is theirs."""
    return Output(torch.stack([output.loss for output in outputs]).mean(), outputs[-1].metrics)


def _finished(output: Output) -> Output:
    return Output(output.loss.detach(), output.metrics)
