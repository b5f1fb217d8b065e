"""A comparison from its plan to its tables, in a folder; docs/how-to/compare.md says what each of its files is."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fullbatch.config.messages import cell
from fullbatch.config.optimization import Schedule
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import write_values
from fullbatch.data.durable import read_lines
from fullbatch.evaluation.metric_names import LINEAR, is_share, metric_named, named_numbers
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.training.run_folder import Folder, alone_in, can_be_locked, replace_text
from fullbatch.trials.checks import check_begun, check_runs, check_same_plan
from fullbatch.trials.comparison_plan import Plan, PlannedRun, plan_from, read_plan
from fullbatch.trials.processes import OUTPUT, Member, Pace, WorkerContext, WorkerPool, in_brackets, last_line, print_to
from fullbatch.trials.progress import RunsDisplay
from fullbatch.trials.statistics import Guessing, Spread, match, paired
from fullbatch.trials.trial import OUTCOME, Outcome, clear, execute, outcome_of

PLAN, SUMMARY, CALIBRATION = "plan.yaml", "comparison.json", "calibration.json"
TRIES = 2  # of a run whose process dies
LOOK_EVERY = 1.0  # seconds between looks for a run that others have left
WARM_UP, MEASURED = 20, 80  # steps: caches, compilation and graphs first; then enough for what happens now and then


def race(plan: Plan, folder: Path, pace: Pace) -> dict[str, Any]:
    """Run what is not done yet; the summary, as in comparison.json.  Several processes may do so at once."""
    until = pace.until()
    configs = plan.configs(folder)
    if (folder / PLAN).is_file():
        check_same_plan(planned_in(folder), plan, folder)
    steps = check_runs(configs)
    tasks = tasks_of(configs[0])
    metric = metric_named(plan.metric, tasks)
    training = plan.base["training"]
    length = {"samples": training["samples"]} if training["samples"] else {"epochs": training["epochs"]}
    budget = {**length, "equal_time": plan.equal_time}
    with alone_in(folder):
        if plan.equal_time is None:
            check_begun(configs)
        replace_text(folder / PLAN, write_values(plan.as_dict()))
        if plan.equal_time is not None:
            seconds = _timed(plan, folder, pace)
            samples = samples_in_equal_time(plan, seconds, steps)
            budget |= {"seconds_a_step": seconds, "samples_of_runs": samples}
            configs = plan.configs(folder, samples)
            check_begun(configs)
            steps = check_runs(configs)
        for config in configs:
            known = _outcome(config)
            if known.status == "failed" and (known.again or pace.retry_failed):
                (Folder.of(config).path / OUTCOME).unlink()

    def write_summary() -> dict[str, Any]:
        """Of the plan in the folder: another command may have added runs."""
        with alone_in(folder):
            latest = plan if plan.equal_time is not None else planned_in(folder)
            of_latest = configs if latest == plan else latest.configs(folder)
            summary = summarize(latest, of_latest, budget, tasks, metric)
            replace_text(folder / SUMMARY, json.dumps(summary, indent=1))
            write_csv(summary, folder / "comparison.csv")
        return summary

    def ending(name: str, outcome: Outcome) -> str:
        run = next(run for run in write_summary()["runs"] if run["name"] == name)
        return outcome.error if outcome.status == "open" and outcome.error else _words(run, metric)

    write_summary()
    with RunsDisplay(configs, steps, pace.quiet, ending) as display:
        train_runs(configs, pace.jobs, display, until)
    return write_summary()


def planned_in(folder: Path) -> Plan:
    """The plan of a comparison that was begun."""
    if not (folder / PLAN).is_file():
        raise ValueError(f"{folder} is not the folder of a comparison: there is no {PLAN} in it.")
    return plan_from(read_plan(folder / PLAN))


def _words(run: Mapping[str, Any], metric: str) -> str:
    if run["status"] == "failed":
        return f"failed: {run['error']}"
    if run["status"] == "open":
        return f"stopped at step {run['steps']}"
    number = _short(run["results"].get(metric), metric)
    return f"{number} {metric.rpartition(' ')[2]} in {run['seconds']:.0f} s of training"


def _short(value: float | None, metric: str) -> str:
    return "no" if value is None else f"{value:.2%}" if is_share(metric) else f"{value:.1f}"


# ---------------------------------------------------------------------------------------------------------------------
# Workers take the first run that is open and that no other process works on: a lock in its folder, which dies with its
# process, says so.  So several commands, also on several machines with a shared disk, may work on one comparison.


def train_runs(configs: Sequence[RunConfig], side_by_side: int, display: RunsDisplay, until: float = math.inf) -> None:
    """All that are open, in this order; after a signal those under way are saved, and Interrupted is raised.  After
    ``until``, by this machine's monotonic clock, no run is begun."""
    is_open = [config for config in configs if _outcome(config).status == "open"]
    if not is_open or time.monotonic() > until:
        return
    deaths = Counter[str]()

    def hear(message: tuple[str, Outcome | None]) -> None:
        name, outcome = message
        if outcome is None:
            display.started(name)
        elif name in display.under_way:  # else another process has just ended it
            display.ended(name, outcome)

    def died(member: Member) -> None:
        """Of a signal of the user's, of too little memory, of a crash in a kernel."""
        name, _ = member.message or ("", None)
        if name not in display.under_way:
            return  # it died between two runs
        folder = display.folders[name].path
        deaths[name] += 1
        words = in_brackets(last_line(folder / OUTPUT)) if (member.process.exitcode or 0) > 0 else ""
        why = f"its process ended {member.ending}{words}"
        outcome = Outcome("open", f"{why}; it is tried again")
        if deaths[name] >= TRIES:
            outcome = Outcome("failed", f"{why}, {TRIES} times", again=True)
            with suppress(Abandoned), alone_in(folder, lambda: True):  # unless another command trains it
                outcome.write(folder)
        display.ended(name, outcome)

    advice = f"Go on with: fullbatch compare --resume {Path(configs[0].run.runs).parent}"
    pool = WorkerPool(side_by_side, len(is_open), hear, died, display.tick, advice)
    pool.run(partial(_work, configs=is_open, side_by_side=side_by_side, until=until))


