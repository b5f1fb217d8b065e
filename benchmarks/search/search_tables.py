"""Tables and the plot of the study of the search, from what ``search_study.py gather`` kept.

    python benchmarks/search/search_tables.py docs/studies/search/pretrained     # writes tables.md and search.svg there

Needs matplotlib and scikit-learn.  What is not run yet is not in the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from search_study import LOSSES, RATES

from fullbatch.trials.phases import Ended, Slot
from fullbatch.trials.search_summary import importance_of
from fullbatch.trials.space import Real
from fullbatch.trials.statistics import half_interval, paired

REPORTED_RATE = 2e-4  # that all optimizers had in the report
EDGE = 0.1  # of a range: a best rate this near to an end may lie beyond it
DRAWS = 100  # of a bootstrap with forests; a second each
BASELINE = "openclip"
COLOURS = {"openclip": "#666666", "sogclr": "#0f7fa8", "isogclr_new": "#c2255c", "isogclr_new_v2": "#a8780f"}

# L: losses   O: optimizers
Table = npt.NDArray[np.float64]  # LO, points
Shares = Mapping[str, float]  # of the variation, by what explains it


@dataclass(frozen=True)
class Trial:
    loss: str
    optimizer: str
    rate: float
    temperature: float | None  # where it was searched
    score: float  # points: mean of the three accuracies; 0 where the loss ran away

    @property
    def place(self) -> float:
        """Of the rate in its optimizer's range, from 0 to 1."""
        return Real(*RATES[self.optimizer], log=True).place(self.rate)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read_trials(folder: Path) -> list[Trial]:
    """Of a search, those that were trained to their end or ran away."""
    path = folder / "search.json"
    summary = json.loads(path.read_text()) if path.is_file() else {"phases": [{"trials": []}]}
    return [
        Trial(
            trial["params"]["method"],
            trial["params"]["optimizer"],
            trial["params"]["lr"],
            trial["params"].get("temperature"),
            100.0 * trial["values"][0],
        )
        for trial in summary["phases"][0]["trials"]
        if trial["values"] is not None
    ]


# ---------------------------------------------------------------------------------------------------------------------
# what explains the objective


def importance(trials: Sequence[Trial]) -> Shares:
    """Shares of fANOVA's main effects, which add up to 1; none where all trials have the same value."""
    ended = []
    for number, trial in enumerate(trials):
        params = {"loss": trial.loss, "optimizer": trial.optimizer, "rate": trial.place}
        params |= {} if trial.temperature is None else {"temperature": trial.temperature}
        ended.append(Ended(Slot(number), "done", params, (trial.score,)))
    shares = importance_of(ended, {"temperature"})
    return {} if isinstance(shares, str) else dict(shares["fanova"])


def bootstrap(
    trials: Sequence[Trial], shares_of: Callable[[Sequence[Trial]], Shares], draws: int, within_pairs: bool = False
) -> dict[str, tuple[float, float]]:
    """The 90 % interval of each share over trials drawn with replacement: from all, or from those of each pair."""
    rng = np.random.default_rng(0)
    pairs = [[t for t in trials if (t.loss, t.optimizer) == pair] for pair in dict.fromkeys(map(pair_of, trials))]
    groups = pairs if within_pairs else [list(trials)]
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        drawn = [group[place] for group in groups for place in rng.integers(len(group), size=len(group))]
        for name, share in shares_of(drawn).items():
            found.setdefault(name, []).append(share)
    absent = {name: [0.0] * (draws - len(shares)) for name, shares in found.items()}  # one value only: it explains none
    return {name: tuple(np.quantile([*shares, *absent[name]], (0.05, 0.95))) for name, shares in found.items()}


def pair_of(trial: Trial) -> tuple[str, str]:
    return trial.loss, trial.optimizer


def sums_of_squares(scores_LO: Table) -> Shares:
    """Of a table's variation the shares of rows, of columns, and of what they do together."""
    centred_LO = scores_LO - scores_LO.mean()
    loss, optimizer = centred_LO.mean(1), centred_LO.mean(0)
    total = float((centred_LO**2).sum()) or 1.0
    by_loss = float((loss**2).sum()) * scores_LO.shape[1] / total
    by_optimizer = float((optimizer**2).sum()) * scores_LO.shape[0] / total
    return {"loss": by_loss, "optimizer": by_optimizer, "together": max(0.0, 1.0 - by_loss - by_optimizer)}


