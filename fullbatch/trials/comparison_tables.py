"""A comparison for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fullbatch.evaluation.named import is_share
from fullbatch.training.display import print_line
from fullbatch.trials.statistics import Spread


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
        values = [_spread(cells.get((method, size)), signed=False) for size in sizes]
        rows.append((method, *values, *(_spread(against.get((method, size)), signed=True) for size in differing)))
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


def _print_columns(title: str, rows: Sequence[Sequence[str]], console: Console) -> None:
    """Plain columns: nothing is cut, however narrow the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print_line(console, title, "bold")
    for first, *others in rows:
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        print_line(console, "  ".join([f"{first:{widths[0]}}", *cells]).rstrip())
    console.print()


def _spread(cell: Mapping[str, Any] | None, signed: bool) -> str:
    if cell is None:
        return ""
    factor, sign = 100.0 if is_share(cell["metric"]) else 1.0, "+" if signed else ""
    mean = f"{factor * cell['mean']:{sign}.2f}"
    return mean if cell["sd"] is None else f"{mean} ± {factor * cell['sd']:.2f}"
