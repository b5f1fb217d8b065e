"""What a run leaves behind, file by file as docs/reference/run-folder.md has it; one process at a time works there."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from fullbatch.config.extras import require_extra
from fullbatch.config.messages import without_password
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, read_yaml, to_dict, write_yaml
from fullbatch.data.durable import make_folder, read_lines, replace_file, sync, told_if_full
from fullbatch.training import checkpoint
from fullbatch.training.interruption import Abandoned

log = logging.getLogger("fullbatch")

_END, _LAST = "...", "wandb"  # YAML's mark of the end; version 0.6 wrote none, and this setting last
ENDED = "ended"  # in a line of an evaluation: the run was ended there, before its last step
SCORE = "score"  # likewise: the number that the run is judged by
BEST = "best"  # likewise: it is the best so far, and its checkpoint is kept
LOSSES = "losses.jsonl"  # in batches/: a line a plan
EVALUATION, AUDIT = "evaluation", "audit"  # kinds of lines of metrics.jsonl; lines of training have none


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results.json"
        self.log = path / "log.txt"
        self.model = path / "model"
        self.batches = path / "batches"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def of(cls, config: RunConfig) -> Folder:
        name = config.run.name
        if not name:
            model = (config.model.image_tower or config.model.model).rsplit("/", 1)[-1].removesuffix(".json")
            name = f"{config.objective.method}-{model}-b{config.training.batch_size}-{time.strftime('%Y%m%d-%H%M%S')}"
        return cls(Path(config.run.runs) / name)

    @property
    def begun(self) -> Path | None:
        """Where to go on; None for a run that never began, or was killed before it had written its config."""
        return self.path if self.config.is_file() else None

    def require_new(self) -> None:
        if self.config.exists():
            raise ValueError(
                f"The run folder {self.path} exists already: go on with `--resume {self.path}`, or give another --name."
            )
        if checkpoint.checkpoints(self.checkpoints):
            raise ValueError(
                f"The folder {self.path} has checkpoints but no {self.config.name}: put it back and go on with "
                f"`--resume {self.path}`, or give another --name."
            )

    def create(self) -> None:
        self.require_new()
        make_folder(self.checkpoints)
        checkpoint.clean(self.checkpoints, None)

    def sweep(self) -> None:
        """What ``replace_text`` had not finished when its process was killed."""
        for path in (*self.path.glob(".*.*"), *self.batches.glob(".*.*")):
            if path.suffix[1:].isdigit():
                path.unlink(missing_ok=True)

    def write_config(self, config: RunConfig) -> None:
        replace_text(self.config, f"{write_yaml(config)}{_END}\n")
        replace_text(self.path / "environment.json", json.dumps(environment(), indent=1))

    def read_config(self) -> RunConfig:
        if not self.config.is_file():
            killed = "; a run that was killed that early starts again with the command that began it"
            early = killed if self.checkpoints.is_dir() and not checkpoint.checkpoints(self.checkpoints) else ""
            raise ValueError(f"{self.path} is not a run folder: there is no {self.config.name} in it{early}.")
        values = self.config_values()
        for group, name, value in _BEFORE:
            if isinstance(values.get(group), dict):
                values[group].setdefault(name, value)
        return from_dict(RunConfig, values)

    def config_values(self) -> dict[str, Any]:
        """As config.yaml has them; what is left of one that was cut would be taken for a run with other settings."""
        values = read_yaml(self.config)
        ends = self.config.read_text(encoding="utf-8").rstrip().endswith(f"\n{_END}")
        run = values.get("run")
        if not ends and not (isinstance(run, dict) and _LAST in run):
            raise ValueError(
                f"{self.config} was cut off: its last line is not {_END!r}. Put back the whole file, or start anew."
            )
        return values

    def read_results(self) -> dict[str, Any]:
        """As results.json has them; none where the run was not measured, or the file is damaged."""
        if not self.results.is_file():
            return {}
        try:
            return dict(json.loads(self.results.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged (%s); --resume %s measures anew", self.results, error, self.path)
            return {}


# -- one process at a time ---------------------------------------------------------------------------------------------

LOCK = ".lock"
_LOOK_EVERY = 0.1  # seconds between looks whether the folder is free
_held: set[tuple[Path, int, int]] = set()  # folder, process and thread, for a lock does not hold up its own process


@contextmanager
def alone_in(run: Path, given_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Wait until no other process is at work in the folder: one that lost its parent may still be saving.  ``given_up``
    is asked while it waits, for the other may never end; then ``Abandoned`` is raised.  The lock dies with its process,
    and data workers do not inherit it.  A file system without locks has to do without."""
    make_folder(run)
    while (lock := _lock(run)) is None:
        if given_up():
            raise Abandoned(f"Another process is still at work in {run}.")
        time.sleep(_LOOK_EVERY)
    here = _here(run)
    _held.add(here)
    try:
        yield
    finally:
        _held.discard(here)
        (run / LOCK).unlink(missing_ok=True)
        lock.close()


