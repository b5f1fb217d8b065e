"""Tables and plots of the clean-up study, from what ``cleanup_study.py gather`` kept.

    python benchmarks/finetune/cleanup_figures.py docs/studies/finetune/cleanup   # writes tables.md and the plots there

Needs matplotlib.  What is not run yet is not in the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleanup_study import A_PART, FLAT, SLOPES, Base, Setting, arms, lengths_of, margins
from figures import at_the_edge, rates_table, read_rates, table
from tuning_figures import finish, spread, svg_pyplot

from fullbatch.trials.statistics import half_interval, paired

COLD = "openclip, cold"
LOSSES = {"openclip": "#666666", "GCL": "#0f7fa8", "HGCL": "#c2255c"}
STYLES = {"cold": ":", "recovery": "-", "recovery, mean weight 1": "--"}
WARMER = ", warmer base"
# What is subtracted from what, and the question that it answers.
DIFFERENCES = {
    "Does recovery help?": [(f"{loss}, recovery", f"{loss}, cold") for loss in LOSSES],
    "With gamma's clock alike?": [(f"{loss}, recovery", f"{loss}, carry none") for loss in ("GCL", "HGCL")],
    "Is it the smaller steps?": [(f"{loss}, recovery", f"{loss}, recovery, mean weight 1") for loss in ("GCL", "HGCL")],
    "Is it the pattern of u?": [
        (f"{loss}, recovery, mean weight 1", f"{loss}, cold, mean weight 1") for loss in ("GCL", "HGCL")
    ],
    "Does the hinge help?": [(f"HGCL, {start}", f"GCL, {start}") for start in ("cold", "recovery")],
    "Is u enough?": [(f"{loss}, recovery", f"{loss}, carry memory") for loss in ("GCL", "HGCL")],
    "Are the moments enough?": [(f"{loss}, recovery", f"{loss}, carry moments") for loss in ("GCL", "HGCL")],
}


@dataclass(frozen=True)
class Run:
    """epochs   of tuning at each evaluation; the first is 0, the base
    test, check   R@1 in percent, likewise
    weight   geometric mean of the weights g / u in the first epoch of tuning; None: nothing was logged in it
    """

    arm: str
    seed: int
    epochs: list[float]
    test: list[float]
    check: list[float]
    weight: float | None

    def after(self, epoch: float) -> int:
        """The first evaluation at or beyond this much tuning."""
        return next(place for place, at in enumerate(self.epochs) if at >= epoch - 1e-9)

    @property
    def kept(self) -> int:
        """The evaluation that `fullbatch finetune` would keep by the check; 0 is the base itself."""
        return max(range(len(self.check)), key=lambda place: self.check[place])

    def change(self, place: int) -> float:
        return self.test[place] - self.test[0]


@dataclass(frozen=True)
class Study:
    folder: Path
    runs: list[Run]
    failed: Mapping[str, str]  # arm -> why
    chosen: Mapping[str, float]
    base: Base
    warmer: Base | None
    gain_of_doubling: float
    epochs: int

    def of(self, arm: str) -> list[Run]:
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    @property
    def arms(self) -> list[str]:
        return list(arms(self.base, self.warmer, self.epochs))


def read_study(folder: Path) -> Study:
    about, bases, chosen = (
        json.loads((folder / name).read_text()) for name in ("study.json", "bases.json", "chosen.json")
    )
    setting, epochs = Setting(Path(about["data"])), about["epochs"]
    runs, failed = [], {}
    for run in json.loads((folder / "race" / "comparison.json").read_text())["runs"]:
        if run["status"] == "done":
            text = (folder / "race" / "runs" / run["name"] / "metrics.jsonl").read_text()
            runs.append(read_run(run, [json.loads(line) for line in text.splitlines()], setting, epochs))
        elif run["status"] == "failed":
            failed[run["method"]] = run["error"]
    base, warmer = Base(**bases["base"]), Base(**bases["warmer"]) if "warmer" in bases else None
    return Study(folder, runs, failed, chosen, base, warmer, bases["gain_of_doubling"], epochs)


def read_run(run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], setting: Setting, epochs: int) -> Run:
    measured = [line for line in lines if line.get("kind") == "evaluation"]
    frozen = max((line["step"] for line in lines if line.get("stage") == "recovery"), default=0)
    per_epoch = (measured[-1]["step"] - frozen) / epochs
    passed = [max(0.0, (line["step"] - frozen) / per_epoch) for line in measured]
    early = [
        statistics.fmean(line[f"log_ratio_{name}"] for name in ("image", "text"))
        for line in lines
        if "log_ratio_image" in line and 0 < line["step"] - frozen <= per_epoch
    ]
    test, check = ([100 * line[f"{task} mean_r1"] for line in measured] for task in (setting.test, setting.check))
    weight = math.exp(statistics.fmean(early)) if early else None
    return Run(run["method"], run["seed"], passed, test, check, weight)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def premise(study: Study) -> str:
    """TuneCLIP's: tuned as usual, the base loses.  Met if plain CLIP, cold and at its own best rate, ends below it in
    every seed."""
    runs = study.of(COLD)
    if not runs:
        return "The premise is open: `openclip` without recovery has not run."
    changes = [run.change(-1) for run in runs]
    met = all(change < 0.0 for change in changes)
    where = "below the base in every seed" if met else "not below the base in every seed"
    return (
        f"**Premise {'met' if met else 'not met'}**: `openclip`, cold, at its own best rate ({study.chosen[COLD]:g}) "
        f"ends at {spread(changes, '+')} points, {where}."
    )


def base_tables(study: Study) -> list[str]:
    parts = []
    for stage, title in (("pretraining", "Learning its own temperature"), ("holding", "Held at its temperature")):
        if (study.folder / stage / "comparison.json").is_file():
            grids, scores = read_rates(study.folder / stage)
            parts += [f"{title}, R@1 on the check:", rates_table(grids, scores), edges(grids, scores)]
            if stage == "pretraining":
                best = ", ".join(f"{100 * score:.2f} % after {n:,} samples" for n, score in lengths_of(scores).items())
                flat = "flat" if study.gain_of_doubling < FLAT else "not flat"
                gain = f"the last doubling gains {100 * study.gain_of_doubling:+.2f} points: {flat}"
                parts.append(f"With the best rate {best}; {gain}.")
    runs = [run for run in study.runs if not run.arm.endswith(WARMER)]
    warmer = [run for run in study.runs if run.arm.endswith(WARMER)]
    rows = [
        [name, f"{base.tau:.4f}", f"{of[0].check[0]:.2f}", f"{of[0].test[0]:.2f}"]
        for name, base, of in (("the base", study.base, runs), ("the warmer base", study.warmer, warmer))
        if base is not None and of
    ]
    return [*parts, table(["R@1, %", "τ", "check", "test"], rows)]


def edges(grids: Any, scores: Any) -> str:
    found = [cell.rpartition(" at B ")[0] for cell in at_the_edge(grids, scores)]
    return f"At the edge of its grid: {'; '.join(found)}." if found else "Every best rate is inside its grid."


def result_table(study: Study, names: Sequence[str]) -> str:
    """Changes of test R@1 against the base, in points."""
    rows = []
    for arm in names:
        runs = study.of(arm)
        if not runs:
            rows.append([arm, "", "", f"failed: {study.failed[arm]}" if arm in study.failed else "not done", *[""] * 4])
            continue
        places: list[Callable[[Run], int]] = [
            lambda run: run.after(1 / A_PART),
            lambda run: run.after(1.0),
            lambda run: -1,
            lambda run: run.kept,
        ]
        changes = [spread([run.change(place(run)) for run in runs], "+") for place in places]
        weights = [run.weight for run in runs if run.weight is not None]
        weight = f"{statistics.fmean(weights):.2f}" if weights else ""
        rows.append([arm, f"{study.chosen[arm]:g}", str(len(runs)), *changes, weight])
    head = [
        "points",
        "rate",
        "seeds",
        "1/8 epoch",
        "1 epoch",
        "at the end",
        "kept by the check",
        "weights in epoch 1",
    ]
    return table(head, rows)


def difference_table(study: Study) -> str:
    """At the end, seed by seed."""
    rows = []
    for question, pairs in DIFFERENCES.items():
        for ours, theirs in pairs:
            ends = [{run.seed: run.change(-1) for run in study.of(arm)} for arm in (ours, theirs)]
            found = paired(*ends)
            if found is not None:
                count, mean = len(found.values), statistics.fmean(found.values)
                half = half_interval(statistics.stdev(found.values), count) if count > 1 else math.nan
                bounds = "" if math.isnan(half) else f"{mean - half:+.2f} … {mean + half:+.2f}"
                rows.append([question, f"{ours} less {theirs}", str(count), spread(found.values, "+"), bounds])
    return table(["", "test R@1 at the end, points", "seeds", "mean ± sd", "95 %"], rows)


def margin_points(study: Study, base: Base, where: str) -> dict[str, tuple[float, list[float]]]:
    """By name: the margin, and the changes at the end; the base's 10 tau is the main arm."""
    found = {}
    for name, margin in margins(base.tau).items():
        runs = study.of(name + where) or (study.of("HGCL, recovery") if name == "m = 10 tau" and not where else [])
        if runs:
            found[name] = (margin, [run.change(-1) for run in runs])
    return found


