"""A method: one choice on every axis, and which choices exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fullbatch.config.checks import require_choice
from fullbatch.config.normalizer import (
    Amortized,
    BatchAndQueue,
    Mlp,
    MovingAverage,
    NoNormalizer,
    Normalizer,
    Prototypes,
    Rolling,
    Scent,
)
from fullbatch.config.pairwise import (
    CycleConsistency,
    Pairwise,
    RobustPositives,
    Sigmoid,
    SquaredHinge,
    VarianceCovariance,
)
from fullbatch.config.temperature import Constant, LearnedScale, PerSample, Predicted, RobustGlobal, Temperature


@dataclass(frozen=True)
class Scale:
    """How the two directions become one number.

    times_temperature   the loss is multiplied by tau, NeuCLIP eq. (1)
    directions          "sum" (eq. (1)) or "mean" (CLIP)
    log_of_sum          the reported value is the log of the sum over negatives, not of their mean (InfoNCE)
    rho_terms           how many times rho * tau is added: once a direction, or once in all (AmorLIP)
    """

    times_temperature: bool = True
    directions: Literal["sum", "mean"] = "sum"
    log_of_sum: bool = False
    rho_terms: Literal["each", "once"] = "each"

    def __post_init__(self) -> None:
        require_choice(self, "times_temperature", (True, False))
        require_choice(self, "directions", ("sum", "mean"))
        require_choice(self, "log_of_sum", (True, False))
        require_choice(self, "rho_terms", ("each", "once"))


AVERAGES = (MovingAverage, Scent)  # one number a sample and direction
SUMMARIES = (BatchAndQueue, Prototypes, Rolling, Mlp, Amortized)  # of the other modality, from its embeddings

PARTS: dict[str, tuple[type, ...]] = {
    "pairwise": get_args(Pairwise),
    "normalizer": get_args(Normalizer),
    "temperature": get_args(Temperature),
    "scale": (Scale,),
    "penalty": (CycleConsistency, type(None)),
}


@dataclass(frozen=True)
class Method:
    """A point of the table: one choice on every axis."""

    pairwise: Pairwise
    normalizer: Normalizer
    temperature: Temperature
    scale: Scale = Scale()
    negatives: Literal["across", "both"] = "across"
    penalty: CycleConsistency | None = None

    def __post_init__(self) -> None:
        for axis, kinds in PARTS.items():
            if not isinstance(getattr(self, axis), kinds):
                allowed = ", ".join("None" if kind is type(None) else f"{kind.__name__}(...)" for kind in kinds)
                raise ValueError(f"{axis} must be one of {allowed} (from fullbatch), got {getattr(self, axis)!r}.")
        if self.negatives not in ("across", "both"):
            raise ValueError(f"negatives must be 'across' or 'both', got {self.negatives!r}.")
        reason = excluded_because(self)
        if reason:
            raise ValueError(reason)

    @property
    def needs_ids(self) -> bool:
        return isinstance(self.normalizer, AVERAGES) or isinstance(self.temperature, PerSample)

    @property
    def needs_width(self) -> bool:
        return isinstance(self.normalizer, SUMMARIES) or isinstance(self.temperature, Predicted)

    @property
    def needs_epochs(self) -> bool:
        by_gamma = isinstance(self.normalizer, MovingAverage) and self.normalizer.gamma_epochs is not None
        by_rho = isinstance(self.temperature, RobustGlobal) and self.temperature.rho_late is not None
        by_adam = isinstance(self.temperature, PerSample) and self.temperature.rule == "adam"
        by_positives = isinstance(self.pairwise, RobustPositives)
        return by_gamma or by_rho or by_adam or by_positives or isinstance(self.normalizer, Amortized)


def excluded_because(method: Method) -> str | None:
    """Why a combination makes no sense, or None."""
    pairwise, normalizer = type(method.pairwise).__name__, type(method.normalizer).__name__
    alone = isinstance(method.pairwise, (Sigmoid, VarianceCovariance))
    if alone and not isinstance(method.normalizer, NoNormalizer):
        return (
            f"{pairwise} ({'SigLIP' if pairwise == 'Sigmoid' else 'VICReg'}) has nothing to normalise, so "
            f"normalizer={normalizer} cannot be used with it; use NoNormalizer()."
        )
    if not alone and isinstance(method.normalizer, NoNormalizer):
        return f"{pairwise} needs a normalizer; NoNormalizer() goes with Sigmoid() and VarianceCovariance() only."
    if alone and not isinstance(method.temperature, (Constant, LearnedScale)):
        return (
            f"temperature={type(method.temperature).__name__} follows a rule on the normalizer and {pairwise} has "
            "none; use Constant() or LearnedScale()."
        )
    if alone and method.negatives == "both":
        return f"{pairwise} has no such negatives; negatives='both' goes with the other pairwise losses."
    if isinstance(method.normalizer, Amortized) and isinstance(method.pairwise, SquaredHinge):
        return (
            "AmorLIP's net predicts a sum of exponentials that is linear in the positive's similarity; "
            "SquaredHinge is not, so they cannot be combined. Use MovingAverage() or Prototypes()."
        )
    if isinstance(method.normalizer, Amortized) and isinstance(method.temperature, PerSample):
        return (
            "AmorLIP's net sees an embedding, not the sample's own temperature, so it cannot predict the sum for "
            "PerSample temperatures. Use RobustGlobal(), or PerSample with MovingAverage() or Prototypes()."
        )
    if method.negatives == "both" and isinstance(method.normalizer, SUMMARIES):
        return (
            f"negatives='both' is available with BatchMean() and MovingAverage(); {normalizer} summarises the other "
            "modality only."
        )
    return None
