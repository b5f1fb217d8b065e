"""One run of a comparison, or one trial of a search: trained by one process from wherever it stands to its end.

A trial is a run whose evaluations are reported, and which may be ended early for what they say.  trial.json in its
folder has every evaluation and what followed from it, and at the end how the trial ended.  A trial whose process dies
goes on from there, in another process, and ends as if nothing had happened: what was decided stays decided, even if by
now the pruner would say otherwise.
"""

from __future__ import annotations

import gc
import json
import logging
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from fullbatch.assembly import check_packages, pick_device
from fullbatch.config.messages import reason_of
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import to_dict
from fullbatch.data.durable import make_folder, read_lines, sync
from fullbatch.data.loader import open_pool
from fullbatch.evaluation.metric_names import Metric, worst_of
from fullbatch.evaluation.tasks import check_tasks, tasks_of
from fullbatch.models.build import build_model
from fullbatch.training import checkpoint
from fullbatch.training.interruption import Abandoned
from fullbatch.training.run_folder import LOCK, Folder, alone_in, replace_text, with_choices_of
from fullbatch.training.stages import cost_of
from fullbatch.training.trainer import Diverged
from fullbatch.training_run import Evaluated, train
from fullbatch.trials.checks import first_difference
from fullbatch.trials.phases import Score, Status
from fullbatch.trials.processes import OUTPUT
from fullbatch.trials.search_plan import Take

log = logging.getLogger("fullbatch")

FILE = "trial.json"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended; outcome.json in its folder."""

    status: Literal["done", "failed", "open"]
    error: str = ""  # of a failed one
    again: bool = False  # whether another try may end otherwise: a full disk, a killed process
    memory_gib: float | None = None  # the most main memory its process held, data workers not counted

    def write(self, run: Path) -> None:
        make_folder(run)
        replace_text(run / OUTCOME, json.dumps(asdict(self), indent=1))


def outcome_of(run: Path) -> Outcome:
    """What is known of a run from its folder; "open" if it has not ended."""
    try:
        return Outcome(**json.loads((run / OUTCOME).read_text()))
    except (OSError, ValueError, TypeError):
        return Outcome("open")


def execute(
    config: RunConfig, busy: Callable[[], bool] = lambda: False, begin: Callable[[], None] = lambda: None
) -> Outcome:
    """Train to the end, going on where the folder stands; Interrupted goes through to the caller.  ``busy`` is asked
    while another process is at work in the folder, and may give up: ``Abandoned``.  ``begin`` is called before the
    training, if there is something to train."""
    folder = Folder.of(config)
    with alone_in(folder.path, busy):
        known = outcome_of(folder.path)
        if known.status != "open":
            return known
        begin()
        forget_earlier_runs()
        outcome = Outcome("done")
        try:
            train(config, folder.begun)
        except torch.OutOfMemoryError as error:
            outcome = Outcome("failed", out_of_memory(error))
        except (ValueError, OSError) as error:
            outcome = Outcome("failed", reason_of(error), again=isinstance(error, OSError))
        outcome = replace(outcome, memory_gib=_most_memory())
        outcome.write(folder.path)
        return outcome


def _most_memory() -> float:
    """GiB.  Without Linux's resettable mark it is the most of all runs of this process so far."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ---------------------------------------------------------------------------------------------------------------------
# a trial of a search


class CannotWork(ValueError):
    """Nothing is wrong with the trial, but this machine cannot train it: a disk is full or gone, there is no GPU."""


Verdict = Literal["", "pruned", "stopped"]  # of an evaluation; "": the run goes on

# Told the number of an evaluation, from 1, and its value; whether the trial is to be pruned there.
Report = Callable[[int, float], bool]


@dataclass(frozen=True)
class Look:
    """One evaluation, after ``seconds`` of training, and what followed from it."""

    step: int
    seconds: float
    values: tuple[float, ...]
    verdict: Verdict = ""


