"""search.json, search.csv and best.yaml: what a search came to so far.  Rewritten whenever a trial ends."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fullbatch.config.messages import cell
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Evaluation
from fullbatch.config.tree import write_yaml
from fullbatch.training.run_folder import replace_text
from fullbatch.trials.importance import importance_of
from fullbatch.trials.phases import fronts, last_won, ranked
from fullbatch.trials.search_plan import SearchPlan
from fullbatch.trials.slots import CHOSEN, PHASES, Ended, PhaseName, Running, Slot
from fullbatch.trials.space import Choice
from fullbatch.trials.verdict import Finalist, finalists_of, gains, said_of_finals, said_of_one, with_spread

SUMMARY, TABLE, BEST = "search.json", "search.csv", "best.yaml"
TRIALS = "trials"  # the folder of all trials, in the search's


Phases = Mapping[PhaseName, Sequence[Ended]]


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
    owed: Mapping[PhaseName, int],
    *,
    importance: bool = True,
    before: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """``importance`` takes some seconds where there are hundreds of trials, so a display does without it; from
    ``before``, an earlier summary, it is taken over for a phase in which nothing has ended since.  ``jobs``: trials
    side by side on this machine."""
    phases = [name for name in PHASES if name in owed]
    finalists = finalists_of(ended.get("finals", ()), plan.finals.baselines if plan.finals else (), plan.measures)
    return {
        "name": plan.name,
        "metrics": [
            {"name": text, "short": metric.short, "maximise": metric.maximise, "share": metric.is_share}
            for text, metric in zip(plan.metrics, plan.measures, strict=True)
        ],
        "plan": plan.as_dict(),
        "log_scaled": log_scaled(plan),
        "phases": [
            {
                **_phase(plan, name, ended.get(name, ()), running.get(name, ()), owed[name]),
                **_importance(plan, name, ended.get(name, ()), importance, before),
            }
            for name in phases
        ],
        "finalists": [
            {**one.as_dict(len(plan.metrics)), "params": _plain_params(plan, one.params)} for one in finalists
        ],
        "winner": _winner(plan, ended, owed, finalists),
        "pareto": _pareto(plan, ended, finalists) if len(plan.metrics) > 1 else [],
        "cost": cost_of(plan, ended, sum(map(len, running.values())), owed, jobs),
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
            "values": None if trial.values is None else _finite(trial.values),
            "seed": plan.seed if trial.slot.seed is None else trial.slot.seed,
            "evaluations": [[step, _finite(values)] for step, values in trial.evaluations],
            "folder": f"{TRIALS}/{trial_name(name, trial.slot.number)}",
            **{key: getattr(trial, key) for key in _AS_STORED},
        }
        for trial in sorted(ended, key=lambda trial: trial.slot.number)
    ]
    under_way = [{**named(trial), "worker": trial.worker, "since": trial.since} for trial in running]
    return {"name": name, "owed": max(owed, len(ended)), "trials": trials, "running": under_way}


def _importance(
    plan: SearchPlan, name: PhaseName, ended: Sequence[Ended], wanted: bool, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    old = next((phase for phase in (before or {}).get("phases", ()) if phase["name"] == name), None)
    if old is not None and (not wanted or old["looked_at"] == len(ended)):
        return {key: old[key] for key in ("importance", "why_none", "looked_at")}
    if not wanted:
        return {"importance": None, "why_none": "not looked at yet", "looked_at": None}
    found = "finals sample nothing" if name == "finals" else importance_of(_plainly(plan, ended), log_scaled(plan))
    none = isinstance(found, str)
    return {"importance": None if none else found, "why_none": found if none else "", "looked_at": len(ended)}


def log_scaled(plan: SearchPlan) -> list[str]:
    """The settings that the plan searches on a log scale, for whichever method or optimizer, by their plain names."""
    found = {key: None for key, dimension in plan.space.items() if not isinstance(dimension, Choice) and dimension.log}
    return sorted(plan.params_of(found))


def _plain_params(plan: SearchPlan, params: Mapping[str, Any]) -> dict[str, Any]:
    """By plain names: what was chosen first, then as the plan's space has them."""
    found = plan.params_of(params)
    order = dict.fromkeys((*CHOSEN, *plan.params_of(plan.space), *found))
    return {name: found[name] for name in order if name in found}


