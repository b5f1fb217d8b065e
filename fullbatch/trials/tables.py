"""Comparisons and searches for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fullbatch.evaluation.metric_names import is_share
from fullbatch.training.display import print_line
from fullbatch.trials.progress import NONE, duration, measured, trial_line
from fullbatch.trials.slots import CHOSEN
from fullbatch.trials.statistics import Spread

MOST_ROWS = 10  # of a search's phase; search.csv has all


def print_comparison(summary: Mapping[str, Any], console: Console) -> None:
    runs = summary["runs"]
    for metric in _main_metrics(summary):
        _print_metric(summary, metric, console)
    if any(run["status"] == "done" for run in runs):
        _print_costs(runs, console)
    for found in summary["matches"]:
        print_line(console, found["text"])
    for status, words in (("failed", "failed"), ("open", "not run to its end")):
        for run in runs:
            if run["status"] == status:
                reason = f": {run['error']}" if run["error"] else ""
                print_line(console, f"{run['name']} {words}{reason}")


def _main_metrics(summary: Mapping[str, Any]) -> list[str]:
    """The metric looked at, then one of every other task, of the same name where it has it."""
    found = {summary["metric"].rpartition(" ")[0]: summary["metric"]}
    known = list(dict.fromkeys(cell["metric"] for cell in summary["table"]))
    for task in summary["tasks"]:
        mine = [metric for metric in known if metric.rpartition(" ")[0] == task]
        main = [metric for metric in mine if metric.rpartition(" ")[2] in ("mean_r1", "accuracy")]
        if mine and task not in found:
            found[task] = (main or mine)[0]
    return [metric for metric in found.values() if metric in known]


def _print_metric(summary: Mapping[str, Any], metric: str, console: Console) -> None:
    cells = {(cell["method"], cell["batch_size"]): cell for cell in summary["table"] if cell["metric"] == metric}
    paired = [cell for cell in summary["differences"] if cell["metric"] == metric]
    against = {(cell["method"], cell["batch_size"]): cell for cell in paired}
    sizes = sorted({size for _, size in cells})
    differing = [size for size in sizes if any(where == size for _, where in against)]
    heads = [*(f"B {size}" for size in sizes), *(f"B {size}, less {summary['baseline']}" for size in differing)]
    rows = [("method", *heads)]
    for method in dict.fromkeys(run["method"] for run in summary["runs"]):
        values = [_with_spread(cells.get((method, size)), signed=False) for size in sizes]
        rows.append((method, *values, *(_with_spread(against.get((method, size)), signed=True) for size in differing)))
    _print_columns(metric, rows, console)


_COSTS = (
    ("samples", "samples", ",.0f"),
    ("seconds", "seconds", ",.1f"),
    ("samples/s", "samples_per_second", ",.0f"),
    ("GPU GiB", "gpu_gib", ".2f"),
    ("memory GiB", "memory_gib", ".2f"),
    ("τ", "tau", ".4f"),
    ("normalizer error", "normalizer_error", ".4f"),
)


def _print_costs(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Time and memory; the mean over seeds."""
    cells: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        if run["status"] == "done":
            cells.setdefault((run["method"], run["batch_size"]), []).append(run)
    known = [cost for cost in _COSTS if any(run[cost[1]] is not None for run in runs)]
    rows: list[tuple[str, ...]] = [("method", "B", *(title for title, _, _ in known), "runs")]
    for (method, size), found in cells.items():
        values = []
        for _, name, form in known:
            numbers = tuple(run[name] for run in found if run[name] is not None)
            values.append(format(Spread(numbers).mean, form) if numbers else "")
        rows.append((method, str(size), *values, str(len(found))))
    _print_columns("a run, mean over seeds", rows, console)


def _with_spread(cell: Mapping[str, Any] | None, signed: bool) -> str:
    if cell is None:
        return ""
    factor, sign = 100.0 if is_share(cell["metric"]) else 1.0, "+" if signed else ""
    mean = f"{factor * cell['mean']:{sign}.2f}"
    return mean if cell["sd"] is None else f"{mean} ± {factor * cell['sd']:.2f}"


# ---------------------------------------------------------------------------------------------------------------------
# searches: the best trials of each phase, the finalists, the winner


