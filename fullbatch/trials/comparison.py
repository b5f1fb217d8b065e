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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fullbatch.config.tree import write_values
from fullbatch.evaluation.named import is_share, metric_named
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.training.interruption import Interrupted
from fullbatch.training.run_folder import alone_in, refuse, replace_text
from fullbatch.trials.comparison_checks import check_begun, check_jobs, check_measured, check_same_plan, check_same_time
from fullbatch.trials.comparison_plan import Plan, plan_from, read_plan
from fullbatch.trials.comparison_progress import Progression
from fullbatch.trials.comparison_summary import summarize, write_csv
from fullbatch.trials.equal_time import MEASURED, WARM_UP, samples_in_equal_time, step_seconds, timing_jobs
from fullbatch.trials.execute import OUTCOME, Outcome, outcome_of
from fullbatch.trials.workers import Crew, Job

PLAN, SUMMARY = "plan.yaml", "comparison.json"


@dataclass(frozen=True)
class Pace:
    """jobs           runs side by side
    quiet          lines in place of bars
    stop_after     minutes after which no further run is started; None: all
    retry_failed   whether runs that failed by themselves are tried again
    """

    jobs: int = 1
    quiet: bool = False
    stop_after: float | None = None
    retry_failed: bool = False


def race(plan: Plan, folder: Path, pace: Pace) -> dict[str, Any]:
    """Run what is not done yet; the summary, as in comparison.json."""
    began = time.monotonic()
    jobs = _jobs(plan, folder)
    if (folder / PLAN).is_file():
        before = planned_in(folder)
        check_same_time(before, plan, str(folder))
        check_same_plan(_jobs(before, folder), jobs, str(folder))
    steps = check_jobs(jobs)
    tasks = tasks_of(jobs[0].config)
    metric = metric_named(plan.metric, tasks)
    check_measured(jobs, tasks)
    busy = f"Another `fullbatch compare` is at work in {folder}; wait for it, or stop it."
    with alone_in(folder, partial(refuse, busy)):
        if plan.equal_time is None:
            check_begun(jobs)
        replace_text(folder / PLAN, write_values(plan.as_dict()))
        budget = _budget(plan)
        if plan.equal_time is not None:
            seconds = _timed(plan, folder, pace)
            samples = samples_in_equal_time(plan, seconds, steps)
            budget = {**budget, "seconds_a_step": seconds, "samples_of_runs": samples}
            jobs = _jobs(plan, folder, samples)
            check_begun(jobs)
            steps = check_jobs(jobs)

        def summed_up() -> dict[str, Any]:
            summary = summarize(plan, jobs, budget, tasks, metric)
            replace_text(folder / SUMMARY, json.dumps(summary, indent=1))
            write_csv(summary, folder / "comparison.csv")
            return summary

        def told(job: Job, outcome: Outcome) -> str:
            run = next(run for run in summed_up()["runs"] if run["name"] == job.name)
            return outcome.error if outcome.status == "open" and outcome.error else _words(run, metric)

        for job in jobs:
            known = outcome_of(job.folder)
            if known.status == "failed" and (known.again or pace.retry_failed):
                (job.folder / OUTCOME).unlink()
        waiting = [job for job in jobs if outcome_of(job.folder).status == "open"]
        summed_up()
        try:
            with Progression(jobs, steps, pace.quiet, told) as progress:
                Crew(pace.jobs, progress, _until(began, pace.stop_after)).work_off(waiting)
        except Interrupted as stopped:
            raise Interrupted(stopped.exit_code - 128, f"Go on with: fullbatch compare --resume {folder}") from None
        return summed_up()


def planned_in(folder: Path) -> Plan:
    """The plan of a comparison that was begun."""
    if not (folder / PLAN).is_file():
        raise ValueError(f"{folder} is not the folder of a comparison: there is no {PLAN} in it.")
    return plan_from(read_plan(folder / PLAN))


def _jobs(plan: Plan, folder: Path, samples: dict[str, int] | None = None) -> list[Job]:
    found = []
    for run in plan.planned:
        own = samples[run.name] if samples else None
        found.append(Job(run.name, plan.config(run, str(folder / "runs"), own)))
    return found


def _timed(plan: Plan, folder: Path, pace: Pace) -> dict[str, float]:
    jobs = timing_jobs(plan, folder)
    steps = {job.name: WARM_UP + MEASURED for job in jobs}
    with Progression(jobs, steps, pace.quiet, lambda job, outcome: f"timed ({outcome.status})") as watch:
        return step_seconds(jobs, folder, watch)


def _budget(plan: Plan) -> dict[str, Any]:
    training = plan.base["training"]
    length = {"samples": training["samples"]} if training["samples"] else {"epochs": training["epochs"]}
    return {**length, "equal_time": plan.equal_time}


def _until(began: float, minutes: float | None) -> Callable[[], bool]:
    return lambda: minutes is None or time.monotonic() - began < 60.0 * minutes


def _words(run: dict[str, Any], metric: str) -> str:
    if run["status"] == "failed":
        return f"failed: {run['error']}"
    if run["status"] == "open":
        return f"stopped at step {run['steps']}"
    value = run["results"].get(metric)
    return f"{_short(value, metric)} {metric.rpartition(' ')[2]} in {run['seconds']:.0f} s of training"


def _short(value: float | None, metric: str) -> str:
    return "no" if value is None else f"{value:.2%}" if is_share(metric) else f"{value:.1f}"
