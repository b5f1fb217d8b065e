"""What a method is made of: frozen descriptions of every choice on every axis, with their defaults and checks.

An objective is pairwise x normalizer x temperature (plus a scale).  The classes here only describe; the code that acts
on them lives in ``fullbatch.objective``.  Field names are the keyword settings of ``make_objective``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# ---------------------------------------------------------------------------------------------------------------------
# checks


def _require(holds: bool, owner: object, field: str, rule: str, hint: str = "") -> None:
    if not holds:
        advice = f"; {hint}" if hint else ""
        raise ValueError(f"{type(owner).__name__}.{field} must {rule}, got {getattr(owner, field)!r}{advice}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        _require(_is_number(value) and value > 0, owner, field, "be a positive number")


def _require_count(owner: object, field: str, least: int) -> None:
    value = getattr(owner, field)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(whole, owner, field, f"be a whole number of at least {least}")


def _require_choice(owner: object, field: str, allowed: tuple[str, ...]) -> None:
    _require(getattr(owner, field) in allowed, owner, field, f"be one of {', '.join(map(repr, allowed))}")


def _require_temperature(owner: object, field: str = "temperature") -> None:
    value = getattr(owner, field)
    hint = "it divides similarities in [-1, 1], so useful values lie between 0.005 and 1"
    _require(_is_number(value) and 0.0 < value <= 10.0, owner, field, "lie in (0, 10]", hint)


def _require_epsilon(owner: object) -> None:
    value = getattr(owner, "epsilon")  # noqa: B009  (the field exists on some variants only)
    _require(_is_number(value) and value >= 0.0, owner, "epsilon", "be a number of at least 0")


def _require_gamma(owner: object) -> None:
    value = getattr(owner, "gamma")  # noqa: B009
    good = _is_number(value) and 0.0 < value <= 1.0
    _require(good, owner, "gamma", "lie in (0, 1]", "for no memory use normalizer=BatchMean()")


# ---------------------------------------------------------------------------------------------------------------------
# pairwise: what one negative costs


@dataclass(frozen=True)
class Identity:
    """The gap itself, d_ij = s_ij - s_ii."""


@dataclass(frozen=True)
class SquaredHinge:
    """max(d_ij + margin, 0)^2: negatives already ``margin`` below the positive cost nothing.  TuneCLIP eq. (8)."""

    margin: float = 0.1

    def __post_init__(self) -> None:
        _require(_is_number(self.margin) and 0.0 <= self.margin <= 2.0, self, "margin", "lie in [0, 2]")


@dataclass(frozen=True)
class RobustPositives:
    """Raw similarities for negatives, positives re-weighted towards the hard ones (the iSogCLR_New_v2 of seed 003).

    ``strength`` is lambda in p_i = exp(-2 s_ii / lambda) / r; r is a running mean of the numerator with rate ``gamma``.
    """

    strength: float = 1.0
    gamma: float = 0.8

    def __post_init__(self) -> None:
        _require_positive(self, "strength")
        _require_gamma(self)


@dataclass(frozen=True)
class Sigmoid:
    """SigLIP: every pair is a binary question; no normalizer exists.  ``bias`` is where the learned bias starts."""

    bias: float = -10.0

    def __post_init__(self) -> None:
        _require(_is_number(self.bias), self, "bias", "be a number")


Pairwise = Identity | SquaredHinge | RobustPositives | Sigmoid

# ---------------------------------------------------------------------------------------------------------------------
# normalizer: how 1 / (epsilon + g_i(data set)) is estimated


@dataclass(frozen=True)
class NoNormalizer:
    """SigLIP has none."""


@dataclass(frozen=True)
class BatchMean:
    """The batch's own mean.  ``epsilon=None`` stands for 1 / (number of negatives), which makes it InfoNCE."""

    epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            _require_epsilon(self)


