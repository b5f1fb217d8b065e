"""Fine-tune a pretrained model and say whether it became better: measure, recover, tune, measure, compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fullbatch import distributed
from fullbatch.assembly import check_packages, pick_device
from fullbatch.config.messages import listed
from fullbatch.config.model import DEFAULT_MODEL, Model
from fullbatch.config.run import RunConfig
from fullbatch.evaluation.tasks import BUILTIN_TASKS, check_tasks
from fullbatch.finetuning.margin import margin_at, with_margin
from fullbatch.finetuning.record import (
    BASE,
    FILE,
    MEAN,
    TUNED,
    EpochRecorder,
    Record,
    Verdict,
    check_tolerance,
    deciding,
    read_record,
    write_record,
)
from fullbatch.loading import KINDS, open_model, settle, write_model
from fullbatch.training import checkpoint
from fullbatch.training.display import Display
from fullbatch.training.run_folder import LOCK, Folder, training_alone_in
from fullbatch.training_run import Trained, check_all_go_on, train

TOLERANCE = 0.01


@dataclass(frozen=True)
class Finetuned:
    trained: Trained  # the run's folder and results.json
    record: Record  # what was measured
    verdict: Verdict
    model: Path  # the folder to take: the run's tuned/ or base/


def finetune(
    config: RunConfig, metric: str | None = None, tolerance: float | None = None, resume: str | Path | None = None
) -> Finetuned:
    """Fine-tune ``config.model``; with ``resume``, go on with the run in that folder.

    metric      what decides which epoch is best: "mean", METRIC or "TASK METRIC"; None: the resumed run's, or "mean"
    tolerance   how far a task may fall before the base is kept; None: the resumed run's, else 0.01
    """
    if tolerance is not None:
        check_tolerance(tolerance)
    if resume is not None:
        read_record(Path(resume))  # is it a run of this kind at all?
    check_packages(config)
    config = measuring(config)
    tasks = config.evaluation.evaluate or ()
    with distributed.ranks(pick_device(config)) as world, ExitStack() as held:
        first = world.rank == 0
        check_all_go_on(resume is not None)
        asked = metric
        metric = distributed.together(lambda: None if asked is None else deciding(asked, tasks))
        distributed.together(lambda: check_tasks(tasks))
        if resume is None:
            config = replace(config, run=replace(config.run, name=distributed.from_first_rank(_name(config))))
        folder = Folder.of(config) if resume is None else Folder(Path(resume))

        def prepared() -> Record:
            """The folder locked, and what is known already."""
            if resume is None:
                _require_room(folder)
            else:
                _check_resumed(folder, config)
            held.enter_context(training_alone_in(folder.path))
            if resume is not None:
                return _resumed(folder, metric, tolerance)
            return Record(_named(config.model), metric or MEAN, TOLERANCE if tolerance is None else tolerance)

        record = distributed.from_first_rank(distributed.together(lambda: prepared() if first else None))
        if not (config.recovery.recovery_epochs or config.recovery.recovery_steps):
            Display(first, config.run.quiet).say("no recovery: the optimizer starts cold")
        with _swept(folder, first):
            if resume is None:
                temperature = distributed.together(lambda: _write_base(config, folder, record) if first else None)
                config = with_margin(config, margin_at(distributed.from_first_rank(temperature)))
            else:
                config = with_margin(config, folder.read_config().objective.settings.get("margin"))
            config = replace(config, model=replace(config.model.as_saved_in(folder.path / BASE), tokenizer=None))
            recorder = EpochRecorder(folder, config, record)
            trained = train(config, resume, recorder, command="finetune")
        ended = recorder.record.verdict()
        if first:
            write_record(folder.path, recorder.record, ended, trained.results.get("cost"))
        distributed.host_barrier()
    model = folder.path / (TUNED if ended.outcome == "tuned" else BASE)
    return Finetuned(trained, recorder.record, ended, model)


def measuring(config: RunConfig) -> RunConfig:
    """Before the first step and after each epoch, on the user's tasks or those of the built-in set."""
    evaluation = config.evaluation
    tasks = BUILTIN_TASKS["emoji"] if evaluation.evaluate is None else evaluation.evaluate
    if not tasks:
        raise ValueError("--evaluate must name at least one task: unmeasured, nobody knows whether tuning did harm.")
    every = evaluation.evaluate_every or int(evaluation.evaluations is None)
    return replace(config, evaluation=replace(evaluation, evaluate=tasks, evaluate_every=every, evaluate_start=True))


