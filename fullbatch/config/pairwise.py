"""What one negative costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fullbatch.config.checks import Checked, Gamma, Number, Positive, number


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
