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
from fullbatch.trials.phases import costs_of, fronts
from fullbatch.trials.slots import CHOSEN, Ended, PhaseName
from fullbatch.trials.statistics import SEEDS_TO_TELL, Spread, half_interval, joined, paired, with_spread

MINUS = "\u2212"
_ORIGIN = re.compile(r"(choices|grid|fine) (\d+)")


@dataclass(frozen=True)
class Finalist:
    """One config over seeds."""

    label: str
    kind: Literal["candidate", "baseline"]
    params: Mapping[str, Any]
    values: Mapping[int, tuple[float, ...]]  # of each seed that has some, by metric
    missing: int = 0  # seeds that ended without a value: they failed, or diverged where there is no worst value
    diverged: int = 0  # seeds that ran away; those with a worst value have it among ``values``
    trained: int = 0  # seeds that were trained to an end; without any it does not win

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
        words = " + ".join(str(self.params[key]) for key in reversed(CHOSEN) if key in self.params)
        return f"{self.label} ({words})" if words and words != self.label else self.label

    def of(self, metric: int) -> dict[int, float]:
        return {seed: self.values[seed][metric] for seed in self.seeds}

    def spread(self, metric: int) -> Spread:
        return Spread(tuple(self.of(metric).values()))

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
    for trial in ended:
        rows.setdefault(trial.slot.label, []).append(trial)
    finalists = [_finalist(label, trials, baselines) for label, trials in rows.items()]
    known = [finalist for finalist in finalists if finalist.values]
    maximise = [metric.maximise for metric in metrics]
    means = [[finalist.spread(number).mean for number in range(len(metrics))] for finalist in known]
    costs = [costs_of(values, maximise) for values in means]
    places = zip(fronts(costs), costs, known, strict=True)
    order = sorted(places, key=lambda row: (not row[2].trained, row[2].missing > 0, row[0], row[1]))
    return [finalist for _, _, finalist in order] + [finalist for finalist in finalists if not finalist.values]


def _finalist(label: str, trials: Sequence[Ended], baselines: Sequence[str]) -> Finalist:
    params = trials[0].slot.params
    by_default = label in baselines and dict(params) == {"method": label}
    values = {
        trial.slot.seed or 0: trial.values for trial in trials if trial.values is not None and trial.status != "failed"
    }
    diverged = sum(trial.status == "diverged" for trial in trials)
    return Finalist(
        label=label,
        kind="baseline" if by_default else "candidate",
        params=params,
        values=values,
        missing=sum(trial.values is None or trial.status == "failed" for trial in trials),
        diverged=diverged,
        trained=sum(trial.values is not None and trial.status not in ("failed", "diverged") for trial in trials),
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
        named = {"against": self.against.label, "kind": self.against.kind, "metric": metrics[self.metric]}
        return {**named, **self.difference.as_dict(), "seen": self.seen}


def gains(winner: Finalist, others: Sequence[Finalist], metrics: Sequence[Metric]) -> list[Gain]:
    """Over the second and over every baseline, where they share seeds."""
    made = []
    for other in (other for place, other in enumerate(others) if place == 0 or other.kind == "baseline"):
        for number, metric in enumerate(metrics):
            difference = paired(winner.of(number), other.of(number))
            if difference is not None:
                better = difference.mean if metric.maximise else -difference.mean
                made.append(Gain(other, number, difference, better))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# words


def value_said(metric: Metric, mean: float, sd: float | None) -> str:
    """A share as "31.21 ± 0.42 %", others in four figures."""
    return f"{with_spread(mean, sd, metric.is_share)}{' %' if metric.is_share else ''}".replace("-", MINUS)


def _gain_said(metric: Metric, gain: Gain) -> str:
    words = with_spread(gain.difference.mean, gain.difference.sd, metric.is_share, "+").replace("-", MINUS)
    return f"{words}{' points' if metric.is_share else ''} against {gain.against.label}"


def said_of_finals(
    winner: Finalist, others: Sequence[Finalist], metrics: Sequence[Metric], final: bool, tried: int, elsewhere: bool
) -> str:
    """``final``: all that was planned has ended.  ``tried``: how many trials the finalists were picked from.
    ``elsewhere``: the finals are measured on sets that nothing was picked by."""
    main, spread = metrics[0], winner.spread(0)
    count = len(spread.values)
    name = f"{winner.name}, a baseline that no candidate beats," if winner.kind == "baseline" else winner.name
    among = f" (the first of {len(metrics)} metrics)" if len(metrics) > 1 else ""
    pieces = [
        f"{name} {_is_best(final)} with {value_said(main, spread.mean, spread.sd)} {main.short}{among} over "
        f"{'one seed' if count == 1 else f'{count} seeds'}"
    ]
    in_main = [gain for gain in gains(winner, others, metrics) if gain.metric == 0]
    if words := [_gain_said(main, gain) for gain in in_main if gain.against.kind == "baseline"]:
        pieces.append(f"seed by seed {joined(words)}")
    pieces.append(_doubt(in_main, count))
    if winner.diverged:
        pieces.append(f"{winner.diverged} of its seeds diverged")
    if winner.missing:
        pieces.append(f"{winner.missing} of its seeds ended without a value")
    if elsewhere:
        pieces.append("measured on sets that nothing was picked by")
    elif tried > 1 and winner.kind == "candidate":
        pieces.append(f"picked as the best of {tried} trials on the same evaluation sets, so on the optimistic side")
    return "; ".join(pieces) + "."


def _is_best(final: bool) -> str:
    return "is best" if final else "is best so far"


def _doubt(made: Sequence[Gain], count: int) -> str:
    """What the seeds do not tell apart; the first of the gains is over the second."""
    if count == 1:
        return "one seed has no spread, so nothing is known of how sure this is"
    if not made:
        return "there is no other finalist to hold it against"
    unsure = [
        f"{gain.against.label}{'' if place else ' (the second)'}"
        for place, gain in enumerate(made)
        if not gain.seen or gain.better <= 0
    ]
    if not unsure:
        kinds = {gain.against.kind for gain in made}
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
