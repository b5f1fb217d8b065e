"""From a method's description and its surroundings to the modules that act on them."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_never

from fullbatch.config import axes
from fullbatch.config.checks import is_number, is_whole
from fullbatch.config.messages import listed
from fullbatch.config.methods import OPERANDS, Method
from fullbatch.objective import normalizers
from fullbatch.objective.fitted_net import build_seeded
from fullbatch.objective.per_sample import TableOptions
from fullbatch.objective.prototypes import MlpNormalizer, PrototypeNormalizer
from fullbatch.objective.step import DIRECTIONS
from fullbatch.objective.temperature import GlobalTemperature, PerSampleTemperature, PredictedTemperature


@dataclass(frozen=True)
class Context:
    """What an objective is told about its surroundings."""

    width: int | None = None
    num_samples: int | None = None
    chunk: int | None = None
    operands: str = "float16"
    seed: int = 0
    table_dtype: torch.dtype = torch.float32
    table_storage: str | os.PathLike[str] = "auto"
    dataset: str | None = None
    guard: float = 8.0
    # whether a correction of selected batches is for the weights of their pairs, too, which then have no emphasis
    correct_weights: bool = False

    @property
    def products(self) -> dict[str, Any]:
        """How the kernel is to multiply."""
        return {"chunk": self.chunk, "operands": self.operands}


def fingerprint(dataset: str | None) -> int:
    return 0 if dataset is None else zlib.crc32(dataset.encode()) + 1


def check_context(method: Method, context: Context) -> None:
    n = context.num_samples
    if n is not None and not is_whole(n, 2):
        raise ValueError(f"num_samples must be the number of training pairs, a whole number of at least 2, got {n!r}.")
    if n is None and (method.needs_ids or method.needs_epochs):
        why = "keeps a value for every sample" if method.needs_ids else "follows a schedule in epochs"
        raise ValueError(f"This method {why}: give num_samples, the number of training pairs.")
    if method.needs_width and context.width is None:
        raise ValueError("This method learns from embeddings of a known size: give width, e.g. width=512, got None.")
    if context.width is not None and not is_whole(context.width, 1):
        raise ValueError(f"width must be the size of the embeddings, a whole number, got {context.width!r}.")
    if context.chunk is not None and not is_whole(context.chunk, 1):
        raise ValueError(f"chunk must be a number of rows of at least 1, or None for all, got {context.chunk!r}.")
    if context.operands not in OPERANDS:
        raise ValueError(f"operands must be one of {listed(OPERANDS)}, got {context.operands!r}.")
    if not is_whole(context.seed, 0):
        raise ValueError(f"seed must be a whole number of at least 0, got {context.seed!r}.")
    if not is_number(context.guard) or not 0.0 < context.guard <= 80.0:
        raise ValueError(f"guard must lie in (0, 80], the log of an anchor's largest weight, got {context.guard!r}.")
    if not isinstance(context.correct_weights, bool):
        raise ValueError(f"correct_weights must be True or False, got {context.correct_weights!r}.")
    if context.correct_weights and not method.remembers:
        raise ValueError(
            "correct_weights must be left out for this method: it keeps no normalizers that are corrected, so its "
            "weights stay what a batch shows."
        )
    TableOptions(n or 2, context.table_dtype, context.table_storage)  # checks its fields, also where no table is made
    if context.dataset is not None and not isinstance(context.dataset, str):
        raise ValueError(f"dataset must be a text that names the data, or None, got {context.dataset!r}.")


def make_temperatures(method: Method, context: Context) -> dict[str, nn.Module]:
    match method.temperature:
        case axes.Constant() | axes.LearnedScale() | axes.RobustGlobal() as config:
            return {"both": GlobalTemperature(config)}
        case axes.PerSample() as config:
            return {name: PerSampleTemperature(config, _table(context), name) for name in DIRECTIONS}
        case axes.Predicted() as config:
            assert context.width is not None
            return {
                name: build_seeded(partial(PredictedTemperature, config, context.width, name), context.seed + tag)
                for tag, name in enumerate(DIRECTIONS)
            }
        case _ as unknown:
            assert_never(unknown)


def make_normalizers(method: Method, context: Context) -> dict[str, nn.Module]:
    if isinstance(method.normalizer, axes.NoNormalizer):
        return {}
    return {name: _make_normalizer(method, context, name) for name in DIRECTIONS}


def _make_normalizer(method: Method, context: Context, name: str) -> nn.Module:
    width = context.width or 0
    match method.normalizer:
        case axes.BatchMean() as config:
            return normalizers.BatchMeanNormalizer(config)
        case axes.BatchAndQueue() as config:
            return normalizers.BatchAndQueueNormalizer(config, method.pairwise, width, context.products)
        case axes.MovingAverage() | axes.Scent() as config:
            return normalizers.MovingAverageNormalizer(config, _table(context), name)
        case axes.Prototypes() as config:
            return PrototypeNormalizer(config, method.pairwise, width, context.products)
        case axes.Rolling() as config:
            return normalizers.RollingNormalizer(config, method.pairwise, width, context.products)
        case axes.Mlp() as config:
            return MlpNormalizer(config, method.pairwise, width, name, context.operands)
        case axes.Amortized() as config:
            return normalizers.AmortizedNormalizer(config, width, name, context.operands)
        case axes.NoNormalizer():
            raise AssertionError("nothing to make")
        case _ as unknown:
            assert_never(unknown)


def _table(context: Context) -> TableOptions:
    assert context.num_samples is not None
    return TableOptions(context.num_samples, context.table_dtype, context.table_storage)
