"""Numbers of several runs: mean and spread, paired differences, which batch size of a baseline a row matches; who won a
search, and how sure that is.

A sentence claims no more than the seeds allow: a difference counts as seen where the 95 % interval of its paired mean
leaves zero out, which needs at least three seeds.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fullbatch.evaluation.metric_names import Metric
from fullbatch.trials.phases import Ended, costs_of, fronts
from fullbatch.trials.search_plan import CHOSEN

SEEDS_TO_TELL = 3  # with fewer, an interval says next to nothing
MINUS = "\u2212"
_ORIGIN = re.compile(r"(choices|grid|fine) (\d+)")


def half_interval(spread: float, count: int) -> float:
    """Half the width of the 95 % interval of a mean over so many seeds, by Student's t."""
    return student_t(count - 1, 0.95) * spread / math.sqrt(count)


@cache
def student_t(degrees: int, share: float) -> float:
    """The t within which, on both sides of zero, this share of Student's distribution lies; by bisection."""
    assert degrees >= 1 and 0.0 < share < 1.0
    low, high = 0.0, math.pi / 2.0
    while low < (middle := (low + high) / 2.0) < high:
        low, high = (middle, high) if _share_within(middle, degrees) < share else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _share_within(theta: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) tan theta).  Abramowitz and Stegun, 26.7.3 for odd degrees and 26.7.4 for even ones."""
    odd, cosine = degrees % 2, math.cos(theta)
    term, total = cosine**odd, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(theta)
    return (theta + total) * 2.0 / math.pi if odd else total


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

    @property
    def leaves_zero_out(self) -> bool:
        """Whether so many seeds tell the mean from zero."""
        count = len(self.values)
        return self.sd is not None and count >= SEEDS_TO_TELL and abs(self.mean) > half_interval(self.sd, count)

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

    def is_near(size: int) -> bool:
        sd, distance = theirs[size].sd, abs(ours.mean - theirs[size].mean)
        return ours.sd is not None and sd is not None and distance <= math.hypot(ours.sd, sd)

    near = [size for size in sizes if is_near(size)]
    subject = f"{row} at {batch_size}"
    if guessing is not None and not guessing.beaten_by(ours):
        learned = [size for size in sizes if guessing.beaten_by(theirs[size])]
        if len(learned) < len(sizes):
            idle = joined(size for size in sizes if size not in learned)
            also = f"; {baseline} at {joined(learned)} is" if learned else ""
            text = f"neither {subject} nor {baseline} at {idle} is above chance ({100 * guessing.chance:.3g} %){also}"
            return Match(None, None, text)
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


# ---------------------------------------------------------------------------------------------------------------------
# finalists and the winner, as search.json has them

Entry = Mapping[str, Any]  # of comparison.json or search.json


def finalists_of(ended: Sequence[Ended], baselines: Sequence[str], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Best first; a finalist that lacks the value of a seed stands behind those that lack none, and one that ran away
    with every seed behind them all."""
    trials: dict[str, list[Ended]] = {}
    for trial in ended:
        trials.setdefault(trial.slot.label, []).append(trial)
    rows = [finalist_of(label, of_label, label in baselines) for label, of_label in trials.items()]
    known = [row for row in rows if row["values"]]
    costs = [costs_of(row["mean"], [metric.maximise for metric in metrics]) for row in known]
    places = zip(fronts(costs), costs, known, strict=True)
    order = sorted(places, key=lambda place: (not place[2]["trained"], place[2]["missing"] > 0, place[0], place[1]))
    return [row for _, _, row in order] + [row for row in rows if not row["values"]]


def finalist_of(label: str, trials: Sequence[Ended], is_baseline: bool = False, seed: int = 0) -> dict[str, Any]:
    """One config over seeds; ``seed``: of a trial that has none of its own."""
    params = dict(trials[0].params)
    by_default = is_baseline and params == {"method": label}
    origin = None if by_default else _ORIGIN.fullmatch(label)
    words = " + ".join(str(params[key]) for key in reversed(CHOSEN) if key in params)
    with_value = [trial for trial in trials if trial.values is not None and trial.status != "failed"]
    values = {seed if trial.slot.seed is None else trial.slot.seed: trial.values or () for trial in with_value}
    seeds = sorted(values)
    spreads = [Spread(column) for column in zip(*(values[seed] for seed in seeds), strict=True)]
    return {
        "label": label,
        "name": f"{label} ({words})" if words and words != label else label,
        "kind": "baseline" if by_default else "candidate",
        "params": params,
        "phase": origin[1] if origin else "finals",  # where its settings come from
        "slot": int(origin[2]) if origin else None,
        "seeds": seeds,
        "values": [list(values[seed]) for seed in seeds],
        "mean": [spread.mean for spread in spreads],
        "sd": [spread.sd for spread in spreads],
        "missing": len(trials) - len(with_value),  # they failed, or diverged where there is no worst value
        "diverged": sum(trial.status == "diverged" for trial in trials),
        "trained": sum(trial.status != "diverged" for trial in with_value),  # without any it does not win
    }


