"""What a person sees while a comparison runs: one bar for all and one for each run under way, or lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fullbatch.training.display import print_line, words_of
from fullbatch.training.run_folder import Folder
from fullbatch.trials.execute import Outcome, outcome_of
from fullbatch.trials.workers import Job

LOOK_EVERY = 1.0  # seconds
TAIL = 16_384  # bytes that surely hold the last lines of metrics.jsonl


class Progression:
    """Steps of all runs together, so that the time left is meaningful.

    on_end   called after each run with its outcome
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        steps: Mapping[str, int],
        quiet: bool,
        on_end: Callable[[Job, Outcome], str],
    ) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.steps, self.on_end, self.count = steps, on_end, len(jobs)
        ended = [job for job in jobs if outcome_of(job.folder).status == "done"]
        self.ended_count = len(ended)
        self._under_way: dict[str, tuple[Job, TaskID]] = {}
        self._looked = 0.0
        self._progress: Progress | None = None
        if not quiet and self.console.is_terminal:
            words, left = TextColumn("{task.description}"), TextColumn("{task.fields[words]}")
            columns = (words, BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), left)
            self._progress = Progress(*columns, console=self.console, transient=True)
            done = sum(steps[job.name] for job in ended)
            self._all = self._progress.add_task("all runs", total=sum(steps.values()), completed=done, words="steps")
            self._done_steps = done

    def __enter__(self) -> Progression:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def started(self, job: Job) -> None:
        task = TaskID(0)
        if self._progress is not None:
            task = self._progress.add_task(job.name, total=self.steps[job.name], words="starting")
        else:
            print_line(self.console, f"{job.name}: {'going on' if Folder(job.folder).config.is_file() else 'started'}")
        self._under_way[job.name] = (job, task)

    def ended(self, job: Job, outcome: Outcome) -> None:
        _, task = self._under_way.pop(job.name)
        text = self.on_end(job, outcome)
        if outcome.status != "open":
            self.ended_count += 1
        if self._progress is not None:
            self._progress.remove_task(task)
            if outcome.status != "open":
                self._done_steps += self.steps[job.name]
        print_line(self.console, f"{job.name}: {text}  [{self.ended_count} of {self.count}]")

    def tick(self) -> None:
        if self._progress is None or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        together = self._done_steps
        for job, task in self._under_way.values():
            line = last_line(Folder(job.folder).metrics)
            if line is not None:
                together += line["step"]
                self._progress.update(task, completed=line["step"], words=words_of(line))
        self._progress.update(self._all, completed=together)


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of training, without reading the whole file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            texts = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    for text in reversed(texts):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "kind" not in line and "loss" in line:
            return line
    return None