def _plainly(plan: SearchPlan, ended: Sequence[Ended]) -> list[Ended]:
    return [replace(one, params=_plain_params(plan, one.params)) for one in ended]


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has no infinity."""
    return [value if math.isfinite(value) else None for value in values]


# ---------------------------------------------------------------------------------------------------------------------
# the winner


def _winner(
    plan: SearchPlan, ended: Phases, owed: Mapping[PhaseName, int], finalists: Sequence[Finalist]
) -> dict[str, Any] | None:
    final = all(len(ended.get(name, ())) >= count for name, count in owed.items())
    last = last_won(ended, plan.maximise)
    tried = len(ranked(ended[last[0]], plan.maximise)) if last else 0
    if finalists and finalists[0].trained:
        best, others = finalists[0], finalists[1:]
        elsewhere = plan.finals is not None and plan.measures_in("finals") != plan.measures
        phase, slot = best.origin
        spreads = [best.spread(number) for number in range(len(plan.metrics))]
        found = {
            "measured": "finals",
            "mean": [spread.mean for spread in spreads],
            "sd": [spread.sd for spread in spreads],
            "seeds": best.seeds,
            "paired": [gain.as_dict(plan.metrics) for gain in gains(best, others, plan.measures)],
            "elsewhere": elsewhere,
            "said": said_of_finals(best, others, plan.measures, final, tried, elsewhere),
        }
    elif last is not None:
        phase, trial = last[0], last[1][0]
        assert trial.values is not None, "only trials with values are ranked"
        slot, best = (
            trial.slot.number,
            Finalist(label_of(phase, trial.slot, trial.params), "candidate", trial.params, {}),
        )
        over = len(ended.get("finals", ())) >= owed.get("finals", 0)
        why = "all finals failed or diverged" if over else "no final has ended yet"
        why = "the plan has no finals" if plan.finals is None else why
        found = {
            "measured": phase,
            "mean": _finite(trial.values),
            "sd": [None] * len(trial.values),
            "seeds": [plan.seed if trial.slot.seed is None else trial.slot.seed],
            "paired": [],
            "said": said_of_one(best.name, plan.measures[0], trial.values[0], phase, tried, final, why),
        }
    else:
        return None
    shown = {"label": best.label, "name": best.name, "kind": best.kind, "params": _plain_params(plan, best.params)}
    return {**shown, "phase": phase, "slot": slot, "final": final, **found}


def _pareto(plan: SearchPlan, ended: Phases, finalists: Sequence[Finalist]) -> list[dict[str, Any]]:
    """Those that no other beats in every metric: of the finalists by their means, else of the last phase's trials."""
    known = [one for one in finalists if one.trained]
    if known:
        means = [tuple(one.spread(number).mean for number in range(len(plan.metrics))) for one in known]
        rows = [(one.name, *one.origin, one.params, values) for one, values in zip(known, means, strict=True)]
    else:
        last = last_won(ended, plan.maximise)
        whole = [] if last is None else [one for one in last[1] if one.status in ("done", "stopped")]
        rows = [
            (label_of(last[0], one.slot, one.params), last[0], one.slot.number, one.params, one.values)
            for one in whole
            if last is not None and one.values is not None
        ]
    signed = [
        tuple(-value if more else value for value, more in zip(row[4], plan.maximise, strict=True)) for row in rows
    ]
    return [
        {"label": label, "phase": phase, "slot": slot, "params": _plain_params(plan, params), "values": list(values)}
        for (label, phase, slot, params, values), front in zip(rows, fronts(signed), strict=True)
        if front == 0
    ]


# ---------------------------------------------------------------------------------------------------------------------
# what it cost so far, and how long it will take yet


def cost_of(
    plan: SearchPlan, ended: Phases, running: int, owed: Mapping[PhaseName, int], jobs: int = 1
) -> dict[str, Any]:
    """``running``: trials under way, anywhere.  ``jobs``: so many at a time on this machine."""
    every = [one for ones in ended.values() for one in ones]
    workers = max(1, jobs, running)
    return {
        "seconds": sum(one.seconds for one in every),
        "device_hours": sum(one.device_hours for one in every),
        "left_seconds": _left(plan, ended, owed, workers),
        "workers": workers,
        "trials_done": len(every),
        "trials_owed": sum(max(count, len(ended.get(name, ()))) for name, count in owed.items()),
    }


def _left(plan: SearchPlan, ended: Phases, owed: Mapping[PhaseName, int], workers: int) -> float | None:
    """Each phase by the mean time of its trials; one that has none yet by the one before and how much longer its runs
    are.  Trials under way count as not begun, so it is a little too much."""
    left, before = 0.0, None
    for name in (name for name in PHASES if name in owed):
        length = _length(plan, name)
        times = [_took(one) for one in ended.get(name, ()) if one.status != "failed" and one.same_as is None]
        rest = max(0, owed[name] - len(ended.get(name, ())))
        if times:
            mean = statistics.fmean(times)
        elif not rest:
            mean = 0.0
        elif before is None or length is None or before[0][0] != length[0]:
            return None
        else:
            mean = before[1] * length[1] / before[0][1]
        if length is not None and mean > 0.0:
            before = (length, mean)
        if rest:
            left += mean * max(1.0, rest / workers)  # a single one is not done sooner by many
    return left


