"""search.json, search.csv and best.yaml: what a search came to so far.  Rewritten whenever a trial ends."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fullbatch.config.checks import is_number
from fullbatch.config.extras import require_extra
from fullbatch.config.messages import cell
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import write_yaml
from fullbatch.training.run_folder import finite, replace_text
from fullbatch.trials.phases import Ended, Running, Slot, costs_of, fronts, last_won, ranked
from fullbatch.trials.search_plan import CHOSEN, PHASES, PhaseName, SearchPlan
from fullbatch.trials.space import Choice, Real, place_of
from fullbatch.trials.statistics import Entry, finalist_of, finalists_of, gains, said_of_finals, said_of_one, value_said

SUMMARY, TABLE, BEST = "search.json", "search.csv", "best.yaml"
TRIALS = "trials"  # the folder of all trials, in the search's

Phases = Mapping[PhaseName, Sequence[Ended]]
Owed = Mapping[PhaseName, int]  # how many trials a phase will have


def trial_name(phase: PhaseName, slot: int) -> str:
    """Of its folder under ``TRIALS``."""
    return f"{phase}-{slot:03d}"


def label_of(phase: PhaseName, slot: Slot, params: Mapping[str, Any]) -> str:
    """As tables call it: "radam + sogclr" where these are searched, "fine 17" where they are settled."""
    if slot.label:
        return slot.label
    chosen = [str(params[name]) for name in reversed(CHOSEN) if name in params]
    return " + ".join(chosen) if chosen and phase in ("choices", "grid") else f"{phase} {slot.number}"


def summarize(
    plan: SearchPlan,
    ended: Phases,
    running: Mapping[PhaseName, Sequence[Running]],
    owed: Owed,
    importance: bool = True,
    jobs: int = 1,
) -> dict[str, Any]:
    """``importance`` takes some seconds where there are hundreds of trials, so a display does without it.  ``jobs``:
    trials side by side on this machine."""
    baselines = plan.finals.baselines if plan.finals else ()
    finalists = finalists_of(ended.get("finals", ()), baselines, plan.measures)
    finalists = [{**row, "params": _plain_params(plan, row["params"])} for row in finalists]
    not_yet = {"importance": None, "why_none": "not looked at yet"}
    return {
        "name": plan.name,
        "metrics": [
            {"name": text, "short": metric.short, "maximise": metric.maximise, "share": metric.is_share}
            for text, metric in zip(plan.metrics, plan.measures, strict=True)
        ],
        "plan": plan.as_dict(),
        "log_scaled": _log_scaled(plan),
        "phases": [
            {
                **_phase(plan, name, ended.get(name, ()), running.get(name, ()), owed[name]),
                **(_importance(plan, name, ended.get(name, ())) if importance else not_yet),
            }
            for name in PHASES
            if name in owed
        ],
        "finalists": finalists,
        "winner": _winner(plan, ended, owed, finalists),
        "pareto": _pareto(plan, ended, finalists) if len(plan.metrics) > 1 else [],
        "cost": _cost(plan, ended, max(1, jobs, sum(map(len, running.values()))), owed),
    }


_AS_STORED = ("status", "seconds", "device_hours", "error", "attempts", "started", "ended")


def _phase(
    plan: SearchPlan, name: PhaseName, ended: Sequence[Ended], running: Sequence[Running], owed: int
) -> dict[str, Any]:
    places = {trial.slot.number: place for place, trial in enumerate(ranked(ended, plan.maximise), start=1)}

    def named(trial: Ended | Running) -> dict[str, Any]:
        label, params = label_of(name, trial.slot, trial.params), _plain_params(plan, trial.params)
        return {"slot": trial.slot.number, "label": label, "params": params}

    trials = [
        {
            **named(trial),
            "rank": places.get(trial.slot.number),
            "values": None if trial.values is None else finite(list(trial.values)),
            "seed": plan.seed if trial.slot.seed is None else trial.slot.seed,
            "evaluations": [[step, finite(list(values))] for step, values in trial.evaluations],
            "folder": f"{TRIALS}/{trial_name(name, trial.slot.number)}",
            **{key: getattr(trial, key) for key in _AS_STORED},
        }
        for trial in sorted(ended, key=lambda trial: trial.slot.number)
    ]
    under_way = [{**named(trial), "worker": trial.worker, "since": trial.since} for trial in running]
    return {"name": name, "owed": max(owed, len(ended)), "trials": trials, "running": under_way}


def _plain_params(plan: SearchPlan, params: Mapping[str, Any]) -> dict[str, Any]:
    """By plain names: what was chosen first, then as the plan's space has them."""
    plain = plan.params_of(params)
    order = dict.fromkeys((*CHOSEN, *plan.params_of(plan.space), *plain))
    return {name: plain[name] for name in order if name in plain}