def can_be_locked(folder: Path) -> bool:
    """Whether its file system has locks."""
    make_folder(folder)
    probe = folder / f"{LOCK}-{os.getpid()}"
    try:
        with probe.open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        probe.unlink(missing_ok=True)
    return True


def _here(run: Path) -> tuple[Path, int, int]:
    return run.resolve(), os.getpid(), threading.get_ident()


def _lock(run: Path) -> TextIO | None:
    """The open file, which is the lock; None while another process or thread has it."""
    if any(held[:2] == _here(run)[:2] for held in _held):
        return None  # without opening the file: closing it again would let go for the whole process
    lock = (run / LOCK).open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            lock.close()
            return None
        log.warning("%s cannot be locked (%s); see to it that nothing else trains there", lock.name, error.strerror)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), (run / LOCK).stat()):
            return lock
    lock.close()  # of one who has just ended, and taken the file along
    return None


@contextmanager
def training_alone_in(run: Path) -> Iterator[None]:
    """Refuse to train where another process does, unless this thread has seen to it that there is none."""
    if _here(run) in _held:
        yield
        return
    with alone_in(run, partial(refuse, f"Another process is training in {run}; wait for it, or stop it.")):
        yield


def refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


# What runs did that were begun before there was a choice
_BEFORE = (("selection", "correction", "none"), ("data", "shuffle", "full"))

# What a checkpoint's meaning hangs on.  Paths of data may change: there the fingerprint decides.
_FIXED = (
    ("objective", ("method", "pairwise", "normalizer", "temperature_rule")),
    ("data", ("data_share", "shuffle", "block_samples", "window_blocks")),
    ("model", ("model", "image_tower", "text_tower", "text_pooling", "embed_dim", "lock_image", "lock_text")),
    ("model", ("lora_rank", "lora_alpha", "lora_towers")),
    ("training", ("batch_size", "seed", "ema")),
    ("optimizer", ("optimizer",)),
    ("evaluation", ("keep_best",)),  # the best so far was judged by it
    ("recovery", ("recovery_epochs", "recovery_steps", "recovery_batch", "carry")),  # they say what a step was
    ("selection", ("batches", "embeddings", "plan_ahead", "period_steps", "block_batches")),
    ("selection", ("drawn_batches", "kept_batches", "reading", "uniform_epochs", "correction")),
)


def with_choices_of(before: RunConfig, now: RunConfig) -> RunConfig:
    """``now``, and what was chosen when the run began: the order, where ``now`` leaves it open, and the correction of
    batches, which says nothing where they are uniform."""
    if now.data.shuffle == "auto":
        now = replace(now, data=replace(now.data, shuffle=before.data.shuffle))
    if before.selection.batches == now.selection.batches == "uniform":
        now = replace(now, selection=replace(now.selection, correction=before.selection.correction))
    return now


def check_same_run(before: RunConfig, now: RunConfig) -> None:
    """Refuse to go on with a run as another one."""
    for group, names in _FIXED:
        for name in names:
            if name in ("block_samples", "window_blocks") and before.data.shuffle != "blocks":
                continue
            was, wanted = getattr(getattr(before, group), name), getattr(getattr(now, group), name)
            changed = (was is None) != (wanted is None) if name == "ema" else was != wanted
            if changed:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"--resume cannot change {flag} (it was {was!r}, now {wanted!r}): the checkpoint would mean "
                    "something else. Start a new run, with --pretrained and an export of this one if you like."
                )


def replace_text(path: Path, text: str) -> None:
    """The new text or the old one, never a part, also after a power cut."""
    replace_file(path, lambda file: file.write(text.encode()))


