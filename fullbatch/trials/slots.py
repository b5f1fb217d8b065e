"""The phases of a search as a plan has them, and the slots they owe: each a trial that must end once, however often its
process dies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fullbatch.config.checks import Checked, Count, is_whole, require
from fullbatch.config.methods import named_method

PhaseName = Literal["choices", "grid", "fine", "finals"]
PHASES: tuple[PhaseName, ...] = ("choices", "grid", "fine", "finals")
CHOSEN = ("method", "optimizer")
Take = Literal["best", "last"]  # which evaluation's values are a trial's

# done      trained to its end
# stopped   it had not improved for a while; its value stands
# pruned    others were better at the same point; its value is the last one
# diverged  the loss ran away: a result, the worst there is
# failed    it could not be trained (memory, a setting that does not fit the data); no value
Status = Literal["done", "stopped", "pruned", "diverged", "failed"]


@dataclass(frozen=True)
class Slot:
    number: int  # its place in the phase
    params: Mapping[str, Any] = field(default_factory=dict)  # what is not left to the sampler, by names of the space
    seed: int | None = None  # of the run; None: the plan's
    label: str = ""  # of a finalist or a baseline, for tables; "": none


@dataclass(frozen=True)
class Score:
    """How a trial ended."""

    status: Status
    values: tuple[float, ...] | None = None  # by the metrics; None: it failed, or diverged and no value is the worst
    seconds: float = 0.0  # of training
    device_hours: float = 0.0  # of training and of measuring
    error: str = ""
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (number, values), oldest first
    same_as: int | None = None  # the slot with the same settings whose numbers these are; None: it was trained itself

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "same_as" or value is not None}

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Score:
        values = None if stored["values"] is None else tuple(stored["values"])
        evaluations = tuple((int(step), tuple(values)) for step, values in stored["evaluations"])
        return cls(**{**stored, "values": values, "evaluations": evaluations})


@dataclass(frozen=True)
class Running:
    """A slot that somebody works on; ``since`` as the storage has it."""

    slot: Slot
    params: Mapping[str, Any]
    worker: str
    since: str


@dataclass(frozen=True)
class Ended:
    """How a slot ended, as the storage has it: a ``Score``, and what it is of."""

    slot: Slot
    status: Status
    params: Mapping[str, Any]  # all of them, sampled ones too
    values: tuple[float, ...] | None
    seconds: float = 0.0
    device_hours: float = 0.0
    error: str = ""
    attempts: int = 1
    number: int = -1  # Optuna's, of the trial that ended it
    evaluations: tuple[tuple[int, tuple[float, ...]], ...] = ()
    same_as: int | None = None
    started: str = ""
    ended: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# The phases.  ``changes``: what trials of the phase have otherwise than the base, by names as in the space.


def all_different(values: Sequence[Any]) -> bool:
    return len(set(values)) == len(values)


@dataclass(frozen=True)
class Choices(Checked):
    """Phase 1, Bayesian: which method and which optimizer, in short trials."""

    trials: Count = 30
    over: tuple[str, ...] | None = CHOSEN  # what is chosen: these, and dimensions of the space; None: all of it
    changes: Mapping[str, Any] = field(default_factory=dict)
    cover: bool = True  # each method and each optimizer is tried once before the sampler chooses


@dataclass(frozen=True)
class Grid(Checked):
    """Phase 2: the best few methods x the best few optimizers of phase 1."""

    methods: Count = 3
    optimizers: Count = 3
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fine(Checked):
    """Phase 3, Bayesian: the settings of the winner, which is the first to be tried."""

    trials: Count = 30
    over: tuple[str, ...] | None = None  # dimensions of the space; None: all that the winner has
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finals(Checked):
    """Phase 4: the best few of the last phase again, with several seeds, beside methods as they come."""

    best: Count = 3
    seeds: tuple[int, ...] = (0, 1, 2)
    baselines: tuple[str, ...] = ()  # methods with their defaults and the base's optimizer
    changes: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        good = bool(self.seeds) and all(is_whole(seed, 0) for seed in self.seeds)
        require(good and all_different(self.seeds), self, "seeds", "be different whole numbers of at least 0")
        for method in self.baselines:
            named_method(method)
        require(all_different(self.baselines), self, "baselines", "be different methods")


Phase = Choices | Grid | Fine | Finals