def at_best_rates(trials: Sequence[Trial]) -> Table:
    """The best of each pair."""
    return _by_pair(trials, lambda of_pair: max(trial.score for trial in of_pair))


def at_one_rate(trials: Sequence[Trial], rate: float) -> Table:
    """Each pair's score at that rate, read off the line through its trials; beyond them, the nearest one's."""

    def read_off(of_pair: Sequence[Trial]) -> float:
        order = sorted(of_pair, key=lambda trial: trial.rate)
        rates, scores = [trial.rate for trial in order], [trial.score for trial in order]
        return float(np.interp(np.log(rate), np.log(rates), scores))

    return _by_pair(trials, read_off)


def _by_pair(trials: Sequence[Trial], value: Callable[[Sequence[Trial]], float]) -> Table:
    losses, optimizers = (list(dict.fromkeys(names)) for names in zip(*map(pair_of, trials), strict=True))
    losses.sort(key=LOSSES.index)
    optimizers.sort(key=list(RATES).index)
    cells = [[[t for t in trials if pair_of(t) == (loss, o)] for o in optimizers] for loss in losses]
    return np.array([[value(cell) for cell in row] for row in cells])


def is_whole(trials: Sequence[Trial]) -> bool:
    """Whether every loss was tried with every optimizer."""
    pairs = set(map(pair_of, trials))
    return len(pairs) == len({loss for loss, _ in pairs}) * len({optimizer for _, optimizer in pairs}) > 0


# ---------------------------------------------------------------------------------------------------------------------
# tables


def best_table(trials: Sequence[Trial]) -> str:
    """The best of each pair, at which rate; an asterisk: near an end of its range."""
    rows = []
    for loss in LOSSES:
        row = [f"`{loss}`"]
        for optimizer in RATES:
            of_pair = [trial for trial in trials if pair_of(trial) == (loss, optimizer)]
            best = max(of_pair, key=lambda trial: trial.score, default=None)
            row.append("" if best is None else f"{best.score:.1f} ({best.rate:.1g}{'*' if at_the_edge(best) else ''})")
        rows.append(row)
    return table(["best, % (rate)", *RATES], rows)


def at_the_edge(trial: Trial) -> bool:
    return not EDGE <= trial.place <= 1.0 - EDGE


def explained_table(trials: Sequence[Trial], draws: int) -> str:
    """Importance in three ways, each with its 90 % interval."""
    ways: dict[str, tuple[Callable[[Sequence[Trial]], Shares], bool]] = {
        "over all rates (fANOVA)": (importance, False),
        "each pair at its best rate": (lambda some: sums_of_squares(at_best_rates(some)), True),
        f"all at {REPORTED_RATE:g}, as reported": (
            lambda some: sums_of_squares(at_one_rate(some, REPORTED_RATE)),
            True,
        ),
    }
    names = ("loss", "optimizer", "rate", "together")
    rows = []
    for label, (shares_of, within_pairs) in ways.items():
        shares, spread = shares_of(trials), bootstrap(trials, shares_of, draws, within_pairs)
        rows.append([label, *(_share(shares, spread, name) for name in names)])
    return table(["what explains the objective, % (90 % interval)", *names], rows)


def _share(shares: Shares, spread: Mapping[str, tuple[float, float]], name: str) -> str:
    if name not in shares:
        return ""
    low, high = spread.get(name, (shares[name], shares[name]))
    return f"{100 * shares[name]:.0f} ({100 * low:.0f} … {100 * high:.0f})"


def temperature_table(trials: Sequence[Trial], draws: int) -> str:
    shares, spread = importance(trials), bootstrap(trials, importance, draws)
    names = ("loss", "rate", "temperature")
    head = "what explains the objective with AdamW, % (90 % interval)"
    rows = [["over all rates and temperatures (fANOVA)", *(_share(shares, spread, name) for name in names)]]
    best = [max((t for t in trials if t.loss == loss), key=lambda t: t.score) for loss in LOSSES]
    of_losses = [[f"`{t.loss}`", f"{t.score:.1f}", f"{t.temperature:.3f}", f"{t.rate:.1g}"] for t in best]
    return table([head, *names], rows) + "\n\n" + table(["loss", "best, %", "temperature", "rate"], of_losses)