@dataclass(frozen=True)
class MovingAverage:
    """One running mean u_i per sample and direction.  NeuCLIP eq. (3).

    ``gamma_epochs=None`` keeps gamma constant; else it falls from 1 to ``gamma`` by a cosine over that many epochs.
    """

    gamma: float = 0.8
    gamma_epochs: float | None = None
    epsilon: float = 1e-14

    def __post_init__(self) -> None:
        _require_gamma(self)
        _require_epsilon(self)
        if self.gamma_epochs is not None:
            _require_positive(self, "gamma_epochs")


def _check_fitted(owner: Prototypes | Mlp) -> None:
    _require_epsilon(owner)
    _require_count(owner, "updates", 0)
    if owner.prototype_lr is not None:
        _require_positive(owner, "prototype_lr")
    if owner.restart_every is not None:
        _require_count(owner, "restart_every", 0)
    _require_choice(owner, "prototype_gradient", ("full", "detached"))
    _require_choice(owner, "fit", ("unified", "separate"))


@dataclass(frozen=True)
class Prototypes:
    """NeuCLIP's normalizer-prediction network: m prototypes and a log-sum-exp pool.  NeuCLIP eq. (10)-(12).

    prototypes           m, how many summarise the data set for each direction
    updates              T_u, AdaGrad updates a step; 0 leaves them as the last restart set them
    restart_every        T_r, steps between restarts from fresh embeddings; None or 0: only at the first step
    prototype_lr         AdaGrad's learning rate; None: 0.01 / sqrt(width), a first step of 0.01 radians
                         (docs/normalizer.md shows why the default is not the paper's 1.0)
    prototype_gradient   "full": the encoders' gradient flows through alpha as eq. (12) says; "detached": it does not
    fit                  "unified": eq. (12); "separate": half the squared log error (Tables 14-16)
    schedule             "alternating": Algorithm 1; "simultaneous": Algorithm 3, prototypes are parameters of the
                         objective, trained by your optimizer
    reset_accumulator    whether a restart also forgets AdaGrad's accumulators
    """

    prototypes: int = 4096
    updates: int = 10
    restart_every: int | None = 500
    prototype_lr: float | None = None
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"
    schedule: Literal["alternating", "simultaneous"] = "alternating"
    reset_accumulator: bool = False
    epsilon: float = 1e-14

    def __post_init__(self) -> None:
        _check_fitted(self)
        _require_count(self, "prototypes", 1)
        _require_choice(self, "schedule", ("alternating", "simultaneous"))

    @classmethod
    def as_published(cls) -> Prototypes:
        """NeuCLIP's Table 4: AdaGrad at 1.0, here started anew at each restart (the paper does not say)."""
        return cls(prototypes=4096, updates=10, restart_every=500, prototype_lr=1.0, reset_accumulator=True)

    def lr_for(self, width: int) -> float:
        return 0.01 / math.sqrt(width) if self.prototype_lr is None else self.prototype_lr


@dataclass(frozen=True)
class Mlp:
    """The MLP that NeuCLIP compares its prototypes with (Tables 14-16): alpha_i = MLP(stopgrad e_i) - s_ii / tau."""

    hidden: int = 512
    updates: int = 10
    restart_every: int | None = 500
    prototype_lr: float = 0.01
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"
    epsilon: float = 1e-14

    def __post_init__(self) -> None:
        _check_fitted(self)
        _require_count(self, "hidden", 1)


@dataclass(frozen=True)
class Amortized:
    """AmorLIP's net predicting log lambda_i, fitted to targets blended with last epoch's averaged net.

    positive_weight   weight of the positive pair in the sum
    blend             beta_z after ``blend_epochs`` epochs of a rising cosine
    divide_by         "target": the encoder divides by the blended target (the authors' script); "net": by the net
    ema, ema_every    the averaged net follows as ema * old + (1 - ema) * new, every so many steps
    updates, net_lr, net_clip   Adam updates a step, their learning rate and gradient clipping
    """

    positive_weight: float = 1e-3
    blend: float = 0.8
    blend_epochs: float = 16.0
    divide_by: Literal["target", "net"] = "target"
    ema: float = 0.92
    ema_every: int = 2
    updates: int = 3
    net_lr: float = 1e-3
    net_clip: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "positive_weight", "blend_epochs", "net_lr", "net_clip")
        _require(_is_number(self.blend) and 0.0 <= self.blend < 1.0, self, "blend", "lie in [0, 1)")
        _require(_is_number(self.ema) and 0.0 <= self.ema < 1.0, self, "ema", "lie in [0, 1)")
        _require_choice(self, "divide_by", ("target", "net"))
        _require_count(self, "ema_every", 1)
        _require_count(self, "updates", 0)


