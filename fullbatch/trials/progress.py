"""What a person sees of a comparison or a search: live lines where there is a terminal, else a line a run; at the end
its tables."""

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
from fullbatch.config.run import RunConfig
from fullbatch.evaluation.metric_names import is_share
from fullbatch.training.display import print_line, words_of
from fullbatch.training.run_folder import Folder
from fullbatch.trials.search_plan import CHOSEN
from fullbatch.trials.statistics import Entry, Spread, with_spread
from fullbatch.trials.trial import Outcome, outcome_of

LOOK_EVERY = 1.0  # seconds
TAIL = 16_384  # bytes that surely hold the last lines of metrics.jsonl
NONE = "\u2013"  # an en dash for what is not known
MOST_RUNNING = 8  # lines of trials under way
MOST_ROWS = 10  # of a search's phase; search.csv has all
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
    """Steps of all runs together, so that the time left is meaningful; ``on_end`` is called after each run with its
    name and its outcome, and says how it ended."""

    _live: Progress | None

    def __init__(
        self, configs: Sequence[RunConfig], steps: Mapping[str, int], quiet: bool, on_end: Callable[[str, Outcome], str]
    ) -> None:
        super().__init__(quiet)
        self.steps, self.on_end = steps, on_end
        self.folders = {config.run.name: Folder.of(config) for config in configs}
        done = [name for name, folder in self.folders.items() if outcome_of(folder.path).status == "done"]
        self.ended_count = len(done)
        self._done_steps = sum(steps[name] for name in done)
        self.under_way: dict[str, TaskID] = {}
        self._looked = 0.0
        if self._has_bars:
            words, left = TextColumn("{task.description}"), TextColumn("{task.fields[words]}")
            columns = (words, BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), left)
            self._live = Progress(*columns, console=self.console, transient=True)
            total = sum(steps.values())
            self._all = self._live.add_task("all runs", total=total, completed=self._done_steps, words="steps")

    def started(self, name: str) -> None:
        self.under_way[name] = TaskID(0)
        if self._live is not None:
            self.under_way[name] = self._live.add_task(name, total=self.steps[name], words="starting")
        else:
            print_line(self.console, f"{name}: {'going on' if self.folders[name].begun else 'started'}")

    def ended(self, name: str, outcome: Outcome) -> None:
        task, text = self.under_way.pop(name), self.on_end(name, outcome)
        if outcome.status != "open":
            self.ended_count += 1
            self._done_steps += self.steps[name]
        if self._live is not None:
            self._live.remove_task(task)
        print_line(self.console, f"{name}: {text}  [{self.ended_count} of {len(self.folders)}]")

    def tick(self) -> None:
        if self._live is None or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        together = self._done_steps
        for name, task in self.under_way.items():
            line = last_metrics(self.folders[name].metrics)
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


class SearchDisplay(_Display):
    """Fed with summaries; says each trial that has ended once, and keeps a few live lines where there is a terminal."""

    _live: Live | None

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        super().__init__(quiet, console)
        if self._has_bars:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
        self._told: set[tuple[str, int]] = set()
        self._begun: set[str] = set()

    def known(self, summary: Entry) -> None:
        """What had ended before this process began is not news."""
        self._told = {(phase["name"], trial["slot"]) for phase in summary["phases"] for trial in phase["trials"]}
        self._begun = {phase["name"] for phase in summary["phases"] if phase["trials"]}

    def show(self, summary: Entry, steps: Steps = lambda phase, slot: "") -> None:
        for phase in summary["phases"]:
            self._tell(phase, summary)
        if self._live is not None:
            self._live.update(live_view(summary, steps), refresh=True)

    def _tell(self, phase: Entry, summary: Entry) -> None:
        name, trials, metrics = phase["name"], phase["trials"], summary["metrics"]
        if name not in self._begun and (trials or phase.get("running")):
            self._begun.add(name)
            by = ", ".join(metric["short"] for metric in metrics)
            print_line(self.console, f"{name}: {phase['owed']} trials, by {by}")
        new = [trial for trial in trials if (name, trial["slot"]) not in self._told]
        for trial in sorted(new, key=lambda trial: (trial["ended"], trial["slot"])):
            self._told.add((name, trial["slot"]))
            told = sum(phase_name == name for phase_name, _ in self._told)
            cost = "" if self._live is not None else f", {cost_and_left(summary['cost'])}"
            print_line(self.console, f"{trial_line(name, trial, metrics)}  [{told} of {phase['owed']}]{cost}")
        if new and len(trials) >= phase["owed"]:
            best = best_line(phase, metrics)
            print_line(self.console, f"{name}: ended{f'; {best}' if best else ''}")


