"""What was measured at the base and after each epoch, and whether the tuned model is better and worse nowhere.

Values go by "TASK METRIC", as in metrics.jsonl; all are shares, and higher is better.  RUN/finetune.json has them all,
RUN/tuned/measured.json those that the weights beside it gave.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fullbatch import distributed
from fullbatch.assembly import Parts
from fullbatch.config.checks import is_number
from fullbatch.config.messages import listed
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict
from fullbatch.distributed import towers
from fullbatch.evaluation.metric_names import is_share, metric_named, named_numbers
from fullbatch.evaluation.result import Measured
from fullbatch.loading import as_loaded, replace_folder
from fullbatch.training.run_folder import Folder, replace_text
from fullbatch.training_run import Evaluated

log = logging.getLogger("fullbatch")

BASE, TUNED = "base", "tuned"  # folders
FILE, MEASURED = "finetune.json", "measured.json"
Values = Mapping[str, float | None]  # by "TASK METRIC"
MEAN = "mean"  # of the main metric of every task


@dataclass(frozen=True)
class Change:
    """What tuning did to one metric of one task; ``chance`` is None where nobody knows it."""

    task: str
    metric: str
    base: float
    tuned: float
    change: float
    chance: float | None
    regressed: bool


@dataclass(frozen=True)
class Verdict:
    """Whether the tuned model takes the base's place, and if not, why."""

    outcome: Literal["tuned", "kept_base"]
    reasons: tuple[str, ...]


def deciding(metric: str, tasks: Sequence[str]) -> str:
    """ "mean", or the "TASK METRIC" that is meant; a name that no task gives is refused before anything is measured."""
    if metric == MEAN:
        return metric
    named = metric_named(metric, tasks)
    if named.startswith("datacomp "):
        raise ValueError(f"--metric {metric!r} is an average; take {MEAN!r}, or one task and its metric.")
    if not is_share(named):
        raise ValueError(f"--metric {metric!r}: of a rank less is better; take one of the shares, such as mean_r1.")
    return named


def check_tolerance(tolerance: float) -> None:
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"--tolerance must lie in [0, 1], got {tolerance}; 0.01 lets a task fall by one point.")


def values_of(measured: Measured, metric: str) -> dict[str, float]:
    """The main value of each task, and the chosen one where it is another."""
    values = dict(measured.main_values)
    if metric == MEAN or metric in values:
        return values
    named = named_numbers(measured.as_dict())
    numbers = {name: named[name] for name in named if is_share(name) and not name.startswith("datacomp ")}
    if metric not in numbers:
        raise ValueError(f"--metric {metric!r} was not measured; take {MEAN!r}, or one of {listed(numbers)}.")
    return {**values, metric: numbers[metric]}


def score_of(values: Values, metric: str, base: Values) -> float | None:
    """The number that decides.  None where a task that the base was measured on has no number: a mean over fewer tasks
    compares with nothing."""
    finite = {name: value for name in base if (value := values.get(name)) is not None and math.isfinite(value)}
    if not finite or len(finite) < len(base):
        return None
    return sum(finite.values()) / len(finite) if metric == MEAN else finite.get(metric)


def changes_between(base: Values, tuned: Values, chances: Mapping[str, float], tolerance: float) -> tuple[Change, ...]:
    """Of the values that both have.  A fall of exactly the tolerance is within it."""
    changes = []
    for name, before in base.items():
        after = tuned.get(name)
        if before is not None and after is not None:
            task, metric = name.rsplit(" ", 1)
            fell = before - after > tolerance + 1e-9  # shares are sums of roundings
            changes.append(Change(task, metric, before, after, after - before, chances.get(name), fell))
    return tuple(changes)


@dataclass(frozen=True)
class Epoch:
    step: int  # of the run, which counts those with frozen weights too
    epoch: float  # passes over the data that have moved the weights; 0 for the base
    values: Values
    score: float | None  # the number that decides; None where a task gave none


