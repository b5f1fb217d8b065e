"""From a config to a trained model in a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from fullbatch import distributed
from fullbatch.assembly import Parts, assemble, fresh_objective, periods_of, pick_device, view_maker
from fullbatch.audit.probe import Probe, plan_audits
from fullbatch.config.run import RunConfig
from fullbatch.config.shown import MessageFormatter
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.evaluation.asked import Metric
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.named import metric_named
from fullbatch.evaluation.result import Measured
from fullbatch.evaluation.tasks import check_captions_unneeded, check_tasks, run_tasks, tasks_of
from fullbatch.evaluation.whole_table import whole_table
from fullbatch.models.export import write_design
from fullbatch.models.load import check_design
from fullbatch.models.views import TwoViews
from fullbatch.selection.periods import Plans
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import Selector, mean_temperature
from fullbatch.training import checkpoint
from fullbatch.training.display import Display
from fullbatch.training.run_folder import (
    BEST,
    SCORE,
    Best,
    Folder,
    Metrics,
    check_same_run,
    read_lines,
    replace_text,
    training_alone_in,
)
from fullbatch.training.stages import cost_of
from fullbatch.training.trainer import Trainer

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Trained:
    """folder    the run's folder
    results   as in results.json: the step, and the numbers of each task
    """

    folder: Path
    results: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """What a watch is shown, while the model still holds the weights that were measured: the averaged ones where there
    is an average.

    seconds   of training so far
    say       a line for the terminal, above the bar
    keep      called on the first rank: this is the best so far, so that its checkpoint stays
    """

    parts: Parts
    measured: Measured
    seconds: float
    say: Callable[[str], None] = lambda text: None
    keep: Callable[[], None] = lambda: None

    @property
    def step(self) -> int:
        return self.parts.state.position.step


# Called on every rank after each evaluation, and once more if the run is killed before that is noted.  True on the
# first rank ends the run there, as if it had been its last step.
Watch = Callable[[Evaluated], bool]


def train(
    config: RunConfig,
    resume: str | Path | None = None,
    watch: Watch | None = None,
    command: str = "train",
    abandoned: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train as ``config`` says; with ``resume``, go on with the run in that folder from its last good checkpoint.

    ``watch`` sees every evaluation and may end the run there.  ``command`` is the one that goes on with the run.
    ``abandoned`` is asked every few steps; True raises ``Abandoned`` without another look at the folder.

    >>> trained = train(RunConfig.of(data=["cc3m/{00000..00331}.tar"], batch_size=256))  # doctest: +SKIP
    """
    device = pick_device(config)
    with distributed.ranks(device) as world, _log_kept() as kept, ExitStack() as held:
        first = world.rank == 0
        display = Display(first, config.run.quiet)
        folder = Folder(Path(resume)) if resume is not None else Folder.of(config)
        folder = Folder(Path(distributed.from_first_rank(str(folder.path))))
        judge = distributed.together(lambda: judge_of(config))
        distributed.together(lambda: check_tasks(tasks_of(config)))

        def lock() -> None:
            if first:
                held.enter_context(training_alone_in(folder.path))
                folder.sweep()

        if resume is not None:
            check_same_run(folder.read_config(), config)
            distributed.together(lock)
        saved = resume is not None and bool(checkpoint.checkpoints(folder.checkpoints))
        design = _design_of(folder) if saved else None
        parts = assemble(config, device, design)
        if resume is None:
            if isinstance(parts.model, TwoViews):
                check_captions_unneeded(tasks_of(config))
            distributed.together(lock)
            distributed.together(lambda: folder.create() if first else None)
        else:
            _restore(parts, folder, display)
        if first:
            folder.write_config(config)  # first of all, so that whatever was begun can go on
            if design is None:
                write_design(parts.model, folder.model)
        distributed.host_barrier()
        with _written_to(folder.log if first else None, kept):
            _announce(config, parts, display)
            _train(config, parts, folder, display, watch, judge, command, abandoned)
        return Trained(folder.path, folder.read_results())


