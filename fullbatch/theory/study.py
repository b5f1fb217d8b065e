"""The whole synthetic study of Cho et al. 2023: what is run, and its numbers as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

from torch import Tensor

from fullbatch.theory import toy
from fullbatch.theory.embeddings import all_batches
from fullbatch.theory.minimizers import (
    AS_PUBLISHED,
    AS_WRITTEN,
    NEAR,
    Choice,
    Descent,
    Ordered,
    Race,
    Reading,
    Spectral,
    Uniform,
    Unproven,
    all_but_one,
    descend,
    partition_batches,
    race,
    unproven,
)
from fullbatch.theory.toy import DRIFT_RATIO, Method, Path, Start, Turn, turn

Part = Literal["optimum", "convergence", "toy", "angle"]
PARTS: tuple[Part, ...] = ("optimum", "convergence", "toy", "angle")
_MOST_BATCHES = 2_000  # of one loss: C(16, 4) is 1,820
RATE = 0.5  # section 6.1
_UNPROVEN = (3, 5)  # widths at N = 8
_UNPROVEN_RATES = (2.0, 16.0)  # of full batch and all batches: the landscape is flat
_RHOS = (0.1, 0.01)
_TEN_DEGREES = 0.17453292519943295  # the authors' start
_METHODS: tuple[Method, ...] = ("ordered", "uniform", "all_batches", "full")


@dataclass(frozen=True)
class Extent:
    """counts           N of the heat maps and races
    seeds            starts, descended side by side
    most_steps       of a descent that should reach the optimum; subset_steps: of one that should not
    unproven_steps   of the full batch, and of all mini-batches, where no optimum is known
    starts, runs     of the toy: rates and first angles; runs that SGD is averaged over
    batch_size       pairs of a batch; of the toy and of the angle two, whatever it is
    """

    counts: tuple[int, ...]
    seeds: int
    most_steps: int
    subset_steps: int
    unproven_steps: tuple[int, int]
    readings: tuple[Reading, ...]
    starts: tuple[Start, ...]
    runs: int
    batch_size: int = 2

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


def whole(seeds: int, batch_size: int = 2) -> Extent:
    starts = tuple(Start(rate, epsilon) for rate in (0.01, 0.05, 0.1, 0.5) for epsilon in (0.01, _TEN_DEGREES))
    counts, readings = _counts(batch_size, 16), (AS_WRITTEN, AS_PUBLISHED)
    return Extent(counts, seeds, 80_000, 10_000, (10_000, 20_000), readings, starts, 1000, batch_size)


def quick(seeds: int, batch_size: int = 2) -> Extent:
    """Without what takes minutes: N above 12, the code's reading of a step, small rates."""
    starts = tuple(Start(rate, epsilon) for rate in (0.05, 0.1) for epsilon in (0.01, _TEN_DEGREES))
    counts = _counts(batch_size, 12)
    return Extent(counts, seeds, 20_000, 2_000, (4_000, 2_000), (AS_WRITTEN,), starts, 250, batch_size)


@dataclass(frozen=True)
class Minimum:
    """What descent on these batches came to; ``optimal`` says whether the theorems promise the optimum."""

    count: int
    width: int
    batches: str
    number: int
    rate: float
    optimal: bool
    descent: Descent


@dataclass(frozen=True)
class Raced:
    count: int
    width: int
    reading: Reading
    method: str
    race: Race


@dataclass(frozen=True)
class ToyWalks:
    """The four methods from one start of the toy."""

    start: Start
    steps: int
    paths: dict[Method, Path]


