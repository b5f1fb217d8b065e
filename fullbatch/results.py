"""What a run learned, for the terminal: each task's number beside chance, and a few answers."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from fullbatch.run import Trained


def print_results(trained: Trained, console: Console) -> None:
    results = trained.results.get("results", [])
    if results:
        _print_table(results, console)
    for result in results:
        if result["examples"]:
            console.print(f"\nThe nearest captions to some images of {result['task']}", markup=False, soft_wrap=True)
            for example in result["examples"]:
                said = f"{example['caption']} (rank {example['rank']} of {result['size']:,})"
                console.print(f"  {said}:  {' | '.join(example['nearest'])}", markup=False, soft_wrap=True)
            break
    console.print(f"\nrun folder: {trained.folder}", markup=False, soft_wrap=True)


def _print_table(results: list[dict[str, Any]], console: Console) -> None:
    """Plain columns: names are never cut, however narrow the terminal."""
    width = max(len(result["task"]) for result in results)
    rows = [("task", "metric", "value", "chance", "ratio", "among")]
    for result in results:
        value, chance = result[result["main"]], result["chance"]
        numbers = (f"{value:.1%}", f"{chance:.2%}", f"{value / chance:.1f}x", f"{result['size']:,}")
        rows.append((result["task"], result["main"], *numbers))
    for task, metric, value, chance, ratio, among in rows:
        line = f"{task:{width}}  {metric:9}  {value:>6}  {chance:>7}  {ratio:>7}  {among:>7}"
        console.print(line, markup=False, soft_wrap=True)
