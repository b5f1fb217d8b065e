"""From a config to a trained model in a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from fullbatch import distributed
from fullbatch.assembly import (
    Parts,
    assemble,
    build_objective,
    changed,
    check_packages,
    make_embedder,
    make_selector,
    pick_device,
)
from fullbatch.audit.probe import Probe, plan_audits
from fullbatch.config.messages import MessageFormatter
from fullbatch.config.run import RunConfig
from fullbatch.data.durable import read_lines, sync, told_if_full
from fullbatch.data.picture_files import one_run
from fullbatch.data.sources import shuffle_for
from fullbatch.distributed import towers
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.metric_names import Metric, metric_named
from fullbatch.evaluation.result import Measured
from fullbatch.evaluation.tasks import check_captions_unneeded, check_tasks, run_tasks, tasks_of
from fullbatch.models.saved import check_design, write_design
from fullbatch.models.timm_towers import TwoViews
from fullbatch.training import checkpoint, run_folder
from fullbatch.training.display import Display
from fullbatch.training.run_folder import Folder, Metrics, replace_text
from fullbatch.training.stages import cost_of
from fullbatch.training.trainer import Hooks, Trainer

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Trained:
    folder: Path  # of the run
    results: Mapping[str, Any]  # as in results.json: the step, and the numbers of each task


@dataclass(frozen=True)
class Evaluated:
    """What a watch is shown, while the model still holds the weights that were measured: the averaged ones where there
    is an average."""

    parts: Parts
    measured: Measured
    seconds: float  # of training so far
    say: Callable[[str], None] = lambda text: None  # a line for the terminal, above the bar
    keep: Callable[[], None] = lambda: None  # called on the first rank: the best so far, so that its checkpoint stays

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
    check_packages(config)
    device = pick_device(config)
    with distributed.ranks(device) as world, _run_log() as write_log_to, one_run(), ExitStack() as held:
        first = world.rank == 0
        check_all_go_on(resume is not None)
        display = Display(first, config.run.quiet)
        folder = Folder(Path(resume)) if resume is not None else Folder.of(config)
        folder = Folder(Path(distributed.from_first_rank(str(folder.path))))
        judge = distributed.together(lambda: judge_of(config))
        distributed.together(lambda: check_tasks(tasks_of(config)))

        def lock() -> None:
            if first:
                held.enter_context(run_folder.training_alone_in(folder.path))
                folder.sweep()

        before = None if resume is None else folder.read_config()
        config = _with_shuffle(config, before)
        if before is not None:
            run_folder.check_same_run(before, config)
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

        def write_beginning() -> None:
            folder.write_config(config)  # first of all, so that whatever was begun can go on
            if design is None:
                with told_if_full(folder.model):
                    write_design(parts.model, folder.model)
                for path in (*folder.model.iterdir(), folder.model, folder.path):
                    sync(path)

        distributed.together(lambda: write_beginning() if first else None)
        write_log_to(folder.log if first else None)
        _announce(config, parts, display)
        embedder = make_embedder(config, parts.model, parts.wrapped, device, display.measured)
        metrics = distributed.together(lambda: Metrics(folder, config, first, parts.state.position.step))
        run = _Run(config, parts, folder, display, watch, judge, embedder, metrics)
        try:
            run.trainer(command, abandoned).run()
            distributed.together(metrics.settle)
        finally:
            metrics.close()

        def write_cost() -> None:
            """Beside the numbers of the last evaluation, or alone where there was none."""
            written = folder.read_results() or {"results": []}
            cost = cost_of(read_lines(folder.metrics), world.size)
            replace_text(folder.results, json.dumps({**written, "cost": cost}, indent=1))

        distributed.together(lambda: write_cost() if first else None)
        return Trained(folder.path, folder.read_results())


def check_all_go_on(resumes: bool) -> None:
    """``--resume auto`` looks on every rank, and a machine may not see yet what another has just written."""
    everywhere = distributed.gather_objects(resumes)
    if len(set(everywhere)) > 1:
        seeing = ", ".join(str(rank) for rank, sees in enumerate(everywhere) if sees)
        raise ValueError(
            f"Only some of the ranks ({seeing}) see the run that has begun; start all again when all machines do."
        )


def _with_shuffle(config: RunConfig, before: RunConfig | None) -> RunConfig:
    """Chosen once: neither data that have moved nor another machine changes the order of a run."""
    if before is not None:
        return run_folder.with_choices_of(before, config)
    return changed(config, shuffle=distributed.from_first_rank(shuffle_for(config.data)))


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
    last = distributed.together(lambda: checkpoint.last_good(folder.checkpoints) if first else None)
    good: Path | None = distributed.from_first_rank(last)
    if good is None and checkpoint.checkpoints(folder.checkpoints):
        raise ValueError(f"Every checkpoint in {folder.checkpoints} is damaged; start a new run.")
    if good is not None:
        empty = towers.empty_as_in(parts.model)
        saved = distributed.together(lambda: checkpoint.read(good, checked=True, empty=empty))
        parts.state.restore(saved)
        step, total = parts.state.position.step, parts.stages.total
        if step > total:
            raise ValueError(
                f"The run is at step {step} already, beyond the {total} that --epochs or --samples ask for."
            )
        display.say(f"going on with {good}")
    else:
        display.say(f"there is no checkpoint in {folder.path} yet: starting at step 0")
    distributed.host_barrier()
    distributed.together(lambda: checkpoint.clean(folder.checkpoints, good) if first else None)


@dataclass(frozen=True)
class _Run:
    """A training in its folder, as the trainer's hooks see it."""

    config: RunConfig
    parts: Parts
    folder: Folder
    display: Display
    watch: Watch | None
    judge: Metric | None
    embedder: Embedder
    metrics: Metrics

    def trainer(self, command: str, abandoned: Callable[[], bool]) -> Trainer:
        config, parts, batches = self.config, self.parts, self.parts.batches
        selector = make_selector(config, parts, self.folder, self.embedder)
        plan = plan_audits(config.evaluation, config.training.batch_size, parts.stages.total, len(batches.pool))
        alone = changed(config, table_storage="rank")  # its tables are in no shared place
        hooks = Hooks(
            evaluate=self.evaluate if tasks_of(config) else None,
            auditor=None if plan is None else Probe(plan, self.embedder, batches, parts.state.objective),
            selector=selector,
            abandoned=abandoned,
            fresh_objective=lambda: build_objective(alone, parts.model, batches.pool),
        )
        return Trainer(
            config=config,
            folder=self.folder,
            batches=batches if selector is None else replace(batches, plans=selector.plans),
            stages=parts.stages,
            device=parts.device,
            model=parts.wrapped,
            state=parts.state,
            metrics=self.metrics,
            display=self.display,
            hooks=hooks,
            command=command,
        )

    def evaluate(self, seconds: float) -> Mapping[str, Any]:
        config, state, watch, judge = self.config, self.parts.state, self.watch, self.judge
        ends, kept = False, list[bool]()
        with state.average.in_use() if state.average is not None else nullcontext():
            measured = run_tasks(tasks_of(config), self.embedder, config.evaluation.templates)
            if watch is not None:
                seen = Evaluated(self.parts, measured, seconds, self.display.say, lambda: kept.append(True))
                ends = bool(distributed.together(lambda: watch(seen)))
        step, before, patience = state.position.step, self.metrics.best, config.evaluation.patience
        values: dict[str, Any] = {**measured.curves, **({run_folder.BEST: True} if kept else {})}
        results = {"step": step, **measured.as_dict()}
        if judge is not None and self.parts.stages.trained(step):
            score = values[run_folder.SCORE] = judge.of(results, seconds)
            if before.beaten_by(score, judge.maximise):
                values[run_folder.BEST] = True
            ends = ends or (patience is not None and run_folder.BEST not in values and before.waited + 1 >= patience)
            results["best"] = self._best(judge, before.after({"step": step, **values}))
        first, text = distributed.world().rank == 0, json.dumps(results, indent=1)
        distributed.together(lambda: replace_text(self.folder.results, text) if first else None)
        if ends and step < self.parts.stages.total:
            values[run_folder.ENDED] = True
        line: Mapping[str, Any] = distributed.from_first_rank(values)
        return line

    def _best(self, judge: Metric, best: run_folder.Best) -> dict[str, Any] | None:
        """As in results.json; other ranks than the first do not know."""
        if best.step is None:
            return None
        name = judge.parts[0] if len(judge.parts) == 1 else judge.name
        place = checkpoint.folder_of(self.folder.checkpoints, best.step).relative_to(self.folder.path)
        said = "" if best.score is None else f"{best.score:.1%}" if judge.is_share else f"{best.score:g}"
        return {"metric": name, "step": best.step, "value": best.score, "said": said, "checkpoint": place.as_posix()}