def bases_of(study: Study) -> list[tuple[Base, str]]:
    return [(study.base, "")] + ([(study.warmer, WARMER)] if study.warmer is not None else [])


def margin_table(study: Study) -> str:
    rows = []
    for base, where in bases_of(study):
        points = margin_points(study, base, where)
        best = max(points, key=lambda name: statistics.fmean(points[name][1]), default="")
        for name, (margin, changes) in sorted(points.items(), key=lambda point: point[1][0]):
            rule = {"m = 10 tau": "m ∝ τ", "m = sqrt tau": "m ∝ √τ"}.get(name, "")
            change = spread(changes, "+")
            shown = f"**{change}**" if name == best else change
            rows.append(
                [f"{base.tau:.4f}", f"{margin:.3f}", f"{margin / base.tau:.1f}", rule, str(len(changes)), shown]
            )
    return table(["τ", "m", "m/τ", "0.1 at 0.01 and", "seeds", "at the end, points"], rows)


def document(study: Study) -> str:
    said = premise(study)
    held = "" if said.startswith("**Premise met") else " (premise not met)"
    names = study.arms
    of_margins = [arm for arm in names if arm.startswith("m = ")]
    sections = {
        "Each loss, cold and with recovery": [arm for arm in names if arm.endswith((", cold", ", recovery"))],
        "u with the mean weight of a cold run": [arm for arm in names if arm.endswith(", mean weight 1")],
        "What recovery hands over": [arm for arm in names if ", carry " in arm],
        "Margins": of_margins,
    }
    grids, scores = read_rates(study.folder / "rates")
    parts = [said, "## The base", *base_tables(study)]
    parts += ["## Learning rates", "R@1 on the check, seed 100:", rates_table(grids, scores), edges(grids, scores)]
    for title, rows in sections.items():
        parts += [f"## {title}{held}", result_table(study, rows)]
        if rows is of_margins:
            parts.append(margin_table(study))
    parts += [f"## Differences{held}", difference_table(study)]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# plots


