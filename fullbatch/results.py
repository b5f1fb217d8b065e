"""What a run learned, for the terminal: each task's number beside chance, and a few answers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fullbatch.run import Trained


def print_results(trained: Trained, console: Console) -> None:
    results = trained.results.get("results", [])
    if results:
        table = Table(box=None, pad_edge=False)
        for heading in ("task", "metric", "value", "chance", "times chance", "among"):
            table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
        for result in results:
            value, chance = result[result["main"]], result["chance"]
            row = (f"{value:.1%}", f"{chance:.2%}", f"{value / chance:.0f}x", f"{result['size']:,}")
            table.add_row(result["task"], result["main"], *row)
        console.print(table)
    for result in results:
        if result.get("examples"):
            console.print(f"\n{result['task']}: captions nearest to an image of ...", markup=False, soft_wrap=True)
            for said, answers in result["examples"]:
                mark = "right" if answers[0] == said else "wrong"
                console.print(f"  {said}  ->  {' | '.join(answers)}  ({mark})", markup=False, soft_wrap=True)
            break
    console.print(f"\nrun folder: {trained.folder}", markup=False, soft_wrap=True)
