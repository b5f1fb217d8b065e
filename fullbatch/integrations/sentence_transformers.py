"""The objective as a loss of sentence-transformers, for pairs of texts and for pairs of image and text.

    class PairTrainer(PairLossMixin, SentenceTransformerTrainer):
        pass

    loss = PairLoss(model, fb.make_objective("sogclr", num_samples=len(dataset)), mini_batch=32)
    trainer = PairTrainer(model, args=arguments, loss=loss, train_dataset=with_ids(dataset))

The library itself is not imported here.
"""

# B: pairs in a batch   D: width

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from fullbatch.config.checks import is_whole
from fullbatch.integrations.ids import number_rows
from fullbatch.integrations.state import check_carried
from fullbatch.integrations.transformers import KeepsObjective, batch_loss
from fullbatch.objective.objective import Objective

_ADVICE = "derive the trainer: class PairTrainer(PairLossMixin, SentenceTransformerTrainer)."
Features = dict[str, Any]


def with_ids(dataset: Any) -> Any:
    """``dataset`` with its row numbers as "label", which is how a loss gets to see them."""
    return number_rows(dataset, "label")


class PairLossMixin(KeepsObjective):
    """To stand before ``SentenceTransformerTrainer`` among the bases."""

    def objectives(self) -> list[Objective]:
        losses: Any = getattr(self, "loss", None)
        found = losses.values() if isinstance(losses, dict) else [losses]
        modules = [module for loss in found for module in loss.modules()]
        return list(dict.fromkeys(module.objective for module in modules if isinstance(module, PairLoss)))


class PairLoss(nn.Module):
    """The first two columns of a row are a pair; embeddings are normalised here.

    With ``mini_batch`` the model embeds that many rows at a time, and again in the backward pass, so that activations
    of one piece are alive at a time (GradCache).  The gradient is that of the whole batch, dropout included.
    """

    def __init__(self, model: nn.Module, objective: Objective, mini_batch: int | None = None) -> None:
        super().__init__()
        if mini_batch is not None and not is_whole(mini_batch, 1):
            raise ValueError(f"mini_batch must be a number of rows of at least 1, or None for all, got {mini_batch!r}.")
        self.model, self.objective, self.mini_batch = model, objective, mini_batch

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        if len(columns) != 2:
            raise ValueError(f"PairLoss takes two columns, a pair a row, got {len(columns)}; leave out the others.")
        training = self.model.training
        if training:
            check_carried(self.objective, _ADVICE)
        ids = self._ids(labels) if training and self.objective.method.needs_ids else None
        first_BD, second_BD = (normalize(self._embed(features).float(), dim=-1) for features in columns)
        if not training:
            return batch_loss(self.objective, first_BD, second_BD)
        loss: Tensor = self.objective.train()(first_BD, second_BD, ids).loss
        return loss

    def _ids(self, labels: Tensor | None) -> Tensor:
        if labels is None or labels.is_floating_point():
            given = "no label" if labels is None else f"labels of type {labels.dtype}"
            raise ValueError(
                f"This method remembers every sample, but the rows have {given}; give the trainer with_ids(dataset)."
            )
        return labels

    def _embed(self, features: Features) -> Tensor:
        pieces = [features] if self.mini_batch is None else split(features, self.mini_batch)
        if len(pieces) == 1 or not torch.is_grad_enabled():
            return torch.cat([_sentence_embedding(self.model, piece) for piece in pieces])
        return torch.cat([_embed_again_in_backward(self.model, piece) for piece in pieces])

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {"objective": repr(self.objective.method), "mini_batch": self.mini_batch}


def _sentence_embedding(model: nn.Module, features: Features) -> Tensor:
    copied = dict(features)  # modules add to the features they are given
    embedding: Tensor = model(copied)["sentence_embedding"]
    return embedding


def _embed_again_in_backward(model: nn.Module, features: Features) -> Tensor:
    """DDP awaits gradients from its own forward pass; in the backward pass it must not be called."""
    wrapped = True

    def embed() -> Tensor:
        nonlocal wrapped
        runner = model if wrapped else getattr(model, "module", model)
        wrapped = False
        return _sentence_embedding(runner, features)

    embedding: Tensor = checkpoint(embed, use_reentrant=False)
    return embedding


def split(features: Features, size: int) -> list[Features]:
    """The features of ``size`` rows at a time.

    >>> [piece["input_ids"].tolist() for piece in split({"input_ids": torch.arange(5), "task": "query"}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    lengths = {key: len(value) for key, value in features.items() if isinstance(value, Tensor) and value.dim()}
    count = lengths.get("input_ids", next(iter(lengths.values()), 0))
    odd = [key for key, length in lengths.items() if length != count]
    if odd or not count:
        raise ValueError(
            f"mini_batch needs features with one row a sample, but {(odd or ['nothing'])[0]!r} is laid out otherwise; "
            "leave mini_batch out for this model."
        )

    def rows(value: Any, start: int) -> Any:
        per_row = (isinstance(value, Tensor) and value.dim()) or (isinstance(value, list) and len(value) == count)
        return value[start : start + size] if per_row else value

    return [{key: rows(value, start) for key, value in features.items()} for start in range(0, count, size)]