def _design_of(folder: Folder) -> Path | None:
    """None where it is damaged: then the model is built as it was at the start."""
    try:
        check_design(folder.model)
    except ValueError as error:
        log.warning("%s", error)
        return None
    return folder.model


def judge_of(config: RunConfig) -> Metric | None:
    """The number that says which evaluation is the best; None where nobody asks."""
    asked, tasks = config.evaluation.keep_best, tasks_of(config)
    if asked is None and config.evaluation.patience is None:
        return None
    judge = Metric.parse(asked or metric_named(None, tasks), tasks, "--keep-best")
    if not judge.parts:
        raise ValueError(f"--keep-best must name something measured, got {asked!r}; take mean_r1 or accuracy.")
    return judge


def _restore(parts: Parts, folder: Folder, display: Display) -> None:
    """Load the last good checkpoint; then, and not before, the folder is changed."""
    first = distributed.world().rank == 0
    good = distributed.together(lambda: checkpoint.last_good(folder.checkpoints) if first else None)
    found: Path | None = distributed.from_first_rank(good)
    if found is None and checkpoint.checkpoints(folder.checkpoints):
        raise ValueError(f"Every checkpoint in {folder.checkpoints} is damaged; start a new run.")
    if found is not None:
        parts.state.restore(checkpoint.read(found, checked=True))
        step, total = parts.state.position.step, parts.stages.total
        if step > total:
            raise ValueError(
                f"The run is at step {step} already, beyond the {total} that --epochs or --samples ask for."
            )
        display.say(f"going on with {found}")
    else:
        display.say(f"there is no checkpoint in {folder.path} yet: starting at step 0")
    distributed.host_barrier()
    if first:
        checkpoint.clean(folder.checkpoints, found)


def _train(
    config: RunConfig,
    parts: Parts,
    folder: Folder,
    display: Display,
    watch: Watch | None,
    judge: Metric | None,
    command: str,
    abandoned: Callable[[], bool],
) -> None:
    first, state, tasks = distributed.world().rank == 0, parts.state, tasks_of(config)
    embedder = Embedder(
        parts.wrapped,
        parts.model.tokenize,
        parts.model.image_size,
        parts.device,
        config.training.precision,
        config.evaluation.eval_batch,
        config.data.workers,
        config.data.max_pixels,
        views=view_maker(config, parts.model),
        watch=display.measured,
    )

    def evaluate(seconds: float) -> tuple[dict[str, Any], bool]:
        ends, kept = False, list[bool]()
        with state.average.in_use() if state.average is not None else nullcontext():
            measured = run_tasks(tasks, embedder, config.evaluation.templates)
            if watch is not None:
                seen = Evaluated(parts, measured, seconds, display.say, lambda: kept.append(True))
                ends = bool(distributed.together(lambda: watch(seen)))
        step, before, patience = state.position.step, metrics.best, config.evaluation.patience
        values: dict[str, Any] = {**measured.curves, **({BEST: True} if kept else {})}
        results = {"step": step, **measured.as_dict()}
        if judge is not None and parts.stages.trained(step):
            score = values[SCORE] = judge.of(results, seconds)
            if before.beaten_by(score, judge.maximise):
                values[BEST] = True
            ends = ends or (patience is not None and BEST not in values and before.waited + 1 >= patience)
            results["best"] = _best(folder, judge, before.after({"step": step, **values}))
        if first:
            replace_text(folder.results, json.dumps(results, indent=1))
        values, ends = distributed.from_first_rank((values, ends))
        return values, ends

    batch_size, pool = config.training.batch_size, parts.batches.pool
    plan = plan_audits(config.evaluation, batch_size, parts.stages.total, len(pool))
    in_memory = parts.batches if isinstance(parts.batches, InMemoryBatches) else None
    probe = None if plan is None else Probe(plan, embedder, pool, batch_size, config.training.seed, in_memory)
    metrics = Metrics(folder, config, first, state.position.step)
    selector = _make_selector(config, parts, folder, embedder)
    trainer = Trainer(
        config=config,
        folder=folder,
        batches=parts.batches if selector is None else replace(parts.batches, plans=selector.plans),
        stages=parts.stages,
        device=parts.device,
        model=parts.wrapped,
        state=state,
        metrics=metrics,
        display=display,
        evaluate=evaluate if tasks else None,
        audit=None if probe is None else partial(probe.audit, state.objective),
        audit_due=(lambda step: False) if plan is None else plan.due,
        fresh_objective=partial(fresh_objective, config, parts.model, parts.batches),
        selector=selector,
        command=command,
        abandoned=abandoned,
    )
    try:
        trainer.run()
    finally:
        metrics.close()
    if first:
        _add_cost(folder, distributed.world().size)
    distributed.host_barrier()