def plot_curves(study: Study, path: Path) -> None:
    """Test R@1 against the base from an eighth of an epoch on; the band is one standard deviation."""
    pyplot = svg_pyplot()
    figure, panels = pyplot.subplots(1, len(LOSSES), figsize=(9.6, 3.2), sharey=True)
    for axes, (loss, colour) in zip(panels, LOSSES.items(), strict=True):
        for start, style in STYLES.items():
            runs = study.of(f"{loss}, {start}")
            if not runs:
                continue
            curves = list(zip(*([run.change(place) for place in range(len(run.test))] for run in runs), strict=True))
            means = [statistics.fmean(at) for at in curves]
            sds = [statistics.stdev(at) if len(at) > 1 else 0.0 for at in curves]
            low, high = ([m + sign * s for m, s in zip(means, sds, strict=True)] for sign in (-1, 1))
            axes.plot(runs[0].epochs, means, label=start, color=colour, linestyle=style, linewidth=1.3)
            axes.fill_between(runs[0].epochs, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(0.0, color="#000000", linewidth=0.7)
        axes.set_title(loss, fontsize=9)
        axes.set_xlabel("epochs of tuning", fontsize=8)
        axes.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("R@1, points from the base", fontsize=8)
    _finish(pyplot, figure, panels, path)


def plot_margins(study: Study, path: Path) -> None:
    """Where the best margin lies at each temperature, and where the two rules put it."""
    pyplot = svg_pyplot()
    bases = bases_of(study)
    figure, panels = pyplot.subplots(1, len(bases), figsize=(3.6 * len(bases), 3.0), squeeze=False)
    for axes, (base, where) in zip(panels[0], bases, strict=True):
        points = sorted(margin_points(study, base, where).values())
        slopes, changes = [margin / base.tau for margin, _ in points], [of for _, of in points]
        means, sds = [[summary(of) for of in changes] for summary in (statistics.fmean, _deviation)]
        axes.errorbar(slopes, means, yerr=sds, color=LOSSES["HGCL"], marker="o", markersize=4, linewidth=1.2)
        for rule, slope, style in (("m ∝ τ", 10.0, "-"), ("m ∝ √τ", 1.0 / math.sqrt(base.tau), "--")):
            axes.axvline(slope, color="#666666", linewidth=0.9, linestyle=style, label=rule)
        axes.set_xscale("log")
        axes.set_xticks(SLOPES, [str(slope) for slope in SLOPES])
        axes.minorticks_off()
        axes.set_title(f"τ = {base.tau:.3f}", fontsize=9)
        axes.set_xlabel("m / τ", fontsize=8)
        axes.legend(frameon=False, fontsize=7)
    panels[0][0].set_ylabel("R@1, points from the base", fontsize=8)
    _finish(pyplot, figure, panels[0], path)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _finish(pyplot: Any, figure: Any, panels: Any, path: Path) -> None:
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    finish(pyplot, figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and plots of the clean-up study.")
    parser.add_argument("study", type=Path, help="where cleanup_study.py gather put what is kept")
    folder = parser.parse_args().study
    study = read_study(folder)
    (folder / "tables.md").write_text(document(study))
    plot_curves(study, folder / "curves.svg")
    plot_margins(study, folder / "margins.svg")
    print((folder / "tables.md").read_text())


if __name__ == "__main__":
    main()
