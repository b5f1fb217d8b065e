"""Tables and the plot of the icon study, from what ``study.py gather`` kept.

    python benchmarks/icons/figures.py docs/studies/icons       # writes tables.md and batch_sizes.svg there

Needs matplotlib.  What is not run yet is not in the tables; until the race has three batch sizes of the baseline
with three seeds each, the plot shows the best of the runs that tuned the learning rates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from study import NEW_CAPTIONS, Grids, Scores, grids_in, rate_label, score_of, scores_of

from fullbatch.trials.statistics import half_interval, paired

BASELINE = "openclip"
COLOURS = {"openclip": "#666666", "neuclip": "#c2255c", "rolling": "#4b3fb5", "queue": "#0f7fa8"}
OTHER_COLOURS = ("#a8780f", "#1b8a4b", "#7a4a1d", "#2d93cf", "#8a8d93", "#b0558c", "#5b5f66", "#cc5500")
MATCH = -0.5  # points: the lower bound of a difference that still is a match
DRAWS = 10_000  # of the bootstrap
HEADINGS = {"parts": "One thing changed", "windows": "Blocks mixed in windows"}

Hits = npt.NDArray[np.float64]  # a pair each: 1 found first in both directions, 0.5 in one


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# learning rates


def read_rates(folder: Path) -> tuple[Grids, Scores]:
    """Of the runs that have ended."""
    comparison = json.loads((folder / "comparison.json").read_text())
    ended = {(run["method"], run["batch_size"]) for run in comparison["runs"] if run["status"] != "open"}
    grids: Grids = {}
    for arm, sizes in grids_in(yaml.safe_load((folder / "plan.yaml").read_text())).items():
        for size, rates in sizes.items():
            if done := [rate for rate in rates if (rate_label(arm, rate), size) in ended]:
                grids.setdefault(arm, {})[size] = done
    return grids, scores_of(comparison, grids)


def rates_table(grids: Grids, scores: Scores) -> str:
    rates = sorted({rate for sizes in grids.values() for grid in sizes.values() for rate in grid})
    rows = []
    for arm, sizes in grids.items():
        for size in sorted(sizes):
            best = max(sizes[size], key=lambda rate: scores[arm, size, rate])
            cells = [f"{100 * scores[arm, size, rate]:.2f}" if rate in sizes[size] else "" for rate in rates]
            cells = [f"**{cell}**" if rate == best else cell for cell, rate in zip(cells, rates, strict=True)]
            rows.append([f"`{arm}`", str(size), *cells])
    return table(["R@1, %", "B", *(f"{rate:g}" for rate in rates)], rows)


def at_the_edge(grids: Grids, scores: Scores) -> list[str]:
    """Cells whose best rate is the lowest or the highest tried."""
    return [
        f"{arm} at B {size}"
        for arm, sizes in grids.items()
        for size, rates in sizes.items()
        if max(rates, key=lambda rate: scores[arm, size, rate]) in (rates[0], rates[-1])
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the race


@dataclass(frozen=True)
class Run:
    """hits    of each test pair; None where they were not kept
    error   mean squared log error, in the last audit, of what a step divides by; None: it has no normalizer
    batch   the same of a batch of the run's size, on the same checkpoint
    """

    arm: str
    batch_size: int
    seed: int
    score: float
    hits: Hits | None
    error: float | None
    batch: float | None


Cells = dict[tuple[str, int], dict[int, Run]]


def read_race(folder: Path) -> Cells:
    """By batch size."""
    cells: Cells = defaultdict(dict)
    for run in json.loads((folder / "comparison.json").read_text())["runs"]:
        if run["status"] == "done":
            cells[run["method"], run["batch_size"]][run["seed"]] = _read_run(run, folder / "runs" / run["name"])
    return dict(sorted(cells.items(), key=lambda cell: cell[0][1]))


def _read_run(run: Mapping[str, Any], folder: Path) -> Run:
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    audits = [line for line in lines if line.get("kind") == "audit"]
    last = audits[-1] if audits else {}
    error = last.get("in_use_error") if last.get("normalizer_error") is not None else None
    hits = read_hits(folder / "hits.json")
    return Run(run["method"], run["batch_size"], run["seed"], 100 * score_of(run), hits, error, last.get("batch_error"))


def read_hits(path: Path) -> Hits | None:
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    directions = [
        np.unpackbits(np.frombuffer(bytes.fromhex(kept[name]), np.uint8))[: kept["pairs"]]
        for name in ("image_to_text", "text_to_image")
    ]
    both: Hits = np.stack(directions).astype(np.float64).mean(axis=0)
    return both


def spread(values: Sequence[float]) -> str:
    """mean ± sd (number of seeds); a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def race_table(cells: Cells) -> str:
    arms, sizes = list(dict.fromkeys(arm for arm, _ in cells)), sorted({size for _, size in cells})
    rows = []
    for arm in arms:
        found = [[run.score for run in cells.get((arm, size), {}).values()] for size in sizes]
        rows.append([f"`{arm}`", *(spread(values) if values else "" for values in found)])
    return table(["R@1, %", *(f"B {size}" for size in sizes)], rows)


