"""How a run trains, which samples meet in a batch, what it measures, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fullbatch.config.checks import Checked, Count, Positive, Whole, at_least, number, require
from fullbatch.config.tasks import parse_task

Precision = Literal["fp32", "bf16", "fp16"]
TEMPLATE_SETS = ("openai", "simple")


def check_templates(templates: tuple[str, ...]) -> None:
    """Each is a prompt with a place for the class name, or the name of a set of them."""
    if not templates or not all("{}" in text or text in TEMPLATE_SETS for text in templates):
        raise ValueError(
            "Evaluation.templates must hold at least one prompt, each with {} for the class name (or the set "
            f"{' or '.join(TEMPLATE_SETS)}), got {templates!r}."
        )


@dataclass(frozen=True)
class Training(Checked):
    """The training loop."""

    batch_size: Annotated[int, at_least(2)] = 128  # pairs a step, over all ranks
    # pairs a rank pushes through the towers at a time; the gradient stays that of the whole batch
    micro_batch: Count | None = None
    epochs: Count = 30  # passes over the data
    samples: Count | None = None  # stop after this many pairs instead of epochs
    precision: Precision = "fp32"  # fp32, bf16, or fp16 with loss scaling
    compile: bool = False  # compile the towers with torch.compile
    # on one GPU, replay the whole step as a CUDA graph: faster where a small batch leaves it waiting; not with compile
    graphs: bool = False
    # keep convolutions with their channels innermost, as those of a ResNet in 16 bits on a GPU are anyway
    channels_last: bool = False
    # decay of an average of the weights, kept beside them and evaluated instead of them; None: no average
    ema: Annotated[float, number("lie in (0, 1)", lambda value: 0.0 < value < 1.0)] | None = None
    # over ranks: "ddp" copies the towers, "fsdp" shards them (FSDP2) for towers that do not fit
    parallel: Literal["ddp", "fsdp"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto", "cpu" or "cuda"
    seed: Whole = 0  # of weights, order, crops and dropout
    # on a GPU, only kernels that give the same bits every time; slower.  A CPU needs no such switch
    deterministic: bool = False

    def _check(self) -> None:
        self.leave_out(bool(self.micro_batch), "be left out with micro_batch", "graphs")
        self.leave_out(self.precision == "fp16", "be left out with fp16; take bf16", "graphs")


@dataclass(frozen=True)
class Selection(Checked):
    """Which samples meet in a batch (Cho et al. 2024: mini-batches that a contrastive loss learns most from)."""

    # "uniform": at random; "spectral": alike samples together, each once an epoch (their Algorithm 3); "ordered": of
    # random batches those of largest loss (their OSGD, which shows some samples often)
    batches: Literal["uniform", "spectral", "ordered"] = "uniform"
    # what a selection goes by: "passes", each sample's embeddings as the last training step that met it computed them,
    # or "forward", a pass over the whole set before each plan
    embeddings: Literal["passes", "forward"] = "passes"
    # plan a period during the one before it, from embeddings one period old; otherwise training waits
    plan_ahead: bool = True
    uniform_epochs: Whole = 0  # epochs before the first that is selected; as few as possible without it
    # spectral: steps a plan is for, at most an epoch's; None: an epoch.  An ordered plan is for kept_batches
    period_steps: Count | None = None
    # spectral: batches of a block; samples meet within their block of so many batches, drawn at random
    block_batches: Count = 40
    drawn_batches: Count = 1500  # ordered: random batches that are looked at
    kept_batches: Count = 150  # ordered: those of largest loss, which are trained on
    # ordered: "sequential", a step for each kept batch (the authors' code), or "averaged", one step on the mean of
    # their losses (Algorithm 7 to the letter)
    reading: Literal["sequential", "averaged"] = "sequential"
    # what a plan knows of how its batches differ from uniform ones corrects the normalizers that a method keeps
    # ("normalizers"), the weights of a batch's pairs as well, which then have no emphasis ("weights"), or nothing
    correction: Literal["normalizers", "weights", "none"] = "normalizers"
    planners: Whole = 1  # processes that plan; 0: the training process itself, while training waits

    def _check(self) -> None:
        rule, hint = 'be left out but with batches="spectral"', "an ordered plan is for kept_batches"
        self.leave_out(self.batches != "spectral", rule, "period_steps", hint=hint)
        self.leave_out(self.batches != "ordered", 'be left out but with batches="ordered"', "reading")
        uniform, rule = self.batches == "uniform", 'be left out with batches="uniform"'
        self.leave_out(uniform, rule, "uniform_epochs")
        self.leave_out(uniform and self.correction == "weights", rule, "correction")
        most = f"be at most drawn_batches ({self.drawn_batches})"
        require(self.kept_batches <= self.drawn_batches, self, "kept_batches", most)

    @property
    def averages(self) -> bool:
        """Whether a step is one on several batches, each with its own loss."""
        return self.batches == "ordered" and self.reading == "averaged"

    @property
    def batches_a_step(self) -> int:
        return self.kept_batches if self.averages else 1

    @property
    def keeps_table(self) -> bool:
        """Whether training remembers what it embeds."""
        return self.batches != "uniform" and self.embeddings == "passes"

    @property
    def lead(self) -> int:
        """Periods between the one at whose start the embeddings are looked at and the one that is planned by them."""
        return 1 if self.plan_ahead else 0


@dataclass(frozen=True)
class Evaluation(Checked):
    """What is measured on data the run does not train on."""

    # tasks: "retrieval:SOURCE", "zero_shot:SOURCE" (its captions are the class names), "imagenet:FOLDER", "wds:FOLDER"
    # (CLIP_benchmark's layout), "datacomp:ROOT" (its 38 sets); of image encoders "views:SOURCE",
    # "corrupted_views:SOURCE", "knn:TRAIN|TEST", "linear:TRAIN|TEST"; None: the tasks of the built-in set when training
    # on it; of `fullbatch train` on other data: retrieval on a part that it holds out; else none
    evaluate: tuple[str, ...] | None = None
    evaluate_every: Whole = 0  # epochs between evaluations; 0: only at the end
    # how many of them in the run, evenly spaced and the last at its end, instead of epochs between them
    evaluations: Count | None = None
    # keep the best checkpoint beside the newest, by METRIC, "TASK METRIC" or "mean(A, B)"; None: without `patience`,
    # none
    keep_best: str | None = None
    # end the training after so many evaluations without a better one by keep_best, or by the main number of the first
    # task; None: it does not
    patience: Count | None = None
    evaluate_start: bool = False  # measure before the first step too: what pretrained weights are worth
    # prompts for zero-shot, {} stands for the class name; "openai" and "simple" are open_clip's 80 and 7; None: the
    # task's own, or "{}", "a picture of {}", "an image about {}" where it has none
    templates: tuple[str, ...] | None = None
    eval_batch: Count = 256  # pairs a rank embeds at a time
    # steps between measurements of how wrong the normalizers are, on a part of the training data; 0: none; None: up to
    # ten a run, as far as they are at most 4 % of its work
    audit_every: Whole | None = None
    audits: Count | None = None  # how many of them in the run, instead of steps between them
    audit_anchors: Count = 256  # how many normalizers are measured
    # how many samples stand for the data set then; None: 4,096, or four batches, or what the 4 % allow
    audit_samples: Annotated[int, at_least(2)] | None = None

    def _check(self) -> None:
        require(not isinstance(self.evaluate, str), self, "evaluate", "be a list of tasks")
        require(not isinstance(self.templates, str), self, "templates", "be a list of prompts")
        for task in self.evaluate or ():
            parse_task(task)
        self.leave_out(bool(self.evaluate_every), "be left out with evaluate_every", "evaluations")
        named = self.keep_best is None or (isinstance(self.keep_best, str) and bool(self.keep_best.strip()))
        require(named, self, "keep_best", "be a metric such as mean_r1")
        never, hint = not (self.evaluate_every or self.evaluations), "set evaluate_every or evaluations"
        self.leave_out(never, "be left out without evaluations during training", "patience", hint=hint)
        if self.templates is not None:
            check_templates(self.templates)
        self.leave_out(self.audit_every is not None, "be left out with audit_every", "audits")


@dataclass(frozen=True)
class RunFolder(Checked):
    """What a run leaves behind."""

    runs: str = "runs"  # the folder of all runs
    name: str = ""  # the run's folder in it; "": method, model, batch size and time
    save_every: Count | None = None  # steps between checkpoints; None: only by minutes
    save_minutes: Positive | None = 10.0  # minutes between checkpoints; None: only by steps
    keep: Count = 3  # how many checkpoints stay; the newest ones
    log_every: Count = 10  # steps between lines of metrics.jsonl
    quiet: bool = False  # log lines instead of a progress bar
    tensorboard: bool = True  # write TensorBoard files
    wandb: str | None = None  # the Weights & Biases project to log to, if wandb is installed; None: none

    def _check(self) -> None:
        safe = isinstance(self.name, str) and "/" not in self.name and self.name not in (".", "..")
        require(safe, self, "name", "be a plain folder name", "the folder it lies in is `runs`")