def _outcome(config: RunConfig) -> Outcome:
    return outcome_of(Folder.of(config).path)


def _work(worker: WorkerContext, configs: Sequence[RunConfig], side_by_side: int, until: float) -> None:
    """Until all runs have ended: another process that works on one may be about to stop, or to die."""
    if not can_be_locked(Path(configs[0].run.runs)):  # then each worker has runs of its own
        configs = configs[worker.place :: side_by_side]
    while not worker.stopping and time.monotonic() < until:
        if any(_tried(worker, config) for config in configs):
            continue
        if all(_outcome(config).status != "open" for config in configs):
            return
        time.sleep(LOOK_EVERY)


def _tried(worker: WorkerContext, config: RunConfig) -> bool:
    """Whether it was for this process to train."""

    def begin() -> None:
        worker.say((config.run.name, None))
        print_to(Folder.of(config).path / OUTPUT)

    if _outcome(config).status != "open":
        return False
    try:
        outcome = execute(config, lambda: True, begin)
    except Abandoned:  # another process is at work in it
        return False
    except Interrupted:
        worker.say((config.run.name, Outcome("open")))
        raise
    worker.say((config.run.name, outcome))
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Equal time in place of equal samples, as in NeuCLIP's Table 13: a short run of every row at every batch size says how
# long a step takes, and each row gets the samples that fit into the time of the row named.


def _timed(plan: Plan, folder: Path, pace: Pace) -> dict[str, float]:
    """Seconds a step for each cell: measured once, one run at a time, and kept in the folder.

    A run that was interrupted is thrown away: gone on with, it would start and warm up again among the steps timed.
    """
    kept = folder / CALIBRATION
    known: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    first = {run.cell: run for run in reversed(plan.planned) if run.cell not in known}
    cells = [run for run in plan.planned if first.get(run.cell) == run]
    configs = [_timing_config(plan.config(run, str(folder / "calibration")), run.cell) for run in cells]
    waiting = [config for config in configs if _outcome(config).status != "done"]
    for config in waiting:
        run_folder = Folder.of(config).path
        with alone_in(run_folder):
            clear(run_folder)
    steps = {config.run.name: WARM_UP + MEASURED for config in configs}
    with RunsDisplay(configs, steps, pace.quiet, lambda name, outcome: f"timed ({outcome.status})") as display:
        train_runs(waiting, 1, display)
    known |= {config.run.name: _measured(config) for config in configs}
    replace_text(kept, json.dumps(known, indent=1))
    return known


def _timing_config(config: RunConfig, name: str) -> RunConfig:
    """The run's own steps, a few of them, at a constant rate and without an evaluation."""
    return replace(
        config,
        training=replace(config.training, samples=(WARM_UP + MEASURED) * _pairs_a_step(config)),
        schedule=Schedule(schedule="constant"),
        evaluation=Evaluation(evaluate=(), audit_every=0),
        run=replace(config.run, name=name, log_every=WARM_UP, save_minutes=None, save_every=None, tensorboard=False),
    )


def _pairs_a_step(config: RunConfig) -> int:
    """OSGD's averaged reading takes several batches a step."""
    return config.training.batch_size * config.selection.batches_a_step


def _measured(config: RunConfig) -> float:
    lines = read_lines(Folder.of(config).metrics)
    at = {line["step"]: line.get("seconds") for line in lines if "kind" not in line}
    first, last = at.get(WARM_UP), at.get(WARM_UP + MEASURED)
    if first is None or last is None:
        reason = _outcome(config).error or "the run did not end"
        raise ValueError(f"The steps of {config.run.name} could not be timed: {reason}.")
    return float(last - first) / MEASURED


