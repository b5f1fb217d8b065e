"""What a person sees while a comparison or a search runs: live lines where there is a terminal, else a line a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from fullbatch.config.messages import message
from fullbatch.training.display import print_line, words_of
from fullbatch.training.run_folder import Folder
from fullbatch.trials.comparison_plan import Job
from fullbatch.trials.comparison_runs import Outcome, outcome_of

LOOK_EVERY = 1.0  # seconds
TAIL = 16_384  # bytes that surely hold the last lines of metrics.jsonl
NONE = "\u2013"  # an en dash for what is not known
MOST_RUNNING = 8  # lines of trials under way
Steps = Callable[[Any, int], str]  # phase and slot of a trial under way -> how far it is; empty: not known


class _Display:
    """Lines, and below them something live where there is a terminal."""

    _live: Progress | Live | None = None

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._has_bars = not quiet and self.console.is_terminal

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()


class RunsDisplay(_Display):
    """Steps of all runs together, so that the time left is meaningful.

    on_end   called after each run with its outcome
    """

    _live: Progress | None

    def __init__(
        self, jobs: Sequence[Job], steps: Mapping[str, int], quiet: bool, on_end: Callable[[Job, Outcome], str]
    ) -> None:
        super().__init__(quiet)
        self.steps, self.on_end, self.count = steps, on_end, len(jobs)
        ended = [job for job in jobs if outcome_of(job.folder).status == "done"]
        self.ended_count = len(ended)
        self._under_way: dict[str, tuple[Job, TaskID]] = {}
        self._looked = 0.0
        if self._has_bars:
            words, left = TextColumn("{task.description}"), TextColumn("{task.fields[words]}")
            columns = (words, BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), left)
            self._live = Progress(*columns, console=self.console, transient=True)
            done = sum(steps[job.name] for job in ended)
            self._all = self._live.add_task("all runs", total=sum(steps.values()), completed=done, words="steps")
            self._done_steps = done

    def started(self, job: Job) -> None:
        task = TaskID(0)
        if self._live is not None:
            task = self._live.add_task(job.name, total=self.steps[job.name], words="starting")
        else:
            print_line(self.console, f"{job.name}: {'going on' if Folder(job.folder).config.is_file() else 'started'}")
        self._under_way[job.name] = (job, task)

    def ended(self, job: Job, outcome: Outcome) -> None:
        _, task = self._under_way.pop(job.name)
        text = self.on_end(job, outcome)
        if outcome.status != "open":
            self.ended_count += 1
        if self._live is not None:
            self._live.remove_task(task)
            if outcome.status != "open":
                self._done_steps += self.steps[job.name]
        print_line(self.console, f"{job.name}: {text}  [{self.ended_count} of {self.count}]")

    def tick(self) -> None:
        if self._live is None or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        together = self._done_steps
        for job, task in self._under_way.values():
            line = last_metrics(Folder(job.folder).metrics)
            if line is not None:
                together += line["step"]
                self._live.update(task, completed=line["step"], words=words_of(line))
        self._live.update(self._all, completed=together)


def last_metrics(path: Path) -> dict[str, Any] | None:
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


# ---------------------------------------------------------------------------------------------------------------------
# searches


class SearchDisplay(_Display):
    """Fed with summaries; says each trial that has ended once, and keeps a few live lines where there is a terminal.

    quiet    lines only
    """

    _live: Live | None

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        super().__init__(quiet, console)
        if self._has_bars:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
        self._told: set[tuple[str, int]] = set()
        self._begun: set[str] = set()

    def known(self, summary: Mapping[str, Any]) -> None:
        """What had ended before this process began is not news."""
        self._told = {(phase["name"], trial["slot"]) for phase in summary["phases"] for trial in phase["trials"]}
        self._begun = {phase["name"] for phase in summary["phases"] if phase["trials"]}

    def show(self, summary: Mapping[str, Any], steps: Steps = lambda phase, slot: "") -> None:
        for phase in summary["phases"]:
            self._tell(phase, summary)
        if self._live is not None:
            self._live.update(live_view(summary, steps), refresh=True)

    def _tell(self, phase: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        name, trials = phase["name"], phase["trials"]
        if name not in self._begun and (trials or phase.get("running")):
            self._begun.add(name)
            by = ", ".join(metric["short"] for metric in summary["metrics"])
            print_line(self.console, f"{name}: {phase['owed']} trials, by {by}")
        new = [trial for trial in trials if (name, trial["slot"]) not in self._told]
        for trial in sorted(new, key=lambda trial: (trial["ended"], trial["slot"])):
            self._told.add((name, trial["slot"]))
            told = sum(phase_name == name for phase_name, _ in self._told)
            cost = "" if self._live is not None else f", {cost_and_left(summary['cost'])}"
            print_line(
                self.console, f"{trial_line(name, trial, summary['metrics'])}  [{told} of {phase['owed']}]{cost}"
            )
        if new and len(trials) >= phase["owed"]:
            best = best_line(phase, summary["metrics"])
            print_line(self.console, f"{name}: ended{f'; {best}' if best else ''}")


# ---------------------------------------------------------------------------------------------------------------------
# words


def trial_line(phase: str, trial: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """
    >>> metric = {"short": "mean_r1", "share": True}
    >>> trial = {"slot": 3, "label": "radam + sogclr", "status": "done", "values": [0.2], "seconds": 65.0, "error": ""}
    >>> trial_line("choices", trial, [metric])
    'choices 3, radam + sogclr: 20.00%, 1 min 5 s'
    """
    slot = f"{phase} {trial['slot']}"
    name = slot if trial["label"] == slot else f"{slot}, {trial['label']}"
    if trial["status"] == "failed":
        return f"{name}: failed, {trial['error'] or 'no reason given'}"
    status = {"done": "", "stopped": "stopped early, "}.get(trial["status"], f"{trial['status']}, ")
    said = _values(trial["values"] or (), metrics)
    words = f"{said}, " if said and trial["status"] != "diverged" else ""
    return f"{name}: {status}{words}{duration(trial['seconds'])}"


def best_line(phase: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Of finals none: a single seed is not what they are about."""
    best = next((trial for trial in phase["trials"] if trial["rank"] == 1), None)
    if best is None or best["values"] is None or best["status"] == "diverged" or phase["name"] == "finals":
        return ""
    return f"best {best['label']} with {_values(best['values'], metrics)}"


