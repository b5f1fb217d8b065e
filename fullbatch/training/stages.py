"""The steps of a run: those of the recovery, with frozen weights, then those that train.  Both read one stream of
batches, so that the second stage goes on in the data's order, and epochs count on, where the first one ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.data.loader import LoadedBatch, TrainingBatches
from fullbatch.training.run_folder import AUDIT, EVALUATION

RECOVERY, TUNING, TRAINING = "recovery", "tuning", "training"


@dataclass(frozen=True)
class Stages:
    per_epoch: int  # batches an epoch
    training: int  # steps that move the weights
    recovery: int = 0  # steps before them that do not
    joined: int = 1  # batches that a step of the recovery takes together, all of one epoch: no sample is there twice
    apart: int = 1  # batches of a training step, each with its own loss, whose gradients it averages

    @classmethod
    def of(cls, config: RunConfig, per_epoch: int) -> Stages:
        """At least one step of training, and of the recovery where there is any."""
        training, recovery, apart = config.training, config.recovery, config.selection.batches_a_step
        steps = training.epochs * per_epoch // apart
        if training.samples is not None:
            steps = -(-training.samples // (training.batch_size * apart))
        joined = (recovery.recovery_batch or training.batch_size) // training.batch_size
        if joined > per_epoch:
            samples = per_epoch * training.batch_size
            raise ValueError(
                f"--recovery-batch {recovery.recovery_batch} is more than the {samples} samples of an epoch; "
                "take less, or more data."
            )
        frozen = recovery.recovery_steps or 0
        if recovery.recovery_epochs:
            frozen = max(1, round(recovery.recovery_epochs * (per_epoch // joined)))
        return cls(per_epoch, steps, frozen, joined, apart)

    @property
    def total(self) -> int:
        return self.recovery + self.training

    @property
    def steps_per_epoch(self) -> int:
        """Steps of training."""
        return self.per_epoch // self.apart

    def recovers(self, step: int) -> bool:
        """Whether the weights stay as they are in step ``step`` (the first is 0)."""
        return step < self.recovery

    def trained(self, step: int) -> int:
        """How many of the first ``step`` steps have moved the weights."""
        return max(0, step - self.recovery)

    def batches_read(self, step: int) -> int:
        """By the first ``step`` steps."""
        return min(step, self.recovery) * self.joined + self.trained(step) * self.apart

    def place(self, step: int) -> int:
        """Of step ``step``'s first batch in the order of the data; an epoch's last batches are left out where they are
        too few to be joined."""
        epochs, left = divmod(min(step, self.recovery), self.per_epoch // self.joined)
        return epochs * self.per_epoch + left * self.joined + self.trained(step) * self.apart

    def places(self, step: int) -> range:
        """Of all its batches."""
        return range(self.place(step), self.place(step) + (self.joined if self.recovers(step) else self.apart))

    @property
    def joined_batches(self) -> range:
        """Those of the recovery, by their places, where a step takes several as one; else none."""
        return range(self.place(self.recovery)) if self.joined > 1 else range(0)

    def epoch(self, step: int) -> int:
        """Of the data, which both stages count together: gamma starting again at 1 would forget what was recovered."""
        return self.place(step) // self.per_epoch

    def evaluation_due(self, step: int, settings: Evaluation) -> bool:
        """After the first ``step`` steps; the end of the run is not asked about."""
        trained = self.trained(step)
        if not trained:
            return step == 0 and settings.evaluate_start
        if settings.evaluations is not None:  # the first step at or beyond each of the equal parts
            parts = min(settings.evaluations, self.training)
            return trained * parts // self.training > (trained - 1) * parts // self.training
        every = settings.evaluate_every * self.steps_per_epoch
        return bool(every) and trained % every == 0

    def name(self, step: int) -> str:
        """Of the stage that step ``step`` belongs to."""
        if not self.recovery:
            return TRAINING
        return RECOVERY if self.recovers(step) else TUNING

    def stream(
        self,
        batches: TrainingBatches | InMemoryBatches,
        step: int,
        workers: int,
        device: torch.device,
        ranges: Callable[[range], Iterable[range]] = lambda numbers: [numbers],
    ) -> Generator[LoadedBatch, None, None]:
        """A batch a step, from ``step`` to the end; ``ranges`` cuts them up, and says when each part may be read."""
        numbers = range(self.place(step), self.place(self.total))
        single = batches.stream(ranges(numbers), min(workers, len(numbers)), device, numbers.stop)
        read = numbers.start
        try:
            for later in range(step, self.total):
                for _ in range(read, self.place(later)):
                    next(single)  # at an epoch's end, too few to be joined
                read = self.places(later).stop
                yield LoadedBatch.joined([next(single) for _ in self.places(later)])
        finally:
            single.close()


@contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """BatchNorm normalises by the batch as ever, but its running statistics stay as they are."""
    tracking = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]


def cost_of(lines: Iterable[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """What a run has cost, stage by stage: seconds, and device-hours over all ranks (TuneCLIP, Tables 16-18).  From the
    lines of metrics.jsonl.  Training counts its seconds on over the stages, measuring is not in them."""
    lines, stages = list(lines), list[dict[str, Any]]()
    steps, samples, seconds = 0, 0, 0.0

    def add(stage: str, steps: int | None, samples: int | None, seconds: float) -> None:
        cost = {"seconds": seconds, "device_hours": seconds * devices / 3600.0}
        stages.append({"stage": stage, "steps": steps, "samples": samples, **cost})

    for stage in (RECOVERY, TUNING, TRAINING):
        own = [line for line in lines if "kind" not in line and line.get("stage", TRAINING) == stage]
        if own:
            last = own[-1]
            until = float(last.get("seconds") or seconds)
            add(stage, last["step"] - steps, last["samples"] - samples, until - seconds)
            steps, samples, seconds = last["step"], last["samples"], until
    for kind in (EVALUATION, AUDIT):
        taken = [float(line.get("seconds") or 0.0) for line in lines if line.get("kind") == kind]
        if taken:
            add(kind, None, None, sum(taken))
    return {"devices": devices, "stages": stages}