# ---------------------------------------------------------------------------------------------------------------------
# How much of the objective's variation each setting explains: Optuna's fANOVA and mean decrease in impurity.
# Both fit a forest to the trials and so speak of the region that was tried, which a Bayesian sampler narrows as it
# goes.  They read settings as they are; one that is searched on a log scale is given to them as its logarithm, or else
# its largest decade would count for nearly all of it.

FEWEST = 8  # trials, below which a forest says nothing


def _importance(plan: SearchPlan, name: PhaseName, ended: Sequence[Ended]) -> dict[str, Any]:
    placed = [replace(trial, params=within_ranges(plan, trial.params)) for trial in ended]
    log_scaled = set(_log_scaled(plan)) - _with_several_ranges(plan)
    shares = "finals sample nothing" if name == "finals" else importance_of(placed, log_scaled)
    why_none = shares if isinstance(shares, str) else ""
    return {"importance": None if why_none else shares, "why_none": why_none}


def within_ranges(plan: SearchPlan, params: Mapping[str, Any]) -> dict[str, Any]:
    """By plain names.  Of a setting with several ranges (lr, sgd.lr) the place in its own: else a rate would tell which
    optimizer it belongs to, and take a part of that one's importance."""
    several = _with_several_ranges(plan)
    own = dict(params)
    for key, value in params.items():
        dimension = plan.space.get(key)
        if isinstance(dimension, Real) and place_of(key, "space").plain in several:
            own[key] = dimension.place(value)
    return _plain_params(plan, own)


def _with_several_ranges(plan: SearchPlan) -> set[str]:
    counts = Counter(place_of(key, "space").plain for key in plan.space)
    return {name for name, count in counts.items() if count > 1}


def _log_scaled(plan: SearchPlan) -> list[str]:
    """The settings that the plan searches on a log scale, for whichever method or optimizer, by their plain names."""
    found = {key: None for key, dimension in plan.space.items() if not isinstance(dimension, Choice) and dimension.log}
    return sorted(plan.params_of(found))


def importance_of(ended: Sequence[Ended], log_scaled: Collection[str]) -> dict[str, Any] | str:
    """Shares by setting, largest first, that add up to 1; or why there are none.

    A trial that diverged counts with the worst value, where there is one.  Pruned trials are left out, since theirs is
    the value of a shorter training, and counted, since those that are left are what the pruner liked; and so are
    settings that not all trials have.
    """
    pruned = sum(trial.status == "pruned" for trial in ended)
    whole = [trial for trial in ended if trial.status not in ("pruned", "failed")]
    known = [(trial.params, trial.values[0]) for trial in whole if trial.values is not None]
    trials = [(params, value) for params, value in known if math.isfinite(value)]
    if len(trials) < FEWEST:
        remark = f" ({pruned} were pruned)" if pruned else ""
        return f"of whole trials there are {len(trials)}{remark}, and fewer than {FEWEST} tell nothing"
    if len({value for _, value in trials}) == 1:
        return f"all {len(trials)} trials have the same value"
    every = dict.fromkeys(name for params, _ in trials for name in params)
    shared = [name for name in every if all(name in params for params, _ in trials)]
    columns = {name: _column([params[name] for params, _ in trials], name in log_scaled) for name in shared}
    columns = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if not columns:
        return "no setting that all trials have takes more than one value"
    try:
        require_extra("sklearn", "importance", "the forest")
    except ValueError as missing:
        return str(missing).rstrip(".")
    left_out = [name for name in every if name not in shared]
    shares = _shares(columns, [value for _, value in trials])
    return {**shares, "trials": len(trials), "pruned": pruned, "left_out": left_out}