def samples_in_equal_time(plan: Plan, seconds: Mapping[str, float], steps: Mapping[str, int]) -> dict[str, int]:
    """The samples each run may see: as many steps as fit into the time of the reference's at its batch size."""
    assert plan.equal_time is not None
    reference = plan.row(plan.equal_time, "equal_time")
    samples = {}
    for run in plan.planned:
        there = replace(run, row=reference)
        if there.cell not in seconds:
            raise ValueError(
                f"--equal-time {plan.equal_time}: it does not run at batch size {run.batch_size}, so there is no time "
                f"for {run.name} to equal."
            )
        its_steps = next(steps[other.name] for other in plan.planned if other.cell == there.cell)
        fitting = max(1, round(its_steps * seconds[there.cell] / seconds[run.cell]))
        samples[run.name] = fitting * _pairs_a_step(plan.config(run, ""))
    return samples


# ---------------------------------------------------------------------------------------------------------------------
# comparison.json: what the runs came to, read from their folders

Cells = dict[tuple[str, int, str], dict[int, float]]  # (row, batch size, metric) -> seed -> value


def summarize(
    plan: Plan, configs: Sequence[RunConfig], budget: Mapping[str, Any], tasks: Sequence[str], metric: str
) -> dict[str, Any]:
    runs = [_run(run, config) for run, config in zip(plan.planned, configs, strict=True)]
    results = (Folder.of(config).read_results() for config in configs if _outcome(config).status == "done")
    guessing = next((guessing_of(of_run, metric) for of_run in results if of_run), None)  # all have the same tasks
    cells: Cells = {}
    for run in runs:  # of one that has not ended well there are no results
        for name, value in run["results"].items():
            cells.setdefault((run["method"], run["batch_size"], name), {})[run["seed"]] = value
    return {
        "name": plan.name,
        "budget": dict(budget),
        "tasks": list(tasks),
        "metric": metric,
        "baseline": plan.baseline,
        "runs": runs,
        "table": [
            {"method": method, "batch_size": size, "metric": name, **_spread(of).as_dict(), "seeds": sorted(of)}
            for (method, size, name), of in cells.items()
        ],
        "differences": [
            {"method": method, "against": plan.baseline, "batch_size": size, "metric": name, **difference.as_dict()}
            for (method, size, name), ours in cells.items()
            if method != plan.baseline
            and (difference := paired(ours, cells.get((plan.baseline, size, name), {}))) is not None
        ],
        "matches": _matches(plan, cells, metric, guessing),
    }


def _run(run: PlannedRun, config: RunConfig) -> dict[str, Any]:
    folder, outcome = Folder.of(config), _outcome(config)
    lines = read_lines(folder.metrics) if folder.metrics.is_file() else []
    training = [line for line in lines if "kind" not in line]
    audits = [line for line in lines if line.get("kind") == "audit"]
    last = training[-1] if training else {}
    seconds, samples = last.get("seconds"), last.get("samples", 0)
    return {
        "name": run.name,
        "folder": f"runs/{run.name}",
        "method": run.row.name,
        "settings": {"method": run.row.method, **config.objective.settings},
        "batch_size": run.batch_size,
        "seed": run.seed,
        "status": outcome.status,
        "error": outcome.error,
        "steps": last.get("step", 0),
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else None,
        "gpu_gib": max((line["gpu_gib"] for line in training if line.get("gpu_gib") is not None), default=None),
        "memory_gib": outcome.memory_gib,
        "results": named_numbers(folder.read_results()) if outcome.status == "done" else {},
        "normalizer_error": audits[-1].get("normalizer_error") if audits else None,
        "tau": last.get("tau"),
    }


def _spread(values: Mapping[int, float]) -> Spread:
    return Spread(tuple(values[seed] for seed in sorted(values)))


def guessing_of(results: Mapping[str, Any], metric: str) -> Guessing | None:
    """What guessing gives for "TASK METRIC"; None where it is not known: of ranks and averages, of a top 5 or 10."""
    for result in results.get("results", ()):
        task, main, name = result["task"], result["main"], metric.rpartition(" ")[2]
        alike = name == main or (main == "mean_r1" and name.endswith("_r1")) or {main, name} <= set(LINEAR)
        asked = result.get("counts", {}).get("images", 0)
        if metric == f"{task} {name}" and alike and asked:
            return Guessing(result["chance"], asked)
    return None


def _matches(plan: Plan, cells: Cells, metric: str, guessing: Guessing | None) -> list[dict[str, Any]]:
    rows = {(method, size): _spread(of) for (method, size, name), of in cells.items() if name == metric}
    theirs = {size: spread for (method, size), spread in rows.items() if method == plan.baseline}
    matches = []
    for (method, size), ours in rows.items():
        if theirs and method != plan.baseline:
            made = match(method, size, ours, plan.baseline, theirs, is_share(metric), guessing)
            matches.append({"method": method, "batch_size": size, "against": plan.baseline, **vars(made)})
    return matches


def write_csv(summary: Mapping[str, Any], path: Path) -> None:
    """The table, for those who draw their own figures."""
    names = ("method", "batch_size", "metric", "mean", "sd", "values")
    file = io.StringIO(newline="")
    table = csv.writer(file)
    table.writerow(names)
    for row in summary["table"]:
        table.writerow([*(cell(row[name]) for name in names[:-1]), " ".join(map(str, row["values"]))])
    replace_text(path, file.getvalue())
