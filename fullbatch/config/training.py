"""How a run trains, what it measures, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullbatch.config.checks import is_number, require, require_choice, require_count, require_positive

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Training:
    """The training loop.

    batch_size    pairs a step, over all ranks
    micro_batch   pairs a rank pushes through the towers at a time; the gradient stays that of the whole batch
    epochs        passes over the data
    samples       stop after this many pairs instead of epochs
    precision     fp32, bf16, or fp16 with loss scaling
    compile       compile the towers with torch.compile
    ema           decay of an average of the weights, kept beside them and evaluated instead of them; None: no average
    parallel      over ranks: "ddp" copies the towers, "fsdp" shards them (FSDP2) for towers that do not fit
    device        "auto", "cpu" or "cuda"
    seed          of weights, order, crops and dropout
    deterministic   on a GPU, only kernels that give the same bits every time; slower.  A CPU needs no such switch
    """

    batch_size: int = 128
    micro_batch: int | None = None
    epochs: int = 30
    samples: int | None = None
    precision: Precision = "fp32"
    compile: bool = False
    ema: float | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        require_count(self, "batch_size", 2)
        if self.micro_batch is not None:
            require_count(self, "micro_batch", 1)
        require_count(self, "epochs", 1)
        if self.samples is not None:
            require_count(self, "samples", 1)
        require_choice(self, "precision", ("fp32", "bf16", "fp16"))
        require_choice(self, "compile", (True, False))
        require_choice(self, "deterministic", (True, False))
        if self.ema is not None:
            require(is_number(self.ema) and 0.0 < self.ema < 1.0, self, "ema", "lie in (0, 1)")
        require_choice(self, "parallel", ("ddp", "fsdp"))
        require_choice(self, "device", ("auto", "cpu", "cuda"))
        require_count(self, "seed", 0)


@dataclass(frozen=True)
class Evaluation:
    """What is measured on data the run does not train on.

    evaluate         tasks: "retrieval:SOURCE" and "zero_shot:SOURCE" (its captions are the class names);
                     None: the tasks of the built-in set when training on it, else none
    evaluate_every   epochs between evaluations; 0: only at the end
    templates        prompts for zero-shot, {} stands for the class name
    eval_batch       pairs a rank embeds at a time
    """

    evaluate: tuple[str, ...] | None = None
    evaluate_every: int = 0
    templates: tuple[str, ...] = ("{}", "a picture of {}", "an image about {}")
    eval_batch: int = 256

    def __post_init__(self) -> None:
        require(not isinstance(self.evaluate, str), self, "evaluate", "be a list of tasks")
        require(not isinstance(self.templates, str), self, "templates", "be a list of prompts")
        for task in self.evaluate or ():
            kind, _, source = task.partition(":")
            good = kind in ("retrieval", "zero_shot") and bool(source)
            require(good, self, "evaluate", "name tasks as retrieval:SOURCE or zero_shot:SOURCE")
        require_count(self, "evaluate_every", 0)
        good = bool(self.templates) and all("{}" in template for template in self.templates)
        require(good, self, "templates", "hold at least one prompt, each with {} for the class name")
        require_count(self, "eval_batch", 1)


@dataclass(frozen=True)
class RunFolder:
    """What a run leaves behind.

    runs               the folder of all runs
    name               the run's folder in it; "": method, model, batch size and time
    save_every         steps between checkpoints; None: only by minutes
    save_minutes       minutes between checkpoints; None: only by steps
    keep               how many checkpoints stay; the newest ones
    log_every          steps between lines of metrics.jsonl
    quiet              log lines instead of a progress bar
    tensorboard        write TensorBoard files
    wandb              the Weights & Biases project to log to, if wandb is installed; None: none
    """

    runs: str = "runs"
    name: str = ""
    save_every: int | None = None
    save_minutes: float | None = 10.0
    keep: int = 3
    log_every: int = 10
    quiet: bool = False
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        safe = isinstance(self.name, str) and "/" not in self.name and self.name not in (".", "..")
        require(safe, self, "name", "be a plain folder name", "the folder it lies in is `runs`")
        if self.save_every is not None:
            require_count(self, "save_every", 1)
        if self.save_minutes is not None:
            require_positive(self, "save_minutes")
        require_count(self, "keep", 1)
        require_count(self, "log_every", 1)
        require_choice(self, "quiet", (True, False))
        require_choice(self, "tensorboard", (True, False))