def _column(values: Sequence[Any], log: bool) -> list[Any]:
    """Numbers as numbers, all else as words."""
    if not all(map(is_number, values)):
        return list(map(repr, values))
    return [math.log(value) for value in values] if log and min(values) > 0.0 else list(map(float, values))


def _shares(columns: Mapping[str, list[Any]], values: Sequence[float]) -> dict[str, dict[str, float]]:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    spaces: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(sorted(set(column)))
        if isinstance(column[0], str)
        else FloatDistribution(min(column), max(column))
        for name, column in columns.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study in memory is nobody's news
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    for place, value in enumerate(values):
        params = {name: column[place] for name, column in columns.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value))
    forests = {
        "fanova": optuna.importance.FanovaImportanceEvaluator(seed=0),
        "mdi": optuna.importance.MeanDecreaseImpurityImportanceEvaluator(seed=0),
    }
    shares = {key: optuna.importance.get_param_importances(study, evaluator=forest) for key, forest in forests.items()}
    return {key: {name: float(share) for name, share in by_name.items()} for key, by_name in shares.items()}


def _winner(plan: SearchPlan, ended: Phases, owed: Owed, finalists: Sequence[Entry]) -> dict[str, Any] | None:
    final = all(len(ended.get(name, ())) >= count for name, count in owed.items())
    last = last_won(ended, plan.maximise)
    tried = len(ranked(ended[last[0]], plan.maximise)) if last else 0
    if finalists and finalists[0]["trained"]:
        best, *others = finalists
        elsewhere = plan.finals is not None and plan.measures_in("finals") != plan.measures
        differences = gains(best, others, plan.measures)
        said = said_of_finals(best, differences, plan.measures, final, tried, elsewhere)
        return {
            **best,
            "measured": "finals",
            "final": final,
            "paired": differences,
            "elsewhere": elsewhere,
            "said": said,
        }
    if last is None:
        return None
    phase, best = last[0], _row_of(plan, last[0], last[1][0])
    over = len(ended.get("finals", ())) >= owed.get("finals", 0)
    why = "all finals failed or diverged" if over else "no final has ended yet"
    why = "the plan has no finals" if plan.finals is None else why
    said = said_of_one(best["name"], plan.measures[0], best["mean"][0], phase, tried, final, why)
    means = {"mean": finite(list(best["mean"])), "values": [finite(list(values)) for values in best["values"]]}
    return {**best, **means, "measured": phase, "final": final, "paired": [], "said": said}


def _row_of(plan: SearchPlan, phase: PhaseName, trial: Ended) -> dict[str, Any]:
    """A trial as if it were a finalist of one seed."""
    row = finalist_of(label_of(phase, trial.slot, trial.params), [trial], seed=plan.seed)
    return {**row, "params": _plain_params(plan, trial.params), "phase": phase, "slot": trial.slot.number}


def _pareto(plan: SearchPlan, ended: Phases, finalists: Sequence[Entry]) -> list[dict[str, Any]]:
    """Those that no other beats in every metric: of the finalists by their means, else of the last phase's trials."""
    rows = [{**row, "label": row["name"]} for row in finalists if row["trained"]]
    if not rows and (last := last_won(ended, plan.maximise)) is not None:
        rows = [_row_of(plan, last[0], trial) for trial in last[1] if trial.status in ("done", "stopped")]
    numbers = fronts([costs_of(row["mean"], plan.maximise) for row in rows])
    first = [row for row, number in zip(rows, numbers, strict=True) if number == 0]
    return [{**{key: row[key] for key in ("label", "phase", "slot", "params")}, "values": row["mean"]} for row in first]


def _cost(plan: SearchPlan, ended: Phases, workers: int, owed: Owed) -> dict[str, Any]:
    trials = [trial for of_phase in ended.values() for trial in of_phase]
    return {
        "seconds": sum(trial.seconds for trial in trials),
        "device_hours": sum(trial.device_hours for trial in trials),
        "left_seconds": _left(plan, ended, owed, workers),
        "workers": workers,
        "trials_done": len(trials),
        "trials_owed": sum(max(count, len(ended.get(name, ()))) for name, count in owed.items()),
    }