def error_table(cells: Cells) -> str:
    """Its error / a batch's of its size on the same checkpoints, mean over seeds."""
    arms, sizes = list(dict.fromkeys(arm for arm, _ in cells)), sorted({size for _, size in cells})

    def mean(runs: Sequence[Run], name: str) -> str:
        values = [getattr(run, name) for run in runs if getattr(run, name) is not None]
        return f"{statistics.fmean(values):.2f}" if values else "none"

    rows = []
    for arm in arms:
        found = [list(cells.get((arm, size), {}).values()) for size in sizes]
        rows.append([f"`{arm}`", *(f"{mean(runs, 'error')} / {mean(runs, 'batch')}" if runs else "" for runs in found)])
    return table(["its error / a batch's", *(f"B {size}" for size in sizes)], rows)


@dataclass(frozen=True)
class Difference:
    """Of two cells, in points: by seed, and bounds of the 95 % interval over pairs (nan: hits were not kept)."""

    values: tuple[float, ...]
    pairs: tuple[float, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def seeds(self) -> tuple[float, float]:
        """Bounds of the 95 % interval over seeds."""
        if len(self.values) < 2:
            return math.nan, math.nan
        half = half_interval(statistics.stdev(self.values), len(self.values))
        return self.mean - half, self.mean + half

    @property
    def matches(self) -> bool:
        return self.seeds[0] > MATCH and self.pairs[0] > MATCH  # nan is no match


def difference(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> Difference | None:
    found = paired({seed: run.score for seed, run in ours.items()}, {seed: run.score for seed, run in theirs.items()})
    if found is None:
        return None
    both = [seed for seed in sorted(ours) if seed in theirs]
    gaps = [(ours[seed].hits, theirs[seed].hits) for seed in both]
    known = [100 * (mine - other) for mine, other in gaps if mine is not None and other is not None]
    return Difference(found.values, bootstrap(np.mean(known, axis=0)) if len(known) == len(both) else (math.nan,) * 2)


def bootstrap(gap_of_pairs: Hits) -> tuple[float, float]:
    """The 95 % interval of the mean over test pairs, pairs drawn anew."""
    generator = np.random.default_rng(0)
    count = len(gap_of_pairs)
    means = [gap_of_pairs[generator.integers(count, size=count)].mean() for _ in range(DRAWS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def differences_table(cells: Cells) -> str:
    rows = []
    for (arm, size), ours in cells.items():
        found = None if arm == BASELINE else difference(ours, cells.get((BASELINE, size), {}))
        if found is not None:
            rows.append([f"`{arm}`", str(size), *_bounds(found)])
    return table(["minus `openclip` at the same B", "B", "points", "95 %, seeds", "95 %, pairs"], rows)


def _bounds(found: Difference) -> list[str]:
    by_seed = ", ".join(f"{value:+.2f}" for value in found.values)
    intervals = ["" if math.isnan(low) else f"{low:+.2f} … {high:+.2f}" for low, high in (found.seeds, found.pairs)]
    return [f"{found.mean:+.2f} ({by_seed})", *intervals]


def best_size(cells: Cells) -> int:
    """The baseline's own best: beyond it k does not count, for a larger batch of it is undertrained."""
    means = {
        size: statistics.fmean(run.score for run in runs.values())
        for (arm, size), runs in cells.items()
        if arm == BASELINE
    }
    return max(means, key=lambda size: means[size])


def matches_table(cells: Cells) -> str:
    """For each arm and size the largest k with which it matches the baseline at k times its size."""
    most, rows = best_size(cells), []
    for (arm, size), ours in cells.items():
        if arm == BASELINE:
            continue
        for other in sorted((s for name, s in cells if name == BASELINE and size <= s <= most), reverse=True):
            found = difference(ours, cells[BASELINE, other])
            if found is not None and found.matches:
                rows.append([f"`{arm}`", str(size), str(other), f"{other / size:g}", *_bounds(found)])
                break
        else:
            rows.append([f"`{arm}`", str(size), "none", "", "", "", ""])
    return table(["arm", "B", "matches `openclip` at", "k", "points", "95 %, seeds", "95 %, pairs"], rows)


# ---------------------------------------------------------------------------------------------------------------------


def plot(points: Mapping[str, Mapping[int, Sequence[float]]], title: str, path: Path) -> None:
    """R@1 against batch size, a line an arm; bars reach from the lowest seed to the highest."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fullbatch"
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
    others = iter(OTHER_COLOURS)
    for place, (arm, sizes) in enumerate(points.items()):
        colour = COLOURS.get(arm) or next(others)
        xs = [size * 2 ** (0.025 * (place - 1)) for size in sorted(sizes)]  # a little apart, so that bars can be told
        means = [statistics.fmean(sizes[size]) for size in sorted(sizes)]
        down = [mean - min(sizes[size]) for size, mean in zip(sorted(sizes), means, strict=True)]
        up = [max(sizes[size]) - mean for size, mean in zip(sorted(sizes), means, strict=True)]
        axes.errorbar(xs, means, [down, up], color=colour, marker="o", markersize=4, capsize=3, label=arm)
    ticks = sorted({size for sizes in points.values() for size in sizes})
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.set_title(title, fontsize=10)
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and the plot of the icon study.")
    parser.add_argument("folder", type=Path, help="where study.py gather put the runs")
    folder: Path = parser.parse_args().folder
    grids, scores = read_rates(folder / "rates")
    edges = ", ".join(at_the_edge(grids, scores))
    note = f"\n\nThe best rate is at the edge of its grid: {edges}." if edges else ""
    parts = [("Learning rates", rates_table(grids, scores) + note)]
    if (folder / NEW_CAPTIONS.stage).is_dir():
        parts.append(("Learning rates, new captions", rates_table(*read_rates(folder / NEW_CAPTIONS.stage))))
    points = {
        arm: {size: [100 * max(scores[arm, size, rate] for rate in rates)] for size, rates in sizes.items()}
        for arm, sizes in grids.items()
    }
    title = "R@1 among the 5,295 icons of the tuning shard, %, 1.25 M samples seen, one seed"
    if (folder / "race").is_dir():
        cells = read_race(folder / "race")
        parts += [
            ("R@1", race_table(cells)),
            ("Differences", differences_table(cells)),
            ("Matches", matches_table(cells)),
            ("Normalizer error at the end", error_table(cells)),
        ]
        if sum(arm == BASELINE and len(runs) > 2 for (arm, _), runs in cells.items()) > 2:
            points = {
                arm: {size: [run.score for run in runs.values()] for (name, size), runs in cells.items() if name == arm}
                for arm in dict.fromkeys(arm for arm, _ in cells)
            }
            title = "R@1 among 3,000 held-out icons, %, 2.5 M samples seen, three seeds"
    for stage, heading in HEADINGS.items():
        if (folder / stage).is_dir():
            cells = read_race(folder / stage)
            parts += [(heading, race_table(cells)), (f"{heading}: normalizer error", error_table(cells))]
    (folder / "tables.md").write_text("\n\n".join(f"## {name}\n\n{text}" for name, text in parts) + "\n")
    plot(points, title, folder / "batch_sizes.svg")
    print((folder / "tables.md").read_text())


if __name__ == "__main__":
    main()
