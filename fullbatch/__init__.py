"""fullbatch: contrastive training in which small batches reach full-batch quality."""

import os

TYPE_CHECKING = False  # typing's own, without importing it: `fullbatch --help` is to be as quick as Python starts
if TYPE_CHECKING:
    from typing import Any

    from fullbatch.audit.exact import exact_log_normalizers
    from fullbatch.config.axes import (
        Amortized,
        BatchAndQueue,
        BatchMean,
        Constant,
        CycleConsistency,
        Identity,
        LearnedScale,
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
        Scent,
        Sigmoid,
        SquaredHinge,
        VarianceCovariance,
    )
    from fullbatch.config.methods import METHODS, Method, Scale, settings_of
    from fullbatch.config.run import RunConfig
    from fullbatch.encoder import Encoder, load
    from fullbatch.finetuning.finetune import finetune
    from fullbatch.objective.objective import Objective, Output, make_objective
    from fullbatch.objective.parts import Context
    from fullbatch.training_run import train

# OpenMP reads it when torch is imported.  Threads that spin while they wait take a core from whoever works beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.6.0"

__all__ = [
    "METHODS", "Amortized", "BatchAndQueue", "BatchMean", "Constant", "Context", "CycleConsistency", "Encoder",
    "Identity", "LearnedScale", "Method", "Mlp", "MovingAverage", "NoNormalizer", "Objective", "Output", "PerSample",
    "Predicted", "Prototypes", "RawSimilarity", "RobustGlobal", "RobustPositives", "Rolling", "RunConfig", "Scale",
    "Scent", "Sigmoid", "SquaredHinge", "VarianceCovariance", "exact_log_normalizers", "finetune", "load",
    "make_objective", "settings_of", "train",
]  # fmt: skip

_MODULES = {  # of the names that are not in fullbatch.config.axes
    **dict.fromkeys(("METHODS", "Method", "Scale", "settings_of"), "config.methods"),
    **dict.fromkeys(("Objective", "Output", "make_objective"), "objective.objective"),
    "Context": "objective.parts",
    "RunConfig": "config.run",
    "exact_log_normalizers": "audit.exact",
    "finetune": "finetuning.finetune",
    "train": "training_run",
    **dict.fromkeys(("Encoder", "load"), "encoder"),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> "Any":
    """A public name brings its module along when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'fullbatch' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"fullbatch.{_MODULES.get(name, 'config.axes')}"), name)
    globals()[name] = value
    return value
