"""Who won, and how sure that is: finalists over their seeds, the gain seed by seed, and the sentence that says it.

A sentence claims no more than the seeds allow: a difference counts as seen where the 95 % interval of its paired mean
leaves zero out, which needs at least three seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fullbatch.evaluation.metric_names import Metric
from fullbatch.trials.phases import fronts
from fullbatch.trials.slots import CHOSEN, Ended, PhaseName
from fullbatch.trials.statistics import SEEDS_TO_TELL, Spread, half_interval, joined, paired

MINUS = "\u2212"
_ORIGIN = re.compile(r"(choices|grid|fine) (\d+)")


@dataclass(frozen=True)
class Finalist:
    """One config over seeds.

    values     of each seed that has some, by metric
    missing    how many of its seeds ended without a value: they failed, or diverged where there is no worst value
    diverged   how many of its seeds ran away; those with a worst value have it among ``values``
    trained    how many of its seeds were trained to an end; without any it does not win
    """

    label: str
    kind: Literal["candidate", "baseline"]
    params: Mapping[str, Any]
    values: Mapping[int, tuple[float, ...]]
    missing: int = 0
    diverged: int = 0
    trained: int = 0

    @property
    def seeds(self) -> list[int]:
        return sorted(self.values)

    @property
    def origin(self) -> tuple[PhaseName, int | None]:
        """Where its settings come from: the finals themselves for a baseline."""
        found = _ORIGIN.fullmatch(self.label) if self.kind == "candidate" else None
        return (found[1], int(found[2])) if found else ("finals", None)  # type: ignore[return-value]

    @property
    def name(self) -> str:
        """The label, with what it stands for."""
        chosen = [str(self.params[key]) for key in reversed(CHOSEN) if key in self.params]
        words = " + ".join(chosen)
        return f"{self.label} ({words})" if words and words != self.label else self.label

    def spread(self, metric: int) -> Spread:
        return Spread(tuple(self.values[seed][metric] for seed in self.seeds))

    def as_dict(self, metrics: int) -> dict[str, Any]:
        spreads = [self.spread(number) for number in range(metrics)] if self.values else []
        return {
            "label": self.label,
            "name": self.name,
            "kind": self.kind,
            "params": dict(self.params),
            "seeds": self.seeds,
            "values": [list(self.values[seed]) for seed in self.seeds],
            "mean": [spread.mean for spread in spreads],
            "sd": [spread.sd for spread in spreads],
            "missing": self.missing,
            "diverged": self.diverged,
        }


def finalists_of(ended: Sequence[Ended], baselines: Sequence[str], metrics: Sequence[Metric]) -> list[Finalist]:
    """Best first; a finalist that lacks the value of a seed stands behind those that lack none, and one that ran away
    with every seed behind them all."""
    rows: dict[str, list[Ended]] = {}
    for one in ended:
        rows.setdefault(one.slot.label, []).append(one)
    found = [_finalist(label, ones, baselines) for label, ones in rows.items()]
    known = [one for one in found if one.values]
    costs = [_costs(one, metrics) for one in known]
    places = zip(fronts(costs), costs, known, strict=True)
    order = sorted(places, key=lambda row: (not row[2].trained, row[2].missing > 0, row[0], row[1]))
    return [one for _, _, one in order] + [one for one in found if not one.values]


def _finalist(label: str, ones: Sequence[Ended], baselines: Sequence[str]) -> Finalist:
    params = ones[0].slot.params
    by_default = label in baselines and dict(params) == {"method": label}
    return Finalist(
        label=label,
        kind="baseline" if by_default else "candidate",
        params=params,
        values={one.slot.seed or 0: one.values for one in ones if one.values is not None and one.status != "failed"},
        missing=sum(one.values is None or one.status == "failed" for one in ones),
        diverged=sum(one.status == "diverged" for one in ones),
        trained=sum(one.values is not None and one.status not in ("failed", "diverged") for one in ones),
    )


def _costs(one: Finalist, metrics: Sequence[Metric]) -> tuple[float, ...]:
    """Its means, signed so that less is better."""
    return tuple(
        -one.spread(number).mean if metric.maximise else one.spread(number).mean
        for number, metric in enumerate(metrics)
    )


# ---------------------------------------------------------------------------------------------------------------------
# differences


@dataclass(frozen=True)
class Gain:
    """Of the winner over another finalist in one metric, seed by seed; ``better`` is in the metric's own direction."""

    against: Finalist
    metric: int
    difference: Spread
    better: float

    @property
    def seen(self) -> bool:
        """Whether the seeds tell the two apart."""
        count, sd = len(self.difference.values), self.difference.sd
        return sd is not None and count >= SEEDS_TO_TELL and abs(self.difference.mean) > half_interval(sd, count)

    def as_dict(self, metrics: Sequence[str]) -> dict[str, Any]:
        return {
            "against": self.against.label,
            "kind": self.against.kind,
            "metric": metrics[self.metric],
            "mean": self.difference.mean,
            "sd": self.difference.sd,
            "values": list(self.difference.values),
            "seen": self.seen,
        }


