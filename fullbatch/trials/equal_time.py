"""Equal time in place of equal samples, as in NeuCLIP's Table 13: a short run of every row at every batch size says how
long a step takes, and each row gets the samples that fit into the time of the row named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fullbatch.config.optimization import Schedule
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.training.run_folder import Folder, read_lines, replace_text
from fullbatch.trials.comparison_plan import Plan, PlannedRun
from fullbatch.trials.execute import outcome_of, throw_away
from fullbatch.trials.workers import Crew, Job, Watch

WARM_UP, MEASURED = 20, 80  # steps: caches, compilation and graphs first; then enough for what happens now and then
FILE = "calibration.json"


def timing_jobs(plan: Plan, folder: Path) -> list[Job]:
    """A short run for each cell whose steps were not timed yet."""
    known, cells = _known(folder), dict[str, PlannedRun]()
    for run in plan.planned:
        cells.setdefault(run.cell, run)
    configs = {cell: _short(plan.config(run, str(folder / "calibration")), cell) for cell, run in cells.items()}
    return [Job(cell, config) for cell, config in configs.items() if cell not in known]


def step_seconds(jobs: Sequence[Job], folder: Path, watch: Watch) -> dict[str, float]:
    """Seconds a step for each cell; measured once, one run at a time, and kept in the folder.

    A run that was interrupted is thrown away: gone on with, it would start and warm up again among the steps timed.
    """
    waiting = [job for job in jobs if outcome_of(job.folder).status != "done"]
    for job in waiting:
        throw_away(job.folder)
    Crew(1, watch).work_off(waiting)
    known = {**_known(folder), **{job.name: _measured(job) for job in jobs}}
    replace_text(folder / FILE, json.dumps(known, indent=1))
    return known


def _known(folder: Path) -> dict[str, float]:
    kept = folder / FILE
    return dict(json.loads(kept.read_text())) if kept.is_file() else {}


def _short(config: RunConfig, name: str) -> RunConfig:
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
    found = {}
    for run in plan.planned:
        there = replace(run, row=reference)
        if there.cell not in seconds:
            raise ValueError(
                f"--equal-time {plan.equal_time}: it does not run at batch size {run.batch_size}, so there is no time "
                f"for {run.name} to equal."
            )
        its_steps = next(steps[other.name] for other in plan.planned if other.cell == there.cell)
        fitting = max(1, round(its_steps * seconds[there.cell] / seconds[run.cell]))
        found[run.name] = fitting * pairs_a_step(plan.config(run, ""))
    return found
