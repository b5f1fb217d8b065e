"""Tables and plots of the study of batches, from what ``batch_study.py gather`` kept.

    python benchmarks/batches/batch_figures.py docs/studies/batches/runs docs/studies/batches

Writes tables.md, accuracies.svg and batch_losses.svg there.  Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOSSES, BATCHES = ("SimCLR", "SogCLR"), ("SGD", "OSGD", "SC")
VARIANTS = ("SC k 5", "SC late", "SC corrected")
COLOURS = {"SGD": "#666666", "OSGD": "#a8780f", "SC": "#c2255c"}
# The name of a task in the tables, by how it begins, and its metric.
TASKS = {
    "corrupted": ("corrupted_views:", "mean_r1"),
    "clean": ("views:", "mean_r1"),
    "k-NN": ("knn:", "accuracy"),
    "linear": ("linear:", "accuracy"),
}
# Cho et al.'s Tables 1 and 2, CIFAR-100, 100 epochs: another data set and a longer run, for the order of things only.
PAPER = {
    ("corrupted", "SimCLR"): {"SGD": "31.3", "OSGD": "31.4", "SC": "32.5"},
    ("corrupted", "SogCLR"): {"SGD": "23.6", "OSGD": "23.8", "SC": "30.0"},
    ("clean", "SimCLR"): {"SGD": "46.91", "OSGD": "47.55", "SC": "56.67"},
    ("clean", "SogCLR"): {"SGD": "12.34", "OSGD": "13.88", "SC": "47.42"},
}


@dataclass(frozen=True)
class Run:
    """scores    per cent, by the names of TASKS or of a retrieval task's metric
    stall     seconds that training waited for plans, and planning seconds of all planners
    losses    a line a plan: mean loss of its batches, and of uniform ones
    purity    shares of a batch's other samples that are of a sample's class, in the run's batches and in uniform ones
    """

    label: str
    seed: int
    seconds: float
    scores: Mapping[str, float]
    stall: float
    planning: float
    losses: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    purity: Mapping[str, float] | None = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []


def read_runs(folder: Path) -> list[Run]:
    """That have ended; none where there is no such folder."""
    runs, comparison = [], folder / "comparison.json"
    for run in json.loads(comparison.read_text())["runs"] if comparison.is_file() else ():
        if run["status"] != "done":
            continue
        kept = folder / "runs" / run["name"]
        lines = read_lines(kept / "metrics.jsonl")
        stall, planning = (
            sum(line.get(name) or 0.0 for line in lines) for name in ("selection_stall", "selection_seconds")
        )
        losses = read_lines(kept / "batches" / "losses.jsonl")
        scores, measured = scores_of(run["results"]), kept / "purity.json"
        purity = json.loads(measured.read_text()) if measured.is_file() else None
        runs.append(Run(run["method"], run["seed"], run["seconds"], scores, stall, planning, tuple(losses), purity))
    return runs


def scores_of(results: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for full, value in results.items():
        task, _, metric = full.rpartition(" ")
        for name, (start, wanted) in TASKS.items():
            if task.startswith(start) and metric == wanted:
                found[name] = 100.0 * value
        if task.startswith("retrieval:") and metric == "mean_r1":
            found["R@1"] = 100.0 * value
    return found


Cells = dict[str, list[Run]]


def cells_of(runs: Sequence[Run]) -> Cells:
    cells: Cells = defaultdict(list)
    for run in runs:
        cells[run.label].append(run)
    return dict(cells)


def spread(values: Sequence[float]) -> str:
    """mean ± sd (number of seeds); a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def accuracy_table(cells: Cells, task: str) -> str:
    """As the paper's Tables 1 and 2: batches by losses."""
    rows = []
    for batches in (*BATCHES, *(name for name in VARIANTS if any(label.endswith(name) for label in cells))):
        row = [batches]
        for loss in LOSSES:
            runs = cells.get(f"{loss} {batches}", [])
            row.append(spread([run.scores[task] for run in runs]) if runs else "not done")
        row += [PAPER.get((task, loss), {}).get(batches, "") for loss in LOSSES]
        rows.append(row)
    return table([f"{task}, %", *LOSSES, *(f"{loss} in the paper, CIFAR-100" for loss in LOSSES)], rows)


def paired_table(cells: Cells, pairs: Sequence[tuple[str, str]], tasks: Sequence[str]) -> str:
    """What the second gains over the first, seed by seed."""
    rows = []
    for before, after in pairs:
        by_seed = {run.seed: run for run in cells.get(before, [])}
        both = [(by_seed[run.seed], run) for run in cells.get(after, []) if run.seed in by_seed]
        if both:
            gains = ([two.scores[task] - one.scores[task] for one, two in both] for task in tasks)
            rows.append([f"{after} less {before}", *map(spread, gains)])
    return table(["points, by seed", *tasks], rows)


def purity_table(cells: Cells) -> str:
    rows = []
    for label, runs in cells.items():
        if known := [run.purity for run in runs if run.purity is not None]:
            shares = ([100.0 * one[batches] for one in known] for batches in ("own", "uniform"))
            rows.append([label, *map(spread, shares)])
    return table(["run", "of a batch's other samples of one's class, %", "in uniform batches"], rows)


