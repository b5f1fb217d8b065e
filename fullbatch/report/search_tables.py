"""Tables of a search: every trial by rank, differences from the winner, cost, and the plan itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullbatch.config.shown import plain
from fullbatch.config.tree import write_values
from fullbatch.report.blocks import Section, best, folded, table
from fullbatch.report.collect import Record, SearchData, records_of
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.search_figures import WHOLE, Measure, Trial
from fullbatch.report.wording import MINUS, NOTHING, duration, is_number, setting_text
from fullbatch.trials.statistics import SEEDS_TO_TELL

_MOST_ROWS = 500
_FIRST_ROWS = 15
TITLES = {
    "choices": ("Choices", "Which method with which optimizer: short trials, chosen by a Bayesian sampler."),
    "grid": ("Grid", "The best methods with the best optimizers, each pair once."),
    "fine": ("Fine", "The settings of the winner, chosen by a Bayesian sampler around it."),
    "finals": ("Finals", ""),
}


def mapping_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def settings_said(params: Mapping[str, Any], skipped: Sequence[str] = ()) -> str:
    """In four figures, which tell two trials apart; the files have all."""
    words = {
        name: f"{value:.4g}" if isinstance(value, float) else setting_text(value) for name, value in params.items()
    }
    return ", ".join(f"{plain(name, 60)} = {plain(said, 60)}" for name, said in words.items() if name not in skipped)


def hours_said(hours: object) -> str:
    return f"{float(hours):,.3g}" if isinstance(hours, int | float) and is_number(hours) else NOTHING


def paired_table(found: SearchData, measures: Sequence[Measure]) -> Html | None:
    winner = mapping_of(found.said.get("winner"))
    rows: list[list[Child]] = []
    by_name = {measure.name: measure for measure in measures}
    for row in records_of(winner, "paired"):
        measure = by_name.get(plain(row.get("metric"), 120), measures[0])
        if not is_number(row.get("mean")):
            continue
        values = [value for value in row.get("values") or () if is_number(value)]
        against = f"{plain(row.get('against'), 80)}{' (baseline)' if row.get('kind') == 'baseline' else ''}"
        rows.append(
            [
                against,
                *([measure.short] if len(measures) > 1 else []),
                _signed(measure, row["mean"], row.get("sd")),
                ", ".join(_signed(measure, value, None) for value in values),
                "yes" if row.get("seen") is True else "no",
            ]
        )
    if not rows:
        return None
    metric = ["metric"] if len(measures) > 1 else []
    head = ["the winner less", *metric, "mean ± sd", "seed by seed", "told apart"]
    unit = "Shares in points" if any(one.share for one in measures) else "In the unit of the metric"
    note = (
        f"{unit}. Told apart: the 95 % interval of the paired mean (Student's t) leaves 0 out, with at least "
        f"{SEEDS_TO_TELL} seeds."
    )
    return joined(node("h3", "Paired differences"), table(head, rows, "numbers"), node("p", note, class_="note"))


def _signed(measure: Measure, value: float, sd: object) -> str:
    scale, form = (100.0, "+.2f") if measure.share else (1.0, "+.4g")
    said = f"{scale * value:{form}}".replace("-", MINUS)
    return f"{said} ± {scale * float(sd):{form[1:]}}" if isinstance(sd, int | float) and is_number(sd) else said


def ranked_section(
    found: SearchData, phases: Mapping[str, Sequence[Trial]], measures: Sequence[Measure]
) -> Section | None:
    """A table a phase, the last one first."""
    made: list[Child] = []
    for name, trials in reversed(list(phases.items())):
        if not trials:
            continue
        title = TITLES.get(name, (plain(name, 40), ""))[0]
        order = sorted(trials, key=lambda one: (one.rank is None, one.rank or 0, one.slot))
        common = _common(trials)
        shown = order[:_MOST_ROWS]
        head = ["trial", "rank", *(measure.short for measure in measures), "status", "settings", "time"]
        written = {row.get("slot"): row for row in _phase_rows(found, name)}
        rows = [_trial_row(one, measures, common, written.get(one.slot, {}), name == "finals") for one in shown]
        said = f"All with {settings_said(common)}." if common else ""
        made += [node("h3", title), node("p", said, class_="note") if said else None]
        made.append(table(head, rows[:_FIRST_ROWS], "trials"))
        if len(rows) > _FIRST_ROWS:
            rest = f"{len(rows) - _FIRST_ROWS} more of {title.lower()}"
            made.append(folded(rest, table(head, rows[_FIRST_ROWS:], "trials")))
        if len(order) > _MOST_ROWS:
            made.append(node("p", f"{len(order) - _MOST_ROWS} more are in search.csv.", class_="note"))
    if not made:
        return None
    by = "by value" if len(measures) == 1 else "by fronts, within a front by the first metric"
    lead = f"Whole trials {by}, then pruned ones, whose value is that of a shorter training, then diverged ones."
    return Section("ranked", "All trials", joined(*made), lead)


def _common(trials: Sequence[Trial]) -> dict[str, Any]:
    """What all trials of a phase have alike."""
    first, *others = trials
    return {
        name: value
        for name, value in first.params.items()
        if others and all(name in one.params and one.params[name] == value for one in others)
    }


def _phase_rows(found: SearchData, name: str) -> list[Record]:
    return [row for phase in found.rows("phases") if phase.get("name") == name for row in records_of(phase, "trials")]


def _trial_row(
    one: Trial, measures: Sequence[Measure], common: Mapping[str, Any], row: Record, final: bool
) -> list[Child]:
    values = one.values or (None,) * len(measures)
    first = one.rank == 1 and one.status in WHOLE
    seconds = row.get("seconds")
    time = duration(float(seconds)) if isinstance(seconds, int | float) and is_number(seconds) else NOTHING
    said = [measure.said(value) for measure, value in zip(measures, values, strict=True)]
    cells = [best(said[0], first), *said[1:]]
    which = f"seed {plain(row.get('seed'), 20)}" if final else f"trial {one.slot}"
    named = joined(one.label, node("span", which, class_="kind") if final or str(one.slot) not in one.label else None)
    rank = str(one.rank) if one.rank is not None else NOTHING
    settings = node("td", settings_said(one.params, list(common)) or NOTHING, class_="said-settings")
    return [named, rank, *cells, one.status, settings, time]


def cost_section(found: SearchData) -> Section | None:
    rows: list[list[Child]] = []
    every = []
    for phase in found.rows("phases"):
        mine = records_of(phase, "trials")
        every += mine
        if mine:
            rows.append([TITLES.get(str(phase.get("name")), ("?", ""))[0], *_costs(mine)])
    if not rows:
        return None
    rows.append(["together", *_costs(every)])
    head = ("phase", "trials", "time of all", "mean a trial", "device-hours", "retries")
    lead = "The time of all trials one after the other; device-hours are wall-clock hours by the number of devices."
    return Section("cost", "Cost", table(head, rows, "numbers"), lead)


def _costs(rows: Sequence[Record]) -> list[Child]:
    seconds = sum(float(row["seconds"]) for row in rows if is_number(row.get("seconds")))
    hours = sum(float(row["device_hours"]) for row in rows if is_number(row.get("device_hours")))
    retries = sum(int(row["attempts"]) - 1 for row in rows if isinstance(row.get("attempts"), int))
    return [str(len(rows)), duration(seconds), duration(seconds / max(len(rows), 1)), hours_said(hours), str(retries)]


def plan_section(found: SearchData) -> Section | None:
    plan = mapping_of(found.said.get("plan"))
    if not plan:
        return None
    short = {key: value for key, value in plan.items() if key != "base"}
    body = joined(
        node("pre", node("code", write_values(short))),
        folded("the base config of all trials", node("pre", node("code", write_values(mapping_of(plan.get("base")))))),
    )
    return Section("plan", "Plan", body)
