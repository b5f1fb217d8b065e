"""A trainer whose towers are two linear maps in float64: small enough to write its steps down by hand."""

# n: samples   B: batch   F: features   D: width

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullbatch as fb
from fullbatch.config.run import RunConfig
from fullbatch.data.loader import LoadedBatch
from fullbatch.training.display import Display
from fullbatch.training.optimizer import make_optimizer, make_temperature_optimizer
from fullbatch.training.run_folder import Folder, Metrics
from fullbatch.training.stages import Stages
from fullbatch.training.state import Position, TrainingState
from fullbatch.training.trainer import Hooks, Trainer

FEATURES, WIDTH = 6, 5
CPU = torch.device("cpu")


class LinearTowers(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.image_FD, self.text_FD = (
            nn.Parameter(torch.randn(FEATURES, WIDTH, generator=drawn, dtype=torch.float64)) for _ in range(2)
        )

    def forward(self, image_BF: Tensor, text_BF: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(image_BF @ self.image_FD, dim=-1), F.normalize(text_BF @ self.text_FD, dim=-1)


@dataclass(frozen=True)
class LinearBatches:
    """Pairs that somewhat agree, in an order that a generator draws anew each epoch."""

    samples: int
    batch_size: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    def features(self) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(1000)
        image_nF, noise_nF = (
            torch.randn(self.samples, FEATURES, generator=drawn, dtype=torch.float64) for _ in range(2)
        )
        return image_nF, image_nF + noise_nF

    def batch(self, number: int) -> LoadedBatch:
        epoch, place = divmod(number, self.steps_per_epoch)
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(10_000 * self.seed + epoch))
        ids = order[place * self.batch_size : (place + 1) * self.batch_size]
        image_nF, text_nF = self.features()
        return LoadedBatch(ids, image_nF[ids], text_nF[ids])


def linear_trainer(folder: Path, batches: LinearBatches, **settings: Any) -> Trainer:
    """As a run makes it, but for the towers."""
    config = RunConfig.of(batch_size=batches.batch_size, runs=str(folder), log_every=10**9, device="cpu", **settings)
    model = LinearTowers()

    def objective() -> Any:
        return fb.make_objective(
            config.objective.method,
            num_samples=batches.samples,
            table_dtype=torch.float64,
            **config.objective.settings,
        ).double()

    made = objective()
    state = TrainingState(
        model=model,
        average=None,
        optimizer=make_optimizer(model, config.optimizer, CPU),
        temperature_optimizer=make_temperature_optimizer(made, config.optimizer),
        objective=made,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        position=Position(),
    )
    return Trainer(
        config=config,
        folder=Folder(folder),
        batches=batches,  # type: ignore[arg-type]
        stages=Stages.of(config, batches.steps_per_epoch),
        device=CPU,
        model=model,
        state=state,
        metrics=Metrics(Folder(folder), config, first=False, step=0),
        display=Display(first=False, quiet=True),
        hooks=Hooks(fresh_objective=objective),
    )


def take_steps(trainer: Trainer, batches: LinearBatches, count: int) -> None:
    for _ in range(count):
        step, stages = trainer.state.position.step, trainer.stages
        trainer.train_step(LoadedBatch.joined([batches.batch(number) for number in stages.places(step)]))
