"""The page of `fullbatch search`: what won and how sure that is, phase by phase what was tried, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fullbatch.config.messages import plain
from fullbatch.config.tree import write_values
from fullbatch.report import blocks
from fullbatch.report import search_figures as draw
from fullbatch.report.blocks import Child, Html, Page, Section, filled, joined, node, table
from fullbatch.report.charts import figures
from fullbatch.report.collect import Fields, SummaryFile, fields_of, numbers_of, records_of
from fullbatch.report.search_figures import WHOLE, EndedTrial, SearchMetric
from fullbatch.report.wording import NOTHING, counted, difference_text, duration, is_number, setting_text, short_number
from fullbatch.trials.statistics import SEEDS_TO_TELL

_MOST_DRAWN = 600  # trials of a phase; beyond, the best half of these and some of the others
_MOST_ERRORS = 20
_MOST_ROWS = 500
_FIRST_ROWS = 15
_STATUSES = ("done", "stopped", "pruned", "diverged", "failed")
_PHASES = {
    "choices": ("Choices", "Which method with which optimizer: short trials, chosen by a Bayesian sampler."),
    "grid": ("Grid", "The best methods with the best optimizers, each pair once."),
    "fine": ("Fine", "The settings of the winner, chosen by a Bayesian sampler around it."),
    "finals": ("Finals", ""),
}


class _Phase:
    """A phase as search.json has it; ``rows`` are its trials as they stand there, by slot."""

    def __init__(self, content: Fields, metrics: Sequence[SearchMetric]) -> None:
        self.content = content
        self.name = plain(content.get("name"), 40)
        self.title, self.lead = _PHASES.get(self.name, (self.name, ""))
        self.rows = {row["slot"]: row for row in records_of(content, "trials") if isinstance(row.get("slot"), int)}
        self.trials = [_trial(row, metrics) for row in self.rows.values()]
        self.running = len(records_of(content, "running"))

    def by_rank(self) -> list[EndedTrial]:
        return sorted(self.trials, key=lambda trial: (trial.rank is None, trial.rank or 0, trial.slot))


def search_page(summary: SummaryFile) -> Page:
    metrics = []
    for row in records_of(summary.content, "metrics") or [{"name": "value"}]:
        name, up, share = plain(row.get("name"), 120), row.get("maximise") is not False, row.get("share") is True
        metrics.append(SearchMetric(name, plain(row.get("short") or name, 120), up, share))
    phases = [_Phase(content, metrics) for content in records_of(summary.content, "phases")]
    log_scaled = [str(setting) for setting in summary.content.get("log_scaled") or ()]
    return Page(
        title=f"{plain(summary.name, 80)} · fullbatch",
        header=_header(summary, phases, metrics),
        sections=[
            _winner(fields_of(summary.content, "winner")),
            _finalists(summary, metrics),
            _front(summary, phases, metrics),
            *(_tried(phase, metrics[0], log_scaled) for phase in phases if phase.name != "finals"),
            _ranked(phases, metrics),
            _cost(phases),
            _plan(fields_of(summary.content, "plan")),
        ],
    )


def _trial(row: Fields, metrics: Sequence[SearchMetric]) -> EndedTrial:
    params, values = fields_of(row, "params"), _values(row.get("values"), len(metrics))
    slot, rank, label, status = row["slot"], row.get("rank"), plain(row.get("label"), 80), plain(row.get("status"), 20)
    error, evaluations = plain(row.get("error") or "", 200), tuple(_evaluations(row.get("evaluations")))
    tip = _tip(f"{label} (trial {slot}), {status}", metrics, values, params, error)
    return EndedTrial(slot, rank if isinstance(rank, int) else None, label, status, params, values, evaluations, tip)


def _tip(label: str, metrics: Sequence[SearchMetric], values: Sequence[object], params: Fields, error: str = "") -> str:
    scores = ", ".join(f"{metric.short} {metric.text(value)}" for metric, value in zip(metrics, values, strict=False))
    return "\n".join(filter(None, (label, scores, _settings(params), error)))


def _values(written: object, count: int) -> tuple[float | None, ...]:
    """One a metric, of a trial or a finalist; empty where the file does not have them all."""
    if not isinstance(written, list) or len(written) != count:
        return ()
    return tuple(float(value) if is_number(value) else None for value in written)


def _evaluations(written: object) -> list[tuple[float, float]]:
    """Steps, and the first metric there."""
    known = []
    for pair in written if isinstance(written, list) else ():
        match pair:
            case [int() | float() as step, [int() | float() as value, *_]] if is_number(value):
                known.append((float(step), float(value)))
    return known


def _settings(params: Fields, skipped: Sequence[str] = ()) -> str:
    """In four figures, which tell two trials apart; the files have all."""
    return ", ".join(
        f"{plain(name, 60)} = {plain(f'{value:.4g}' if isinstance(value, float) else setting_text(value), 60)}"
        for name, value in params.items()
        if name not in skipped
    )


def _settings_cell(params: Fields, skipped: Sequence[str] = ()) -> Html:
    return node("td", _settings(params, skipped) or NOTHING, class_="said-settings")


# ---------------------------------------------------------------------------------------------------------------------
# what came of it


def _header(summary: SummaryFile, phases: Sequence[_Phase], metrics: Sequence[SearchMetric]) -> Html:
    cost, ended = fields_of(summary.content, "cost"), [trial.status for phase in phases for trial in phase.trials]
    statuses = ", ".join(f"{ended.count(name)} {name}" for name in _STATUSES if name in ended)
    owed, left = cost.get("trials_owed"), cost.get("left_seconds")
    facts = [
        ("metric" if len(metrics) == 1 else "metrics", "; ".join(metric.name for metric in metrics)),
        ("trials", f"{len(ended)} of {owed}" if is_number(owed) else f"{len(ended)}"),
        ("ended as", statuses or "none yet"),
        ("running", str(sum(phase.running for phase in phases) or "")),
        ("device-hours", short_number(cost.get("device_hours"))),
        ("left", f"about {duration(left)}" if is_number(left) and cost.get("trials_done") != owed else ""),
    ]
    return blocks.page_header("a search", plain(summary.name, 120), facts, _failed(phases))


def _failed(phases: Sequence[_Phase]) -> Html:
    items: list[Child] = []
    for phase in phases:
        for trial in (trial for trial in phase.trials if trial.status == "failed"):
            name = f"{phase.name} {trial.slot}"
            which = "" if trial.label == name else f" ({trial.label})"
            reason = plain(phase.rows[trial.slot].get("error") or "no reason given")
            items.append(joined(node("strong", name), f"{which} failed: ", reason))
    if len(items) > _MOST_ERRORS:
        items[_MOST_ERRORS:] = [f"and {len(items) - _MOST_ERRORS} more, in search.csv"]
    heading = node("p", "Trials that could not be trained:") if items else None
    return filled("div", heading, blocks.listing(items), class_="notice")


def _winner(winner: Fields) -> Section:
    if not winner:
        text = "No trial has ended with a value yet, so there is no winner."
        return Section("winner", "In short", blocks.notice(text))
    settings = [(plain(name, 60), plain(setting_text(value))) for name, value in fields_of(winner, "params").items()]
    body = joined(
        blocks.listing([plain(winner.get("said"), 1200)], "verdicts"),
        table(("the winner's settings", "value"), settings, "settings"),
        blocks.note(joined("Its whole config is best.yaml: ", node("code", "fullbatch train --config best.yaml"))),
    )
    return Section("winner", "In short", body)


def _finalists(summary: SummaryFile, metrics: Sequence[SearchMetric]) -> Section:
    rows, winner = records_of(summary.content, "finalists"), fields_of(summary.content, "winner")
    if not any(numbers_of(row, "mean") for row in rows):
        return Section("finalists", "Finalists", Html(""))
    tips = [_settings(fields_of(row, "params")) for row in rows]
    unfit = [
        f"{plain(row.get('name') or row.get('label'), 80)}: {row.get('diverged') or 0} seeds diverged, "
        f"{row.get('missing') or 0} ended without a value"
        for row in rows
        if row.get("missing") or row.get("diverged")
    ]
    lead = "The same configs and the baselines over seeds" + (
        ", measured on sets that nothing was picked by."
        if winner.get("elsewhere") is True
        else ". A winner picked as the best of several on the same evaluation sets looks a little better than it is."
    )
    body = joined(
        [draw.finalists(number, rows, tips, metric) for number, metric in enumerate(metrics)],
        _paired(winner, metrics),
        filled("p", blocks.listing(unfit), class_="notice"),
    )
    return Section("finalists", "Finalists", body, lead)


def _paired(winner: Fields, metrics: Sequence[SearchMetric]) -> Html | None:
    """Differences from the winner, seed by seed."""
    rows: list[list[Child]] = []
    by_name, several = {metric.name: metric for metric in metrics}, len(metrics) > 1
    for row in (row for row in records_of(winner, "paired") if is_number(row.get("mean"))):
        metric = by_name.get(plain(row.get("metric"), 120), metrics[0])
        name = f"{plain(row.get('against'), 80)}{' (baseline)' if row.get('kind') == 'baseline' else ''}"
        mean = difference_text(row["mean"], metric.share, row.get("sd"))
        seeds = ", ".join(difference_text(value, metric.share) for value in numbers_of(row, "values"))
        rows.append([name, *[metric.short] * several, mean, seeds, "yes" if row.get("seen") is True else "no"])
    if not rows:
        return None
    head = ["the winner less", *["metric"] * several, "mean ± sd", "seed by seed", "told apart"]
    unit = "Shares in points" if any(metric.share for metric in metrics) else "In the unit of the metric"
    under = (
        f"{unit}. Told apart: the 95 % interval of the paired mean (Student's t) leaves 0 out, with at least "
        f"{SEEDS_TO_TELL} seeds."
    )
    return joined(node("h3", "Paired differences"), table(head, rows, "numbers"), node("p", under, class_="note"))


def _front(summary: SummaryFile, phases: Sequence[_Phase], metrics: Sequence[SearchMetric]) -> Section:
    rows = [row for row in records_of(summary.content, "pareto") if _values(row.get("values"), len(metrics))]
    if len(metrics) < 2 or not rows:
        return Section("front", "Front", Html(""))
    shown = []
    for row in records_of(summary.content, "finalists"):  # by their means, each a point
        label, means = plain(row.get("name") or row.get("label"), 80), _values(row.get("mean"), len(metrics))
        tip = _tip(label, metrics, means, fields_of(row, "params"))
        shown += [EndedTrial(0, None, label, "done", {}, means, (), tip)] if means else []
    of = "finalists, by their means over seeds"
    last = next((phase for phase in reversed(phases) if phase.name != "finals" and phase.trials), None)
    if not shown and last is not None:
        shown, of = last.trials, f"whole trials of the phase {last.name}"
    cells: list[list[Child]] = []
    for row in rows:
        texts = [metric.text(value) for metric, value in zip(metrics, row["values"], strict=True)]
        cells.append([plain(row.get("label"), 80), *texts, _settings_cell(fields_of(row, "params"))])
    head = ["on the front", *(metric.short for metric in metrics), "settings"]
    body = joined(draw.front(shown, [numbers_of(row, "values") for row in rows], metrics), table(head, cells, "trials"))
    return Section("front", "Front", body, f"Not beaten in every metric, among the {of}.")


def _tried(phase: _Phase, metric: SearchMetric, log_scaled: Sequence[str]) -> Section:
    owed, trials, key = phase.content.get("owed"), phase.trials, phase.name
    count = f"{len(trials)} of {counted(owed, 'trial')}" if isinstance(owed, int) else counted(len(trials), "trial")
    lead = f"{phase.lead} {count} ended{f', {phase.running} running' if phase.running else ''}."
    if not trials:
        return Section(key, phase.title, blocks.notice("No trial has ended yet."), lead)
    if len(trials) > _MOST_DRAWN:  # the best half, and of the others every so many-th
        order, half = phase.by_rank(), _MOST_DRAWN // 2
        stride = -(-len(order[half:]) // half)
        trials = sorted([*order[:half], *order[half::stride]], key=lambda trial: trial.slot)
        lead += f" The figures show {len(trials)}: the best half of them, and a part of the others."
    choosing = key != "fine"
    bars = draw.importance(key, fields_of(phase.content, "importance"))
    why = plain(phase.content.get("why_none") or "", 200)
    charts = [
        draw.by_choice(key, trials, "optimizer", "method", metric) if choosing else None,
        draw.by_choice(key, trials, "method", "optimizer", metric) if choosing else None,
        draw.progression(key, trials, metric, "method" if choosing else ""),
        bars,
        draw.learning_curves(key, trials, metric),
    ]
    varied = [trial for trial in trials if trial.params]
    shown_before = ("method", "optimizer") if choosing else ()  # by the charts by choice
    sliced = [
        replace(trial, params={name: value for name, value in trial.params.items() if name not in shown_before})
        for trial in varied
    ]
    body = joined(
        figures(charts) or node("div", class_="charts"),
        node("p", f"No importance: {why}.", class_="note") if bars is None and why else None,
        draw.slices(key, sliced, log_scaled, metric),
        draw.parallel(key, varied, log_scaled, metric),
    )
    return Section(key, phase.title, body, lead)


def _ranked(phases: Sequence[_Phase], metrics: Sequence[SearchMetric]) -> Section:
    """A table a phase, the last one first."""
    made: list[Child] = []
    head = ["trial", "rank", *(metric.short for metric in metrics), "status", "settings", "time"]
    for phase in (phase for phase in reversed(phases) if phase.trials):
        trials = phase.by_rank()
        common = {
            setting: value
            for setting, value in trials[0].params.items()
            if len(trials) > 1 and all(trial.params.get(setting, ...) == value for trial in trials)
        }
        rows = [_trial_row(trial, metrics, list(common), phase) for trial in trials]
        more, left = rows[_FIRST_ROWS:_MOST_ROWS], len(rows) - _MOST_ROWS
        made += [
            node("h3", phase.title),
            node("p", f"All with {_settings(common)}.", class_="note") if common else None,
            table(head, rows[:_FIRST_ROWS], "trials"),
            blocks.folded(f"{len(more)} more of {phase.title.lower()}", table(head, more, "trials")),
            node("p", f"{left} more are in search.csv.", class_="note") if left > 0 else None,
        ]
    by = "by value" if len(metrics) == 1 else "by fronts, within a front by the first metric"
    lead = f"Whole trials {by}, then pruned ones, whose value is that of a shorter training, then diverged ones."
    return Section("ranked", "All trials", joined(*made), lead)


def _trial_row(trial: EndedTrial, metrics: Sequence[SearchMetric], common: Sequence[str], phase: _Phase) -> list[Child]:
    row, final = phase.rows[trial.slot], phase.name == "finals"
    values = [metric.text(value) for metric, value in zip(metrics, trial.values or [None] * len(metrics), strict=True)]
    which = f"seed {plain(row.get('seed'), 20)}" if final else f"trial {trial.slot}"
    hidden = not final and str(trial.slot) in trial.label
    return [
        joined(trial.label, None if hidden else node("span", which, class_="kind")),
        NOTHING if trial.rank is None else str(trial.rank),
        blocks.best(values[0], trial.rank == 1 and trial.status in WHOLE),
        *values[1:],
        trial.status,
        _settings_cell(trial.params, common),
        duration(row.get("seconds")),
    ]


def _cost(phases: Sequence[_Phase]) -> Section:
    named = [(phase.title, list(phase.rows.values())) for phase in phases if phase.rows]
    named += [("together", [row for _, rows_of in named for row in rows_of])] if named else []
    rows: list[list[Child]] = []
    for name, trials in named:
        seconds, hours = (
            sum(float(row[key]) for row in trials if is_number(row.get(key))) for key in ("seconds", "device_hours")
        )
        retries = sum(int(row["attempts"]) - 1 for row in trials if isinstance(row.get("attempts"), int))
        mean = duration(seconds / len(trials))
        rows.append([name, str(len(trials)), duration(seconds), mean, short_number(hours), str(retries)])
    head = ("phase", "trials", "time of all", "mean a trial", "device-hours", "retries")
    lead = "The time of all trials one after the other; device-hours are wall-clock hours by the number of devices."
    return Section("cost", "Cost", table(head, rows, "numbers"), lead)


def _plan(plan: Fields) -> Section:
    short = {key: value for key, value in plan.items() if key != "base"}
    base = node("pre", node("code", write_values(fields_of(plan, "base"))))
    body = joined(node("pre", node("code", write_values(short))), blocks.folded("the base config of all trials", base))
    return Section("plan", "Plan", body if plan else Html(""))