def _named(model: Model) -> str:
    """What the user called it."""
    name = f"{model.image_tower} + {model.text_tower}" if model.is_pair else model.model
    if model.pretrained is None:
        return name
    return model.pretrained if name == DEFAULT_MODEL else f"{name} ({model.pretrained})"


def _name(config: RunConfig) -> str:
    """Of the run's folder: the user's, or after the model and the time."""
    if config.run.name:
        return config.run.name
    model = config.model
    path = Path(model.image_tower or (model.pretrained if model.model == DEFAULT_MODEL else None) or model.model)
    if path.parent.name == "checkpoints":
        path = path.parent.parent
    plain = path.resolve().stem if path.is_file() else path.resolve().name
    return f"finetune-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"


def _write_base(config: RunConfig, folder: Folder, record: Record) -> float:
    """The run starts from its own copy of the base, whatever becomes of the original.  Returns its
    temperature, or the user's."""
    model, given = config.model, config.objective.settings.get("temperature")
    if model.model == DEFAULT_MODEL and model.pretrained is None and not model.is_pair:
        raise ValueError(f"--model says what to fine-tune: {KINDS}.")
    opened = open_model(model, config.data.image_size, given)
    write_record(folder.path, record)  # first: by it the same command knows a folder in which it was killed
    write_model(opened, folder.path / BASE)
    return opened.temperature if given is None else float(given)


def _require_room(folder: Folder) -> None:
    """Nothing of the user's may lie where the base is written; what a run left that was killed before it began may."""
    if folder.config.exists() and not (folder.path / FILE).is_file():
        raise ValueError(f"{folder.path} is a run of another kind; give another --name.")
    folder.require_new()
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file; give another --name.")
    filled = folder.path.is_dir() and any(not path.name.startswith(".") for path in folder.path.iterdir())
    if filled and not (folder.path / FILE).is_file():
        raise ValueError(f"The folder {folder.path} is not empty; give another --name, so that nothing is overwritten.")


def _check_resumed(folder: Folder, config: RunConfig) -> None:
    before = folder.read_config()
    named = _named(config.model)
    if named not in (_named(before.model), read_record(folder.path).model):
        raise ValueError(f"--resume goes on with the model of {folder.path}, not with {named}; leave --model out.")
    if config.evaluation.evaluate != before.evaluation.evaluate:
        raise ValueError(
            f"--resume cannot change the tasks: the base was measured on {listed(before.evaluation.evaluate or ())}. "
            f"Measure others afterwards, with `fullbatch evaluate {folder.path / TUNED}`."
        )


def _resumed(folder: Folder, metric: str | None, tolerance: float | None) -> Record:
    for name in (BASE, TUNED):
        settle(folder.path / name)
    record = read_record(folder.path)
    if metric is not None and metric != record.metric:
        if len(record.epochs) > 1:
            raise ValueError(
                f"--resume cannot change the metric (it was {record.metric!r}): {folder.path / TUNED} holds the best "
                "epoch by that one. Start a new run."
            )
        record = record.by(metric)
    good = checkpoint.last_good(folder.checkpoints)
    record = record.until(0 if good is None else int(good.name.rsplit("-", 1)[-1]))
    return record if tolerance is None else replace(record, tolerance=tolerance)


@contextmanager
def _swept(folder: Folder, first: bool) -> Iterator[None]:
    """A run that was refused before it began leaves nothing behind."""
    try:
        yield
    except BaseException:
        if first and folder.path.is_dir() and not folder.config.exists() and not folder.checkpoints.exists():
            settle(folder.path / BASE)
            shutil.rmtree(folder.path / BASE, ignore_errors=True)
            (folder.path / FILE).unlink(missing_ok=True)
            if all(path.name == LOCK for path in folder.path.iterdir()):
                shutil.rmtree(folder.path, ignore_errors=True)
        raise
