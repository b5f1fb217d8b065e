"""The axes of a method: what one negative costs, how the normalizer is estimated, where the temperature comes from.

An objective is pairwise x normalizer x temperature (plus a scale).  The classes here only describe; the code that acts
on them lives in ``fullbatch.objective``.  Field names are the keyword settings of ``make_objective``.
"""

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

# ---------------------------------------------------------------------------------------------------------------------
# what one negative costs


@dataclass(frozen=True)
class Identity:
    """The gap itself, d_ij = s_ij - s_ii."""


@dataclass(frozen=True)
class RawSimilarity:
    """The similarity s_ij itself; the positive stands apart, as -s_ii.

    The exact loss is that of the gap: tau log mean exp(s_ij / tau) - s_ii = tau log mean exp((s_ij - s_ii) / tau).
    What is remembered differs: a moving average of it does not move with the positive (SogCLR on two views).
    """


@dataclass(frozen=True)
class SquaredHinge(Checked):
    """max(d_ij + margin, 0)^2: negatives far enough below the positive cost nothing.  TuneCLIP eq. (8).

    margin   how far that is
    """

    margin: Annotated[float, number("lie in [0, 2]", lambda value: 0.0 <= value <= 2.0)] = 0.1


@dataclass(frozen=True)
class RobustPositives(Checked):
    """Raw similarities for negatives, positives re-weighted towards the hard ones (iSogCLR_New_v2).

    strength   lambda in p_i = exp(-2 s_ii / lambda) / r
    gamma      rate of r, the running mean of the numerator; in epoch 0 r is the batch's own mean
    """

    strength: Positive = 1.0
    gamma: Gamma = 0.8


@dataclass(frozen=True)
class Sigmoid(Checked):
    """SigLIP: every pair is a binary question; no normalizer exists.

    bias   where the learned bias starts
    """

    bias: Number = -10.0


@dataclass(frozen=True)
class VarianceCovariance(Checked):
    """VICReg: pairs alike, coordinates spread out and uncorrelated; no negatives at all.

    Its hinge asks for a standard deviation of 1, which unit rows never reach: it pushes outwards all the time.

    invariance, variance, covariance   weights of the three terms
    """

    invariance: Positive = 25.0
    variance: Positive = 25.0
    covariance: Positive = 1.0


Pairwise = Identity | RawSimilarity | SquaredHinge | RobustPositives | Sigmoid | VarianceCovariance


RAW = (RawSimilarity, RobustPositives)  # negatives are not compared with the positive


@dataclass(frozen=True)
class CycleConsistency(Checked):
    """CyCLIP's two penalties, added to any loss: similarities symmetric across modalities, and alike within them.

    in_modal, cross_modal   their weights
    """

    in_modal: Positive = 0.25
    cross_modal: Positive = 0.25


# ---------------------------------------------------------------------------------------------------------------------
# how 1 / (epsilon + g_i(data set)) is estimated


@dataclass(frozen=True)
class NoNormalizer:
    """SigLIP has none."""


@dataclass(frozen=True)
class BatchMean(Checked):
    """The batch's own mean.

    epsilon   added to it; None stands for 1 / (number of negatives), which makes it InfoNCE
    """

    epsilon: NotNegative | None = None


@dataclass(frozen=True)
class MovingAverage(Checked):
    """One running mean u_i per sample and direction.  NeuCLIP eq. (3).

    gamma          weight of the new value
    gamma_epochs   epochs in which gamma falls from 1 to its value by a cosine; None: it is constant
    epsilon        added to the batch's mean
    shared         one u_i for both directions, the mean of what they make of it: for two views of one image, which
                   are alike (SogCLR's code)
    """

    gamma: Gamma = 0.8
    gamma_epochs: Positive | None = None
    epsilon: NotNegative = 1e-14
    shared: bool = False


@dataclass(frozen=True)
class Scent(Checked):
    """A moving average whose weight is a sample's own: u_i <- (1 - gamma_i) u_i + gamma_i (epsilon + g_i) with
    gamma_i = sigmoid(log_step + log u_i), so that large normalizers forget faster.  SCENT, Wei et al. 2026.

    log_step   log of the step size; at 10, the authors' value, only a normalizer below exp(-10) remembers much
    epsilon    added to the batch's mean
    """

    log_step: Number = 10.0
    epsilon: NotNegative = 1e-14


_Forgotten = Annotated[
    float, Rule("lie in [0, 1]", lambda value: isinstance(value, numbers.Real) and 0.0 <= value <= 1.0)
]