def live_view(summary: Entry, steps: Steps = lambda phase, slot: "") -> Group:
    """A bar a phase, the trials under way and how far they are, and what it cost."""
    bars = Table.grid(padding=(0, 2))
    lines: list[Text] = []
    for phase in summary["phases"]:
        done, owed, running = len(phase["trials"]), phase["owed"], phase.get("running") or []
        count = f"{done} of {owed}" + (f", {len(running)} running" if running else "")
        best = best_line(phase, summary["metrics"]) if done else ""
        bar = ProgressBar(total=max(owed, 1), completed=done, width=20)
        bars.add_row(Text(phase["name"]), bar, Text(count), Text(message(best)))
        for trial in running[:MOST_RUNNING]:
            words = (trial["label"], trial["worker"], steps(phase["name"], trial["slot"]))
            line = f"  {phase['name']} {trial['slot']}: {', '.join(word for word in words if word)}"
            lines.append(Text(message(line), style="dim"))
        if len(running) > MOST_RUNNING:
            lines.append(Text(f"  and {len(running) - MOST_RUNNING} more", style="dim"))
    return Group(bars, *lines, Text(cost_and_left(summary["cost"])))


def trial_line(phase: str, trial: Entry, metrics: Sequence[Entry]) -> str:
    """As "choices 3, radam + sogclr: 20.00%, 1 min 5 s"."""
    slot = f"{phase} {trial['slot']}"
    name = slot if trial["label"] == slot else f"{slot}, {trial['label']}"
    if trial["status"] == "failed":
        return f"{name}: failed, {trial['error'] or 'no reason given'}"
    status = {"done": "", "stopped": "stopped early, "}.get(trial["status"], f"{trial['status']}, ")
    values = _values(trial["values"] or (), metrics)
    words = f"{values}, " if values and trial["status"] != "diverged" else ""
    return f"{name}: {status}{words}{duration(trial['seconds'])}"


def best_line(phase: Entry, metrics: Sequence[Entry]) -> str:
    """Of finals none: a single seed is not what they are about."""
    best = next((trial for trial in phase["trials"] if trial["rank"] == 1), None)
    if best is None or best["values"] is None or best["status"] == "diverged" or phase["name"] == "finals":
        return ""
    return f"best {best['label']} with {_values(best['values'], metrics)}"


def _values(values: Sequence[float | None], metrics: Sequence[Entry]) -> str:
    """One metric goes without its name, which the phase's first line has."""
    pairs = [(metric, value) for metric, value in zip(metrics, values, strict=False) if value is not None]
    return ", ".join(f"{metric['short']} " * (len(metrics) > 1) + measured(metric, value) for metric, value in pairs)


def measured(metric: Entry, mean: float | None, sd: float | None = None) -> str:
    """
    >>> measured({"share": True}, 0.2, 0.01), measured({"share": False}, 65.0)
    ('20.00 ± 1.00%', '65')
    """
    return NONE if mean is None else with_spread(mean, sd, metric["share"]) + ("%" if metric["share"] else "")


