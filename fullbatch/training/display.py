"""What a person sees while a run trains: a progress bar, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fullbatch.config.messages import message, plain

LINE_EVERY = 10.0  # seconds
MARKS = 10  # log lines that a pace is measured over


def words_of(line: dict[str, Any]) -> str:
    tau = f"τ {line['tau']:.4f}" if "tau" in line else ""
    memory = f"{line['gpu_gib']:.1f} GiB" if "gpu_gib" in line else ""
    speed = f"{line['samples_per_second']:,.0f} samples/s"
    return "  ".join(filter(None, (f"loss {line['loss']:.4f}", tau, f"lr {line['lr']:.2e}", speed, memory)))


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """A line for the terminal, whatever it holds; it is not cut where the terminal ends."""
    console.print(message(text), markup=False, soft_wrap=True, style=style)


@contextmanager
def progress_bar(what: str, wanted: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A function to tell how many are done, of how many.  On stderr, for answers go to stdout; gone when all is done;
    none where nobody looks."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Display:
    """Silent on all ranks but the first.  Without a terminal, or with ``quiet``, lines instead of a bar."""

    def __init__(self, first: bool, quiet: bool) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.first = first
        self.bar = first and not quiet and self.console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._measuring: TaskID | None = None
        self._total = 0
        self._marks: list[tuple[float, int, int, float]] = []  # time, steps, samples, seconds waited for data
        self._shown = 0.0

    def say(self, text: str) -> None:
        if self.first:
            print_line(self.console, text)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """A place for bars, below what is said."""
        if not self.bar:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress, self._measuring = progress, None
            try:
                yield
            finally:
                self._progress = None

    @contextmanager
    def running(self, step: int, total: int, samples: int = 0) -> Iterator[None]:
        self._total, self._marks = total, [(time.monotonic(), step, samples, 0.0)]
        with self.bars():
            if self._progress is not None:
                self._task = self._progress.add_task("training", total=total, completed=step, words="")
            yield

    def measured(self, source: str, done: int, total: int) -> None:
        """Where a pass over a source stands, in batches; from 0 to ``total`` it has a bar of its own."""
        if self._progress is None:
            return
        if self._measuring is not None and done in (0, total):
            self._progress.remove_task(self._measuring)
            self._measuring = None
        if done == 0 < total:
            name = plain(source.rsplit("/", 1)[-1], 60)
            self._measuring = self._progress.add_task("evaluating", total=total, words=name)
            self._progress.refresh()  # a small source is passed before the next turn
        elif self._measuring is not None:
            self._progress.update(self._measuring, completed=done)

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def pace(self, step: int, samples: int, waited: float) -> tuple[float, float]:
        """Since the log lines of up to ten ago: samples a second, and the share of the time spent waiting for them.
        ``samples`` is how many the run has read so far, ``waited`` the seconds it has waited."""
        now = time.monotonic()
        self._marks = [*self._marks[-MARKS:], (now, step, samples, waited)]
        then, _, read, idle = self._marks[0]
        seconds = max(now - then, 1e-9)
        return (samples - read) / seconds, (waited - idle) / seconds

    @property
    def is_steady(self) -> bool:
        """Whether the start of the run no longer counts in its pace."""
        return len(self._marks) > MARKS and self._marks[-1][0] - self._marks[0][0] > LINE_EVERY

    def show(self, line: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress.update(self._task, words=words_of(line))
        elif self.first and (time.monotonic() - self._shown > LINE_EVERY or line["step"] == self._total):
            self._shown = time.monotonic()
            then, before, *_ = self._marks[0]
            rate = (line["step"] - before) / max(time.monotonic() - then, 1e-9)
            left = (self._total - line["step"]) / rate if rate else 0.0
            self.say(f"step {line['step']}/{self._total}  {words_of(line)}  {left / 60:.1f} min left")
