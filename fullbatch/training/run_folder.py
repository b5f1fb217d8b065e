"""What a run leaves behind.

runs/NAME/
  config.yaml        the whole config; `fullbatch train --config` takes it
  environment.json   versions, machine, command
  metrics.jsonl      a line every few steps, and a line an evaluation and an audit
  log.txt            warnings, samples that could not be read
  results.json       the last evaluation, and what the run cost
  model/             the model's design and tokenizer, without weights
  batches/           which samples meet in a batch, where that is planned; see training/selector.py
  checkpoints/       step-000000100/ ...
  tensorboard/
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, read_yaml, to_dict, write_yaml
from fullbatch.training import checkpoint
from fullbatch.training.best import Best

log = logging.getLogger("fullbatch")

ENDED = "ended"  # in a line of an evaluation: the run was ended there, before its last step
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

    def require_new(self) -> None:
        if self.checkpoints.exists() or self.config.exists():
            raise ValueError(
                f"The run folder {self.path} exists already: go on with `--resume {self.path}`, or give another --name."
            )

    def create(self) -> None:
        self.require_new()
        self.checkpoints.mkdir(parents=True)

    def write_config(self, config: RunConfig) -> None:
        replace_text(self.config, write_yaml(config))
        replace_text(self.path / "environment.json", json.dumps(environment(), indent=1))

    def read_config(self) -> RunConfig:
        if not self.config.is_file():
            raise ValueError(f"{self.path} is not a run folder: there is no {self.config.name} in it.")
        return from_dict(RunConfig, read_yaml(self.config))


# What a checkpoint's meaning hangs on.  Paths of data may change: there the fingerprint decides.
_FIXED = (
    ("objective", ("method", "pairwise", "normalizer", "temperature_rule")),
    ("data", ("data_share",)),
    ("model", ("model", "image_tower", "text_tower", "embed_dim", "lock_image", "lock_text")),
    ("model", ("lora_rank", "lora_alpha", "lora_towers")),
    ("training", ("batch_size", "seed", "parallel", "ema")),
    ("optimizer", ("optimizer",)),
    ("recovery", ("recovery_epochs", "recovery_steps", "recovery_batch", "carry")),  # they say what a step was
    ("selection", ("batches", "embeddings", "plan_ahead", "period_steps", "block_batches")),
    ("selection", ("drawn_batches", "kept_batches", "reading")),
)


def check_same_run(before: RunConfig, now: RunConfig) -> None:
    """Refuse to go on with a run as another one."""
    for group, names in _FIXED:
        for name in names:
            was, wanted = getattr(getattr(before, group), name), getattr(getattr(now, group), name)
            changed = (was is None) != (wanted is None) if name == "ema" else was != wanted
            if changed:
                raise ValueError(
                    f"--resume cannot change {name} (it was {was!r}, now {wanted!r}): the checkpoint would mean "
                    "something else. Start a new run, with --pretrained and an export of this one if you like."
                )


def replace_text(path: Path, text: str) -> None:
    """The new text or the old one, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def environment() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("fullbatch", "torch", "torchvision", "open_clip_torch", "timm", "transformers", "numpy", "pillow"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "versions": versions,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


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
            if line.get("kind") == EVALUATION:
                self.evaluated, self.ended = line["step"], bool(line.get(ENDED))
                self.best = self.best.after(line)
            self.audited = line["step"] if line.get("kind") == AUDIT else self.audited
            self.seconds = line.get("seconds") or self.seconds if "kind" not in line else self.seconds
        self.seconds = max(self.seconds, checkpoint.seconds_at(folder.checkpoints, step))
        self._file = folder.metrics.open("a", encoding="utf-8")
        if config.run.tensorboard:
            self._board = _tensorboard(folder.tensorboard, step)
        if config.run.wandb:
            self._wandb = _wandb(config, folder.path.name)

    def write(self, line: dict[str, Any], kind: str = "train") -> None:
        if self._file is None:
            return
        if kind == EVALUATION:
            self.evaluated, self.ended = line["step"], bool(line.get(ENDED))
            self.best = self.best.after(line)
        if kind == AUDIT:
            self.audited = line["step"]
        if kind in (EVALUATION, AUDIT):
            line = {**line, "kind": kind}
        line = {key: value if _is_plain(value) else None for key, value in line.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["step"])

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()


def _is_plain(value: Any) -> bool:
    """JSON has no nan and no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


def forget_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of steps that will be done again, and a line that was cut off; the others."""
    if not path.is_file():
        return []
    kept = [line for line in read_lines(path) if line["step"] <= step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("no TensorBoard files are written: tensorboard is not installed")
        return None
    return SummaryWriter(str(folder), purge_step=step or None)


def _wandb(config: RunConfig, name: str) -> Any:
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError("--wandb needs Weights & Biases: pip install wandb.") from None
    return wandb.init(project=config.run.wandb, name=name, id=name, resume="allow", config=to_dict(config))