def print_search(summary: Mapping[str, Any], console: Console) -> None:
    for head, metric in zip(heads(summary["metrics"]), summary["metrics"], strict=True):
        if head != metric["short"] and summary["cost"]["trials_done"]:
            print_line(console, f"{head}: {metric['short']}")
            console.print()
    for phase in summary["phases"]:
        if phase["name"] != "finals" and phase["trials"]:
            title, rows, after = _ranked(phase, summary["metrics"])
            _print_columns(title, rows, console, after, styled=True)
    if summary["finalists"]:
        rows = _finalists(summary["finalists"], summary["metrics"])
        _print_columns("finalists, mean ± standard deviation over seeds", rows, console, styled=True)
    for phase in summary["phases"]:
        for trial in phase["trials"]:
            if trial["status"] == "failed":
                print_line(console, trial_line(phase["name"], trial, summary["metrics"]))
    if summary["winner"] is not None:
        print_line(console, summary["winner"]["said"])
    print_line(console, cost_line(summary["cost"]))


def cost_line(cost: Mapping[str, Any]) -> str:
    done = f"{cost['trials_done']} of {cost['trials_owed']} trials"
    return f"{done}, {duration(cost['seconds'])} of training, {cost['device_hours']:.3g} device-hours"


Rows = list[list[str]]


def heads(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of columns: a long metric has a name for it."""
    numbers = [""] if len(metrics) == 1 else [f" {place}" for place in range(1, len(metrics) + 1)]
    short = [metric["short"] for metric in metrics]
    return [name if len(name) <= 24 else f"value{number}" for name, number in zip(short, numbers, strict=True)]


def _ranked(phase: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> tuple[str, Rows, str]:
    """A title, the rows, and what is left out.  Settings that differ have columns; the others are in the title."""
    order = sorted(phase["trials"], key=lambda one: (one["rank"] is None, one["rank"] or 0, one["slot"]))
    names = list(dict.fromkeys(name for one in order for name in one["params"]))
    varied = [name for name in names if len({repr(one["params"].get(name)) for one in order}) > 1]
    own = [name for name in varied if name not in CHOSEN]
    fixed = [f"{name} {value_said(order[0]['params'].get(name))}" for name in names if name not in varied]
    title = f"{phase['name']}: {len(order)} of {phase['owed']} trials{', all with ' if fixed else ''}{', '.join(fixed)}"
    rows = [["trial", "rank", *heads(metrics), *own, "status", "time"]]
    for one in order[:MOST_ROWS]:
        values = one["values"] or [None] * len(metrics)
        rows.append(
            [
                one["label"],
                NONE if one["rank"] is None else str(one["rank"]),
                *(measured(metric, value) for metric, value in zip(metrics, values, strict=True)),
                *(value_said(one["params"][name]) if name in one["params"] else NONE for name in own),
                one["status"],
                duration(one["seconds"]),
            ]
        )
    return title, rows, f"and {len(order) - MOST_ROWS} more, in search.csv" if len(order) > MOST_ROWS else ""


def _finalists(finalists: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> Rows:
    rows = [["config", *heads(metrics), "seeds", ""]]
    for one in finalists:
        means, spreads = (one[name] or [None] * len(metrics) for name in ("mean", "sd"))
        cells = [measured(*parts) for parts in zip(metrics, means, spreads, strict=True)]
        remarks = [one["kind"]] if one["kind"] == "baseline" else []
        remarks += [f"{one['diverged']} diverged"] if one["diverged"] else []
        remarks += [f"{one['missing']} without a value"] if one["missing"] else []
        rows.append([one["name"], *cells, str(len(one["seeds"])), ", ".join(remarks)])
    return rows


def _print_columns(
    title: str, rows: Sequence[Sequence[str]], console: Console, after: str = "", styled: bool = False
) -> None:
    """Plain columns: nothing is cut, however narrow the terminal.  ``styled``: the head is dim, the first row bold."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print_line(console, title, "bold")
    for place, (first, *others) in enumerate(rows):
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        style = {0: "dim", 1: "bold"}.get(place) if styled else None
        print_line(console, "  ".join([f"{first:{widths[0]}}", *cells]).rstrip(), style)
    if after:
        print_line(console, after)
    console.print()


def value_said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
