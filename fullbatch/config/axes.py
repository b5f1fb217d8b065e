"""The axes of a method: what one negative costs, how the normalizer is estimated, where the temperature comes from.  An
objective is pairwise x normalizer x temperature (plus a scale).  The classes here only describe; the code that acts on
them lives in ``fullbatch.objective``.  Field names are the keyword settings of ``make_objective``."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fullbatch.config.checks import (
    BelowOne,
    Checked,
    Count,
    Gamma,
    NotNegative,
    Number,
    Positive,
    Rule,
    Tau,
    UpToOne,
    Whole,
    at_least,
    is_number,
    number,
    require,
)

# -- what one negative costs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """The gap itself, d_ij = s_ij - s_ii."""


@dataclass(frozen=True)
class RawSimilarity:
    """The similarity s_ij itself; the positive stands apart, as -s_ii.  The exact loss is that of the gap: tau log mean
    exp(s_ij / tau) - s_ii = tau log mean exp((s_ij - s_ii) / tau).  What is remembered differs: a moving average of it
    does not move with the positive (SogCLR on two views)."""


@dataclass(frozen=True)
class SquaredHinge(Checked):
    """max(d_ij + margin, 0)^2: negatives far enough below the positive cost nothing.  TuneCLIP eq. (8)."""

    margin: Annotated[float, number("lie in [0, 2]", lambda value: 0.0 <= value <= 2.0)] = 0.1  # how far that is


@dataclass(frozen=True)
class RobustPositives(Checked):
    """Raw similarities for negatives, positives re-weighted towards the hard ones (iSogCLR_New_v2)."""

    strength: Positive = 1.0  # lambda in p_i = exp(-2 s_ii / lambda) / r
    gamma: Gamma = 0.8  # rate of r, the running mean of the numerator; in epoch 0 r is the batch's own mean


@dataclass(frozen=True)
class Sigmoid(Checked):
    """SigLIP: every pair is a binary question; no normalizer exists."""

    bias: Number = -10.0  # where the learned bias starts


@dataclass(frozen=True)
class VarianceCovariance(Checked):
    """VICReg: pairs alike, coordinates spread out and uncorrelated; no negatives at all.  Its hinge asks for a standard
    deviation of 1, which unit rows never reach: it pushes outwards all the time."""

    # weights of the three terms
    invariance: Positive = 25.0
    variance: Positive = 25.0
    covariance: Positive = 1.0


Pairwise = Identity | RawSimilarity | SquaredHinge | RobustPositives | Sigmoid | VarianceCovariance


RAW = (RawSimilarity, RobustPositives)  # negatives are not compared with the positive


@dataclass(frozen=True)
class CycleConsistency(Checked):
    """CyCLIP's two penalties, added to any loss: similarities symmetric across modalities, and alike within them."""

    # their weights
    in_modal: Positive = 0.25
    cross_modal: Positive = 0.25


# -- how 1 / (epsilon + g_i(data set)) is estimated --------------------------------------------------------------------


@dataclass(frozen=True)
class NoNormalizer:
    """SigLIP has none."""


@dataclass(frozen=True)
class BatchMean(Checked):
    """The batch's own mean."""

    epsilon: NotNegative | None = None  # added to it; None stands for 1 / (number of negatives), which makes it InfoNCE


@dataclass(frozen=True)
class MovingAverage(Checked):
    """One running mean u_i per sample and direction.  NeuCLIP eq. (3)."""

    gamma: Gamma = 0.8  # weight of the new value
    # epochs in which gamma falls from 1 to its value by a cosine; None: it is constant
    gamma_epochs: Positive | None = None
    epsilon: NotNegative = 1e-14  # added to the batch's mean
    # one u_i for both directions, the mean of what they make of it: for two views of one image, which are alike
    # (SogCLR's code)
    shared: bool = False
    # in each step u is scaled so that the batch's weights (epsilon + g_i) / u_i have mean 1, as those of a run without
    # memory have; what is kept is not scaled.  A control: what remains of u then is which samples count for more
    unit_mean: bool = False


@dataclass(frozen=True)
class Scent(Checked):
    """A moving average whose weight is a sample's own: u_i <- (1 - gamma_i) u_i + gamma_i (epsilon + g_i) with
    gamma_i = sigmoid(log_step + log u_i), so that large normalizers forget faster.  SCENT, Wei et al. 2026."""

    # log of the step size; at 10, the authors' value, only a normalizer below exp(-10) remembers much
    log_step: Number = 10.0
    epsilon: NotNegative = 1e-14  # added to the batch's mean


_Forgotten = Annotated[
    float, Rule("lie in [0, 1]", lambda value: isinstance(value, numbers.Real) and 0.0 <= value <= 1.0)
]


class _Learning(Checked):
    """Prototypes that AdaGrad moves."""

    def lr_for(self: Any, width: int) -> float:
        return 0.05 / math.sqrt(width) if self.prototype_lr is None else float(self.prototype_lr)


