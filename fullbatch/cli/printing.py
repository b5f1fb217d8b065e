"""What a model can do, for the terminal: each task's number beside chance, what is missing, and a few answers.

Tables are plain columns: names are never cut, however narrow the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fullbatch.config.messages import plain
from fullbatch.report.wording import duration
from fullbatch.training.display import print_line
from fullbatch.training_run import Trained


def print_results(trained: Trained, console: Console) -> None:
    print_measured(trained.results, console)
    if best := trained.results.get("best"):
        console.print()
        place = trained.folder / best["checkpoint"]
        print_line(console, f"best: {best['metric']} {best['said']} at step {best['step']:,}: {place}")
    print_cost(trained.results.get("cost", {}), console)
    console.print()
    print_line(console, f"run folder: {trained.folder}")


def print_measured(measured: Mapping[str, Any], console: Console) -> None:
    """As in results.json: a table, the tasks without a number, the averages over suites, and examples."""
    results = measured.get("results", [])
    if results:
        _print_table(results, console)
    for result in results:
        for note in result.get("notes", ()):
            print_line(console, f"note: {result['task']}: {note}")
    _print_gaps(measured.get("gaps", []), console)
    averages = measured.get("averages", [])
    if averages:
        width = max(len(average["name"]) for average in averages)
        console.print()
        for average in averages:
            print_line(console, f"{average['name']:{width}}  {average['text']}")
    for result in results:
        if result["examples"]:
            _print_examples(result, console)
            break


def print_cost(cost: Mapping[str, Any], console: Console) -> None:
    """A line: stage by stage, how long it took, and on how many devices."""
    stages = cost.get("stages", [])
    if not stages:
        return
    parts = [f"{stage['stage']} {duration(stage['seconds'])}" for stage in stages]
    hours = sum(stage["device_hours"] for stage in stages)
    console.print()
    print_line(console, f"cost: {', '.join(parts)}; {hours:.3g} device-hours")


def _print_gaps(gaps: list[dict[str, str]], console: Console) -> None:
    for gap in gaps:
        if gap["kind"] == "failed":
            print_line(console, f"FAILED: {gap['task']}: {gap['reason']}")
    missing = [gap["task"] for gap in gaps if gap["kind"] == "missing"]
    if missing:
        print_line(console, f"missing, {len(missing)} tasks: {', '.join(missing)}")


def _print_examples(result: Mapping[str, Any], console: Console) -> None:
    console.print()
    print_line(console, f"The nearest captions to some images of {result['task']}")
    for example in result["examples"]:
        caption = f"{plain(example['caption'])} (rank {example['rank']} of {result['size']:,})"
        print_line(console, f"  {caption}:  {' | '.join(map(plain, example['nearest']))}")


def _print_table(results: list[dict[str, Any]], console: Console) -> None:
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "chance", "ratio", "among", "")]
    for result in results:
        value, chance = result[result["main"]], result["chance"]
        numbers = (f"{value:.1%}", f"{chance:.2%}", f"{value / chance:.1f}x", f"{result['size']:,}")
        rows.append((result["task"], result["main"], *numbers, ""))
    for line in columns(rows, left=2):
        print_line(console, line)


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The first ``left`` columns begin together, the others end together, but for the last, a remark."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = ["<"] * left + [">"] * (len(widths) - left - 1) + ["<"]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
