"""Tables and plots of the icon study, from what ``study.py gather`` kept.

    python benchmarks/icons/figures.py docs/studies/icons       # writes tables.md and two SVG plots there

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("openclip", "siglip", "sogclr", "fastclip_v3", "amorlip", "neuclip")
COLOURS = ("#666666", "#a8780f", "#0f7fa8", "#4b3fb5", "#1b8a4b", "#c2255c")
TENTH = " n/10"
# % of R@1: a run below has hardly left the plateau, where similarities are alike and any normalizer is right.
LEARNED = 2.0


@dataclass(frozen=True)
class Run:
    """error    mean over the run's audits of the mean squared log error of what a step divides by; None: no normalizer
    batch    the same of a batch of the run's size, on the same checkpoints
    last_error, last_batch   the same of the last audit alone
    """

    label: str
    batch_size: int
    seed: int
    score: float
    tau: float
    error: float | None
    batch: float | None
    last_error: float | None
    last_batch: float | None


def read_runs(folder: Path) -> list[Run]:
    comparison = json.loads((folder / "comparison.json").read_text())
    runs = []
    for run in comparison["runs"]:
        lines = folder / "metrics" / f"{run['name']}.jsonl"
        if run["status"] == "done" and lines.is_file():
            runs.append(_read_run(run, [json.loads(text) for text in lines.read_text().splitlines()]))
    return runs


def _read_run(run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Run:
    audits = [line for line in lines if line.get("kind") == "audit"]
    score = next(value for name, value in run["results"].items() if name.endswith("mean_r1"))

    def found(name: str) -> list[float]:
        return [line[name] for line in audits if line.get(name) is not None]

    errors, batches = found("in_use_error") if found("normalizer_error") else [], found("batch_error")
    means = [statistics.fmean(values) if values else None for values in (errors, batches)]
    lasts = [values[-1] if values else None for values in (errors, batches)]
    return Run(run["method"], run["batch_size"], run["seed"], 100.0 * score, run["tau"], *means, *lasts)


Cells = dict[tuple[str, int], list[Run]]


def cells_of(runs: Sequence[Run]) -> Cells:
    cells: Cells = defaultdict(list)
    for run in runs:
        cells[run.label, run.batch_size].append(run)
    return cells


def spread(values: Sequence[float]) -> str:
    """mean ± sd (number of seeds); a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def score_table(cells: Cells) -> str:
    sizes = sorted({size for label, size in cells if label in METHODS})
    rows = []
    for method in METHODS:
        found = [cells.get((method, size), []) for size in sizes]
        rows.append([f"`{method}`", *(spread([run.score for run in runs]) if runs else "not done" for runs in found)])
    return table(["R@1, %", *(f"B {size}" for size in sizes)], rows)


def error_table(cells: Cells) -> str:
    rows = []
    for (label, size), runs in sorted(cells.items(), key=lambda item: (item[0][1], item[0][0])):
        base = label.removesuffix(TENTH)
        if base not in METHODS:
            continue
        errors = [run.error for run in runs if run.error is not None]
        batches = [run.batch for run in runs if run.batch is not None]
        rows.append(
            [
                f"`{base}`", str(size), "n/10" if label.endswith(TENTH) else "n",
                f"{statistics.fmean(run.tau for run in runs):.4f}",
                f"{statistics.fmean(errors):.3f}" if errors else "none",
                f"{statistics.fmean(batches):.3f}" if batches else "",
            ]
        )  # fmt: skip
    return table(["method", "B", "data", "τ at the end", "its error", "a batch's, same checkpoints"], rows)


def error_summary(cells: Cells, error: str, batch: str) -> str:
    """A row a method, a column a batch size; ``error`` and ``batch`` name a run's fields."""
    learned = {key: runs for key, runs in cells.items() if min(run.score for run in runs) >= LEARNED}
    columns = [(size, tail) for size in sorted({size for _, size in learned}) for tail in ("", TENTH)]
    columns = [(size, tail) for size, tail in columns if any((method + tail, size) in learned for method in METHODS)]

    def mean(runs: Sequence[Run], name: str) -> str:
        values = [getattr(run, name) for run in runs if getattr(run, name) is not None]
        return f"{statistics.fmean(values):.2f}" if values else "none"

    rows = []
    for method in METHODS:
        found = [learned.get((method + tail, size), []) for size, tail in columns]
        rows.append([f"`{method}`", *(f"{mean(runs, error)} / {mean(runs, batch)}" if runs else "" for runs in found)])
    return table(["its error / a batch's", *(f"B {size}{',' * bool(tail)}{tail}" for size, tail in columns)], rows)


def ablation_table(cells: Cells) -> str:
    rows = []
    for (label, size), runs in cells.items():
        if (label == "neuclip" and size == 128) or (label.startswith("neuclip ") and not label.endswith(TENTH)):
            first = [run for run in runs if run.seed == 0]
            if first:
                both = [f"{value:.3f}" if value is not None else "none" for value in (first[0].error, first[0].batch)]
                rows.append([label, f"{first[0].score:.2f}", *both])
    return table(["B 128, seed 0", "R@1, %", "its error", "a batch's, same checkpoints"], rows)


def plot(cells: Cells, value: str, title: str, path: Path) -> None:
    """``value`` against batch size, a line a method; bars reach from the lowest seed to the highest."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fullbatch"
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
    ticks = set()
    for place, (method, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
        points = []
        for (label, size), runs in sorted(cells.items(), key=lambda item: item[0][1]):
            found = [getattr(run, value) for run in runs if getattr(run, value) is not None]
            if value == "error" and min(run.score for run in runs) < LEARNED:
                continue
            if label == method and found:
                ticks.add(size)
                points.append((size * 2 ** (0.025 * (place - 2.5)), found))  # a little apart, so that bars can be told
        if points:
            axes.plot(*zip(*((x, statistics.fmean(found)) for x, found in points), strict=True), color=colour)
            for x, found in points:
                mean = statistics.fmean(found)
                bar = [[mean - min(found)], [max(found) - mean]] if len(found) > 1 else None
                axes.errorbar(x, mean, bar, color=colour, marker="o", markersize=4, capsize=3)
            axes.plot([], [], color=colour, marker="o", markersize=4, label=method)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.set_title(title, fontsize=10)
    if value == "error":
        axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [str(size) for size in sorted(ticks)])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and plots of the icon study.")
    parser.add_argument("folder", type=Path, help="where study.py gather put the runs")
    folder: Path = parser.parse_args().folder
    cells = cells_of(read_runs(folder / "icons"))
    parts = [
        ("R@1", score_table(cells)),
        ("Normalizer error, mean over the audits", error_summary(cells, "error", "batch")),
        ("Normalizer error, the last audit", error_summary(cells, "last_error", "last_batch")),
        ("NeuCLIP", ablation_table(cells)),
        ("Normalizer error, all runs, mean over the audits", error_table(cells)),
    ]
    (folder / "tables.md").write_text("\n\n".join(f"## {title}\n\n{text}" for title, text in parts) + "\n")
    plot(cells, "score", "R@1 among 3,000 held-out pairs, %, mean of both directions", folder / "batch_sizes.svg")
    plot(
        cells,
        "error",
        "mean squared log error of the normalizers in use, mean over the audits",
        folder / "normalizer_error.svg",
    )
    print((folder / "tables.md").read_text())


if __name__ == "__main__":
    main()