def duration(seconds: float) -> str:
    """
    >>> duration(7.25), duration(65), duration(7300)
    ('7.2 s', '1 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def cost_and_left(cost: Entry) -> str:
    left = "time left not known yet" if cost["left_seconds"] is None else f"about {duration(cost['left_seconds'])} left"
    left = "nothing left" if cost["trials_done"] >= cost["trials_owed"] else left
    return f"{cost['device_hours']:.3g} device-hours, {left}"


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


def print_comparison(summary: Entry, console: Console) -> None:
    for metric in _main_metrics(summary):
        _print_metric(summary, metric, console)
    if any(run["status"] == "done" for run in summary["runs"]):
        _print_costs(summary["runs"], console)
    for match in summary["matches"]:
        print_line(console, match["text"])
    for status, words in (("failed", "failed"), ("open", "not run to its end")):
        for run in summary["runs"]:
            if run["status"] == status:
                print_line(console, f"{run['name']} {words}{': ' if run['error'] else ''}{run['error']}")


def _main_metrics(summary: Entry) -> list[str]:
    """The metric looked at, then one of every other task, of the same name where it has it."""
    by_task = {summary["metric"].rpartition(" ")[0]: summary["metric"]}
    known = list(dict.fromkeys(cell["metric"] for cell in summary["table"]))
    for task in summary["tasks"]:
        own = [metric for metric in known if metric.rpartition(" ")[0] == task]
        main = [metric for metric in own if metric.rpartition(" ")[2] in ("mean_r1", "accuracy")]
        if own:
            by_task.setdefault(task, (main or own)[0])
    return [metric for metric in by_task.values() if metric in known]


def _print_metric(summary: Entry, metric: str, console: Console) -> None:
    cells, against = (
        {(cell["method"], cell["batch_size"]): cell for cell in summary[part] if cell["metric"] == metric}
        for part in ("table", "differences")
    )

    def shown(cell: Entry | None, sign: str) -> str:
        return "" if cell is None else with_spread(cell["mean"], cell["sd"], is_share(metric), sign)

    sizes = sorted({size for _, size in cells})
    differing = [size for size in sizes if any(where == size for _, where in against)]
    heads = [*(f"B {size}" for size in sizes), *(f"B {size}, less {summary['baseline']}" for size in differing)]
    rows = [["method", *heads]]
    for method in dict.fromkeys(run["method"] for run in summary["runs"]):
        values = [shown(cells.get((method, size)), "") for size in sizes]
        rows.append([method, *values, *(shown(against.get((method, size)), "+") for size in differing)])
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


def _print_costs(runs: Sequence[Entry], console: Console) -> None:
    """Time and memory; the mean over seeds."""
    cells: dict[tuple[str, int], list[Entry]] = {}
    for run in runs:
        if run["status"] == "done":
            cells.setdefault((run["method"], run["batch_size"]), []).append(run)
    known = [cost for cost in _COSTS if any(run[cost[1]] is not None for run in runs)]
    rows = [["method", "B", *(title for title, _, _ in known), "runs"]]
    for (method, size), own in cells.items():
        values = []
        for _, name, form in known:
            numbers = tuple(run[name] for run in own if run[name] is not None)
            values.append(format(Spread(numbers).mean, form) if numbers else "")
        rows.append([method, str(size), *values, str(len(own))])
    _print_columns("a run, mean over seeds", rows, console)


def print_search(summary: Entry, console: Console) -> None:
    """The best trials of each phase, the finalists, the winner."""
    metrics, cost = summary["metrics"], summary["cost"]
    for head, metric in zip(_heads(metrics), metrics, strict=True):
        if head != metric["short"] and cost["trials_done"]:
            print_line(console, f"{head}: {metric['short']}")
            console.print()
    for phase in summary["phases"]:
        if phase["name"] != "finals" and phase["trials"]:
            _print_phase(phase, metrics, console)
    if summary["finalists"]:
        rows = [["config", *_heads(metrics), "seeds", ""], *(_finalist(one, metrics) for one in summary["finalists"])]
        _print_columns("finalists, mean ± standard deviation over seeds", rows, console, styled=True)
    for phase in summary["phases"]:
        for trial in phase["trials"]:
            if trial["status"] == "failed":
                print_line(console, trial_line(phase["name"], trial, metrics))
    if summary["winner"] is not None:
        print_line(console, summary["winner"]["said"])
    done = f"{cost['trials_done']} of {cost['trials_owed']} trials"
    print_line(console, f"{done}, {duration(cost['seconds'])} of training, {cost['device_hours']:.3g} device-hours")


def _heads(metrics: Sequence[Entry]) -> list[str]:
    """Of columns: a long metric has a name for it."""
    numbers = [""] if len(metrics) == 1 else [f" {place}" for place in range(1, len(metrics) + 1)]
    short = [metric["short"] for metric in metrics]
    return [name if len(name) <= 24 else f"value{number}" for name, number in zip(short, numbers, strict=True)]


def _print_phase(phase: Entry, metrics: Sequence[Entry], console: Console) -> None:
    """Settings that differ have columns; the others are in the title."""
    order = sorted(phase["trials"], key=lambda trial: (trial["rank"] is None, trial["rank"] or 0, trial["slot"]))
    names = list(dict.fromkeys(name for trial in order for name in trial["params"]))
    varied = [name for name in names if len({repr(trial["params"].get(name)) for trial in order}) > 1]
    own = [name for name in varied if name not in CHOSEN]
    fixed = [f"{name} {_setting(order[0]['params'].get(name))}" for name in names if name not in varied]
    title = f"{phase['name']}: {len(order)} of {phase['owed']} trials{', all with ' if fixed else ''}{', '.join(fixed)}"
    rows = [["trial", "rank", *_heads(metrics), *own, "status", "time"]]
    for trial in order[:MOST_ROWS]:
        values = zip(metrics, trial["values"] or [None] * len(metrics), strict=True)
        settings = [_setting(trial["params"][name]) if name in trial["params"] else NONE for name in own]
        rank = NONE if trial["rank"] is None else str(trial["rank"])
        shown = [rank, *(measured(*pair) for pair in values), *settings]
        rows.append([trial["label"], *shown, trial["status"], duration(trial["seconds"])])
    after = f"and {len(order) - MOST_ROWS} more, in search.csv" if len(order) > MOST_ROWS else ""
    _print_columns(title, rows, console, after, styled=True)


def _setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finalist(finalist: Entry, metrics: Sequence[Entry]) -> list[str]:
    means, spreads = (finalist[name] or [None] * len(metrics) for name in ("mean", "sd"))
    remarks = [finalist["kind"]] if finalist["kind"] == "baseline" else []
    remarks += [f"{finalist['diverged']} diverged"] if finalist["diverged"] else []
    remarks += [f"{finalist['missing']} without a value"] if finalist["missing"] else []
    cells = [measured(*parts) for parts in zip(metrics, means, spreads, strict=True)]
    return [finalist["name"], *cells, str(len(finalist["seeds"])), ", ".join(remarks)]