def _took(one: Ended) -> float:
    """By the clock: the model is built and measured, too.  One that was taken up again has trained before."""
    if not one.started or not one.ended:
        return one.seconds
    clock = datetime.fromisoformat(one.ended) - datetime.fromisoformat(one.started)
    return max(one.seconds, clock.total_seconds())


def _length(plan: SearchPlan, phase: PhaseName) -> tuple[str, float] | None:
    """How long a run of the phase is, in its own unit; phases in different units do not compare."""
    config = plan.config(phase, {"method": plan.methods[0], "optimizer": plan.optimizers[0]}, None, "", "")
    if config.training.samples is not None:
        return "samples", float(config.training.samples)
    return "epochs", float(config.training.epochs) * config.data.data_share


# ---------------------------------------------------------------------------------------------------------------------
# files


def write_files(plan: SearchPlan, summary: Mapping[str, Any], folder: Path) -> None:
    """Each as a whole or not at all, so that a page or a person may read them at any time."""
    replace_text(folder / SUMMARY, json.dumps(summary, indent=1, allow_nan=False))
    replace_text(folder / TABLE, table_of(summary))
    if summary["winner"] is not None:
        replace_text(folder / BEST, best_yaml(plan, summary["winner"]))


def table_of(summary: Mapping[str, Any]) -> str:
    """Ranked, the last phase first; trials without a rank after those with one."""
    rows = [(phase["name"], trial) for phase in summary["phases"] for trial in phase["trials"]]
    params = sorted({name for _, trial in rows for name in trial["params"]} - set(CHOSEN))
    names = [metric["name"] for metric in summary["metrics"]]
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    head = ("phase", "rank", "slot", "label", "status", *names, "seed", *CHOSEN, *params)
    table.writerow(map(cell, (*head, "seconds", "device_hours", "attempts", "folder", "error")))
    order = {name: -place for place, name in enumerate(PHASES)}
    for phase, trial in sorted(rows, key=lambda row: (order[row[0]], row[1]["rank"] or math.inf, row[1]["slot"])):
        values = trial["values"] or [None] * len(names)
        settings = [trial["params"].get(name) for name in (*CHOSEN, *params)]
        first = (phase, trial["rank"], trial["slot"], trial["label"], trial["status"])
        cost = (trial["seconds"], trial["device_hours"], trial["attempts"], trial["folder"], trial["error"])
        table.writerow(map(cell, (*first, *values, trial["seed"], *settings, *cost)))
    return written.getvalue()


def best_yaml(plan: SearchPlan, winner: Mapping[str, Any]) -> str:
    """The winner's config for `fullbatch train --config`, which gives it a folder of its own."""
    trained: PhaseName = winner["measured"]
    config = plan.config(trained, winner["params"], winner["seeds"][0], RunConfig().run.runs, "")
    config = replace(config, evaluation=_judged(plan, config.evaluation))
    values = [
        f"#   {text}: {with_spread(metric, mean, sd)}"
        for text, metric, mean, sd in zip(plan.metrics, plan.measures, winner["mean"], winner["sd"], strict=True)
        if mean is not None
    ]
    comments = [
        f"# The best config of the search {plan.name}; train it with `fullbatch train --config best.yaml`.",
        f"# {winner['said']}",
        f"# It has the length of the phase {trained!r}: {_long(config)}.",
        *values,
    ]
    wrapped = [textwrap.fill(line, 110, subsequent_indent="# ", break_long_words=False) for line in comments]
    return "\n".join(wrapped) + "\n" + write_yaml(config)


def _judged(plan: SearchPlan, evaluation: Evaluation) -> Evaluation:
    """As the trials were: what counted is the best checkpoint, and patience ended them."""
    measured = next((text for text, metric in zip(plan.metrics, plan.measures, strict=True) if metric.parts), None)
    often = bool(evaluation.evaluate_every or evaluation.evaluations)
    kept = measured if plan.take == "best" and often else None
    return replace(evaluation, keep_best=kept, patience=plan.patience if often else None)


def _long(config: RunConfig) -> str:
    length = config.training.samples
    return f"{config.training.epochs:g} epochs" if length is None else f"{length:,} samples"