def environment() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("fullbatch", "torch", "torchvision", "open_clip_torch", "timm", "transformers", "numpy", "pillow"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": [without_password(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "versions": versions,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null in their place, however deep."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """metrics.jsonl, TensorBoard and, if asked for, Weights & Biases; on other ranks than the first, nothing."""

    def __init__(self, folder: Folder, config: RunConfig, first: bool, step: int) -> None:
        self._file: Any = None
        self._board: Any = None
        self._wandb: Any = None
        self.evaluated = self.audited = -1  # the step of the last evaluation, of the last audit that was written
        self.ended = False  # whether that evaluation ended the run
        self.best = Best()
        self.seconds = 0.0  # of training, up to the checkpoint; a line of its step may be all that says it
        if not first:
            return
        for line in forget_after(folder.metrics, step):
            self._note(line, line.get("kind"))
            self.seconds = line.get("seconds") or self.seconds if "kind" not in line else self.seconds
        if not self.ended and not folder.read_results():
            self.evaluated = -1  # its numbers are lost: measure again
        self.seconds = max(self.seconds, checkpoint.seconds_at(folder.checkpoints, step))
        self._path = folder.metrics
        self._file = folder.metrics.open("a", encoding="utf-8")
        sync(folder.path)  # its name
        if config.run.tensorboard:
            self._board = _tensorboard(folder.tensorboard, step)
        if config.run.wandb:
            self._wandb = _wandb(config, folder.path.name)

    def _note(self, line: Mapping[str, Any], kind: Any) -> None:
        """What a run must know of its lines."""
        if kind == EVALUATION:
            self.evaluated, self.ended = line["step"], bool(line.get(ENDED))
            self.best = self.best.after(line)
        if kind == AUDIT:
            self.audited = line["step"]

    def write(self, line: dict[str, Any], kind: str = "train") -> None:
        if self._file is None:
            return
        self._note(line, kind)
        if kind in (EVALUATION, AUDIT):
            line = {**line, "kind": kind}
        line = finite(line)
        with told_if_full(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
        try:
            for key, value in numbers.items() if self._board is not None else ():
                self._board.add_scalar(key, value, line["step"])
        except OSError as error:
            log.warning("no more TensorBoard files are written: %s", error.strerror or error)
            self._board = None
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["step"])

    def settle(self) -> None:
        """Have the lines so far on the disk: a checkpoint of their step, or the end of the run, must not outlive them
        where the power fails."""
        if self._file is not None:
            with told_if_full(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                with suppress(OSError):  # what could not be written was said before
                    sink.close()
        if self._wandb is not None:
            self._wandb.finish()


def forget_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of steps that will be done again, and what cannot be read; the others."""
    if not path.is_file():
        return []
    kept = [line for line in read_lines(path) if line["step"] <= step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("no TensorBoard files are written: tensorboard is not installed")
        return None
    global _hook
    if threading.excepthook is not _not_of_tensorboard:
        _hook, threading.excepthook = threading.excepthook, _not_of_tensorboard
    try:
        return SummaryWriter(str(folder), purge_step=step or None)
    except OSError as error:
        log.warning("no TensorBoard files are written: %s", error.strerror or error)
        return None


_hook = threading.excepthook


def _not_of_tensorboard(failure: threading.ExceptHookArgs) -> None:
    """What stops TensorBoard's thread, such as a full disk, is raised once more where a line is written."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        _hook(failure)


def _wandb(config: RunConfig, name: str) -> Any:
    require_extra("wandb", "wandb", "--wandb")
    import wandb

    return wandb.init(project=config.run.wandb, name=name, id=name, resume="allow", config=to_dict(config))


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, as the lines of metrics.jsonl say it: what a resumed run needs to know."""

    step: int | None = None  # of the best evaluation; None: there was none
    score: float | None = None  # its number; None where somebody else judges
    waited: int = 0  # evaluations since then

    def after(self, line: Mapping[str, Any]) -> Best:
        """Once this evaluation was written down."""
        if line.get(BEST):
            return Best(line["step"], line.get(SCORE))
        return replace(self, waited=self.waited + 1)

    def beaten_by(self, score: float, more_is_better: bool) -> bool:
        """Of equal ones the first is the best."""
        return self.score is None or (score > self.score if more_is_better else score < self.score)
