"""What a model can do, in lines for the terminal: each task's number beside chance, what is missing, a few answers.
Tables are plain columns: names are never cut, however narrow the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fullbatch.config.messages import plain
from fullbatch.report.wording import duration
from fullbatch.training.display import print_line

if TYPE_CHECKING:
    from fullbatch.training_run import Trained


def print_lines(lines: Iterable[str]) -> None:
    console = Console(highlight=False)
    for line in lines:
        print_line(console, line)


def result_lines(trained: Trained) -> list[str]:
    lines = measured_lines(trained.results)
    if best := trained.results.get("best"):
        place = trained.folder / best["checkpoint"]
        lines += ["", f"best: {best['metric']} {best['said']} at step {best['step']:,}: {place}"]
    return [*lines, *cost_lines(trained.results.get("cost", {})), "", f"run folder: {trained.folder}"]


def measured_lines(measured: Mapping[str, Any]) -> list[str]:
    """As in results.json: a table, the tasks without a number, the averages over suites, and examples."""
    results, gaps, averages = (measured.get(name, []) for name in ("results", "gaps", "averages"))
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "chance", "ratio", "among", "")]
    for result in results:
        value, chance = result[result["main"]], result["chance"]
        numbers = (f"{value:.1%}", f"{chance:.2%}", f"{value / chance:.1f}x", f"{result['size']:,}")
        rows.append((result["task"], result["main"], *numbers, ""))
    lines = columns(rows, left=2) if results else []
    lines += [f"note: {result['task']}: {note}" for result in results for note in result.get("notes", ())]
    lines += [f"FAILED: {gap['task']}: {gap['reason']}" for gap in gaps if gap["kind"] == "failed"]
    if missing := [gap["task"] for gap in gaps if gap["kind"] == "missing"]:
        lines.append(f"missing, {len(missing)} tasks: {', '.join(missing)}")
    if averages:
        width = max(len(average["name"]) for average in averages)
        lines += ["", *(f"{average['name']:{width}}  {average['text']}" for average in averages)]
    for result in [result for result in results if result["examples"]][:1]:
        lines += ["", f"The nearest captions to some images of {result['task']}"]
        for example in result["examples"]:
            caption = f"{plain(example['caption'])} (rank {example['rank']} of {result['size']:,})"
            lines.append(f"  {caption}:  {' | '.join(map(plain, example['nearest']))}")
    return lines


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """Stage by stage, how long it took, and on how many devices."""
    stages = cost.get("stages", [])
    parts = [f"{stage['stage']} {duration(stage['seconds'])}" for stage in stages]
    hours = sum(stage["device_hours"] for stage in stages)
    return ["", f"cost: {', '.join(parts)}; {hours:.3g} device-hours"] if stages else []


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The first ``left`` columns begin together, the others end together, but for the last, a remark."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = ["<"] * left + [">"] * (len(widths) - left - 1) + ["<"]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
