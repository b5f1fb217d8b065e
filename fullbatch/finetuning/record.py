"""finetune.json: what was measured at the base and after each epoch, and what came of it.

RUN/
  base/           the model as it was
  tuned/          the best epoch's, with measured.json: the numbers that these very weights gave
  finetune.json   {"model", "metric", "tolerance", "epochs": [{"step", "epoch", "values", "score"}], "chances",
                  "best_step", "tasks": [{"task", "metric", "base", "tuned", "change", "chance", "regressed"}],
                  "outcome": "tuned", "kept_base" or while it runs null, "result": "tuned" or "base", "reasons", "cost"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fullbatch.config.messages import listed
from fullbatch.finetuning.verdict import MEAN, Change, Verdict, changes_between, judged, score_of
from fullbatch.training.run_folder import replace_text

BASE, TUNED = "base", "tuned"  # folders
FILE, MEASURED = "finetune.json", "measured.json"


@dataclass(frozen=True)
class Epoch:
    """step    of the run, which counts those with frozen weights too
    epoch   passes over the data that have moved the weights; 0 for the base
    values  "TASK METRIC" -> value
    score   the number that decides; None where a task gave none
    """

    step: int
    epoch: float
    values: Mapping[str, float | None]
    score: float | None


@dataclass(frozen=True)
class Record:
    """model      what the user named
    metric     "mean", or "TASK METRIC"
    tolerance  how far a value may fall
    epochs     oldest first; the first is the base
    best_step  of the epoch whose weights are in tuned/
    chances    "TASK METRIC" -> what guessing gives
    """

    model: str
    metric: str
    tolerance: float
    epochs: tuple[Epoch, ...] = ()
    best_step: int | None = None
    chances: Mapping[str, float] = field(default_factory=dict)

    @property
    def base(self) -> Epoch | None:
        return next((each for each in self.epochs if each.epoch == 0), None)

    @property
    def best(self) -> Epoch | None:
        return next((each for each in self.epochs if each.step == self.best_step and each.epoch > 0), None)

    def beats(self, epoch: Epoch) -> bool:
        """Whether its weights belong in tuned/: the first that has a score, then whatever scores higher."""
        best = self.best
        if epoch.epoch == 0 or epoch.score is None:
            return False
        return best is None or best.score is None or epoch.score > best.score

    def with_epoch(self, epoch: Epoch, best: bool) -> Record:
        """With this one in the place of what was known of its step; as ``best``, its weights are in tuned/.

        The numbers of the best epoch stay those of the weights on disk, should its step be done again.
        """
        if self.best is not None and epoch.step == self.best.step and not best:
            return self
        others = [each for each in self.epochs if each.step != epoch.step]
        epochs = tuple(sorted([*others, epoch], key=lambda each: each.step))
        return replace(self, epochs=epochs, best_step=epoch.step if best else self.best_step)

    def by(self, metric: str) -> Record:
        """Scored by another metric; before the first epoch, so that only the base has a score."""
        base = self.base
        if base is None:
            return replace(self, metric=metric)
        if metric != MEAN and metric not in base.values:
            raise ValueError(
                f"--resume --metric {metric!r}: the base was not measured by it, but by {listed(base.values)}. "
                "Start a new run."
            )
        scored = replace(base, score=score_of(base.values, metric, base.values))
        return replace(self, metric=metric, epochs=(scored,), best_step=None)

    def until(self, step: int) -> Record:
        """Without the epochs that a run which goes on from ``step`` will do again."""
        kept = tuple(each for each in self.epochs if each.step <= step or each.step == self.best_step)
        return replace(self, epochs=kept)

    def epoch_of(self, step: int, epoch: float, values: Mapping[str, float]) -> Epoch:
        base = self.base.values if self.base is not None and epoch else values
        return Epoch(step, int(epoch) if epoch == int(epoch) else epoch, values, score_of(values, self.metric, base))

    @property
    def changes(self) -> tuple[Change, ...]:
        if self.base is None or self.best is None:
            return ()
        return changes_between(self.base.values, self.best.values, self.chances, self.tolerance)

    def verdict(self) -> Verdict:
        base, best = (None if each is None else each.score for each in (self.base, self.best))
        return judged(base, best, self.changes, self.tolerance)


def write_record(
    run: Path, record: Record, ended: Verdict | None = None, cost: Mapping[str, Any] | None = None
) -> None:
    outcome = None if ended is None else ended.outcome
    said = {
        "model": record.model,
        "metric": record.metric,
        "tolerance": record.tolerance,
        "epochs": [asdict(each) for each in record.epochs],
        "chances": dict(record.chances),
        "best_step": record.best_step,
        "tasks": [asdict(change) for change in record.changes],
        "outcome": outcome,
        "result": None if outcome is None else TUNED if outcome == "tuned" else BASE,
        "reasons": [] if ended is None else list(ended.reasons),
        "cost": cost,
    }
    replace_text(run / FILE, json.dumps(said, indent=1) + "\n")


def result_of(run: Path) -> Path | None:
    """The folder that a run which has ended says to take."""
    said = json.loads((run / FILE).read_text(encoding="utf-8")).get("result")
    return None if said is None else run / str(said)


def read_record(run: Path) -> Record:
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of a `fullbatch finetune` run: there is no {FILE} in it.")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        epochs = tuple(Epoch(**each) for each in said["epochs"])
        record = Record(said["model"], said["metric"], said["tolerance"], epochs, said["best_step"], said["chances"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}).") from None
    tuned = run / TUNED / MEASURED
    if not tuned.is_file():
        return replace(record, best_step=None)
    return record.with_epoch(Epoch(**json.loads(tuned.read_text(encoding="utf-8"))), best=True)
