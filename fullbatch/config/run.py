"""A run, whole: one frozen tree.  The command line, YAML files and the Python interface all speak it."""

from __future__ import annotations

from dataclasses import dataclass

from fullbatch.config.data import Data
from fullbatch.config.model import Model
from fullbatch.config.objective import Objective
from fullbatch.config.optimization import Optimizer, Schedule
from fullbatch.config.training import Evaluation, RunFolder, Training


@dataclass(frozen=True)
class RunConfig:
    objective: Objective = Objective()
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    run: RunFolder = RunFolder()

    def __post_init__(self) -> None:
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"Schedule.min_lr must not exceed Optimizer.lr, got {self.schedule.min_lr} > {self.optimizer.lr}."
            )
