"""While a model is tuned: keep what each evaluation gave, and the weights of the best epoch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fullbatch import distributed
from fullbatch.assembly import Parts
from fullbatch.config.run import RunConfig
from fullbatch.distributed import towers
from fullbatch.finetuning.base import replace_folder
from fullbatch.finetuning.record import MEASURED, TUNED, Epoch, Record, values_of, write_record
from fullbatch.loading import as_loaded
from fullbatch.models.saved import export
from fullbatch.training.run_folder import Folder
from fullbatch.training_run import Evaluated

log = logging.getLogger("fullbatch")


class EpochRecorder:
    """Called after each evaluation, on every rank, while the model holds the weights that were measured."""

    def __init__(self, folder: Folder, config: RunConfig, record: Record) -> None:
        self.folder, self.config, self.record = folder, config, record
        self.first = distributed.world().rank == 0

    def __call__(self, seen: Evaluated) -> bool:
        """False: whatever it says, tuning goes on."""
        parts, measured, step, stages = seen.parts, seen.measured, seen.step, seen.parts.stages
        trained = stages.trained(step)
        if step > 0 and trained == 0:
            return False  # the base once more
        values = values_of(measured, self.record.metric)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        epoch = self.record.epoch_of(step, trained / stages.steps_per_epoch, finite)
        best = bool(distributed.from_first_rank(self.record.beats(epoch)))
        if best:
            self._keep_weights(parts, epoch)
        self.record = self.record.with_epoch(epoch, best)
        if trained == 0:
            chances = {f"{result.task} {result.main}": result.chance for result in measured.results}
            self.record = replace(self.record, chances=chances)
        if self.first:
            write_record(self.folder.path, self.record)
        self._announce(epoch, best, seen.say)
        return False

    def _keep_weights(self, parts: Parts, epoch: Epoch) -> None:
        """Whole weights, however the ranks hold them, are put into towers of the first rank's own and exported."""
        state = parts.state
        held = {
            "model": towers.weights_of(parts.model),
            "objective": state.objective.state_dict(),
            "position": state.position.state_dict(),
        }
        distributed.together(lambda: self._write(held, epoch) if self.first else None)

    def _write(self, held: Mapping[str, Any], epoch: Epoch) -> None:
        loaded = as_loaded(self.config, self.folder.model, held)

        def write(new: Path) -> None:
            export(loaded.model, new, "safetensors", loaded.temperature, loaded.bias)
            (new / MEASURED).write_text(json.dumps(asdict(epoch)) + "\n", encoding="utf-8")

        replace_folder(self.folder.path / TUNED, write)

    def _announce(self, epoch: Epoch, best: bool, say: Callable[[str], None]) -> None:
        if epoch.score is None:
            log.warning("step %d has no score: a task that the base was measured on gave no number", epoch.step)
            return
        score = f"{self.record.metric} {epoch.score:.2%}"
        if epoch.epoch == 0:
            say(f"base: {score}")
            return
        base = self.record.base
        change = "" if base is None or base.score is None else f" ({100 * (epoch.score - base.score):+.2f} points)"
        say(f"epoch {epoch.epoch:g}: {score}{change}{', the best epoch so far' if best else ''}")
