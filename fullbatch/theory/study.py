"""The whole synthetic study of Cho et al. 2023: what is run, its numbers as plain values, and its tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import comb
from typing import Any, Literal

from torch import Tensor

from fullbatch.selection.spectral import require_packages
from fullbatch.theory import minimizers
from fullbatch.theory.embeddings import all_batches
from fullbatch.theory.minimizers import AS_PUBLISHED, AS_WRITTEN, NEAR, Descent, Race, RacingMethod, Reading, Unproven
from fullbatch.theory.toy import DRIFT_RATIO, GOAL, METHODS, Method, Path, Start, Turn, drift_ratio, turn, walk

Part = Literal["optimum", "convergence", "toy", "angle"]
PARTS: tuple[Part, ...] = ("optimum", "convergence", "toy", "angle")
Rows = list[list[str]]  # of a table, the first is its head
_MOST_BATCHES = 2_000  # of one loss: C(16, 4) is 1,820
RATE = 0.5  # section 6.1
_UNPROVEN = (3, 5)  # widths at N = 8
_UNPROVEN_RATES = (2.0, 16.0)  # of full batch and all batches: the landscape is flat
_RHOS = (0.1, 0.01)
_TEN_DEGREES = 0.17453292519943295  # the authors' start
_RACED: tuple[RacingMethod, ...] = ("SGD", "OSGD", "spectral", "SGD with replacement", "OSGD of a partition")


@dataclass(frozen=True)
class Extent:
    counts: tuple[int, ...]  # N of the heat maps and races
    seeds: int  # starts, descended side by side
    most_steps: int  # of a descent that should reach the optimum
    subset_steps: int  # of one that should not
    unproven_steps: tuple[int, int]  # of the full batch, and of all mini-batches, where no optimum is known
    readings: tuple[Reading, ...]
    starts: tuple[Start, ...]  # of the toy: rates and first angles
    runs: int  # that the toy's SGD is averaged over
    batch_size: int = 2  # of the toy and of the angle two, whatever it is

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}.")


def _counts(batch_size: int, most: int) -> tuple[int, ...]:
    """Two, four and eight batches a partition, as far as all C(N, B) batches can be descended at once."""
    counts = (parts * batch_size for parts in (2, 4, 8))
    usable = tuple(count for count in counts if count <= most and comb(count, batch_size) <= _MOST_BATCHES)
    if batch_size < 2 or not usable:
        raise ValueError(f"--batch-size must lie between 2 and 6, got {batch_size}: all C(N, B) batches are descended.")
    return usable


def _starts(*rates: float) -> tuple[Start, ...]:
    return tuple(Start(rate, epsilon) for rate in rates for epsilon in (0.01, _TEN_DEGREES))


def whole(seeds: int, batch_size: int = 2) -> Extent:
    counts, starts = _counts(batch_size, 16), _starts(0.01, 0.05, 0.1, 0.5)
    readings = (AS_WRITTEN, AS_PUBLISHED)
    return Extent(counts, seeds, 80_000, 10_000, (10_000, 20_000), readings, starts, 1000, batch_size)


def quick(seeds: int, batch_size: int = 2) -> Extent:
    """Without what takes minutes: N above 12, the code's reading of a step, small rates."""
    counts, starts = _counts(batch_size, 12), _starts(0.05, 0.1)
    return Extent(counts, seeds, 20_000, 2_000, (4_000, 2_000), (AS_WRITTEN,), starts, 250, batch_size)


@dataclass(frozen=True)
class ToyWalks:
    """The four methods from one start of the toy."""

    start: Start
    steps: int
    paths: dict[Method, Path]


