"""How the weights move: the optimizer, the path of its learning rate, and what happens before pretrained weights do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from fullbatch.config.checks import BelowOne, Checked, NotNegative, Positive, Tau, Whole, at_least, number, require
from fullbatch.config.messages import listed, nearest

OPTIMIZERS: tuple[str, ...] = (
    "adamw", "adam", "radam", "novograd", "nvnovograd", "rmsprop", "sgd", "lamb", "lars", "lion", "muon", "adopt",
)  # fmt: skip

# Of the fields below that not every optimizer reads, those it does; lr and weight_decay all of them read.
OPTIMIZER_SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("adamw", "adam", "radam", "novograd", "nvnovograd", "lamb", "adopt"), ("beta1", "beta2", "eps")
        ),
        "rmsprop": ("beta2", "eps", "momentum"),
        **dict.fromkeys(("sgd", "lars"), ("momentum",)),
        "lion": ("beta1", "beta2"),
        "muon": ("beta1", "beta2", "eps", "momentum"),
    }
)

ScheduleKind = Literal["cosine", "tanh", "linear", "constant"]
Clock = Literal["steps", "albef"]


@dataclass(frozen=True)
class Optimizer(Checked):
    """What moves the encoders' weights, and at which rate the temperature follows."""

    # adamw, adam, radam, novograd (the paper's), nvnovograd (NVIDIA's), rmsprop, sgd (with momentum), lamb, lars, lion,
    # muon (AdamW for embeddings, gains and biases) or adopt
    optimizer: str = "adamw"
    lr: Positive = 1e-3  # the peak learning rate
    # on matrices only.  Decoupled from the gradient in adamw, radam, lion, muon and adopt, inside the normalised update
    # in lamb and novograd, added to the gradient in adam, rmsprop, sgd and lars: there 1e-6 to 1e-3 is usual and 0.1 is
    # far too much
    weight_decay: NotNegative = 0.1
    # decay of the first and second moments, the same whichever optimizer; rmsprop has only beta2. NovoGrad's authors
    # take 0.95 and 0.98, RMSProp's 0.9
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.98
    eps: Positive = 1e-6  # added to the root of the second moment
    momentum: BelowOne = 0.9  # of sgd, lars, rmsprop and muon
    # bound on the norm of the gradient of all encoders; None: none, also with lamb (Apex's has 1)
    clip_norm: Positive | None = None
    # peak rate of log tau and of SigLIP's bias; None: an eighth of lr.  TempNet's net starts at it (None: 3e-5) and
    # falls by 0.9 an epoch
    temperature_lr: Positive | None = None
    # the temperature's rate is a third while tau is at or below this (FastCLIP: 0.03)
    temperature_lr_drop_below: Tau | None = None

    def _check(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"Optimizer.optimizer has no {self.optimizer!r}{nearest(str(self.optimizer).lower(), OPTIMIZERS)} "
                f"The optimizers are {listed(OPTIMIZERS)}."
            )


@dataclass(frozen=True)
class Schedule(Checked):
    """The learning rate over a run: a linear warm-up to the peak, a descent, a cool-down at ``min_lr``."""

    schedule: ScheduleKind = "cosine"  # the descent: cosine, tanh (late and steep), linear, or constant
    # length of the warm-up, in one unit or another (a share of the run); none of them: none
    warmup_steps: Whole | None = None
    warmup_epochs: NotNegative | None = None
    warmup_share: BelowOne | None = None
    warmup_from: NotNegative = 0.0  # the rate that the warm-up rises from
    min_lr: NotNegative = 0.0  # where the descent ends, at most the peak
    # length of the cool-down at the end of the run; neither: none
    cooldown_steps: Whole | None = None
    cooldown_epochs: NotNegative | None = None
    # "steps": the rate moves with every step, and the descent begins where the warm-up ends.  "albef": as in ALBEF's
    # training loop, which iSogCLR's code has: the rate moves once an epoch, an "epoch" of the warm-up is 100 steps of
    # the first one, and the descent's clock is ahead of the run by the warm-up's epochs, so that as many at the end
    # have min_lr; tanh runs over -6 ... 4, not -7 ... 3
    clock: Clock = "steps"

    def _check(self) -> None:
        hint = "it warms up by epochs and cools down by itself"
        lengths = ("warmup_steps", "warmup_share", "cooldown_steps", "cooldown_epochs")
        self.leave_out(self.clock == "albef", "be None with clock='albef'", *lengths, hint=hint)
        for steps, epochs in (("warmup_steps", "warmup_epochs"), ("cooldown_steps", "cooldown_epochs")):
            self.leave_out(getattr(self, steps) is not None, f"be None where {steps} is given", epochs)
        given = self.warmup_steps is not None or self.warmup_epochs is not None
        self.leave_out(given, "be None where warmup_steps or warmup_epochs is given", "warmup_share")
        cools = bool(self.cooldown_steps or self.cooldown_epochs)
        hint = "a cool-down at a rate of 0 would learn nothing"
        require(self.min_lr > 0.0 or not cools, self, "min_lr", "be positive where there is a cool-down", hint)


_PASSES = number("be a number of at least 0", lambda value: value >= 0.0, "0 means no recovery")
Carry = Literal["all", "moments", "memory", "none"]


@dataclass(frozen=True)
class Recovery(Checked):
    """Optimizer statistics recovery (TuneCLIP, Algorithm 1): steps with frozen weights, before those that move them."""

    # passes over the data in which the optimizer's moments and the objective's memory settle on the weights as they
    # are; 0: none, the run starts cold
    recovery_epochs: Annotated[float, _PASSES] | None = None
    recovery_steps: Whole | None = None  # the same in steps
    # pairs of such a step, a multiple of batch_size; None: batch_size
    recovery_batch: Annotated[int, at_least(2)] | None = None
    # what of it training starts with: "all", "moments" (the optimizer's), "memory" (the objective's: u of each sample,
    # prototypes, nets), or "none"
    carry: Carry = "all"

    def _check(self) -> None:
        self.leave_out(self.recovery_epochs is not None, "be left out with recovery_epochs", "recovery_steps")