Normalizer = NoNormalizer | BatchMean | MovingAverage | Prototypes | Mlp | Amortized

# ---------------------------------------------------------------------------------------------------------------------
# temperature


def _check_bounds(owner: LearnedScale | RobustGlobal | PerSample | Predicted) -> None:
    low, high = owner.temperature_min, owner.temperature_max
    _require_temperature(owner, "temperature_min")
    _require_temperature(owner, "temperature_max")
    _require(high > low, owner, "temperature_max", f"exceed temperature_min ({low})")


def temperature_bounds(owner: LearnedScale | RobustGlobal | PerSample) -> tuple[float, float]:
    """The bounds, widened where the start lies outside them: who starts at 0.005 means it."""
    return min(owner.temperature_min, owner.temperature), max(owner.temperature_max, owner.temperature)


@dataclass(frozen=True)
class Constant:
    """One temperature that never moves."""

    temperature: float = 0.07

    def __post_init__(self) -> None:
        _require_temperature(self)


@dataclass(frozen=True)
class LearnedScale:
    """CLIP's learned 1/tau, kept as log tau; the bounds are CLIP's 1 to 100 on the scale."""

    temperature: float = 0.07
    temperature_min: float = 0.01
    temperature_max: float = 1.0

    def __post_init__(self) -> None:
        _require_temperature(self)
        _check_bounds(self)


@dataclass(frozen=True)
class RobustGlobal:
    """One learned temperature with a KL budget ``rho``: the loss gains rho * tau a direction.  NeuCLIP eq. (1), (13).

    ``rho_late`` replaces ``rho`` from epoch ``rho_late_epoch`` on (AmorLIP's script does that).
    """

    temperature: float = 0.07
    rho: float = 6.5
    temperature_min: float = 0.01
    temperature_max: float = 1.0
    rho_late: float | None = None
    rho_late_epoch: float = 0.0

    def __post_init__(self) -> None:
        _require_temperature(self)
        _check_bounds(self)
        _require(_is_number(self.rho), self, "rho", "be a number")

    def rho_at(self, epoch: float) -> float:
        late = self.rho_late is not None and epoch >= self.rho_late_epoch
        return self.rho_late if late and self.rho_late is not None else self.rho


def _check_rho(owner: PerSample | Predicted) -> None:
    for field in ("rho", "rho_image", "rho_text"):
        value = getattr(owner, field)
        _require(_is_number(value) or (value is None and field != "rho"), owner, field, "be a number")


@dataclass(frozen=True)
class PerSample:
    """iSogCLR: a temperature per sample and direction, moved by its own rule inside the objective.

    rule   "momentum": m <- (1 - beta) m + beta dtau; "adam": FastCLIP v2's per-sample Adam
    clip   bound on the temperature's gradient, None for none
    """

    temperature: float = 0.01
    rho: float = 8.0
    rho_image: float | None = None
    rho_text: float | None = None
    temperature_lr: float = 0.03
    temperature_min: float = 0.005
    temperature_max: float = 1.0
    rule: Literal["momentum", "adam"] = "momentum"
    beta: float = 0.9
    clip: float | None = 5.0

    def __post_init__(self) -> None:
        _require_temperature(self)
        _check_bounds(self)
        _check_rho(self)
        _require_positive(self, "temperature_lr")
        _require_choice(self, "rule", ("momentum", "adam"))
        _require(_is_number(self.beta) and 0.0 < self.beta <= 1.0, self, "beta", "lie in (0, 1]")
        if self.clip is not None:
            _require_positive(self, "clip")