@dataclass
class Trial:
    config: RunConfig  # names the folder
    metrics: Sequence[Metric]
    report: Report = lambda number, value: False  # only with a single metric; of what the folder has already first
    patience: int | None = None  # evaluations without a better one after which the run ends; None: it never does so
    take: Take = "best"  # which evaluation's values are the trial's
    lost: Callable[[], bool] = lambda: False  # whether the trial was given to another process
    stopping: Callable[[], bool] = lambda: False  # whether this process was told to stop; not asked of one that is over
    looks: list[Look] = field(default_factory=list)
    untold: Exception | None = None  # what the report raised

    def run(self) -> Score:
        """Train, going on where the folder stands.  ``Abandoned``: the trial is lost, or the process is to stop.  What
        ``report`` raises goes through, as does ``Interrupted``: as after ``CannotWork``, the trial has not ended."""
        assert self.config.run.name, "a trial has a folder of its own"
        self.config = replace(self.config, run=replace(self.config.run, keep=1))
        self.folder = Folder.of(self.config)
        with alone_in(self.folder.path, self.given_up):
            score = self.open()
            self.check_ours(self.given_up)
            if score is None:
                ended = self.go_on()
                self.check_ours(self.lost)
                if isinstance(ended, CannotWork):
                    raise ended
                score = ended
            self.close(score)
            return score

    def open(self) -> Score | None:
        """Read what is there and report it; the score, if the trial had ended already."""
        self._clear_if_another()
        score = self._read()
        for number, look in enumerate(self.looks, 1):
            self._tell(number, look.values)  # whatever the answer: what was decided stays decided
        killed = self.looks and self.looks[-1].verdict == "pruned"  # before it could say so
        return self._score() if score is None and killed else score

    def _clear_if_another(self) -> None:
        """A run that was begun with other settings, by a search that is gone, is nothing to go on with."""
        if not self.folder.config.is_file():
            return
        try:
            before = self.folder.read_config()
            change = first_difference(to_dict(before), to_dict(with_choices_of(before, self.config)))
        except ValueError as error:
            change = str(error)
        if change:
            log.warning("%s is trained anew: it is of another trial (%s)", self.folder.path, change)
            clear(self.folder.path)

    def given_up(self) -> bool:
        return self.lost() or self.stopping()

    def check_ours(self, lost: Callable[[], bool]) -> None:
        """Whether it is for us to go on with the trial or to end it, and can be told."""
        if self.untold is not None:
            raise self.untold
        if lost():
            raise Abandoned(f"The trial in {self.folder.path} is left to another process.")

    def close(self, score: Score) -> None:
        """Write the score, but for a failure, which another try may not meet; then drop what nobody needs again."""
        if score.status == "failed":
            (self.folder.path / FILE).unlink(missing_ok=True)
        else:
            self._write(score)
        kept = self._counting() if score.status in ("done", "stopped") else None
        for path in self.folder.checkpoints.glob("*"):
            if path != kept:
                checkpoint.drop(path)
        if self.folder.checkpoints.is_dir():
            sync(self.folder.checkpoints)  # once the study says that the trial ended, nobody drops them

    def _counting(self) -> Path | None:
        """The checkpoint of the evaluation that counts; of a trial that was not measured, the last one."""
        there = checkpoint.checkpoints(self.folder.checkpoints)
        if self.take == "best" and self.looks:
            best = checkpoint.folder_of(self.folder.checkpoints, self.looks[self._best(self.looks)].step)
            there = [best] if best in there else there
        return there[-1] if there else None

    def _read(self) -> Score | None:
        path = self.folder.path / FILE
        if not path.is_file():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        self.looks = [Look(**{**look, "values": tuple(look["values"])}) for look in stored["evaluations"]]
        return None if stored["score"] is None else Score.read(stored["score"])

    def _write(self, score: Score | None = None) -> None:
        stored = {"evaluations": list(map(asdict, self.looks)), "score": None if score is None else asdict(score)}
        replace_text(self.folder.path / FILE, json.dumps(stored, indent=1))

    def go_on(self) -> Score | CannotWork:
        """From wherever it stands to its end."""
        forget_earlier_runs()
        try:
            train(self.config, self.folder.begun, self.watch, command="train", abandoned=self.given_up)
            return self._score()
        except Diverged as error:
            return self._score("diverged", str(error))
        except (torch.OutOfMemoryError, MemoryError) as error:
            return self._score("failed", out_of_memory(error))
        except ValueError as error:
            unseen = _unseen(self.config)
            return CannotWork(f"{self.folder.path}: {unseen}") if unseen else self._score("failed", str(error))
        except OSError as error:
            return CannotWork(f"{self.folder.path}: {reason_of(error)}")
        except RuntimeError as error:
            if "CUDA" in str(error):
                raise  # the device is of no use to this process any more; another one will try
            traceback.print_exc()
            return self._score("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def watch(self, seen: Evaluated) -> bool:
        """Whether the run ends here.  An evaluation that is done again, after a kill, keeps what followed from it."""
        if not seen.parts.stages.trained(seen.step):
            return False
        self.check_ours(self.lost)  # else this evaluation would be noted as done
        look = next((look for look in self.looks if look.step == seen.step), None)
        if look is None:
            results = seen.measured.as_dict()
            values = tuple(metric.of(results, seen.seconds) for metric in self.metrics)
            look = Look(seen.step, seen.seconds, values)
            look = replace(look, verdict=self._verdict(look, last=seen.step == seen.parts.stages.total))
            self.looks.append(look)
            self._write()
        place = self.looks.index(look)
        if self.take == "best" and self._best(self.looks[: place + 1]) == place:
            seen.keep()
        return bool(look.verdict)

    def _verdict(self, look: Look, last: bool) -> Verdict:
        """At its last step a run has ended, whatever anyone says."""
        looks = [*self.looks, look]
        pruned = self._tell(len(looks), look.values)
        if last or pruned:
            return "" if last else "pruned"
        waited = len(looks) - 1 - self._best(looks)
        return "stopped" if self.patience is not None and waited >= self.patience else ""

    def _tell(self, number: int, values: tuple[float, ...]) -> bool:
        """A study of several metrics knows no intermediate values."""
        if len(values) > 1:
            return False
        try:
            return bool(self.report(number, values[0]))
        except Exception as error:
            self.untold = error
            raise

    def _best(self, looks: Sequence[Look]) -> int:
        """By the first metric that is measured: the first one that none beats."""
        which = next((place for place, metric in enumerate(self.metrics) if metric.parts), None)
        if which is None:
            return len(looks) - 1
        sign = -1.0 if self.metrics[which].maximise else 1.0
        return min(range(len(looks)), key=lambda place: sign * looks[place].values[which])

    def _score(self, status: Status | None = None, error: str = "") -> Score:
        lines = read_lines(self.folder.metrics) if self.folder.metrics.is_file() else []
        trained = [float(line.get("seconds") or 0.0) for line in lines if "kind" not in line]
        seconds = max([*trained[-1:], *(look.seconds for look in self.looks[-1:])], default=0.0)
        hours = sum(stage["device_hours"] for stage in cost_of(lines, devices=1)["stages"])
        evaluations = tuple((number, look.values) for number, look in enumerate(self.looks, 1))
        if status is None:
            status = self.looks[-1].verdict or "done" if self.looks else "done"
        return Score(status, self._values(status, seconds), seconds, hours, error, evaluations)

    def _values(self, status: Status, seconds: float) -> tuple[float, ...] | None:
        if status == "failed":
            return None
        if status == "diverged":
            return worst_of(self.metrics)
        if not self.looks:
            return tuple(metric.of({"results": []}, seconds) for metric in self.metrics)
        best = self.take == "best" and status != "pruned"
        return self.looks[self._best(self.looks) if best else -1].values


def out_of_memory(error: Exception) -> str:
    advice = "; the same gradient in less memory: --micro-batch, and fewer runs side by side: --jobs"
    return str(error).split(".")[0] + advice


def clear(run: Path) -> None:
    """All but the lock, which is the caller's, and what its processes print."""
    for path in run.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (LOCK, OUTPUT):
            path.unlink()


def forget_earlier_runs() -> None:
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else a later model would meet the limit on recompilations
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux: the high-water mark falls to what is held now
        Path("/proc/self/clear_refs").write_text("5")


def _unseen(config: RunConfig) -> str:
    """Which of the things that every trial needs this machine does not have, though it had when the search began."""
    model = config.model
    try:
        check_packages(config)
        pick_device(config)
        open_pool(replace(config.data, data_share=1.0))
        check_tasks(tasks_of(config))
        if model.pretrained or model.image_weights or model.text_weights:
            build_model(model, config.data.image_size)
    except (ValueError, OSError) as error:
        return str(error)
    return ""
