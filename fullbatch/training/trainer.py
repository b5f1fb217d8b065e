"""The training loop: read a batch, compute the gradient, step, log, save, audit, evaluate.  A batch comes here in four
hops: ``Order.ids`` says which samples (where batches are planned, by the plan's places), ``__getitem__`` of
``TrainingBatches`` or ``InMemoryBatches`` makes the batch, ``read_ahead`` has that done in other processes and moves it
to the device, ``Stages.stream`` joins those of one step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config.messages import reason_of
from fullbatch.config.run import RunConfig
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.data.loader import LoadedBatch, TrainingBatches
from fullbatch.data.workers import WorkerDied
from fullbatch.distributed import towers
from fullbatch.objective.objective import Objective
from fullbatch.objective.recorded import CannotRecord
from fullbatch.selection.selector import Selector
from fullbatch.training import checkpoint
from fullbatch.training.display import Display
from fullbatch.training.gradient import GradientRule
from fullbatch.training.graphs import Computed, StepGraphs
from fullbatch.training.interruption import Abandoned, Interrupted, Interruption
from fullbatch.training.optimizer import clip_gradients, set_learning_rates
from fullbatch.training.run_folder import AUDIT, BEST, ENDED, EVALUATION, Folder, Metrics
from fullbatch.training.stages import Stages, statistics_kept
from fullbatch.training.state import TrainingState

log = logging.getLogger("fullbatch")

AGREE_EVERY = 8  # steps between questions to all ranks whether one was told to stop, or a save is due by the clock
FEWEST_FOR_SHARE = 200  # pairs read before the share of bad ones says anything
LONG_WAIT = 0.25  # of the time, for data
DIVERGED = 10.0  # times the size of the first loss


class Diverged(ValueError):
    """The loss is no longer a number, or has run away."""


class Auditor(Protocol):
    def due(self, step: int) -> bool:
        """Whether to measure the normalizers after so many steps."""

    def audit(self) -> Mapping[str, Any]:
        """Measure them, for a line of the log."""


@dataclass(frozen=True)
class Hooks:
    """Every rank calls each of them at the same step.  None: there is nothing to do."""

    # measures the model after so many seconds of training, for a line of the log, in which it may be marked as the best
    # so far (BEST), or the run as to end here (ENDED)
    evaluate: Callable[[float], Mapping[str, Any]] | None = None
    auditor: Auditor | None = None  # measures the normalizers now and then
    selector: Selector | None = None  # plans which samples meet in a batch; None: the order's neighbours do
    # asked now and then: whether to leave the run where it stands, at once
    abandoned: Callable[[], bool] = lambda: False
    # makes one without memory, for a recovery that does not carry it over
    fresh_objective: Callable[[], Objective] | None = None


@dataclass
class Trainer:
    config: RunConfig
    folder: Folder
    batches: TrainingBatches | InMemoryBatches
    stages: Stages
    device: torch.device
    model: nn.Module  # as wrapped for the ranks; ``state.model`` is the bare one
    state: TrainingState
    metrics: Metrics
    display: Display
    hooks: Hooks = Hooks()
    command: str = "train"  # that goes on with such a run

    def __post_init__(self) -> None:
        training = self.config.training
        self.gradient = GradientRule(
            training.micro_batch, training.precision, training.seed, self.stages.apart, self.state.table
        )
        self.writer = checkpoint.Writer(
            self.folder.checkpoints, self.config.run.keep, self.metrics.best.step, self.metrics.settle
        )
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.saved_at = time.monotonic()
        self.saved_step = -1
        self.rehearsed = False
        self.stopwatch = Stopwatch(self.metrics.seconds, self.device)
        self.waited = 0.0  # seconds, for batches
        self.waits_too_long = False
        self.unreported: list[str] = []  # bad samples this rank met since the ranks last counted
        self.first_rank = distributed.world().rank == 0
        self.graphs = self._make_graphs()

    def _make_graphs(self) -> StepGraphs | None:
        if not self.config.training.graphs:
            return None
        seed = self.gradient.seed_dropout
        return StepGraphs(self._compute, seed, self.state.objective, self._optimizers(), self.device)

    def run(self) -> None:
        position = self.state.position
        shown = self.display.running(position.step, self.stages.total, self._samples_read)
        with Interruption() as interruption, shown:
            self.audit_if_due()  # the run may have ended between a save and what is measured after it
            if self.ended_before():
                return
            if self.evaluate_if_due():
                self.end_early()
                return
            self.stopwatch.restart(self.metrics.seconds)
            source = self.batches, position.step, self.config.data.workers, self.device
            selector = self.hooks.selector  # of a plan's batches each comes when the plan is there
            batches = self.stages.stream(*source) if selector is None else self.stages.stream(*source, selector.ranges)
            try:
                for batch in self._waited_for(batches):
                    if not self.rehearsed:
                        self.gradient.rehearse(self.model, batch, position.step)
                        self.rehearsed = True
                    line = self.train_step(batch)
                    if line is not None:
                        self.log(line)
                    self.display.advance(position.step)
                    stop = self.save_if_due(interruption)
                    self.audit_if_due()
                    if self.evaluate_if_due():
                        self.end_early()
                        break
                    if stop:
                        distributed.together(self.writer.wait)  # if that failed, there is less to go on from
                        raise Interrupted(interruption.signal, f"Go on with: {self.go_on}")
                distributed.together(self.writer.wait)
            except WorkerDied as error:
                raise WorkerDied(f"{error} Go on with: {self.go_on}") from None
            finally:
                batches.close()  # ends the workers
                if selector is not None:
                    selector.close()
                self.writer.finish_quietly()

    def _waited_for(self, batches: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
        while True:
            start = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - start
            if batch is None:
                return
            yield batch

    @property
    def go_on(self) -> str:
        return f"fullbatch {self.command} --resume {self.folder.path}"

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, batch: LoadedBatch) -> dict[str, Any] | None:
        """One update; the line for the log if it is this step's turn."""
        state, position, config, stages = self.state, self.state.position, self.config, self.stages
        recovers, stage = stages.recovers(position.step), stages.name(position.step)
        if stages.recovery and position.step == stages.recovery:
            self._begin_tuning()
        rate = set_learning_rates(
            state.optimizer,
            state.temperature_optimizer,
            config.optimizer,
            config.schedule,
            stages,
            position.step,
            position.temperature,
        )
        state.objective.set_epoch(stages.epoch(position.step))
        ends = position.step + 1 in (stages.recovery, stages.total)
        logged = ends or (position.step + 1) % config.run.log_every == 0
        try:
            with statistics_kept(state.model) if recovers else nullcontext():
                computed = self.graphs(batch, position.step) if self.graphs else self._compute(batch, logged)
        except CannotRecord:
            raise
        except ValueError as error:  # on a CPU the objective looks at every batch, and refuses what is not finite
            raise Diverged(f"{error} This was step {position.step + 1}; {self._advice()}") from None
        position.step += 1
        if state.average is not None and not recovers:
            state.average.update(stages.trained(position.step))
        output, norm = computed.output, computed.norm
        self.unreported += [str(error) for error in batch.bad]
        if not logged:
            return None
        numbers = {name: float(value) for name, value in output.metrics.items()}
        loss = float(distributed.mean_over_ranks(output.loss))
        return {
            "step": position.step,
            **({"stage": stage} if stages.recovery else {}),
            "epoch": stages.place(position.step) / stages.per_epoch,
            "samples": self._samples_read,
            "loss": loss,
            "lr": rate,
            "gradient_norm": float(norm) if norm is not None else math.nan,
            **{name: value for name, value in numbers.items() if name != "epoch"},
            **(self.hooks.selector.costs() if self.hooks.selector is not None else {}),
        }

    def _begin_tuning(self) -> None:
        """Before the first step that moves the weights: leave behind what is not to be carried over."""
        state, carry = self.state, self.config.recovery.carry
        if carry in ("memory", "none"):
            for optimizer in self._optimizers():
                optimizer.state.clear()
        if carry in ("moments", "none"):
            assert self.hooks.fresh_objective is not None
            state.objective.load_state_dict(self.hooks.fresh_objective().state_dict())
            for group in state.temperature_optimizer.param_groups if state.temperature_optimizer is not None else ():
                for parameter in group["params"] if group["learns"] != "temperature" else ():
                    state.temperature_optimizer.state.pop(parameter, None)  # type: ignore[union-attr]
        self.graphs = self._make_graphs()  # of steps of another size, on other memory

    @property
    def _samples_read(self) -> int:
        return self.stages.batches_read(self.state.position.step) * self.config.training.batch_size

    def _compute(self, batch: LoadedBatch, measured: bool = True) -> Computed:
        """Gradient and update: all that the device does in a step, but for the averaged weights."""
        state = self.state
        output = self.gradient(self.model, state.objective, batch, state.position.step, state.scaler)
        norm = self._update(measured)
        self.finite.logical_and_(output.loss.isfinite())
        return Computed(output, norm)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        state = self.state
        return [optimizer for optimizer in (state.optimizer, state.temperature_optimizer) if optimizer is not None]

    def _update(self, measured: bool) -> Tensor | None:
        """Move the weights; the norm of the gradient, if it is needed or to be ``measured``."""
        state, bound = self.state, self.config.optimizer.clip_norm
        optimizers = self._optimizers()
        for optimizer in optimizers:
            state.scaler.unscale_(optimizer)
        norm = None
        if measured or bound is not None:
            norm = towers.whole(clip_gradients(state.model.parameters(), bound))
        for optimizer in optimizers:
            state.scaler.step(optimizer)
        state.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm

    def _report_bad(self) -> None:
        """Bring together what the ranks could not read; every rank must call."""
        bad = [name for names in distributed.gather_objects(self.unreported) for name in names]
        if bad and not self.state.position.bad and self.first_rank:
            log.warning("some samples cannot be read and are replaced by others; %s names them", self.folder.log)
        for name in bad:
            log.info("skipped a bad sample: %s", name)
        self.state.position.bad += len(bad)
        self.unreported = []

    # -- log, save, evaluate, stop ----------------------------------------------------------------------------------

    def log(self, line: dict[str, Any]) -> None:
        position = self.state.position
        self._check_health(line["loss"])
        if "tau" in line:
            position.temperature = line["tau"]
        if math.isnan(position.first_loss):
            position.first_loss = line["loss"]
        line["bad_samples"] = self._check_bad_share()
        line["seconds"] = self.stopwatch.seconds
        line["samples_per_second"], line["waiting"] = self.display.pace(position.step, self._samples_read, self.waited)
        self._check_waiting(line["waiting"])
        if self.device.type == "cuda":
            line["gpu_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self._write(line)
        self.display.show(line)

    def _write(self, line: dict[str, Any], kind: str = "train") -> None:
        """The first rank does; where it cannot, no other waits for it."""
        distributed.together(lambda: self.metrics.write(line, kind))

    def _advice(self) -> str:
        kept = checkpoint.checkpoints(self.folder.checkpoints)
        good = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        return f"{good}. Try a lower --lr, a longer warm-up, --clip-norm 1.0, or --precision bf16 or fp32."

    def _check_health(self, loss: float) -> None:
        position = self.state.position
        (spoilt,) = distributed.any_rank(not bool(self.finite) or not math.isfinite(loss))
        if spoilt:
            raise Diverged(f"The loss is not a finite number any more (by step {position.step}); {self._advice()}")
        if loss > position.first_loss + DIVERGED * max(1.0, abs(position.first_loss)):
            first = position.first_loss
            raise Diverged(
                f"The loss ran away, from {first:.4g} to {loss:.4g} (step {position.step}); {self._advice()}"
            )

    def _check_bad_share(self) -> int:
        self._report_bad()
        bad, allowed = self.state.position.bad, self.config.data.max_bad
        tried = self._samples_read + bad
        if tried >= FEWEST_FOR_SHARE and bad > allowed * tried:
            raise ValueError(
                f"{bad} of {tried} samples could not be read, more than --max-bad {allowed:g} of them; "
                f"{self.folder.log} names them. Repair the data, or allow more."
            )
        return bad

    def _check_waiting(self, share: float) -> None:
        """Say once that reading is what training waits for.  What a plan of batches costs is in the log by itself."""
        if self.waits_too_long or share < LONG_WAIT or not self.display.is_steady or self.hooks.selector is not None:
            return
        self.waits_too_long = True
        data = self.config.data
        other = "" if data.in_memory else ", or --in-memory for a data set that fits"
        log.warning(
            "training waits for data %.0f %% of the time: try more --workers (now %d)%s",
            100 * share,
            data.workers,
            other,
        )

    def save_if_due(self, interruption: Interruption) -> bool:
        """Save by step, by the clock or on a signal; whether to stop."""
        run, step = self.config.run, self.state.position.step
        by_step = step == self.stages.total or (run.save_every is not None and step % run.save_every == 0)
        by_clock = stop = False
        if distributed.world().size == 1 or step % AGREE_EVERY == 0 or by_step:
            waited = time.monotonic() - self.saved_at
            overdue = run.save_minutes is not None and waited > 60.0 * run.save_minutes
            signalled, abandoned = interruption.signal is not None, self.hooks.abandoned()
            by_clock, stop, left = distributed.any_rank(overdue and self.first_rank, signalled, abandoned)
            if left:
                raise Abandoned(f"The run in {self.folder.path} is left at step {step}.")
            distributed.together(self.writer.check)
        if by_step or by_clock or stop:
            self.save()
        return stop and step < self.stages.total

    def save(self) -> None:
        """Unless that was done at this step already."""
        if self.saved_step == self.state.position.step:
            return
        self._check_health(0.0)  # a spoilt state must not take a good one's place
        self._report_bad()
        if self.hooks.selector is not None:
            self.hooks.selector.settle()
        captured = self.state.capture(keep=self.first_rank)
        self.writer.save(self.state.position.step, captured, self.stopwatch.seconds)
        self.saved_at, self.saved_step = time.monotonic(), self.state.position.step

    def audit_if_due(self) -> None:
        step, auditor = self.state.position.step, self.hooks.auditor
        if auditor is None or step == 0 or not auditor.due(step):
            return
        if distributed.from_first_rank(self.metrics.audited) != step:
            with self.stopwatch.paused():
                self._write({"step": step, **auditor.audit()}, AUDIT)

    def evaluate_if_due(self) -> bool:
        """At the end, every so often, and if asked before the first step: once each.  Whether the run is to end here,
        before its last step; that is written down with the numbers, so that a resumed run knows it too."""
        step = self.state.position.step
        due = step == self.stages.total or self.stages.evaluation_due(step, self.config.evaluation)
        if self.hooks.evaluate is None or not due or distributed.from_first_rank(self.metrics.evaluated) == step:
            return False
        seconds = self.stopwatch.seconds
        with self.stopwatch.paused():
            started = time.monotonic()
            try:
                line = self.hooks.evaluate(seconds)
            except (ValueError, OSError) as error:  # the data to measure on may be gone; what was trained is not lost
                reason = f"{reason_of(error)} This was the evaluation at step {step}"
                log.info("%s", reason)
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{reason}; go on from there with `{self.go_on}`.") from None
            self._write({"step": step, **line, "seconds": time.monotonic() - started}, EVALUATION)
            if line.get(BEST):
                self.save()
                if self.first_rank:
                    self.writer.keep_best(step)
        return bool(line.get(ENDED))

    def ended_before(self) -> bool:
        """Whether the run that is resumed was ended early, right here; with more patience it goes on."""
        metrics, step, patience = self.metrics, self.state.position.step, self.config.evaluation.patience
        patient = patience is not None and metrics.best.waited < patience
        ended = bool(distributed.from_first_rank(metrics.ended and metrics.evaluated == step and not patient))
        if ended:
            self._announce(f"the run was ended early, at step {step} of {self.stages.total}: there is nothing to do")
        return ended

    def end_early(self) -> None:
        """What was trained is kept, as at the end."""
        self.save()
        distributed.together(self.writer.wait)
        self._announce(f"the run ends early, at step {self.state.position.step} of {self.stages.total}")

    def _announce(self, text: str) -> None:
        log.info("%s", text)
        self.display.say(text)


class Stopwatch:
    """How long a run has trained: wall-clock without what only measures, continued when the run is resumed.  Starts at
    ``seconds``, what the run had trained before, for work on ``device``."""

    def __init__(self, seconds: float = 0.0, device: torch.device = torch.device("cpu")) -> None:
        self._device = device
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        self._since = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluations and audits do not count, so that equal times are equal times of training.  Each side waits for
        its own: steps that a GPU still has to do count, and what was measured does not."""
        self._finish()
        before = self.seconds
        try:
            yield
            self._finish()
        finally:
            self.restart(before)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
