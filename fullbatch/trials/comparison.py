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

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullbatch.config.optimization import Schedule
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import write_values
from fullbatch.evaluation.metric_names import is_share, metric_named
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.training.interruption import Interrupted
from fullbatch.training.run_folder import Folder, alone_in, read_lines, replace_text
from fullbatch.trials.checks import check_begun, check_jobs, check_measured, check_same_plan, check_same_time
from fullbatch.trials.comparison_plan import Job, Plan, PlannedRun, plan_from, read_plan
from fullbatch.trials.comparison_runs import OUTCOME, Outcome, outcome_of, throw_away, train_runs
from fullbatch.trials.comparison_summary import summarize, write_csv
from fullbatch.trials.processes import Pace
from fullbatch.trials.progress import RunsDisplay

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
    budget = _budget(plan)
    with alone_in(folder), _resumable(folder):
        if plan.equal_time is None:
            check_begun(jobs)
        replace_text(folder / PLAN, write_values(plan.as_dict()))
        if plan.equal_time is not None:
            seconds = _timed(plan, folder, pace)
            samples = samples_in_equal_time(plan, seconds, steps)
            budget = {**budget, "seconds_a_step": seconds, "samples_of_runs": samples}
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


def _budget(plan: Plan) -> dict[str, Any]:
    training = plan.base["training"]
    length = {"samples": training["samples"]} if training["samples"] else {"epochs": training["epochs"]}
    return {**length, "equal_time": plan.equal_time}


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
    jobs = timing_jobs(plan, folder)
    steps = {job.name: WARM_UP + MEASURED for job in jobs}
    with RunsDisplay(jobs, steps, pace.quiet, lambda job, outcome: f"timed ({outcome.status})") as watch:
        return step_seconds(jobs, folder, watch)


def timing_jobs(plan: Plan, folder: Path) -> list[Job]:
    """A short run for each cell whose steps were not timed yet."""
    known, cells = _known(folder), dict[str, PlannedRun]()
    for run in plan.planned:
        cells.setdefault(run.cell, run)
    configs = {cell: _timing_config(plan.config(run, str(folder / "calibration")), cell) for cell, run in cells.items()}
    return [Job(cell, config) for cell, config in configs.items() if cell not in known]


def step_seconds(jobs: Sequence[Job], folder: Path, watch: RunsDisplay) -> dict[str, float]:
    """Seconds a step for each cell; measured once, one run at a time, and kept in the folder.

    A run that was interrupted is thrown away: gone on with, it would start and warm up again among the steps timed.
    """
    waiting = [job for job in jobs if outcome_of(job.folder).status != "done"]
    for job in waiting:
        throw_away(job.folder)
    train_runs(waiting, 1, watch)
    known = {**_known(folder), **{job.name: _measured(job) for job in jobs}}
    replace_text(folder / CALIBRATION, json.dumps(known, indent=1))
    return known


def _known(folder: Path) -> dict[str, float]:
    kept = folder / CALIBRATION
    return dict(json.loads(kept.read_text())) if kept.is_file() else {}


def _timing_config(config: RunConfig, name: str) -> RunConfig:
    """The run's own steps, a few of them, at a constant rate and without an evaluation."""
    return replace(
        config,
        training=replace(config.training, samples=(WARM_UP + MEASURED) * pairs_a_step(config)),
        schedule=Schedule(schedule="constant"),
        evaluation=Evaluation(evaluate=(), audit_every=0),
        run=replace(config.run, name=name, log_every=WARM_UP, save_minutes=None, save_every=None, tensorboard=False),
    )


def pairs_a_step(config: RunConfig) -> int:
    """OSGD's averaged reading takes several batches a step."""
    return config.training.batch_size * config.selection.batches_a_step


def _measured(job: Job) -> float:
    outcome = outcome_of(job.folder)
    lines = read_lines(Folder(job.folder).metrics)
    at = {line["step"]: line.get("seconds") for line in lines if "kind" not in line}
    first, last = at.get(WARM_UP), at.get(WARM_UP + MEASURED)
    if first is None or last is None:
        raise ValueError(f"The steps of {job.name} could not be timed: {outcome.error or 'the run did not end'}.")
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
        samples[run.name] = fitting * pairs_a_step(plan.config(run, ""))
    return samples