@dataclass(frozen=True)
class Study:
    extent: Extent
    minima: tuple[Descent, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    races: tuple[Race, ...] = ()
    walks: tuple[ToyWalks, ...] = ()
    turn: Turn | None = None


def study(parts: tuple[Part, ...], extent: Extent, say: Callable[[str], None]) -> Study:
    """Run the parts; ``say`` hears of each step that takes seconds."""
    if "convergence" in parts:
        require_packages("The part 'convergence', a race with spectral batches,")
    return Study(
        extent,
        minima=tuple(_minima(extent, say)) if "optimum" in parts else (),
        unproven=tuple(_unproven(extent, say)) if "optimum" in parts else (),
        races=tuple(_races(extent, say)) if "convergence" in parts else (),
        walks=tuple(_walks(extent, say)) if "toy" in parts else (),
        turn=turn() if "angle" in parts else None,
    )


def _minima(extent: Extent, say: Callable[[str], None]) -> Iterator[Descent]:
    size = extent.batch_size
    for count in extent.counts:
        # a mean over more batches moves each pair less, and what should fail must not fail for want of steps
        subset_rate = RATE if count < 16 else 8 * RATE
        wholes = (("full batch", all_batches(count, count)), ("all batches", all_batches(count, size)))
        partition, nearly_all = minimizers.partition_batches(count, size), minimizers.all_but_one(count, size)
        subsets = (("a partition", partition), ("all but one", nearly_all))
        for width in (2 * count, count // 2):
            for group, rate, steps in ((wholes, RATE, extent.most_steps), (subsets, subset_rate, extent.subset_steps)):
                for name, batches in group:
                    say(f"optimum: N = {count}, d = {width}, {name}")
                    descent = minimizers.descend(count, width, batches, rate, steps, extent.seeds)
                    yield replace(descent, batches=name, optimal=group is wholes)


def _unproven(extent: Extent, say: Callable[[str], None]) -> Iterator[Unproven]:
    for width in _UNPROVEN:
        say(f"optimum: N = 8, d = {width}, where none is proved")
        yield minimizers.unproven(8, width, extent.batch_size, _UNPROVEN_RATES, extent.unproven_steps, extent.seeds)


def _races(extent: Extent, say: Callable[[str], None]) -> Iterator[Race]:
    for reading in extent.readings:
        for count in extent.counts:
            for width in (2 * count, count // 2):
                say(f"convergence: N = {count}, d = {width}, {reading}")
                for method in _RACED[:3] if reading.free else _RACED:
                    yield minimizers.race(method, count, width, extent.batch_size, reading, RATE, extent.seeds)


def _walks(extent: Extent, say: Callable[[str], None]) -> Iterator[ToyWalks]:
    for start in extent.starts:
        steps = round(60 / start.rate)
        say(f"toy: rate {start.rate:g}, epsilon {start.epsilon:.4g}")
        paths = {method: walk(method, start, steps, extent.runs, GOAL - min(_RHOS)) for method in METHODS}
        yield ToyWalks(start, steps, paths)


def optimum_rows(minima: Sequence[Descent]) -> Rows:
    rows = [["where descent ends", "rate", "reached after steps", "distance at the end"]]
    for minimum in minima:
        far, reached = minimum.distance_R, [step for step in minimum.reached_R.tolist() if step >= 0]
        missed = len(far) - len(reached)
        span = f"none of {missed} in {minimum.steps:,}"
        if reached:
            span = f"{min(reached):,} to {max(reached):,}{f', {missed} never' if missed else ''}"
        label = f"{minimum.case}, {minimum.batches} ({minimum.number})"
        rows.append([label, f"{minimum.rate:g}", span, f"{far.min():.2g} to {far.max():.2g}"])
    return rows


def unproven_rows(cases: Sequence[Unproven]) -> Rows:
    losses = ("full loss of full", "full loss of all", "mini loss of full", "mini loss of all")
    rows = [["where none is proved", "distance", *losses, "full slope", "mini slope"]]
    for case in cases:
        values = [f"{loss:.7f}" for of in (case.full_batch_loss, case.mini_batch_loss) for loss in of.values()]
        slopes = [f"{slope:.1e}" for slope in case.slope_at_full.values()]
        rows.append([f"N = {case.count}, d = {case.width}", f"{case.distance:.2g}", *values, *slopes])
    return rows


def race_rows(races: Sequence[Race]) -> Rows:
    """Of one reading: the mean distance, on how many starts it is less than SGD's, and a star at the least."""
    rows = [["distance at the end", *dict.fromkeys(race.method for race in races)]]
    for (count, width), case in groupby(races, key=lambda race: (race.count, race.width)):
        finals = {race.method: race.final_R for race in case}
        nearest = min(finals, key=lambda method: float(finals[method].mean()))
        cells = []
        for method, final_R in finals.items():
            nearer = "" if method == "SGD" else f" ({int((final_R < finals['SGD']).sum())}/{len(final_R)})"
            cells.append(f"{float(final_R.mean()):.3g}{nearer}{' ★' if method == nearest else ''}")
        rows.append([f"N = {count}, d = {width}", *cells])
    return rows


def toy_rows(walks: Sequence[ToyWalks]) -> Rows:
    others = [method for method in METHODS if method != "ordered"]
    rows = [["steps to the square", *METHODS.values(), *(f"{METHODS[method]} / OSGD" for method in others)]]
    for row in (row for walked in walks for row in hitting_times(walked)):
        times = [f"not in {row['most']:,}" if row[method] is None else f"{row[method]:,}" for method in METHODS]
        known = [row[method] / row["ordered"] if row[method] and row["ordered"] else None for method in others]
        ratios = ["-" if ratio is None else f"{ratio:.2f}\u00d7" for ratio in known]
        rows.append([f"rate {row['rate']:g}, epsilon {row['epsilon']:.3g}, rho {row['rho']:g}", *times, *ratios])
    return rows


def hitting_times(walks: ToyWalks) -> list[dict[str, Any]]:
    """By how close is close enough; None: not within ``steps``."""
    start = {"rate": walks.start.rate, "epsilon": walks.start.epsilon}
    return [
        {**start, "rho": rho, "most": walks.steps}
        | {method: path.hitting_time(rho) for method, path in walks.paths.items()}
        for rho in _RHOS
    ]


def numbers(done: Study) -> dict[str, Any]:
    """Everything, as JSON can hold it; a part that was not run is left out."""
    minima = [
        {
            **_case(minimum),
            "batches": minimum.batches,
            "number_of_batches": minimum.number,
            "rate": minimum.rate,
            "optimal": minimum.optimal,
            "steps": minimum.steps,
            "reached_at": minimum.reached_R.tolist(),
            "distance": minimum.distance_R.tolist(),
            "heat_map": _rounded(minimum.gram_RNN[0]),
        }
        for minimum in done.minima
    ]
    unproven = [
        {
            **_case(case),
            **{name: value for name, value in vars(case).items() if name not in ("count", "width")},
            "heat_maps": {name: _rounded(gram_NN) for name, gram_NN in case.heat_maps.items()},
        }
        for case in done.unproven
    ]
    races = [
        {
            **_case(race),
            "reading": str(race.reading),
            "method": race.method,
            "updates": race.at[-1],
            "distance": race.final_R.tolist(),
            "curve": {"update": race.at, "mean": race.distance_TR.mean(1).tolist()},
        }
        for race in done.races
    ]
    parts: dict[str, Any] = {"optimum": minima, "unproven": unproven, "convergence": races}
    if done.walks:
        ratios = {f"{epsilon:g}": drift_ratio(epsilon) for epsilon in (_TEN_DEGREES, 1e-2, 1e-3, 1e-4, 1e-5)}
        times = [row for walks in done.walks for row in hitting_times(walks)]
        parts["toy"] = {"drift_ratio": {"expected": DRIFT_RATIO, "at_epsilon": ratios}, "hitting_times": times}
    if done.turn is not None:
        parts["angle"] = {"best_angle": done.turn.best_angle, "ratio": done.turn.ratio, "curve": vars(done.turn)}
    sizes = {"seeds": done.extent.seeds, "batch_size": done.extent.batch_size, "near": NEAR}
    return {**sizes, **{name: part for name, part in parts.items() if part}}


def _case(record: Descent | Unproven | Race) -> dict[str, int]:
    return {"N": record.count, "d": record.width}


def _rounded(gram_NN: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in gram_NN.tolist()]
