"""A search for the terminal: the best trials of each phase, the finalists, the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fullbatch.training.display import print_line
from fullbatch.trials.plan_parts import CHOSEN
from fullbatch.trials.search_progress import NONE, duration, measured, trial_line

MOST_ROWS = 10  # of a phase; search.csv has all


def print_search(summary: Mapping[str, Any], console: Console) -> None:
    for head, metric in zip(heads(summary["metrics"]), summary["metrics"], strict=True):
        if head != metric["short"] and summary["cost"]["trials_done"]:
            print_line(console, f"{head}: {metric['short']}")
            console.print()
    for phase in summary["phases"]:
        if phase["name"] != "finals" and phase["trials"]:
            _print_columns(*_ranked(phase, summary["metrics"]), console)
    if summary["finalists"]:
        _print_columns(*_finalists(summary["finalists"], summary["metrics"]), console)
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


def _finalists(finalists: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> tuple[str, Rows, str]:
    rows = [["config", *heads(metrics), "seeds", ""]]
    for one in finalists:
        means, spreads = (one[name] or [None] * len(metrics) for name in ("mean", "sd"))
        cells = [measured(*parts) for parts in zip(metrics, means, spreads, strict=True)]
        remarks = [one["kind"]] if one["kind"] == "baseline" else []
        remarks += [f"{one['diverged']} diverged"] if one["diverged"] else []
        remarks += [f"{one['missing']} without a value"] if one["missing"] else []
        rows.append([one["name"], *cells, str(len(one["seeds"])), ", ".join(remarks)])
    return "finalists, mean ± standard deviation over seeds", rows, ""


def _print_columns(title: str, rows: Rows, after: str, console: Console) -> None:
    """Plain columns: nothing is cut, however narrow the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print_line(console, title, "bold")
    for place, (first, *others) in enumerate(rows):
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        style = {0: "dim", 1: "bold"}.get(place)
        print_line(console, "  ".join([f"{first:{widths[0]}}", *cells]).rstrip(), style)
    if after:
        print_line(console, after)
    console.print()


def value_said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
