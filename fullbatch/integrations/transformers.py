"""The objective in a ``transformers.Trainer``, for any model whose output has image_embeds and text_embeds.

    class ContrastiveTrainer(ContrastiveMixin, transformers.Trainer):
        pass

    objective = fb.make_objective("sogclr", num_samples=len(dataset))
    trainer = ContrastiveTrainer(model, args=arguments, objective=objective, train_dataset=with_ids(dataset))

The mixin asks for nothing of transformers before it is mixed with one of its trainers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fullbatch.integrations.ids import ID, number_rows
from fullbatch.integrations.ids import keep_ids as keep_ids
from fullbatch.integrations.state import (
    carry_state,
    check_carried,
    freeze_temperature,
    log_temperature,
    write_temperature,
)
from fullbatch.objective.objective import Objective

_ADVICE = (
    "let the trainer's create_optimizer call super().create_optimizer(), with ContrastiveMixin first in its bases."
)
CLIP_START = 0.07  # where CLIP's temperature begins: an evaluation's, if every training sample has its own
_FILES = ("optimizer.pt", "scheduler.pt")  # the trainer loads both or none


def with_ids(dataset: Any) -> Any:
    """``dataset`` with its row numbers as "sample_id"; a Hugging Face data set or any with ``len`` and indexing."""
    return number_rows(dataset)


class KeepsObjective:
    """For any trainer derived from transformers': its optimizer learns the objective's temperature, and its checkpoints
    hold the objective (in optimizer.pt)."""

    temperature_lr: float | None = None
    _step_is_new = True  # no gradient is accumulated yet

    def objectives(self) -> list[Objective]:
        raise NotImplementedError

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        trainer: Any = self
        for name in ("deepspeed", "fsdp"):
            if getattr(trainer, f"is_{name}_enabled", False):
                raise ValueError(
                    f"With {name} the optimizer's state is saved in pieces, which cannot hold the objective; train "
                    "with DDP, or without."
                )
        parent: Any = super()
        self._step_is_new = True
        optimizer: torch.optim.Optimizer = parent.create_optimizer(*args, **kwargs)
        return carry_state(optimizer, *self.objectives(), temperature_lr=self.temperature_lr)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The trainer goes on without an optimizer's file, where the objective would begin anew unnoticed."""
        parent: Any = super()
        parent._load_optimizer_and_scheduler(checkpoint)
        missing = [name for name in _FILES if checkpoint is not None and not os.path.isfile(Path(checkpoint, name))]
        if missing:
            raise ValueError(
                f"{checkpoint} has no {missing[0]}, so the objective's state is not in it; resume from a checkpoint "
                "that was saved without save_only_model."
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Before a step the trainer clears the gradients of its model only."""
        trainer: Any = self
        parent: Any = super()
        if self._step_is_new:
            for objective in self.objectives():
                objective.zero_grad()
        loss: Tensor = parent.training_step(*args, **kwargs)
        self._step_is_new = trainer.accelerator.sync_gradients
        return loss


class ContrastiveMixin(KeepsObjective):
    """To stand before ``Trainer`` among the bases; ``objective`` and ``temperature_lr`` are keywords of its own."""

    loss_is_scaled_for_ga = False  # a mean over a batch: the trainer divides it by the batches it accumulates

    def __init__(self, *args: Any, objective: Objective, temperature_lr: float | None = None, **kwargs: Any) -> None:
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        trainer: Any = self
        self.objective, self.temperature_lr = objective.to(trainer.args.device), temperature_lr
        trainer.can_return_loss = True  # without labels, in an evaluation too
        trainer.model_accepts_loss_kwargs = False  # as loss_is_scaled_for_ga, in versions before it
        freeze_temperature(trainer.model)

    def objectives(self) -> list[Objective]:
        return [self.objective]

    def _set_signature_columns_if_needed(self) -> None:
        """Columns that the model does not take are removed; the ids are not for the model."""
        parent: Any = super()
        parent._set_signature_columns_if_needed()
        trainer: Any = self
        if ID not in trainer._signature_columns:
            trainer._signature_columns.append(ID)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        ids = inputs.get(ID)
        outputs = model(**{key: value for key, value in inputs.items() if key not in (ID, "return_loss")})
        image_BD, text_BD = _embeddings(outputs)
        if model.training:
            loss = self._training_loss(image_BD, text_BD, ids)
        else:
            loss = batch_loss(self.objective, image_BD, text_BD)
        # what compute_metrics is given; hidden states of a whole evaluation would fill the memory
        return (loss, {"image_embeds": image_BD, "text_embeds": text_BD}) if return_outputs else loss

    def _training_loss(self, image_BD: Tensor, text_BD: Tensor, ids: Tensor | None) -> Tensor:
        check_carried(self.objective, _ADVICE)
        if ids is None and self.objective.method.needs_ids:
            raise ValueError(
                f"This method remembers every sample, but the batch has no {ID!r}; give the trainer "
                "with_ids(train_dataset), and keep_ids(collator) if the collator is your own."
            )
        loss: Tensor = self.objective.train()(image_BD, text_BD, ids).loss
        trainer: Any = self
        write_temperature(trainer.model, self.objective)
        return loss


def _embeddings(outputs: Any) -> tuple[Tensor, Tensor]:
    try:
        return outputs["image_embeds"], outputs["text_embeds"]
    except (KeyError, TypeError, IndexError):
        raise ValueError(
            "The model's output must have image_embeds and text_embeds, as CLIPModel's and SiglipModel's have, got "
            f"{type(outputs).__name__}."
        ) from None


@torch.no_grad()
def batch_loss(objective: Objective, image_BD: Tensor, text_BD: Tensor) -> Tensor:
    """What an evaluation reports: the objective's loss; for one with tables, in which new samples have no place, CLIP's
    loss within the batch."""
    if len(image_BD) < 2:  # the last batch of a set; nothing to confuse the pair with
        return image_BD.new_zeros(())
    if not objective.method.needs_ids:
        loss: Tensor = objective.eval()(image_BD, text_BD).loss
        return loss
    log_tau = log_temperature(objective)
    tau = CLIP_START if log_tau is None else log_tau.exp().to(image_BD.device)
    sim_BB = (image_BD @ text_BD.T).float() / tau
    own_B = torch.arange(len(sim_BB), device=sim_BB.device)
    return (cross_entropy(sim_BB, own_B) + cross_entropy(sim_BB.T, own_B)) / 2
