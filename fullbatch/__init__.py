"""fullbatch: contrastive training in which small batches reach full-batch quality."""

from fullbatch.config import (
    Amortized,
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
    RobustGlobal,
    RobustPositives,
    Scale,
    Sigmoid,
    SquaredHinge,
    VarianceCovariance,
)
from fullbatch.config.methods import METHODS, settings_of
from fullbatch.evaluation.exact_normalizers import exact_log_normalizers
from fullbatch.objective.make import make_objective
from fullbatch.objective.objective import Objective, Output
from fullbatch.objective.parts import Context

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Amortized",
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
    "RobustGlobal",
    "RobustPositives",
    "Scale",
    "Sigmoid",
    "SquaredHinge",
    "VarianceCovariance",
    "exact_log_normalizers",
    "make_objective",
    "settings_of",
]