@dataclass(frozen=True)
class Predicted:
    """TempNet: a small net per direction predicts each anchor's temperature; its weights are trained by your optimizer.

    ``centers`` unit vectors start from the first batch of the other modality.
    """

    rho: float = 7.0
    rho_image: float | None = None
    rho_text: float | None = None
    temperature_min: float = 0.005
    temperature_max: float = 0.05
    centers: int = 256
    dropout: float = 0.5

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_rho(self)
        _require_count(self, "centers", 2)
        _require(_is_number(self.dropout) and 0.0 <= self.dropout < 1.0, self, "dropout", "lie in [0, 1)")


Temperature = Constant | LearnedScale | RobustGlobal | PerSample | Predicted


def rho_of_direction(temperature: PerSample | Predicted, direction: str) -> float:
    own = temperature.rho_image if direction == "image" else temperature.rho_text
    return temperature.rho if own is None else own


# ---------------------------------------------------------------------------------------------------------------------
# scale and method


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


@dataclass(frozen=True)
class Method:
    """A point of the table: one choice on every axis."""

    pairwise: Pairwise
    normalizer: Normalizer
    temperature: Temperature
    scale: Scale = Scale()
    negatives: Literal["across", "both"] = "across"

    def __post_init__(self) -> None:
        reason = excluded_because(self)
        if reason:
            raise ValueError(reason)

    @property
    def needs_ids(self) -> bool:
        return isinstance(self.normalizer, MovingAverage) or isinstance(self.temperature, PerSample)

    @property
    def needs_width(self) -> bool:
        return isinstance(self.normalizer, (Prototypes, Mlp, Amortized)) or isinstance(self.temperature, Predicted)

    @property
    def needs_epochs(self) -> bool:
        by_gamma = isinstance(self.normalizer, MovingAverage) and self.normalizer.gamma_epochs is not None
        by_rho = isinstance(self.temperature, RobustGlobal) and self.temperature.rho_late is not None
        by_adam = isinstance(self.temperature, PerSample) and self.temperature.rule == "adam"
        return by_gamma or by_rho or by_adam or isinstance(self.normalizer, Amortized)


def excluded_because(method: Method) -> str | None:
    """Why a combination makes no sense, or None."""
    sigmoid, none = isinstance(method.pairwise, Sigmoid), isinstance(method.normalizer, NoNormalizer)
    if sigmoid and not none:
        return (
            f"Sigmoid (SigLIP) asks about every pair on its own and has nothing to normalise, so "
            f"normalizer={type(method.normalizer).__name__} cannot be used with it; use NoNormalizer()."
        )
    if none and not sigmoid:
        return f"{type(method.pairwise).__name__} needs a normalizer; NoNormalizer() goes with Sigmoid() (SigLIP) only."
    if sigmoid and not isinstance(method.temperature, (Constant, LearnedScale)):
        return (
            f"temperature={type(method.temperature).__name__} follows a rule on the normalizer and Sigmoid (SigLIP) "
            "has none; use Constant() or LearnedScale()."
        )
    if sigmoid and method.negatives == "both":
        return "Sigmoid (SigLIP) is defined on image-text pairs; negatives='both' goes with the other pairwise losses."
    if isinstance(method.normalizer, Amortized):
        if isinstance(method.pairwise, SquaredHinge):
            return (
                "AmorLIP's net predicts a sum of exponentials that is linear in the positive's similarity; "
                "SquaredHinge is not, so they cannot be combined. Use MovingAverage() or Prototypes()."
            )
        if isinstance(method.temperature, PerSample):
            return (
                "AmorLIP's net sees an embedding, not the sample's own temperature, so it cannot predict the sum for "
                "PerSample temperatures. Use RobustGlobal(), or PerSample with MovingAverage() or Prototypes()."
            )
    if method.negatives == "both" and isinstance(method.normalizer, (Prototypes, Mlp, Amortized)):
        return (
            f"negatives='both' is available with BatchMean() and MovingAverage(); "
            f"{type(method.normalizer).__name__} summarises the other modality only."
        )
    return None