@dataclass(frozen=True)
class Record:
    model: str  # what the user named
    metric: str  # "mean", or "TASK METRIC"
    tolerance: float  # how far a value may fall
    epochs: tuple[Epoch, ...] = ()  # oldest first; the first is the base
    best_step: int | None = None  # of the epoch whose weights are in tuned/
    chances: Mapping[str, float] = field(default_factory=dict)  # by "TASK METRIC": what guessing gives

    @property
    def base(self) -> Epoch | None:
        return next((known for known in self.epochs if known.epoch == 0), None)

    @property
    def best(self) -> Epoch | None:
        return next((known for known in self.epochs if known.step == self.best_step and known.epoch > 0), None)

    def beats(self, epoch: Epoch) -> bool:
        """Whether its weights belong in tuned/: the first that has a score, then whatever scores higher."""
        best = self.best
        if epoch.epoch == 0 or epoch.score is None:
            return False
        return best is None or best.score is None or epoch.score > best.score

    def with_epoch(self, epoch: Epoch, best: bool) -> Record:
        """With this epoch in place of what was known of its step; as ``best``, its weights are in tuned/.  The numbers
        of the best epoch stay those of the weights on disk, should its step be done again."""
        if self.best is not None and epoch.step == self.best.step and not best:
            return self
        others = [known for known in self.epochs if known.step != epoch.step]
        epochs = tuple(sorted([*others, epoch], key=lambda known: known.step))
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
        kept = tuple(known for known in self.epochs if known.step <= step or known.step == self.best_step)
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
        """The base stays unless the best epoch beats it and no task pays for that."""
        base, best = (None if known is None else known.score for known in (self.base, self.best))
        reasons = []
        if best is None or base is None:
            reasons.append("no epoch could be scored, for a task gave no number")
        elif best <= base:
            reasons.append(f"no epoch beats the base: the best one scores {best:.2%}, the base {base:.2%}")
        reasons += [
            f"{change.task} fell from {change.base:.2%} to {change.tuned:.2%} ({change.metric}), "
            f"by more than the tolerance, {self.tolerance:g}"
            for change in self.changes
            if change.regressed
        ]
        return Verdict("kept_base" if reasons else "tuned", tuple(reasons))


def write_record(
    run: Path, record: Record, ended: Verdict | None = None, cost: Mapping[str, Any] | None = None
) -> None:
    outcome = None if ended is None else ended.outcome
    content = {
        **asdict(record),
        "tasks": [asdict(change) for change in record.changes],
        "outcome": outcome,
        "result": None if outcome is None else TUNED if outcome == "tuned" else BASE,
        "reasons": [] if ended is None else list(ended.reasons),
        "cost": cost,
    }
    replace_text(run / FILE, json.dumps(content, indent=1) + "\n")


def result_of(run: Path) -> Path | None:
    """The folder that a run which has ended says to take."""
    result = json.loads((run / FILE).read_text(encoding="utf-8")).get("result")
    return None if result is None else run / str(result)


def read_record(run: Path) -> Record:
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of a `fullbatch finetune` run: there is no {FILE} in it.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        epochs = tuple(_epoch(epoch) for epoch in content["epochs"])
        kept = ("model", "metric", "tolerance", "best_step", "chances")
        record = from_dict(Record, {name: content[name] for name in kept})
        record = replace(record, epochs=epochs)
        path = run / TUNED / MEASURED
        if not path.is_file():
            return replace(record, best_step=None)
        return record.with_epoch(_epoch(json.loads(path.read_text(encoding="utf-8"))), best=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); put back a whole one, or start a new run.") from None


def _epoch(values: Any) -> Epoch:
    epoch = Epoch(**values)
    numbers = (*epoch.values.values(), epoch.score)
    known = is_number(epoch.step) and is_number(epoch.epoch)
    if not known or not all(number is None or is_number(number) for number in numbers):
        raise ValueError("a number of an epoch is no number")
    return epoch


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
            "model": towers.whole_weights(parts.model),
            "objective": state.objective.state_dict(),
            "position": state.position.state_dict(),
        }

        def write(new: Path) -> None:
            as_loaded(self.config, self.folder.model, held).export(new)
            (new / MEASURED).write_text(json.dumps(asdict(epoch)) + "\n", encoding="utf-8")

        distributed.together(lambda: replace_folder(self.folder.path / TUNED, write) if self.first else None)

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