@dataclass(frozen=True)
class Prototypes(_Learning):
    """NeuCLIP's normalizer-prediction network: m prototypes and a log-sum-exp pool.  NeuCLIP eq. (10)-(12)."""

    prototypes: Count = 4096  # m, how many summarise the data set for each direction
    updates: Whole = 10  # T_u, AdaGrad updates a step; 0 leaves them as the last restart set them
    # T_r, steps between restarts from fresh embeddings; None or 0: only at the first step
    restart_every: Whole | None = 500
    # where a batch is smaller than m: "recent": the m newest embeddings, this batch's among them; "batch": its own
    # alone, as Algorithm 1 has it, and no more prototypes than it has pairs
    restart_from: Literal["recent", "batch"] = "recent"
    # AdaGrad's learning rate; None: 0.05 / sqrt(width), a first step of 0.05 radians (docs/explanation/normalizers.md
    # shows why the default is not the paper's 1.0)
    prototype_lr: Positive | None = None
    # "full": the encoders' gradient flows through alpha as eq. (12) says; "detached": it does not
    prototype_gradient: Literal["full", "detached"] = "full"
    # "unified": eq. (12); "separate": half the squared log error (Tables 14-16)
    fit: Literal["unified", "separate"] = "unified"
    # "alternating": Algorithm 1; "simultaneous": Algorithm 3, prototypes are parameters of the objective, trained by
    # your optimizer
    schedule: Literal["alternating", "simultaneous"] = "alternating"
    # share of AdaGrad's accumulators that a restart forgets: 0 (or False) none, 1 (or True) all
    reset_accumulator: _Forgotten = 0.5
    epsilon: NotNegative = 1e-14  # added to the mean of the exponentials

    def _check(self) -> None:
        if self.schedule == "simultaneous":
            hint = 'with schedule="simultaneous" the prototypes learn from the loss itself'
            require(self.prototype_gradient == "full", self, "prototype_gradient", "be 'full'", hint)
            require(self.fit == "unified", self, "fit", "be 'unified'", hint)

    @classmethod
    def as_published(cls) -> Prototypes:
        """NeuCLIP's Table 4: AdaGrad at 1.0, here started anew at each restart (the paper does not say)."""
        return cls(4096, updates=10, restart_every=500, restart_from="batch", prototype_lr=1.0, reset_accumulator=True)


@dataclass(frozen=True)
class Rolling(_Learning):
    """The newest embeddings as prototypes: in each step the batch's take the places of the oldest, and then all learn
    as NeuCLIP's do.  There are no restarts.  With ``updates=0`` it is a plain queue."""

    # how many there are for each direction; at least as many as a batch has pairs
    prototypes: Annotated[int, at_least(2)] = 4096
    updates: Whole = 10  # AdaGrad updates a step; 0: they stay the embeddings they were
    prototype_lr: Positive | None = None  # AdaGrad's learning rate; None: 0.05 / sqrt(width)
    # "full": the encoders' gradient flows through alpha as eq. (12) says; "detached": it does not
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"  # "unified": eq. (12); "separate": half the squared log error
    # share of AdaGrad's accumulator that a place forgets when it gets a new embedding
    reset_accumulator: _Forgotten = 0.5
    # "left_out": an anchor's own positive, which is among the newest, does not count for it; "kept": it does, and its
    # term, 1 / prototypes, is a floor under the normalizer
    own_positive: Literal["left_out", "kept"] = "left_out"
    epsilon: NotNegative = 1e-14  # added to the mean of the exponentials


@dataclass(frozen=True)
class BatchAndQueue(Checked):
    """The mean over the batch's negatives and the newest embeddings before it, as XBM has it: no estimate beside the
    loss, but a longer loss."""

    queue: Count = 4096  # how many embeddings are remembered for each direction
    # batches with which they do not count yet: a model drifts fast at first, and would flee from what it was
    starts_after: Whole = 1000
    # added to the mean; None stands for 1 / (number of negatives), which makes it InfoNCE
    epsilon: NotNegative | None = None


@dataclass(frozen=True)
class Mlp(Checked):
    """The MLP that NeuCLIP compares its prototypes with (Tables 14-16): alpha_i = MLP(stopgrad e_i) - s_ii / tau.  The
    net is AmorLIP's, which it follows."""

    updates: Whole = 10  # updates a step
    restart_every: Whole | None = 500  # steps between re-initialisations; None or 0: never
    prototype_lr: Positive = 0.01  # learning rate of the updates
    # "full": the encoders' gradient flows through alpha; "detached": it does not
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"  # "unified": eq. (12); "separate": half the squared log error
    epsilon: NotNegative = 1e-14  # added to the mean of the exponentials