def _announce(config: RunConfig, parts: Parts, display: Display) -> None:
    world, order = distributed.world(), parts.batches.order
    weights = sum(weight.numel() for weight in parts.model.parameters())
    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    blocks = " in blocks" if order.by_blocks else ""
    recovered = f" after {parts.stages.recovery:,} with frozen weights" if parts.stages.recovery else ""
    display.say(
        f"{config.objective.method}, {parts.model.design.name}, {weights / 1e6:.1f} M weights, "
        f"{order.num_samples:,} samples{blocks}, batch {config.training.batch_size}{ranks}, "
        f"{parts.stages.training:,} steps{recovered}"
    )


@contextmanager
def _run_log() -> Iterator[Callable[[Path | None], None]]:
    """What is logged is kept until it is said which file is the run's log; None: there is none here.  The log has it
    all, down to the name of every bad sample; the terminal only warnings."""
    handler = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def write_to(path: Path | None) -> None:
        if path is None:
            log.removeHandler(handler)
            return
        target = logging.FileHandler(path, encoding="utf-8")
        target.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk stops the run elsewhere
        target.setFormatter(MessageFormatter("%(asctime)s %(levelname)s %(message)s"))
        handler.setTarget(target)
        handler.flush()
        handler.capacity = 1  # nothing waits any more

    try:
        yield write_to
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        with suppress(OSError):
            if handler.target is not None:
                handler.target.close()
        handler.close()