def gains(winner: Finalist, others: Sequence[Finalist], metrics: Sequence[Metric]) -> list[Gain]:
    """Over the second and over every baseline, where they share seeds."""
    found = []
    held = [one for place, one in enumerate(others) if place == 0 or one.kind == "baseline"]
    for one in held:
        for number, metric in enumerate(metrics):
            ours = {seed: values[number] for seed, values in winner.values.items()}
            theirs = {seed: values[number] for seed, values in one.values.items()}
            difference = paired(ours, theirs)
            if difference is not None:
                better = difference.mean if metric.maximise else -difference.mean
                found.append(Gain(one, number, difference, better))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# words


def with_spread(metric: Metric, mean: float, sd: float | None) -> str:
    """A share as "31.21 ± 0.42 %", others in four figures."""
    scale, unit = (100.0, " %") if metric.is_share else (1.0, "")
    form = ".2f" if metric.is_share else ".4g"
    spread = "" if sd is None else f" ± {scale * sd:{form}}"
    return f"{scale * mean:{form}}{spread}{unit}".replace("-", MINUS)


def difference_said(metric: Metric, difference: Spread) -> str:
    scale, form = (100.0, "+.2f") if metric.is_share else (1.0, "+.4g")
    unit = " points" if metric.is_share else ""
    spread = "" if difference.sd is None else f" ± {scale * difference.sd:{form[1:]}}"
    return f"{scale * difference.mean:{form}}{spread}{unit}".replace("-", MINUS)


def said_of_finals(
    winner: Finalist, others: Sequence[Finalist], metrics: Sequence[Metric], final: bool, tried: int, elsewhere: bool
) -> str:
    """``final``: all that was planned has ended.  ``tried``: how many trials the finalists were picked from.
    ``elsewhere``: the finals are measured on sets that nothing was picked by."""
    main = metrics[0]
    spread = winner.spread(0)
    count = len(spread.values)
    pieces = [_opening(winner, with_spread(main, spread.mean, spread.sd), main.short, count, final, len(metrics))]
    found = [one for one in gains(winner, others, metrics) if one.metric == 0]
    bases = [one for one in found if one.against.kind == "baseline"]
    if bases:
        words = [f"{difference_said(main, one.difference)} against {one.against.label}" for one in bases]
        pieces.append(f"seed by seed {joined(words)}")
    pieces += _doubts(found, count)
    if winner.diverged:
        pieces.append(f"{winner.diverged} of its seeds diverged")
    if winner.missing:
        pieces.append(f"{winner.missing} of its seeds ended without a value")
    if elsewhere:
        pieces.append("measured on sets that nothing was picked by")
    elif tried > 1 and winner.kind == "candidate":
        pieces.append(f"picked as the best of {tried} trials on the same evaluation sets, so on the optimistic side")
    return "; ".join(pieces) + "."


def _opening(winner: Finalist, value: str, short: str, count: int, final: bool, metrics: int) -> str:
    seeds = "one seed" if count == 1 else f"{count} seeds"
    best = "is best" if final else "is best so far"
    name = f"{winner.name}, a baseline that no candidate beats," if winner.kind == "baseline" else winner.name
    among = f" (the first of {metrics} metrics)" if metrics > 1 else ""
    return f"{name} {best} with {value} {short}{among} over {seeds}"


def _doubts(found: Sequence[Gain], count: int) -> list[str]:
    """What the seeds do not tell apart; the first of ``found`` is over the second."""
    if count == 1:
        return ["one seed has no spread, so nothing is known of how sure this is"]
    if not found:
        return ["there is no other finalist to hold it against"]
    unsure = [place for place, one in enumerate(found) if not (one.seen and one.better > 0)]
    if not unsure:
        kinds = {one.against.kind for one in found}
        apart = [
            words for kind, words in (("candidate", "the second"), ("baseline", "every baseline")) if kind in kinds
        ]
        return [f"the spread separates it from {' and from '.join(apart)}"]
    names = [f"{found[place].against.label}{'' if place else ' (the second)'}" for place in unsure]
    if count < SEEDS_TO_TELL:
        return [f"{count} seeds are too few to separate it from {joined(names, 'or')}"]
    return [f"the spread does not separate it from {joined(names, 'or')}"]


def said_of_one(name: str, metric: Metric, value: float, phase: str, trials: int, final: bool, why: str) -> str:
    """Of a winner without finals (yet); ``why``."""
    best = "is best" if final else "is best so far"
    of = "the only trial" if trials == 1 else f"the best of {trials} trials"
    return (
        f"{name} {best} with {with_spread(metric, value, None)} {metric.short}, {of} of the phase {phase!r}; it is one "
        f"run and {why}, so its spread is not known and its value is optimistic."
    )