def read_finals(folder: Path) -> dict[str, dict[int, float]]:
    """Points by row and seed."""
    path = folder / "finals" / "comparison.json"
    rows: dict[str, dict[int, float]] = {}
    for run in json.loads(path.read_text())["runs"] if path.is_file() else ():
        if run["status"] == "done":
            parts = [run["results"][name] for name in run["results"] if name.split()[-1] in PARTS]
            rows.setdefault(run["method"], {})[run["seed"]] = 100.0 * statistics.fmean(parts)
    return rows


PARTS = ("text_to_image_r1", "image_to_text_r1", "accuracy")


def finals_table(rows: Mapping[str, Mapping[int, float]]) -> str:
    """Mean, standard deviation, and the difference from the baseline seed by seed with its 95 % interval."""
    lines = []
    for name, by_seed in rows.items():
        values = list(by_seed.values())
        sd = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        gain = paired(by_seed, rows.get(BASELINE, {})) if name != BASELINE else None
        said = ""
        if gain is not None and len(gain.values) > 1:
            half = half_interval(statistics.stdev(gain.values), len(gain.values))
            said = f"{gain.mean:+.2f} ({gain.mean - half:+.2f} … {gain.mean + half:+.2f})"
        lines.append([name, f"{statistics.fmean(values):.2f}{sd}", str(len(values)), said])
    return table(["finals", "objective, %", "seeds", f"less `{BASELINE}` (95 % interval)"], lines)


def temperatures_table(folder: Path) -> str:
    """The mean over a loss's trials of the last batch's mean, and the extremes."""
    path = folder / "losses" / "temperatures.json"
    ends: dict[str, list[list[float]]] = {}
    for trial in json.loads(path.read_text()) if path.is_file() else ():
        ends.setdefault(trial["method"], []).append([trial[name] for name in ("tau", "tau_min", "tau_max")])
    rows = [
        [f"`{loss}`", f"{statistics.fmean(mean for mean, _, _ in found):.3f}"]
        + [f"{min(low for _, low, _ in found):.3f}", f"{max(high for _, _, high in found):.3f}"]
        for loss, found in ends.items()
    ]
    return table(["temperature at the end", "mean", "lowest", "highest"], rows) if rows else ""


# ---------------------------------------------------------------------------------------------------------------------


def plot(trials: Sequence[Trial], with_temperature: Sequence[Trial], path: Path) -> None:
    """The objective over the rate, an optimizer each; the last panel over the temperature."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fullbatch"
    figure, axes = pyplot.subplots(1, len(RATES) + 1, figsize=(13.0, 2.6), sharey=True)
    for axis, optimizer in zip(axes, (*RATES, "temperature"), strict=True):
        for loss in LOSSES:
            last = optimizer == "temperature"
            some = with_temperature if last else [trial for trial in trials if trial.optimizer == optimizer]
            points = sorted(((t.temperature or 0.0) if last else t.rate, t.score) for t in some if t.loss == loss)
            style = "o" if last else "o-"
            axis.plot(*zip(*points, strict=True), style, color=COLOURS[loss], label=loss, markersize=3, linewidth=1)
        axis.set_xscale("log")
        axis.set_title(
            "AdamW, over temperature" if optimizer == "temperature" else f"{optimizer}, over rate", fontsize=8
        )
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean of three R@1, %", fontsize=8)
    axes[0].legend(frameon=False, fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(folder: Path, draws: int) -> None:
    trials, with_temperature = read_trials(folder / "losses"), read_trials(folder / "temperature")
    parts = []
    if is_whole(trials):
        parts += [best_table(trials), explained_table(trials, draws), temperatures_table(folder)]
    if {trial.loss for trial in with_temperature} == set(LOSSES):
        parts.append(temperature_table(with_temperature, draws))
    if len(parts) == 4:
        plot(trials, with_temperature, folder / "search.svg")
    if rows := read_finals(folder):
        parts.append(finals_table(rows))
    (folder / "tables.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and the plot of the study of the search.")
    parser.add_argument("folder", type=Path, help="what search_study.py gather kept")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of the bootstrap")
    options = parser.parse_args()
    write(options.folder, options.draws)
    print((options.folder / "tables.md").read_text())


if __name__ == "__main__":
    main()