def _best(folder: Folder, judge: Metric, best: Best) -> dict[str, Any] | None:
    """As in results.json; other ranks than the first do not know."""
    if best.step is None:
        return None
    name = judge.parts[0] if len(judge.parts) == 1 else judge.name
    place = checkpoint.folder_of(folder.checkpoints, best.step).relative_to(folder.path)
    said = "" if best.score is None else f"{best.score:.1%}" if judge.is_share else f"{best.score:g}"
    return {"metric": name, "step": best.step, "value": best.score, "said": said, "checkpoint": place.as_posix()}


def _make_selector(config: RunConfig, parts: Parts, folder: Folder, embedder: Embedder) -> Selector | None:
    """Where batches are not uniform."""
    if config.selection.batches == "uniform":
        return None
    batches, stages, table = parts.batches, parts.stages, parts.state.table
    in_memory = batches if isinstance(batches, InMemoryBatches) else None

    def oldest() -> int | None:
        kept = checkpoint.checkpoints(folder.checkpoints)
        return stages.place(checkpoint.step_of(kept[0])) if kept else None

    return Selector(
        plans=Plans(folder.batches, periods_of(config, batches), batches.batch_size),
        order=batches.order,
        planners=Planners(config.selection.planners),
        look=partial(whole_table, embedder, batches.pool, in_memory) if table is None else lambda: table.rows_n2D,
        tau=partial(mean_temperature, parts.state.objective),
        oldest=oldest,
    )


def _add_cost(folder: Folder, devices: int) -> None:
    """To the numbers of the last evaluation, or alone where there was none."""
    written = folder.read_results() or {"results": []}
    cost = cost_of(read_lines(folder.metrics), devices)
    replace_text(folder.results, json.dumps({**written, "cost": cost}, indent=1))


def _announce(config: RunConfig, parts: Parts, display: Display) -> None:
    world = distributed.world()
    weights = sum(weight.numel() for weight in parts.model.parameters())
    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    display.say(
        f"{config.objective.method}, {parts.model.design.name}, {weights / 1e6:.1f} M weights, "
        f"{parts.batches.order.num_samples:,} samples, batch {config.training.batch_size}{ranks}, "
        f"{parts.stages.training:,} steps"
        + (f" after {parts.stages.recovery:,} with frozen weights" if parts.stages.recovery else "")
    )


@contextmanager
def _log_kept() -> Iterator[MemoryHandler]:
    """What is logged before there is a run folder is kept for its log."""
    handler = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        handler.close()


@contextmanager
def _written_to(path: Path | None, kept: MemoryHandler) -> Iterator[None]:
    """The run's log has it all, down to the name of every bad sample; the terminal only warnings."""
    if path is None:
        yield
        return
    target = logging.FileHandler(path, encoding="utf-8")
    target.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk stops the run elsewhere
    target.setFormatter(MessageFormatter("%(asctime)s %(levelname)s %(message)s"))
    kept.setTarget(target)
    kept.flush()
    log.removeHandler(kept)
    log.addHandler(target)
    try:
        yield
    finally:
        log.removeHandler(target)
        with suppress(OSError):
            target.close()