class _Learning(Checked):
    """Prototypes that AdaGrad moves."""

    def lr_for(self: Any, width: int) -> float:
        return 0.05 / math.sqrt(width) if self.prototype_lr is None else float(self.prototype_lr)


@dataclass(frozen=True)
class Prototypes(_Learning):
    """NeuCLIP's normalizer-prediction network: m prototypes and a log-sum-exp pool.  NeuCLIP eq. (10)-(12).

    prototypes           m, how many summarise the data set for each direction
    updates              T_u, AdaGrad updates a step; 0 leaves them as the last restart set them
    restart_every        T_r, steps between restarts from fresh embeddings; None or 0: only at the first step
    restart_from         where a batch is smaller than m: "recent": the m newest embeddings, this batch's among them;
                         "batch": its own alone, as Algorithm 1 has it, and no more prototypes than it has pairs
    prototype_lr         AdaGrad's learning rate; None: 0.05 / sqrt(width), a first step of 0.05 radians
                         (docs/explanation/normalizers.md shows why the default is not the paper's 1.0)
    prototype_gradient   "full": the encoders' gradient flows through alpha as eq. (12) says; "detached": it does not
    fit                  "unified": eq. (12); "separate": half the squared log error (Tables 14-16)
    schedule             "alternating": Algorithm 1; "simultaneous": Algorithm 3, prototypes are parameters of the
                         objective, trained by your optimizer
    reset_accumulator    share of AdaGrad's accumulators that a restart forgets: 0 (or False) none, 1 (or True) all
    epsilon              added to the mean of the exponentials
    """

    prototypes: Count = 4096
    updates: Whole = 10
    restart_every: Whole | None = 500
    restart_from: Literal["recent", "batch"] = "recent"
    prototype_lr: Positive | None = None
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"
    schedule: Literal["alternating", "simultaneous"] = "alternating"
    reset_accumulator: _Forgotten = 0.5
    epsilon: NotNegative = 1e-14

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
    as NeuCLIP's do.  There are no restarts.  With ``updates=0`` it is a plain queue.

    prototypes           how many there are for each direction; at least as many as a batch has pairs
    updates              AdaGrad updates a step; 0: they stay the embeddings they were
    prototype_lr         AdaGrad's learning rate; None: 0.05 / sqrt(width)
    prototype_gradient   "full": the encoders' gradient flows through alpha as eq. (12) says; "detached": it does not
    fit                  "unified": eq. (12); "separate": half the squared log error
    reset_accumulator    share of AdaGrad's accumulator that a place forgets when it gets a new embedding
    own_positive         "left_out": an anchor's own positive, which is among the newest, does not count for it;
                         "kept": it does, and its term, 1 / prototypes, is a floor under the normalizer
    epsilon              added to the mean of the exponentials
    """

    prototypes: Annotated[int, at_least(2)] = 4096
    updates: Whole = 10
    prototype_lr: Positive | None = None
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"
    reset_accumulator: _Forgotten = 0.5
    own_positive: Literal["left_out", "kept"] = "left_out"
    epsilon: NotNegative = 1e-14


@dataclass(frozen=True)
class BatchAndQueue(Checked):
    """The mean over the batch's negatives and the newest embeddings before it, as XBM has it: no estimate beside the
    loss, but a longer loss.

    queue     how many embeddings are remembered for each direction
    epsilon   added to the mean; None stands for 1 / (number of negatives), which makes it InfoNCE
    """

    queue: Count = 4096
    epsilon: NotNegative | None = None


@dataclass(frozen=True)
class Mlp(Checked):
    """The MLP that NeuCLIP compares its prototypes with (Tables 14-16): alpha_i = MLP(stopgrad e_i) - s_ii / tau.  The
    net is AmorLIP's, which it follows.

    updates              updates a step
    restart_every        steps between re-initialisations; None or 0: never
    prototype_lr         learning rate of the updates
    prototype_gradient   "full": the encoders' gradient flows through alpha; "detached": it does not
    fit                  "unified": eq. (12); "separate": half the squared log error
    epsilon              added to the mean of the exponentials
    """

    updates: Whole = 10
    restart_every: Whole | None = 500
    prototype_lr: Positive = 0.01
    prototype_gradient: Literal["full", "detached"] = "full"
    fit: Literal["unified", "separate"] = "unified"
    epsilon: NotNegative = 1e-14


@dataclass(frozen=True)
class Amortized(Checked):
    """AmorLIP's net predicting log lambda_i, fitted to targets blended with last epoch's averaged net.

    positive_weight   weight of the positive pair in the sum
    blend             beta_z at the end of a rising cosine
    blend_epochs      epochs it rises for
    divide_by         "target": the encoder divides by the blended target (the authors' script); "net": by the net
    ema, ema_every    the averaged net follows as ema * old + (1 - ema) * new, every so many steps
    updates, net_lr, net_clip   Adam updates a step, their learning rate and gradient clipping
    """

    positive_weight: Positive = 1e-3
    blend: BelowOne = 0.8
    blend_epochs: Positive = 16.0
    divide_by: Literal["target", "net"] = "target"
    ema: BelowOne = 0.92
    ema_every: Count = 2
    updates: Whole = 3
    net_lr: Positive = 1e-3
    net_clip: Positive = 1.0


Normalizer = NoNormalizer | BatchMean | BatchAndQueue | MovingAverage | Scent | Prototypes | Rolling | Mlp | Amortized


# ---------------------------------------------------------------------------------------------------------------------
# where tau comes from


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
    """One temperature that never moves.

    temperature   tau
    """

    temperature: Tau = 0.07


@dataclass(frozen=True)
class LearnedScale(_Bounded):
    """CLIP's learned 1/tau, kept as log tau; the bounds are CLIP's 1 to 100 on the scale.

    temperature   where tau starts
    temperature_min, temperature_max   its bounds
    """

    temperature: Tau = 0.07
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0


@dataclass(frozen=True)
class RobustGlobal(_Bounded):
    """One learned temperature with a KL budget ``rho``: the loss gains rho * tau a direction.  NeuCLIP eq. (1), (13).

    temperature   where tau starts
    rho           the KL budget; below log(number of negatives), or tau falls to its least value.  None: half of the
                  largest there can be, log(number of samples - 1), or 6.5 where that number is not known
    temperature_min, temperature_max   the bounds of tau
    rho_late      replaces rho from epoch rho_late_epoch on (AmorLIP's script does that); None: rho stays
    rho_late_epoch   see rho_late
    rule          "equation": tau's gradient is eq. (13); "released": that of FastCLIP's released code, in which the
                  terms with tau inside g count twice: tau comes to rest lower, and FastCLIP's published rho is meant so
    """

    temperature: Tau = 0.07
    rho: _Budget = None
    temperature_min: Tau = 0.01
    temperature_max: Tau = 1.0
    rho_late: _Budget = None
    rho_late_epoch: Number = 0.0
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
    """iSogCLR: a temperature per sample and direction, moved by its own rule inside the objective.

    temperature   where each tau starts
    rho           the KL budget of both directions
    rho_image, rho_text   the budget of one direction; None: rho
    temperature_lr   step size of the rule
    temperature_min, temperature_max   the bounds of each tau
    rule          "momentum": m <- (1 - beta) m + beta dtau; "adam": FastCLIP v2's per-sample Adam
    beta          of the rule "momentum"
    clip          bound on the temperature's gradient, None for none
    """

    temperature: Tau = 0.01
    rho: Number = 8.0
    rho_image: Number | None = None
    rho_text: Number | None = None
    temperature_lr: Positive = 0.03
    temperature_min: Tau = 0.005
    temperature_max: Tau = 1.0
    rule: Literal["momentum", "adam"] = "momentum"
    beta: UpToOne = 0.9
    clip: Positive | None = 5.0


@dataclass(frozen=True)
class Predicted(_Bounded):
    """TempNet: a small net per direction predicts each anchor's temperature; its weights are trained by your optimizer.

    rho           the KL budget of both directions
    rho_image, rho_text   the budget of one direction; None: rho
    temperature_min, temperature_max   what the net can predict
    centers       unit vectors it compares with; they start from the first batch of the other modality
    dropout       inside the net
    """

    rho: Number = 7.0
    rho_image: Number | None = None
    rho_text: Number | None = None
    temperature_min: Tau = 0.005
    temperature_max: Tau = 0.05
    centers: Annotated[int, at_least(2)] = 256
    dropout: BelowOne = 0.5


Temperature = Constant | LearnedScale | RobustGlobal | PerSample | Predicted


def rho_of_direction(temperature: PerSample | Predicted, direction: str) -> float:
    own = temperature.rho_image if direction == "image" else temperature.rho_text
    return temperature.rho if own is None else own
