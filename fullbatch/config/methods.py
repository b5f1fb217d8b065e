"""The methods: one choice on every axis, which choices exclude each other, the named ones, and a run's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

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
    Normalizer,
    Pairwise,
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
    Temperature,
    VarianceCovariance,
)
from fullbatch.config.checks import Checked, one_of, require
from fullbatch.config.messages import listed, nearest


@dataclass(frozen=True)
class Scale(Checked):
    """How the two directions become one number."""

    times_temperature: bool = True  # the loss is multiplied by tau, NeuCLIP eq. (1)
    directions: Literal["sum", "mean"] = "sum"  # "sum" (eq. (1)) or "mean" (CLIP)
    log_of_sum: bool = False  # the reported value is the log of the sum over negatives, not of their mean (InfoNCE)
    # how many times rho * tau is added: once a direction, or once in all (AmorLIP)
    rho_terms: Literal["each", "once"] = "each"


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
    def remembers(self) -> bool:
        """Whether its normalizers are more than what the batch at hand, or a queue beside it, shows."""
        return not isinstance(self.normalizer, (BatchMean, BatchAndQueue, NoNormalizer))

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


_CLIP = Scale(times_temperature=False, directions="mean", log_of_sum=True)
_FASTCLIP = MovingAverage(gamma=0.2, gamma_epochs=16)

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        # baselines
        "openclip": Method(Identity(), BatchMean(), LearnedScale(0.07), _CLIP),
        "siglip": Method(Sigmoid(), NoNormalizer(), LearnedScale(0.1)),
        "simclr": Method(Identity(), BatchMean(), Constant(0.1), _CLIP, negatives="both"),
        "cyclip": Method(Identity(), BatchMean(), LearnedScale(0.07), _CLIP, penalty=CycleConsistency()),
        "vicreg": Method(VarianceCovariance(), NoNormalizer(), Constant()),
        "gcl_batch": Method(Identity(), BatchMean(epsilon=1e-14), Constant(0.07)),
        "xbm": Method(Identity(), BatchAndQueue(), LearnedScale(0.07), _CLIP),
        # a moving average per sample
        "sogclr": Method(Identity(), MovingAverage(gamma=0.8), Constant(0.07)),
        "sogclr_views": Method(RawSimilarity(), MovingAverage(gamma=0.9, shared=True), Constant(0.1), negatives="both"),
        "scent": Method(Identity(), Scent(), Constant(0.07)),
        "fastclip_v0": Method(Identity(), _FASTCLIP, LearnedScale(0.07), Scale(times_temperature=False)),
        "fastclip_v1": Method(Identity(), _FASTCLIP, Constant(0.07)),
        "fastclip_v2": Method(
            Identity(),
            _FASTCLIP,
            PerSample(0.03, rho=7.0, temperature_lr=0.0133, temperature_min=0.01, rule="adam"),
        ),
        "fastclip_v3": Method(Identity(), _FASTCLIP, RobustGlobal(0.07)),
        "isogclr": Method(Identity(), MovingAverage(gamma=0.8), PerSample(0.01, rho=8.0)),
        "isogclr_new": Method(
            Identity(),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, beta=0.5, temperature_lr=1e-5, temperature_max=0.05),
        ),
        "isogclr_new_v2": Method(
            RobustPositives(strength=1.0, gamma=0.8),
            MovingAverage(gamma=0.8),
            PerSample(0.01, rho=8.0, temperature_lr=0.001, clip=None),
        ),
        "tempnet": Method(Identity(), MovingAverage(gamma=0.8), Predicted(rho=7.0)),
        "tuneclip": Method(SquaredHinge(0.1), MovingAverage(gamma=0.9, gamma_epochs=4), Constant(0.01)),
        # a network predicts the normalizer
        "neuclip": Method(Identity(), Prototypes(), RobustGlobal(0.07)),
        "rolling": Method(Identity(), Rolling(), RobustGlobal(0.07)),
        "queue": Method(Identity(), Rolling(updates=0), RobustGlobal(0.07)),
        "amorlip": Method(
            Identity(),
            Amortized(),
            RobustGlobal(0.07, rho=8.5, rho_late=-8.5, rho_late_epoch=11),
            Scale(rho_terms="once"),
        ),
    }
)


def _named(kinds: Any, *names: str) -> Mapping[str, type]:
    return dict(zip(names, get_args(kinds), strict=True))


# The choices on each axis by the names they have on the command line and in YAML.
PAIRWISE = _named(Pairwise, "identity", "raw", "squared_hinge", "robust_positives", "sigmoid", "variance_covariance")
NORMALIZERS = _named(
    Normalizer,
    *("none", "batch_mean", "batch_and_queue", "moving_average", "scent", "prototypes", "rolling", "mlp", "amortized"),
)
TEMPERATURES = _named(Temperature, "constant", "learned", "robust", "per_sample", "predicted")

AXES = (*PARTS, "negatives")
_ELSEWHERE = {"clip": "openclip", "infonce": "openclip", "nt_xent": "simclr"}  # what others call a method


def named_method(name: object) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        known = _ELSEWHERE.get(str(name).lower(), name)
        raise ValueError(f"Unknown method {name!r}{nearest(known, METHODS)} The methods are {listed(METHODS)}.")
    return METHODS[name]


def method_with(
    name: str, parts: Mapping[str, Any], settings: Mapping[str, Any], surroundings: tuple[str, ...] = ()
) -> Method:
    """A named method with whole ``parts`` replaced (``pairwise=...``), then fields of parts set (``rho=6.5``).
    ``surroundings`` are further settings the caller takes; they are named when a setting is not known."""
    method = named_method(name)
    chosen = {axis: parts.get(axis, getattr(method, axis)) for axis in AXES}
    Method(**chosen)  # a wrong part is refused before its settings are
    known = {field for axis in AXES for field in _fields(chosen[axis])}
    for unknown in (key for key in settings if key not in known):
        around = f"; surroundings: {listed(surroundings)}" if surroundings else ""
        guess = nearest(unknown, {*known, *surroundings, *AXES} - {unknown})
        raise ValueError(
            f"{name!r} has no setting {unknown!r}{guess} Its settings are "
            f"{listed(sorted(known))}; whole parts: {listed(AXES)}{around}."
        )
    for axis in PARTS:
        own = {key: value for key, value in settings.items() if key in _fields(chosen[axis])}
        if own:
            chosen[axis] = dataclasses.replace(chosen[axis], **own)
    return Method(**chosen)


def settings_of(method: Method) -> tuple[str, ...]:
    """The keyword settings a method takes, beside whole parts and surroundings."""
    return tuple(sorted({field for axis in PARTS for field in _fields(getattr(method, axis))}))


def _fields(part: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()


OPERANDS = ("float16", "split", "float32")


@dataclass(frozen=True)
class ObjectiveConfig(Checked):
    """The method."""

    method: str = "neuclip"  # a named point of pairwise x normalizer x temperature
    pairwise: str | None = None  # another pairwise loss than the method's own
    normalizer: str | None = None  # another normalizer than the method's own
    temperature_rule: str | None = None  # another temperature rule than the method's own
    # "across": of the other modality or view; "both": of the anchor's own as well; None: the method's
    negatives: Annotated[str, one_of("across", "both")] | None = None
    # fields of the method's parts: rho, gamma, prototypes, ...
    settings: Mapping[str, Any] = field(default_factory=dict)
    loss_chunk: int | None = None  # rows of the similarity matrix at a time; None: all
    # what the loss multiplies on a GPU: embeddings as float16, as two of them ("split"), or as they are; "auto": split
    # where the towers run in fp32, else float16, which is finer than what they compute
    loss_operands: Annotated[str, one_of("auto", *OPERANDS)] = "auto"
    table_dtype: Annotated[str, one_of("float32", "float16")] = "float32"  # how the per-sample tables are stored
    table_storage: str = "auto"  # "auto", "rank", "node" (shared by the ranks of a node) or a folder

    def _check(self) -> None:
        named_method(self.method)
        for axis, kinds in (("pairwise", PAIRWISE), ("normalizer", NORMALIZERS), ("temperature_rule", TEMPERATURES)):
            value = getattr(self, axis)
            hint = str(nearest(value, kinds)).strip("; .")
            require(value is None or value in kinds, self, axis, f"be one of {listed(kinds)}", hint)
        require(isinstance(self.settings, Mapping), self, "settings", "map names to values")
        self.build()

    def build(self) -> Method:
        chosen = {
            "pairwise": PAIRWISE.get(self.pairwise or ""),
            "normalizer": NORMALIZERS.get(self.normalizer or ""),
            "temperature": TEMPERATURES.get(self.temperature_rule or ""),
        }
        parts: dict[str, Any] = {axis: kind() for axis, kind in chosen.items() if kind}
        if self.negatives is not None:
            parts["negatives"] = self.negatives
        return method_with(self.method, parts, self.settings)