@dataclass(frozen=True)
class Study:
    extent: Extent
    minima: tuple[Minimum, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    races: tuple[Raced, ...] = ()
    walks: tuple[ToyWalks, ...] = ()
    turn: Turn | None = None


def study(parts: tuple[Part, ...], extent: Extent, say: Callable[[str], None]) -> Study:
    """Run the parts; ``say`` hears of each step that takes seconds."""
    return Study(
        extent,
        minima=tuple(_minima(extent, say)) if "optimum" in parts else (),
        unproven=tuple(_unproven(extent, say)) if "optimum" in parts else (),
        races=tuple(_races(extent, say)) if "convergence" in parts else (),
        walks=tuple(_walks(extent, say)) if "toy" in parts else (),
        turn=turn() if "angle" in parts else None,
    )


def _minima(extent: Extent, say: Callable[[str], None]) -> Iterator[Minimum]:
    size = extent.batch_size
    for count in extent.counts:
        # a mean over more batches moves each pair less, and what should fail must not fail for want of steps
        subset_rate = RATE if count < 16 else 8 * RATE
        wholes = (("full batch", all_batches(count, count)), ("all batches", all_batches(count, size)))
        subsets = (("a partition", partition_batches(count, size)), ("all but one", all_but_one(count, size)))
        for width in (2 * count, count // 2):
            for group, rate, steps in ((wholes, RATE, extent.most_steps), (subsets, subset_rate, extent.subset_steps)):
                for name, batches in group:
                    say(f"optimum: N = {count}, d = {width}, {name}")
                    descent = descend(count, width, batches, rate, steps, extent.seeds)
                    yield Minimum(count, width, name, len(batches), rate, group is wholes, descent)


def _unproven(extent: Extent, say: Callable[[str], None]) -> Iterator[Unproven]:
    for width in _UNPROVEN:
        say(f"optimum: N = 8, d = {width}, where none is proved")
        yield unproven(8, width, extent.batch_size, _UNPROVEN_RATES, extent.unproven_steps, extent.seeds)


def _races(extent: Extent, say: Callable[[str], None]) -> Iterator[Raced]:
    main: tuple[tuple[str, Choice], ...] = (("SGD", Uniform()), ("OSGD", Ordered()), ("spectral", Spectral()))
    more: tuple[tuple[str, Choice], ...] = (
        ("SGD with replacement", Uniform(replacement=True)),
        ("OSGD of a partition", Ordered(of_partition=True)),
    )
    for reading in extent.readings:
        for count in extent.counts:
            for width in (2 * count, count // 2):
                say(f"convergence: N = {count}, d = {width}, {reading_name(reading)}")
                for name, choice in main if reading.free else main + more:
                    result = race(choice, count, width, extent.batch_size, reading, RATE, extent.seeds)
                    yield Raced(count, width, reading, name, result)


def _walks(extent: Extent, say: Callable[[str], None]) -> Iterator[ToyWalks]:
    for start in extent.starts:
        steps = round(60 / start.rate)
        say(f"toy: rate {start.rate:g}, epsilon {start.epsilon:.4g}")
        goal = toy.GOAL - min(_RHOS)
        paths = {method: toy.walk(method, start, steps, extent.runs, enough=goal) for method in _METHODS}
        yield ToyWalks(start, steps, paths)


def reading_name(reading: Reading) -> str:
    unit = "epochs of N / B steps" if reading.epochs else "steps"
    return f"{reading.steps} {unit}, {'vectors of free length' if reading.free else 'normalised each step'}"


# ---------------------------------------------------------------------------------------------------------------------
# numbers


def numbers(done: Study) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    written: dict[str, Any] = {"seeds": done.extent.seeds, "batch_size": done.extent.batch_size, "near": NEAR}
    if done.minima:
        written["optimum"] = [
            {
                "N": minimum.count,
                "d": minimum.width,
                "batches": minimum.batches,
                "number_of_batches": minimum.number,
                "rate": minimum.rate,
                "optimal": minimum.optimal,
                "steps": minimum.descent.steps,
                "reached_at": minimum.descent.reached_R.tolist(),
                "distance": minimum.descent.distance_R.tolist(),
                "heat_map": _rounded(minimum.descent.gram_RNN[0]),
            }
            for minimum in done.minima
        ]
    if done.unproven:
        written["unproven"] = [
            {
                "N": case.count,
                "d": case.width,
                "distance": case.distance,
                "full_batch_loss": dict(zip(("of_full", "of_all"), case.full_losses, strict=True)),
                "mini_batch_loss": dict(zip(("of_full", "of_all"), case.all_losses, strict=True)),
                "full_minima": case.full_minima,
                "all_minima": case.all_minima,
                "slope_at_full": dict(zip(("full", "mini"), case.slopes, strict=True)),
                "heat_maps": {"full": _rounded(case.full_NN), "all": _rounded(case.all_NN)},
            }
            for case in done.unproven
        ]
    if done.races:
        written["convergence"] = [
            {
                "N": raced.count,
                "d": raced.width,
                "reading": reading_name(raced.reading),
                "method": raced.method,
                "updates": raced.race.at[-1],
                "distance": raced.race.final_R.tolist(),
                "curve": {"update": raced.race.at, "mean": raced.race.distance_TR.mean(1).tolist()},
            }
            for raced in done.races
        ]
    if done.walks:
        ratios = {f"{epsilon:g}": toy.drift_ratio(epsilon) for epsilon in (_TEN_DEGREES, 1e-2, 1e-3, 1e-4, 1e-5)}
        written["toy"] = {
            "drift_ratio": {"expected": DRIFT_RATIO, "at_epsilon": ratios},
            "hitting_times": [row for walks in done.walks for row in hitting_times(walks)],
        }
    if done.turn is not None:
        full, mini = done.turn.best_angles
        written["angle"] = {
            "best_angle": {"full": full, "mini": mini},
            "ratio": {"least": done.turn.ratios[0], "greatest": done.turn.ratios[1]},
            "curve": {"angle": done.turn.angle, "full": done.turn.full, "mini": done.turn.mini},
        }
    return written


def hitting_times(walks: ToyWalks) -> list[dict[str, Any]]:
    """By how close is close enough; None: not within ``steps``."""
    start = {"rate": walks.start.rate, "epsilon": walks.start.epsilon}
    return [
        {**start, "rho": rho, "most": walks.steps}
        | {method: path.hitting_time(rho) for method, path in walks.paths.items()}
        for rho in _RHOS
    ]


def _rounded(gram_NN: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in gram_NN.tolist()]