def _values(values: Sequence[float | None], metrics: Sequence[Mapping[str, Any]]) -> str:
    """One metric goes without its name, which the phase's first line has."""
    pairs = [(metric, value) for metric, value in zip(metrics, values, strict=False) if value is not None]
    names = [f"{metric['short']} " if len(metrics) > 1 else "" for metric, _ in pairs]
    return ", ".join(f"{name}{measured(*pair)}" for name, pair in zip(names, pairs, strict=True))


def measured(metric: Mapping[str, Any], mean: float | None, sd: float | None = None) -> str:
    """
    >>> measured({"share": True}, 0.2, 0.01), measured({"share": False}, 65.0)
    ('20.00 ± 1.00%', '65')
    """
    if mean is None:
        return NONE
    scale, form, unit = (100.0, ".2f", "%") if metric["share"] else (1.0, ".4g", "")
    spread = "" if sd is None else f" ± {scale * sd:{form}}"
    return f"{scale * mean:{form}}{spread}{unit}"


def duration(seconds: float) -> str:
    """
    >>> duration(7.25), duration(65), duration(7300)
    ('7.2 s', '1 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


# ---------------------------------------------------------------------------------------------------------------------
# the live lines


def live_view(summary: Mapping[str, Any], steps: Steps = lambda phase, slot: "") -> Group:
    """A bar a phase, the trials under way and how far they are, and what it cost."""
    bars = Table.grid(padding=(0, 2))
    lines: list[Text] = []
    for phase in summary["phases"]:
        done, owed, running = len(phase["trials"]), phase["owed"], phase.get("running") or []
        count = f"{done} of {owed}" + (f", {len(running)} running" if running else "")
        best = best_line(phase, summary["metrics"]) if done else ""
        bars.add_row(
            Text(phase["name"]),
            ProgressBar(total=max(owed, 1), completed=done, width=20),
            Text(count),
            Text(message(best)),
        )
        for one in running[:MOST_RUNNING]:
            words = (one["label"], one["worker"], steps(phase["name"], one["slot"]))
            line = f"  {phase['name']} {one['slot']}: {', '.join(word for word in words if word)}"
            lines.append(Text(message(line), style="dim"))
        if len(running) > MOST_RUNNING:
            lines.append(Text(f"  and {len(running) - MOST_RUNNING} more", style="dim"))
    return Group(bars, *lines, Text(cost_and_left(summary["cost"])))


def cost_and_left(cost: Mapping[str, Any]) -> str:
    left = cost["left_seconds"]
    if cost["trials_done"] >= cost["trials_owed"]:
        rest = "nothing left"
    elif left is None:
        rest = "time left not known yet"
    else:
        rest = f"about {duration(left)} left"
    return f"{cost['device_hours']:.3g} device-hours, {rest}"
