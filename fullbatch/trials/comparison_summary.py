"""comparison.json: what the runs of a comparison came to, read from their folders.  Rewritten whenever a run ends."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullbatch.config.messages import cell
from fullbatch.evaluation.metric_names import LINEAR, more_is_better, named_numbers
from fullbatch.training.run_folder import Folder, read_lines
from fullbatch.trials.comparison_plan import Job, Plan, PlannedRun
from fullbatch.trials.comparison_runs import outcome_of
from fullbatch.trials.statistics import Guessing, Spread, match, paired

Cells = dict[tuple[str, int, str], dict[int, float]]  # (row, batch size, metric) -> seed -> value


def summarize(
    plan: Plan, jobs: Sequence[Job], budget: Mapping[str, Any], tasks: Sequence[str], metric: str
) -> dict[str, Any]:
    runs = [_run(run, job) for run, job in zip(plan.planned, jobs, strict=True)]
    cells: Cells = {}
    for run in runs:
        if run["status"] == "done":
            for name, value in run["results"].items():
                cells.setdefault((run["method"], run["batch_size"], name), {})[run["seed"]] = value
    return {
        "name": plan.name,
        "budget": dict(budget),
        "tasks": list(tasks),
        "metric": metric,
        "baseline": plan.baseline,
        "runs": runs,
        "table": [{**_cell(key), **_numbers(values)} for key, values in cells.items()],
        "differences": _differences(plan, cells),
        "matches": _matches(plan, cells, metric, _guessing(jobs, metric)),
    }


def _run(run: PlannedRun, job: Job) -> dict[str, Any]:
    folder, outcome = Folder(job.folder), outcome_of(job.folder)
    lines = read_lines(folder.metrics) if folder.metrics.is_file() else []
    training = [line for line in lines if "kind" not in line]
    audits = [line for line in lines if line.get("kind") == "audit"]
    last = training[-1] if training else {}
    seconds, samples = last.get("seconds"), last.get("samples", 0)
    gpu = [line["gpu_gib"] for line in training if line.get("gpu_gib") is not None]
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
        "gpu_gib": max(gpu) if gpu else None,
        "memory_gib": outcome.memory_gib,
        "results": results_of(folder) if outcome.status == "done" else {},
        "normalizer_error": audits[-1].get("normalizer_error") if audits else None,
        "tau": last.get("tau"),
    }


def results_of(folder: Folder) -> dict[str, float]:
    """Every number of results.json under "TASK METRIC"."""
    return named_numbers(folder.read_results())


def _cell(key: tuple[str, int, str]) -> dict[str, Any]:
    method, batch_size, metric = key
    return {"method": method, "batch_size": batch_size, "metric": metric}


def _numbers(values: Mapping[int, float]) -> dict[str, Any]:
    seeds = sorted(values)
    spread = Spread(tuple(values[seed] for seed in seeds))
    return {"mean": spread.mean, "sd": spread.sd, "values": list(spread.values), "seeds": seeds}


def _differences(plan: Plan, cells: Cells) -> list[dict[str, Any]]:
    found = []
    for (method, batch_size, metric), ours in cells.items():
        difference = paired(ours, cells.get((plan.baseline, batch_size, metric), {}))
        if method != plan.baseline and difference is not None:
            cell = {"method": method, "against": plan.baseline, "batch_size": batch_size, "metric": metric}
            found.append({**cell, "mean": difference.mean, "sd": difference.sd, "values": list(difference.values)})
    return found


def _guessing(jobs: Sequence[Job], metric: str) -> Guessing | None:
    """Of whichever run has been measured: all have the same tasks."""
    for job in jobs:
        folder = Folder(job.folder)
        if outcome_of(job.folder).status == "done" and (results := folder.read_results()):
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
    def spread(values: Mapping[int, float]) -> Spread:
        return Spread(tuple(values[seed] for seed in sorted(values)))

    theirs = {size: spread(v) for (method, size, name), v in cells.items() if (method, name) == (plan.baseline, metric)}
    found = []
    for (method, size, name), values in cells.items():
        if theirs and name == metric and method != plan.baseline:
            made = match(method, size, spread(values), plan.baseline, theirs, more_is_better(metric), guessing)
            where = {"method": method, "batch_size": size, "against": plan.baseline}
            found.append({**where, "matches": made.matches, "about": made.about, "text": made.text})
    return found


def write_csv(summary: Mapping[str, Any], path: Path) -> None:
    """The table, for those who draw their own figures."""
    names = ("method", "batch_size", "metric", "mean", "sd", "values")
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for row in summary["table"]:
            texts = [cell(row[name]) for name in names[:-1]]
            table.writerow([*texts, " ".join(map(str, row["values"]))])
