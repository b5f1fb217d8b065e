"""A comparison from its plan to its tables.

comparisons/NAME/
  plan.yaml          what is compared; `fullbatch compare --resume` reads it
  runs/              an ordinary run folder each, with outcome.json (how it ended) and output.txt (what it said)
  comparison.json    every run's numbers, the table, paired differences, matches; rewritten whenever a run ends
  comparison.csv     the table
  report.html        the page
  calibration.json   seconds a step, where times are to be equal; calibration/ has the runs that were timed
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullbatch.config.messages import cell
from fullbatch.config.optimization import Schedule
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import write_values
from fullbatch.evaluation.metric_names import LINEAR, is_share, metric_named, named_numbers
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.training.interruption import Interrupted
from fullbatch.training.run_folder import Folder, alone_in, read_lines, replace_text
from fullbatch.trials.checks import check_begun, check_jobs, check_measured, check_same_plan, check_same_time
from fullbatch.trials.comparison_plan import Job, Plan, PlannedRun, plan_from, read_plan
from fullbatch.trials.comparison_runs import OUTCOME, Outcome, outcome_of, train_runs
from fullbatch.trials.processes import Pace
from fullbatch.trials.progress import RunsDisplay
from fullbatch.trials.statistics import Guessing, Spread, match, paired
from fullbatch.trials.trial import clear

PLAN, SUMMARY, CALIBRATION = "plan.yaml", "comparison.json", "calibration.json"
WARM_UP, MEASURED = 20, 80  # steps: caches, compilation and graphs first; then enough for what happens now and then


def race(plan: Plan, folder: Path, pace: Pace) -> dict[str, Any]:
    """Run what is not done yet; the summary, as in comparison.json.  Several processes may do so at once."""
    until = pace.until()
    jobs = _jobs(plan, folder)
    if (folder / PLAN).is_file():
        before = planned_in(folder)
        check_same_time(before, plan, str(folder))
        check_same_plan(_jobs(before, folder), jobs, str(folder))
    steps = check_jobs(jobs)
    tasks = tasks_of(jobs[0].config)
    metric = metric_named(plan.metric, tasks)
    check_measured(jobs, tasks)
    training = plan.base["training"]
    length = {"samples": training["samples"]} if training["samples"] else {"epochs": training["epochs"]}
    budget = {**length, "equal_time": plan.equal_time}
    with alone_in(folder), _resumable(folder):
        if plan.equal_time is None:
            check_begun(jobs)
        replace_text(folder / PLAN, write_values(plan.as_dict()))
        if plan.equal_time is not None:
            seconds = _timed(plan, folder, pace)
            samples = samples_in_equal_time(plan, seconds, steps)
            budget |= {"seconds_a_step": seconds, "samples_of_runs": samples}
            jobs = _jobs(plan, folder, samples)
            check_begun(jobs)
            steps = check_jobs(jobs)
        for job in jobs:
            known = outcome_of(job.folder)
            if known.status == "failed" and (known.again or pace.retry_failed):
                (job.folder / OUTCOME).unlink()

    def write_summary() -> dict[str, Any]:
        """Of the plan in the folder: another command may have added runs."""
        with alone_in(folder):
            latest = plan if plan.equal_time is not None else planned_in(folder)
            summary = summarize(latest, jobs if latest == plan else _jobs(latest, folder), budget, tasks, metric)
            replace_text(folder / SUMMARY, json.dumps(summary, indent=1))
            write_csv(summary, folder / "comparison.csv")
        return summary

    def ending(job: Job, outcome: Outcome) -> str:
        run = next(run for run in write_summary()["runs"] if run["name"] == job.name)
        return outcome.error if outcome.status == "open" and outcome.error else _words(run, metric)

    write_summary()
    with _resumable(folder), RunsDisplay(jobs, steps, pace.quiet, ending) as display:
        train_runs(jobs, pace.jobs, display, until)
    return write_summary()


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    try:
        yield
    except Interrupted as stopped:
        raise Interrupted(stopped.exit_code - 128, f"Go on with: fullbatch compare --resume {folder}") from None


def planned_in(folder: Path) -> Plan:
    """The plan of a comparison that was begun."""
    if not (folder / PLAN).is_file():
        raise ValueError(f"{folder} is not the folder of a comparison: there is no {PLAN} in it.")
    return plan_from(read_plan(folder / PLAN))


def _jobs(plan: Plan, folder: Path, samples: Mapping[str, int] | None = None) -> list[Job]:
    runs = str(folder / "runs")
    return [Job(run.name, plan.config(run, runs, samples[run.name] if samples else None)) for run in plan.planned]


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
    jobs = [Job(run.cell, _timing_config(plan.config(run, str(folder / "calibration")), run.cell)) for run in cells]
    waiting = [job for job in jobs if outcome_of(job.folder).status != "done"]
    for job in waiting:
        with alone_in(job.folder):
            clear(job.folder)
    steps = {job.name: WARM_UP + MEASURED for job in jobs}
    with RunsDisplay(jobs, steps, pace.quiet, lambda job, outcome: f"timed ({outcome.status})") as display:
        train_runs(waiting, 1, display)
    known |= {job.name: _measured(job) for job in jobs}
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


def _measured(job: Job) -> float:
    lines = read_lines(Folder(job.folder).metrics)
    at = {line["step"]: line.get("seconds") for line in lines if "kind" not in line}
    first, last = at.get(WARM_UP), at.get(WARM_UP + MEASURED)
    if first is None or last is None:
        reason = outcome_of(job.folder).error or "the run did not end"
        raise ValueError(f"The steps of {job.name} could not be timed: {reason}.")
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
    plan: Plan, jobs: Sequence[Job], budget: Mapping[str, Any], tasks: Sequence[str], metric: str
) -> dict[str, Any]:
    runs = [_run(run, job) for run, job in zip(plan.planned, jobs, strict=True)]
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
        "matches": _matches(plan, cells, metric, _guessing(jobs, metric)),
    }


def _run(run: PlannedRun, job: Job) -> dict[str, Any]:
    folder, outcome = Folder(job.folder), outcome_of(job.folder)
    lines = read_lines(folder.metrics) if folder.metrics.is_file() else []
    training = [line for line in lines if "kind" not in line]
    audits = [line for line in lines if line.get("kind") == "audit"]
    last = training[-1] if training else {}
    seconds, samples = last.get("seconds"), last.get("samples", 0)
    return {
        "name": run.name,
        "folder": f"runs/{run.name}",
        "method": run.row.name,
        "settings": {"method": run.row.method, **dict(job.config.objective.settings)},
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
        "results": results_of(folder) if outcome.status == "done" else {},
        "normalizer_error": audits[-1].get("normalizer_error") if audits else None,
        "tau": last.get("tau"),
    }


def results_of(folder: Folder) -> dict[str, float]:
    """Every number of results.json under "TASK METRIC"."""
    return named_numbers(folder.read_results())


def _spread(values: Mapping[int, float]) -> Spread:
    return Spread(tuple(values[seed] for seed in sorted(values)))


def _guessing(jobs: Sequence[Job], metric: str) -> Guessing | None:
    """Of whichever run has been measured: all have the same tasks."""
    for job in jobs:
        if outcome_of(job.folder).status == "done" and (results := Folder(job.folder).read_results()):
            return guessing_of(results, metric)
    return None


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
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for row in summary["table"]:
            table.writerow([*(cell(row[name]) for name in names[:-1]), " ".join(map(str, row["values"]))])