def cost_table(cells: Cells) -> str:
    rows = []
    for label, runs in cells.items():
        seconds, stall, planning = (
            statistics.fmean(getattr(run, name) for run in runs) for name in ("seconds", "stall", "planning")
        )
        waited = f"{stall:.1f} ({stall / seconds:.1%})" if seconds else f"{stall:.1f}"
        rows.append([label, f"{seconds:.0f}", waited, f"{planning:.0f}"])
    return table(["run", "seconds", "of which waiting for plans", "CPU seconds of planners"], rows)


def hardness_table(cells: Cells) -> str:
    """How much harder the chosen batches were than uniform ones, by the embeddings they were chosen from."""
    rows = []
    for label, runs in cells.items():
        lines = [line for run in runs for line in run.losses]
        if not lines:
            continue
        first, last = runs[0].losses[0], runs[0].losses[-1]
        share = statistics.fmean(line["mean"] / line["uniform_mean"] for line in lines)
        both = (f"{line['mean']:.3f} / {line['uniform_mean']:.3f}" for line in (first, last))
        rows.append([label, *both, f"{share:.2f}"])
    return table(["run", "mean loss, chosen / uniform: first plan", "last plan", "ratio, all plans"], rows)


# ---------------------------------------------------------------------------------------------------------------------
# plots


def plotted(size: tuple[float, float], columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fullbatch"
    figure, axes = pyplot.subplots(1, columns, figsize=size, squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plot_accuracies(cells: Cells, path: Path) -> None:
    """A point a seed; the line is their mean."""
    figure, axes = plotted((9.0, 3.0), len(TASKS))
    for axis, task in zip(axes, TASKS, strict=True):
        places = {}
        for place, (loss, batches) in enumerate((loss, batches) for loss in LOSSES for batches in BATCHES):
            values = [run.scores[task] for run in cells.get(f"{loss} {batches}", [])]
            places[place] = f"{batches}\n{loss}" if batches == "OSGD" else batches
            if values:
                axis.hlines(statistics.fmean(values), place - 0.3, place + 0.3, color=COLOURS[batches])
                axis.plot([place] * len(values), values, "o", color=COLOURS[batches], markersize=3)
        axis.set_xticks(list(places), list(places.values()), fontsize=7)
        axis.set_title(f"{task}, %", fontsize=9)
    save(figure, path)


def plot_batch_losses(cells: Cells, path: Path) -> None:
    """The paper's Figure 3 and 5: how many batches have which loss, chosen and uniform, at the last plan of seed 0."""
    shown = [(label, runs[0].losses[-1]) for label, runs in cells.items() if runs[0].losses]
    if not shown:
        return
    figure, axes = plotted((2.6 * len(shown), 2.8), len(shown))
    for axis, (label, line) in zip(axes, shown, strict=True):
        for counts, colour, name in (("uniform_counts", "#666666", "uniform"), ("counts", "#c2255c", "chosen")):
            axis.stairs(line[counts], line["edges"], fill=True, color=colour, alpha=0.5, label=name)
        axis.set_title(f"{label}, step {line['step']:,}", fontsize=8)
        axis.set_xlabel("loss of a batch", fontsize=8)
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and plots of the study of batches.")
    parser.add_argument("runs", type=Path, help="where batch_study.py gather put the runs")
    parser.add_argument("out", type=Path, help="where tables.md and the plots go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[str, str]] = []
    if cells := cells_of(read_runs(options.runs / "cifar") + read_runs(options.runs / "further")):
        parts += [(f"CIFAR-10, {task}", accuracy_table(cells, task)) for task in TASKS]
        ways = (("SGD", "SC"), ("SGD", "OSGD"), *(("SC", name) for name in VARIANTS))
        against = [(f"{loss} {one}", f"{loss} {other}") for loss in ("SogCLR", "SimCLR") for one, other in ways]
        parts.append(("CIFAR-10, gains", paired_table(cells, against, list(TASKS))))
        if any(run.purity is not None for runs in cells.values() for run in runs):
            parts.append(("CIFAR-10, purity", purity_table(cells)))
        parts += [("CIFAR-10, batches", hardness_table(cells)), ("CIFAR-10, cost", cost_table(cells))]
        plot_accuracies(cells, options.out / "accuracies.svg")
        plot_batch_losses(cells, options.out / "batch_losses.svg")
    if cells := cells_of(read_runs(options.runs / "icons")):
        rows = [[label, spread([run.scores["R@1"] for run in runs])] for label, runs in cells.items()]
        parts.append(("Icons", table(["B 128", "R@1, %"], rows)))
        against = [(f"{method} uniform", f"{method} spectral") for method in ("openclip", "neuclip")]
        parts.append(("Icons, gains", paired_table(cells, against, ["R@1"])))
        parts += [("Icons, batches", hardness_table(cells)), ("Icons, cost", cost_table(cells))]
    text = "\n\n".join(f"## {title}\n\n{found}" for title, found in parts) + "\n"
    (options.out / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