def gains(winner: Entry, others: Sequence[Entry], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Over the second and over every baseline, seed by seed, where they share seeds."""
    rows = []
    for other in (other for place, other in enumerate(others) if place == 0 or other["kind"] == "baseline"):
        for number, metric in enumerate(metrics):
            of_seed = [dict(zip(row["seeds"], row["values"], strict=True)) for row in (winner, other)]
            ours, theirs = ({seed: values[number] for seed, values in by_seed.items()} for by_seed in of_seed)
            if difference := paired(ours, theirs):
                named = {"against": other["label"], "kind": other["kind"], "metric": metric.name}
                rows.append({**named, **difference.as_dict(), "seen": difference.leaves_zero_out})
    return rows


def value_said(metric: Metric, mean: float, sd: float | None) -> str:
    """A share as "31.21 ± 0.42 %", others in four figures."""
    return f"{with_spread(mean, sd, metric.is_share)}{' %' if metric.is_share else ''}".replace("-", MINUS)


def _gain_said(metric: Metric, gain: Entry) -> str:
    words = with_spread(gain["mean"], gain["sd"], metric.is_share, "+").replace("-", MINUS)
    return f"{words}{' points' if metric.is_share else ''} against {gain['against']}"


def said_of_finals(
    winner: Entry, differences: Sequence[Entry], metrics: Sequence[Metric], final: bool, tried: int, elsewhere: bool
) -> str:
    """``differences``: its gains.  ``final``: all that was planned has ended.  ``tried``: how many trials the finalists
    were picked from.  ``elsewhere``: the finals are measured on sets that nothing was picked by."""
    main, count = metrics[0], len(winner["seeds"])
    value = value_said(main, winner["mean"][0], winner["sd"][0])
    is_baseline = winner["kind"] == "baseline"
    name = f"{winner['name']}, a baseline that no candidate beats," if is_baseline else winner["name"]
    among = f" (the first of {len(metrics)} metrics)" if len(metrics) > 1 else ""
    pieces = [
        f"{name} {_is_best(final)} with {value} {main.short}{among} over "
        f"{'one seed' if count == 1 else f'{count} seeds'}"
    ]
    in_main = [gain for gain in differences if gain["metric"] == main.name]
    if words := [_gain_said(main, gain) for gain in in_main if gain["kind"] == "baseline"]:
        pieces.append(f"seed by seed {joined(words)}")
    pieces.append(_doubt(in_main, count, main.maximise))
    for key, ending in (("diverged", "diverged"), ("missing", "ended without a value")):
        if winner[key]:
            pieces.append(f"{winner[key]} of its seeds {ending}")
    if elsewhere:
        pieces.append("measured on sets that nothing was picked by")
    elif tried > 1 and not is_baseline:
        pieces.append(f"picked as the best of {tried} trials on the same evaluation sets, so on the optimistic side")
    return "; ".join(pieces) + "."


def _is_best(final: bool) -> str:
    return "is best" if final else "is best so far"


def _doubt(differences: Sequence[Entry], count: int, more_is_better: bool) -> str:
    """What the seeds do not tell apart; the first of the differences is from the second."""
    if count == 1:
        return "one seed has no spread, so nothing is known of how sure this is"
    if not differences:
        return "there is no other finalist to hold it against"
    unsure = [
        f"{gain['against']}{'' if place else ' (the second)'}"
        for place, gain in enumerate(differences)
        if not gain["seen"] or (gain["mean"] > 0) != more_is_better
    ]
    if not unsure:
        kinds = {gain["kind"] for gain in differences}
        words = {"candidate": "the second", "baseline": "every baseline"}
        return f"the spread separates it from {' and from '.join(words[kind] for kind in words if kind in kinds)}"
    if count < SEEDS_TO_TELL:
        return f"{count} seeds are too few to separate it from {joined(unsure, 'or')}"
    return f"the spread does not separate it from {joined(unsure, 'or')}"


def said_of_one(name: str, metric: Metric, value: float, phase: str, trials: int, final: bool, why: str) -> str:
    """Of a winner without finals (yet); ``why``."""
    of = "the only trial" if trials == 1 else f"the best of {trials} trials"
    return (
        f"{name} {_is_best(final)} with {value_said(metric, value, None)} {metric.short}, {of} of the phase {phase!r}; "
        f"it is one run and {why}, so its spread is not known and its value is optimistic."
    )