@dataclass(frozen=True)
class Amortized(Checked):
    """AmorLIP's net predicting log lambda_i, fitted to targets blended with last epoch's averaged net."""

    positive_weight: Positive = 1e-3  # weight of the positive pair in the sum
    blend: BelowOne = 0.8  # beta_z at the end of a rising cosine
    blend_epochs: Positive = 16.0  # epochs it rises for
    # "target": the encoder divides by the blended target (the authors' script); "net": by the net
    divide_by: Literal["target", "net"] = "target"
    # the averaged net follows as ema * old + (1 - ema) * new, every so many steps
    ema: BelowOne = 0.92
    ema_every: Count = 2
    # Adam updates a step, their learning rate and gradient clipping
    updates: Whole = 3
    net_lr: Positive = 1e-3
    net_clip: Positive = 1.0


Normalizer = NoNormalizer | BatchMean | BatchAndQueue | MovingAverage | Scent | Prototypes | Rolling | Mlp | Amortized


# -- where tau comes from ----------------------------------------------------------------------------------------------


class _Bounded(Checked):
    """It moves between temperature_min and temperature_max."""

    def _check(self: Any) -> None:
        low = self.temperature_min
        require(self.temperature_max > low, self, "temperature_max", f"exceed temperature_min ({low})")


_Budget = Annotated[float | None, Rule("be a number or None", lambda value: value is None or is_number(value))]


def temperature_bounds(owner: LearnedScale | RobustGlobal | PerSample) -> tuple[float, float]:
    """The bounds, widened where the start lies outside them: who starts at 0.005 means it."""
    return min(owner.temperature_min, owner.temperature), max(owner.temperature_max, owner.temperature)


@dataclass(frozen=True)
class Constant(Checked):
    """One temperature that never moves."""

    temperature: Tau = 0.07  # tau


@dataclass(frozen=True)
class LearnedScale(_Bounded):
    """CLIP's learned 1/tau, kept as log tau; the bounds are CLIP's 1 to 100 on the scale."""

    temperature: Tau = 0.07  # where tau starts
    # its bounds
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0


@dataclass(frozen=True)
class RobustGlobal(_Bounded):
    """One learned temperature with a KL budget: the loss gains rho * tau a direction.  NeuCLIP eq. (1), (13)."""

    temperature: Tau = 0.07  # where tau starts
    # the KL budget; below log(number of negatives), or tau falls to its least value.  None: half of the largest there
    # can be, log(number of samples - 1), or 6.5 where that number is not known
    rho: _Budget = None
    # the bounds of tau
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0
    rho_late: _Budget = None  # replaces rho from epoch rho_late_epoch on (AmorLIP's script does that); None: rho stays
    rho_late_epoch: Number = 0.0  # see rho_late
    # "equation": tau's gradient is eq. (13); "released": that of FastCLIP's released code, in which the terms with tau
    # inside g count twice: tau comes to rest lower, and FastCLIP's published rho is meant so
    rule: Literal["equation", "released"] = "equation"

    def for_samples(self, count: int | None) -> RobustGlobal:
        """With a budget, where none was given: the papers' lie between 0.44 and 0.67 of the largest there can be."""
        if self.rho is not None:
            return self
        return replace(self, rho=6.5 if count is None else 0.5 * math.log(max(count - 1, 2)))

    def rho_at(self, epoch: float) -> float:
        assert self.rho is not None, "for_samples chooses it"
        late = self.rho_late is not None and epoch >= self.rho_late_epoch
        return self.rho_late if late and self.rho_late is not None else self.rho


@dataclass(frozen=True)
class PerSample(_Bounded):
    """iSogCLR: a temperature per sample and direction, moved by its own rule inside the objective."""

    temperature: Tau = 0.01  # where each tau starts
    rho: Number = 8.0  # the KL budget of both directions
    # the budget of one direction; None: rho
    rho_image: Number | None = None
    rho_text: Number | None = None
    temperature_lr: Positive = 0.03  # step size of the rule
    # the bounds of each tau
    temperature_min: Tau = 0.005
    temperature_max: Tau = 1.0
    # "momentum": m <- (1 - beta) m + beta dtau; "adam": FastCLIP v2's per-sample Adam
    rule: Literal["momentum", "adam"] = "momentum"
    beta: UpToOne = 0.9  # of the rule "momentum"
    clip: Positive | None = 5.0  # bound on the temperature's gradient, None for none


@dataclass(frozen=True)
class Predicted(_Bounded):
    """TempNet: a small net per direction predicts each anchor's temperature; your optimizer trains its weights."""

    rho: Number = 7.0  # the KL budget of both directions
    # the budget of one direction; None: rho
    rho_image: Number | None = None
    rho_text: Number | None = None
    # what the net can predict
    temperature_min: Tau = 0.005
    temperature_max: Tau = 0.05
    # unit vectors it compares with; they start from the first batch of the other modality
    centers: Annotated[int, at_least(2)] = 256
    dropout: BelowOne = 0.5  # inside the net


Temperature = Constant | LearnedScale | RobustGlobal | PerSample | Predicted


def rho_of_direction(temperature: PerSample | Predicted, direction: str) -> float:
    own = temperature.rho_image if direction == "image" else temperature.rho_text
    return temperature.rho if own is None else own
