"""The phases of a search as a plan has them: how many trials, over what, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fullbatch.config.checks import is_whole, require, require_choice, require_count
from fullbatch.config.methods import named_method

CHOSEN = ("method", "optimizer")
Take = Literal["best", "last"]  # which evaluation's values are a trial's


def all_different(values: Sequence[Any]) -> bool:
    return len(set(values)) == len(values)


@dataclass(frozen=True)
class Choices:
    """Phase 1, Bayesian: which method and which optimizer, in short trials.

    trials    how many
    over      what is chosen: "method", "optimizer", dimensions of the space; None: all of it
    changes   what its trials have otherwise than the base, by names as in the space: epochs, data_share, sgd.lr, gamma
    cover     each method and each optimizer is tried once before the sampler chooses
    """

    trials: int = 30
    over: tuple[str, ...] | None = CHOSEN
    changes: Mapping[str, Any] = field(default_factory=dict)
    cover: bool = True

    def __post_init__(self) -> None:
        require_count(self, "trials", 1)
        require_choice(self, "cover", (True, False))


@dataclass(frozen=True)
class Grid:
    """Phase 2: the best few methods x the best few optimizers of phase 1.

    methods      how many
    optimizers   how many
    changes      what its trials have otherwise than the base
    """

    methods: int = 3
    optimizers: int = 3
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count(self, "methods", 1)
        require_count(self, "optimizers", 1)


@dataclass(frozen=True)
class Fine:
    """Phase 3, Bayesian: the settings of the winner, which is the first to be tried.

    trials    how many
    over      dimensions of the space; None: all that the winner's method and optimizer have
    changes   what its trials have otherwise than the base
    """

    trials: int = 30
    over: tuple[str, ...] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count(self, "trials", 1)


@dataclass(frozen=True)
class Finals:
    """Phase 4: the best few again, with several seeds, beside methods as they come.

    best        how many of the last phase
    seeds       of each
    baselines   methods with their defaults and the base's optimizer
    changes     what its trials have otherwise than the base
    """

    best: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)
    baselines: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count(self, "best", 1)
        good = bool(self.seeds) and all(is_whole(seed, 0) for seed in self.seeds)
        require(good and all_different(self.seeds), self, "seeds", "be different whole numbers of at least 0")
        for method in self.baselines:
            named_method(method)
        require(all_different(self.baselines), self, "baselines", "be different methods")


Phase = Choices | Grid | Fine | Finals
