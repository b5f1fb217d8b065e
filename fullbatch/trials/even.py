"""Drawing evenly: a Latin hypercube for every pair of a method and an optimizer.  Of a pair's K trials each has its own
K-th of every range, and a place in it at random, so that few trials see all of a range."""

from __future__ import annotations

import random
import zlib
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from fullbatch.trials.space import Real


class EvenSampler(RandomSampler):
    """Of the slot ``number``; ``pairs`` take turns, ``trials`` in all.  Choices and whole numbers are drawn at
    random."""

    def __init__(self, seed: int, number: int, pairs: int, trials: int) -> None:
        super().__init__(zlib.crc32(f"{seed} {number}".encode()))
        self._seed, self._number, self._pairs, self._turns = seed, number, pairs, -(-trials // pairs)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if not isinstance(param_distribution, FloatDistribution) or param_distribution.step is not None:
            return super().sample_independent(study, trial, param_name, param_distribution)
        turn, pair = divmod(self._number, self._pairs)
        parts = list(range(self._turns))
        random.Random(f"{self._seed} {pair} {param_name}").shuffle(parts)  # the same for all turns of the pair
        inside = random.Random(f"{self._seed} {self._number} {param_name}").random()
        dimension = Real(param_distribution.low, param_distribution.high, param_distribution.log)
        return dimension.at((parts[turn] + inside) / self._turns)
