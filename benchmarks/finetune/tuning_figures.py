"""Tables and plots of the fine-tuning study, from what ``tuning_study.py gather`` kept.

    python benchmarks/finetune/tuning_figures.py docs/studies/finetune/runs docs/studies/finetune

writes tables.md, curves.svg, before_after.svg and, where they were measured, similarities.svg.  Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuning_study import blocks, checks, tasks

COLOURS = {"openclip": "#666666", "fastclip_v3": "#0f7fa8", "tuneclip": "#c2255c"}
TITLES = {
    "main": "Three ways to tune",
    "Table 2": "What recovery hands over",
    "GCL": "The global loss without the hinge",
    "margins": "Margins of the hinge",
    "Table 19": "Other cures for a cold start",
    "equal compute": "As many passes over the data as recovery and tuning take together",
    "negatives": "True and false negatives",
    "noise": "Three captions in ten are another picture's",
    "rates": "Learning rates of TuneCLIP",
}
NOTES = {
    "negatives": "The rows on emoji are tuned on emoji of other vendors: to them that task is not foreign.",
    "noise": "The last row has the captions as they are.",
}
KINDS = {"positives": "true pairs", "nearest": "5 nearest negatives", "far": "ranks 90 to 100", "lower": "lower half"}


@dataclass(frozen=True)
class Run:
    """values   of each task in percent, at every evaluation; the first is the base's
    scores   mean of both checks, likewise
    """

    name: str
    label: str
    seed: int
    values: Mapping[str, list[float]]
    scores: list[float]
    tau: float | None

    @property
    def best(self) -> int:
        """Which evaluation `fullbatch finetune` would keep by the checks; 0 is the base itself."""
        return max(range(len(self.scores)), key=lambda place: self.scores[place])


@dataclass(frozen=True)
class Study:
    runs: list[Run]
    failed: Mapping[str, str]  # label -> why
    rows: Mapping[str, list[str]]  # question -> labels
    costs: Mapping[str, Any]
    similarities: Mapping[str, Any]
    chosen: Mapping[str, float]

    def of(self, label: str) -> list[Run]:
        return sorted((run for run in self.runs if run.label == label), key=lambda run: run.seed)

    @property
    def names(self) -> list[str]:
        return list(self.runs[0].values)


def read_study(folder: Path) -> Study:
    about = json.loads((folder / "study.json").read_text())
    chosen = json.loads((folder / "chosen.json").read_text())
    data = Path(about["data"])
    comparison = json.loads((folder / "race" / "comparison.json").read_text())
    runs, failed = [], {}
    for each in comparison["runs"]:
        lines = folder / "race" / "metrics" / f"{each['name']}.jsonl"
        if each["status"] == "done":
            runs.append(_read_run(each, [json.loads(text) for text in lines.read_text().splitlines()], data))
        elif each["status"] == "failed":
            failed[each["method"]] = each["error"]
    if not runs:
        raise SystemExit(f"error: no run in {folder / 'race'} has ended well")
    rows = {name: [row["name"] for row in of] for name, of in blocks(data, chosen, about["epochs"]).items()}
    costs = json.loads((folder / "race" / "costs.json").read_text())
    similar = folder / "similarities.json"
    similarities = json.loads(similar.read_text()) if similar.is_file() else {}
    return Study(runs, failed, rows, costs, similarities, chosen)


def _read_run(run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], data: Path) -> Run:
    measured = [line for line in lines if line.get("kind") == "evaluation"]

    def of(task: str) -> list[float]:
        """A task has one number in such a line, under "TASK METRIC"."""
        found = [100.0 * next(v for k, v in line.items() if k.startswith(f"{task} ")) for line in measured]
        return found

    check = [of(task) for task in checks(data)]
    scores = [statistics.fmean(pair) for pair in zip(*check, strict=True)]
    values = {name: of(task) for name, task in tasks(data).items()}
    return Run(run["name"], run["method"], run["seed"], values, scores, run["tau"])


# ---------------------------------------------------------------------------------------------------------------------
# tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], sign: str = "") -> str:
    """mean ± sd; a single value alone."""
    mean = f"{statistics.fmean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def held_out(run: Run, place: int) -> float:
    """Mean change over the tasks that the tuning set has nothing of."""
    names = list(run.values)[1:]
    return statistics.fmean(run.values[name][place] - run.values[name][0] for name in names)


def base_table(study: Study) -> str:
    run = study.runs[0]
    return table(["", *study.names], [["base, %", *(f"{run.values[name][0]:.2f}" for name in study.names)]])


def result_table(study: Study, labels: Sequence[str], place: Callable[[Run], int]) -> str:
    """Change against the base, in points."""
    rows = []
    for label in labels:
        runs = study.of(label)
        if not runs:
            why = f"failed: {study.failed[label]}" if label in study.failed else "not done"
            rows.append([label, "", why, *[""] * len(study.names)])
            continue
        changes = [[run.values[name][place(run)] - run.values[name][0] for run in runs] for name in study.names]
        kept = [held_out(run, place(run)) for run in runs]
        rows.append([label, str(len(runs)), *(spread(change, "+") for change in changes), spread(kept, "+")])
    return table(["points gained or lost", "seeds", *study.names, "mean of the last four"], rows)


def cost_table(study: Study) -> str:
    rows = []
    for label in dict.fromkeys([*study.rows["main"], *study.rows["equal compute"], "larger frozen batches"]):
        found = [study.costs[run.name] for run in study.of(label) if study.costs.get(run.name)]
        for stage in dict.fromkeys(each["stage"] for cost in found for each in cost["stages"]):
            of_stage = [each for cost in found for each in cost["stages"] if each["stage"] == stage]
            steps, samples = of_stage[0]["steps"], of_stage[0]["samples"]
            rows.append(
                [
                    label, stage,
                    "" if steps is None else f"{steps:,}",
                    "" if samples is None else f"{samples:,}",
                    spread([each["seconds"] for each in of_stage]),
                    f"{statistics.fmean(each['device_hours'] for each in of_stage):.4f}",
                ]
            )  # fmt: skip
    return table(["run", "stage", "steps", "pairs", "seconds", "GPU-hours"], rows)


def similarity_table(study: Study) -> str:
    """Mean and standard deviation over the pairs."""
    rows = [
        [name, *(f"{of[kind]['mean']:.3f} ± {of[kind]['deviation']:.3f}" if kind in of else "" for kind in KINDS)]
        for name, of in study.similarities.items()
    ]
    return table(["each picture with captions", *KINDS.values()], rows)


def best_epochs(study: Study) -> str:
    rows = []
    for label in study.rows["main"]:
        for run in study.of(label):
            change = run.scores[run.best] - run.scores[0]
            rows.append([label, str(run.seed), str(run.best), f"{change:+.2f}", f"{held_out(run, run.best):+.2f}"])
    return table(["", "seed", "best epoch (0: the base)", "checks, points", "mean of the last four, points"], rows)


def document(study: Study) -> str:
    parts = ["## The base", base_table(study)]
    parts += ["## Chosen learning rates", table(["", "rate"], [[w, f"{rate:g}"] for w, rate in study.chosen.items()])]
    for question, title in TITLES.items():
        labels = study.rows[question]
        shown = labels if question == "main" else [*labels, "tuneclip"]
        parts += [f"## {title}", *([NOTES[question]] if question in NOTES else [])]
        parts += ["After the last epoch:", result_table(study, shown, lambda run: -1)]
        if question == "main":
            parts += ["After the best epoch, by the checks:", result_table(study, shown, lambda run: run.best)]
            parts += [best_epochs(study)]
    if study.similarities:
        parts += ["## How similar pictures and captions are", similarity_table(study)]
    parts += ["## Cost by stage", cost_table(study)]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# plots


def svg_pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fullbatch"
    return pyplot


def finish(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plot_curves(study: Study, path: Path) -> None:
    """Every task from the base on; the band is one standard deviation."""
    pyplot = svg_pyplot()
    figure, grid = pyplot.subplots(2, 3, figsize=(9.6, 5.4))
    panels = [*study.names, "both checks"]
    for axes, name in zip(grid.flat, panels, strict=True):
        for label in study.rows["main"]:
            runs = study.of(label)
            if not runs:
                continue
            curves = [run.scores if name == "both checks" else run.values[name] for run in runs]
            means = [statistics.fmean(at) for at in zip(*curves, strict=True)]
            sds = [statistics.stdev(at) if len(at) > 1 else 0.0 for at in zip(*curves, strict=True)]
            epochs = range(len(means))
            low, high = ([m + sign * s for m, s in zip(means, sds, strict=True)] for sign in (-1, 1))
            axes.plot(epochs, means, label=label, color=COLOURS[label], marker="o", markersize=3)
            axes.fill_between(epochs, low, high, color=COLOURS[label], alpha=0.15, linewidth=0)
        axes.axhline(study.runs[0].scores[0] if name == "both checks" else study.runs[0].values[name][0],
                     color="#000000", linewidth=0.7, linestyle=":")  # fmt: skip
        axes.set_title(f"{name}, %", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("epochs of tuning", fontsize=8)
    grid.flat[0].legend(frameon=False, fontsize=8)
    finish(pyplot, figure, path)


def plot_before_after(study: Study, path: Path) -> None:
    """The change of every task, a point a seed, after the last epoch."""
    pyplot = svg_pyplot()
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6))
    labels = [label for label in study.rows["main"] if study.of(label)]
    for number, label in enumerate(labels):
        for place, name in enumerate(study.names):
            changes = [run.values[name][-1] - run.values[name][0] for run in study.of(label)]
            x = place + (number - (len(labels) - 1) / 2) * 0.24
            shown = label if place == 0 else None
            axes.bar([x], [statistics.fmean(changes)], 0.22, color=COLOURS[label], alpha=0.35, label=shown)
            axes.scatter([x] * len(changes), changes, color=COLOURS[label], s=12, zorder=3)
    axes.axhline(0.0, color="#000000", linewidth=0.8)
    axes.set_xticks(range(len(study.names)), [f"{n}\n{study.runs[0].values[n][0]:.1f} %" for n in study.names])
    axes.set_ylabel("points gained or lost")
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    finish(pyplot, figure, path)


def plot_similarities(study: Study, path: Path) -> None:
    """Figure 11: the distributions, a panel a model."""
    pyplot = svg_pyplot()
    colours = dict(zip(KINDS, ("#1b8a4b", "#c2255c", "#a8780f", "#666666"), strict=True))
    count = len(study.similarities)
    figure, grid = pyplot.subplots(1, count, figsize=(2.6 * count, 2.8), sharex=True, squeeze=False)
    for axes, (name, of) in zip(grid.flat, study.similarities.items(), strict=True):
        for kind, shares in of["shares"].items():
            axes.plot(of["middles"], shares, color=colours[kind], label=KINDS[kind], linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.set_yticks([])
        axes.set_xlabel("similarity", fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    grid.flat[0].legend(frameon=False, fontsize=7)
    finish(pyplot, figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and plots of the fine-tuning study.")
    parser.add_argument("kept", type=Path, help="where tuning_study.py gather put the runs")
    parser.add_argument("out", type=Path, help="where to write")
    options = parser.parse_args()
    study = read_study(options.kept)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tables.md").write_text(document(study))
    plot_curves(study, options.out / "curves.svg")
    plot_before_after(study, options.out / "before_after.svg")
    if study.similarities:
        plot_similarities(study, options.out / "similarities.svg")
    print((options.out / "tables.md").read_text())


if __name__ == "__main__":
    main()