def _left(plan: SearchPlan, ended: Phases, owed: Owed, workers: int) -> float | None:
    """Each phase by the mean time of its trials; one that has none yet by the one before and how much longer its runs
    are, in their own unit.  Trials under way count as not begun, so it is a little too much."""
    left, pace = 0.0, dict[str, float]()  # seconds a unit of length, by the unit
    for name in (name for name in PHASES if name in owed):
        config = plan.config(name, {"method": plan.methods[0], "optimizer": plan.optimizers[0]}, None, "", "")
        samples, epochs = config.training.samples, float(config.training.epochs) * config.data.data_share
        unit, length = ("epochs", epochs) if samples is None else ("samples", float(samples))
        times = [_took(trial) for trial in ended.get(name, ()) if trial.status != "failed" and trial.same_as is None]
        rest = max(0, owed[name] - len(ended.get(name, ())))
        if times:
            pace = {unit: statistics.fmean(times) / length}
        elif rest and unit not in pace:
            return None
        if rest:
            left += pace[unit] * length * max(1.0, rest / workers)  # a single one is not done sooner by many
    return left


def _took(trial: Ended) -> float:
    """By the clock: the model is built and measured, too.  One that was taken up again has trained before."""
    if not trial.started or not trial.ended:
        return trial.seconds
    clock = datetime.fromisoformat(trial.ended) - datetime.fromisoformat(trial.started)
    return max(trial.seconds, clock.total_seconds())


def write_files(plan: SearchPlan, summary: Mapping[str, Any], folder: Path) -> None:
    """Each as a whole or not at all, so that a page or a person may read them at any time."""
    replace_text(folder / SUMMARY, json.dumps(summary, indent=1, allow_nan=False))
    replace_text(folder / TABLE, table_of(summary))
    if summary["winner"] is not None:
        replace_text(folder / BEST, _best_yaml(plan, summary["winner"]))


def table_of(summary: Mapping[str, Any]) -> str:
    """Ranked, the last phase first; trials without a rank after those with one."""
    rows = [(phase["name"], trial) for phase in summary["phases"] for trial in phase["trials"]]
    params = sorted({name for _, trial in rows for name in trial["params"]} - set(CHOSEN))
    metrics = [metric["name"] for metric in summary["metrics"]]
    first, last = ("rank", "slot", "label", "status"), ("seconds", "device_hours", "attempts", "folder", "error")
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(map(cell, ("phase", *first, *metrics, "seed", *CHOSEN, *params, *last)))
    order = {name: -place for place, name in enumerate(PHASES)}
    for phase, trial in sorted(rows, key=lambda row: (order[row[0]], row[1]["rank"] or math.inf, row[1]["slot"])):
        values = trial["values"] or [None] * len(metrics)
        settings = [trial["params"].get(name) for name in (*CHOSEN, *params)]
        known = [[trial[name] for name in names] for names in (first, last)]
        table.writerow(map(cell, (phase, *known[0], *values, trial["seed"], *settings, *known[1])))
    return written.getvalue()


def _best_yaml(plan: SearchPlan, winner: Mapping[str, Any]) -> str:
    """The winner's config for `fullbatch train --config`, which gives it a folder of its own.  It is judged as the
    trials were: what counted is the best checkpoint, and patience ended them."""
    trained: PhaseName = winner["measured"]
    config = plan.config(trained, winner["params"], winner["seeds"][0], RunConfig().run.runs, "")
    measured = next((text for text, metric in zip(plan.metrics, plan.measures, strict=True) if metric.parts), None)
    often = bool(config.evaluation.evaluate_every or config.evaluation.evaluations)
    best, patience = measured if plan.take == "best" and often else None, plan.patience if often else None
    config = replace(config, evaluation=replace(config.evaluation, keep_best=best, patience=patience))
    samples = config.training.samples
    length = f"{config.training.epochs:g} epochs" if samples is None else f"{samples:,} samples"
    comments = [
        f"# The best config of the search {plan.name}; train it with `fullbatch train --config best.yaml`.",
        f"# {winner['said']}",
        f"# It has the length of the phase {trained!r}: {length}.",
        *(
            f"#   {text}: {value_said(metric, mean, sd)}"
            for text, metric, mean, sd in zip(plan.metrics, plan.measures, winner["mean"], winner["sd"], strict=True)
            if mean is not None
        ),
    ]
    wrapped = [textwrap.fill(line, 110, subsequent_indent="# ", break_long_words=False) for line in comments]
    return "\n".join(wrapped) + "\n" + write_yaml(config)
