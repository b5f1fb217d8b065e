"""Numbers of several runs: mean and spread, paired differences, and which batch size of a baseline a row matches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

SEEDS_TO_TELL = 3  # with fewer, an interval says next to nothing


def half_interval(spread: float, count: int) -> float:
    """Half the width of the 95 % interval of a mean over so many seeds, by Student's t."""
    return float(stdtrit(count - 1, 0.975)) * spread / math.sqrt(count)


@dataclass(frozen=True)
class Spread:
    """mean and sample standard deviation of ``values``; None: one value has no spread"""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "sd": self.sd, "values": list(self.values)}


def with_spread(mean: float, sd: float | None, share: bool, sign: str = "") -> str:
    """A share in per cent, others in four figures.

    >>> with_spread(0.2, 0.01, True), with_spread(65.0, None, False, "+")
    ('20.00 ± 1.00', '+65')
    """
    scale, form = (100.0, ".2f") if share else (1.0, ".4g")
    return f"{scale * mean:{sign}{form}}" + ("" if sd is None else f" ± {scale * sd:{form}}")


@dataclass(frozen=True)
class Guessing:
    chance: float  # the share of right answers that guessing gives
    asked: int  # how many answers a run's share is taken over

    def beaten_by(self, found: Spread) -> bool:
        """Whether the mean lies two standard errors above chance: by the noise of so many guesses, and by the spread
        over seeds, which is the larger where a model gives one answer to everything."""
        noise = max(math.sqrt(self.chance * (1.0 - self.chance) / self.asked), found.sd or 0.0)
        return found.mean - 2.0 * noise / math.sqrt(len(found.values)) > self.chance


@dataclass(frozen=True)
class Match:
    matches: int | None  # the baseline's batch size whose mean lies nearest, if within one combined standard deviation
    about: float | None  # where the baseline's curve, drawn over log2 of the batch size, first reaches the row's mean
    text: str


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """Differences seed by seed, over the seeds both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    return Spread(tuple(ours[seed] - theirs[seed] for seed in seeds)) if seeds else None


def match(
    row: str,
    batch_size: int,
    ours: Spread,
    baseline: str,
    theirs: Mapping[int, Spread],
    up: bool,
    guessing: Guessing | None = None,
) -> Match:
    """Where ``row`` at ``batch_size`` stands on the baseline's curve over batch sizes; ``up``: more is better.

    "Matches" is said only when the means differ by at most one combined standard deviation; with one seed nothing is
    known of the spread, so it is not said at all.  Nor are two compared that have learned nothing, where what guessing
    gives is known.
    """
    sign = 1.0 if up else -1.0
    sizes = sorted(theirs)
    level = sign * ours.mean
    means = [sign * theirs[size].mean for size in sizes]
    about = _crossing(sizes, means, level)
    near = [size for size in sizes if _within_spread(ours, theirs[size])]
    subject = f"{row} at {batch_size}"
    if guessing is not None and not guessing.beaten_by(ours):
        learned = [size for size in sizes if guessing.beaten_by(theirs[size])]
        if len(learned) < len(sizes):
            return _neither(subject, baseline, sizes, learned, guessing.chance)
    if len(near) == len(sizes) > 1:
        every = f"{baseline} at {joined(sizes)}"
        return Match(None, about, f"{subject} cannot be told apart from {every}: the spread is larger")
    if near:
        best = min(near, key=lambda size: (abs(theirs[size].mean - ours.mean), size))
        others = [size for size in near if size != best]
        also = f" (and is within the spread of {joined(others)} too)" if others else ""
        return Match(best, about, f"{subject} matches {baseline} at {best}{also}")

    def caveat(*held_against: int) -> str:
        """Names those of one seed, among the cells that the sentence rests on."""
        single = [size for size in held_against if theirs[size].sd is None]
        cells = [f"of {subject}"] if ours.sd is None else []
        cells += [f"of {baseline} at {joined(single)}"] if single else []
        return f"; one seed {' and '.join(cells)}, so the spread is not known" if cells else ""

    if level > max(means):
        every = f"at every tested batch size (up to {sizes[-1]})"
        every = every if len(sizes) > 1 else f"at {sizes[0]}, the only one tested"
        return Match(None, None, f"{subject} beats {baseline} {every}{caveat(*sizes)}")
    if about is None or level < min(means):
        worst = sizes[means.index(min(means))]
        stays_below = "stays below" if up else "is worse than"
        return Match(None, None, f"{subject} {stays_below} {baseline} at {worst}{caveat(worst)}")
    below = max((size for size in sizes if size <= about), default=sizes[0])
    above = min((size for size in sizes if size >= about), default=sizes[-1])
    if below == above:
        return Match(None, about, f"{subject} lies level with {baseline} at {below}{caveat(below)}")
    between = f"{subject} lies between {baseline} at {below} and at {above}, about {about:.0f}"
    return Match(None, about, f"{between}{caveat(below, above)}")


def _neither(subject: str, baseline: str, sizes: Sequence[int], learned: Sequence[int], chance: float) -> Match:
    idle = joined([size for size in sizes if size not in learned])
    others = f"; {baseline} at {joined(learned)} is" if learned else ""
    text = f"neither {subject} nor {baseline} at {idle} is above chance ({100 * chance:.3g} %){others}"
    return Match(None, None, text)


def _within_spread(ours: Spread, theirs: Spread) -> bool:
    if ours.sd is None or theirs.sd is None:
        return False
    return abs(ours.mean - theirs.mean) <= math.hypot(ours.sd, theirs.sd)


def _crossing(sizes: Sequence[int], means: Sequence[float], level: float) -> float | None:
    """The smallest batch size at which the straight lines between the tested ones, over log2, reach the level."""
    for size, mean in zip(sizes, means, strict=True):
        if mean == level:
            return float(size)
    for left, right, low, high in zip(sizes, sizes[1:], means, means[1:], strict=False):
        if min(low, high) < level < max(low, high):
            share = (level - low) / (high - low)
            return float(2 ** (math.log2(left) + share * (math.log2(right) - math.log2(left))))
    return None


def joined(items: Iterable[object], last: str = "and") -> str:
    """
    >>> joined(["a", "b", "c"], "or")
    'a, b or c'
    """
    words = list(map(str, items))
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
