"""fullbatch: contrastive training in which small batches reach full-batch quality."""

import os
from typing import TYPE_CHECKING, Any

# OpenMP reads it when torch is imported.  Threads that spin while they wait take a core from whoever works beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fullbatch.audit.exact import exact_log_normalizers
from fullbatch.config import (
    Amortized,
    BatchAndQueue,
    BatchMean,
    Constant,
    CycleConsistency,
    Identity,
    LearnedScale,
    Method,
    Mlp,
    MovingAverage,
    NoNormalizer,
    PerSample,
    Predicted,
    Prototypes,
    RawSimilarity,
    RobustGlobal,
    RobustPositives,
    Rolling,
    Scale,
    Scent,
    Sigmoid,
    SquaredHinge,
    VarianceCovariance,
)
from fullbatch.config.methods import METHODS, settings_of
from fullbatch.config.run import RunConfig
from fullbatch.objective.objective import Objective, Output, make_objective
from fullbatch.objective.parts import Context

if TYPE_CHECKING:
    from fullbatch.finetuning.finetune import finetune
    from fullbatch.training_run import train

__version__ = "0.6.0"

__all__ = [
    "METHODS",
    "Amortized",
    "BatchAndQueue",
    "BatchMean",
    "Constant",
    "Context",
    "CycleConsistency",
    "Identity",
    "LearnedScale",
    "Method",
    "Mlp",
    "MovingAverage",
    "NoNormalizer",
    "Objective",
    "Output",
    "PerSample",
    "Predicted",
    "Prototypes",
    "RawSimilarity",
    "RobustGlobal",
    "RobustPositives",
    "Rolling",
    "RunConfig",
    "Scale",
    "Scent",
    "Sigmoid",
    "SquaredHinge",
    "VarianceCovariance",
    "exact_log_normalizers",
    "finetune",
    "make_objective",
    "settings_of",
    "train",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Training brings image libraries along; who only wants an objective need not wait for them."""
    if name == "train":
        from fullbatch.training_run import train

        return train
    if name == "finetune":
        from fullbatch.finetuning.finetune import finetune

        return finetune
    raise AttributeError(f"module 'fullbatch' has no attribute {name!r}")
