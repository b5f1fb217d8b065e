"""The page of `fullbatch search`: what won and how sure that is, phase by phase what was tried, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fullbatch.config.messages import plain
from fullbatch.config.tree import write_values
from fullbatch.report.blocks import Page, Section, best, folded, listing, note, notice, page_header, present, table
from fullbatch.report.charts import figures
from fullbatch.report.collect import Fields, SummaryFile, mapping_of, records_of
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.search_figures import (
    WHOLE,
    EndedTrial,
    FinalistRow,
    SearchMetric,
    by_choice,
    finalists,
    front,
    importance,
    learning_curves,
    parallel,
    progression,
    slices,
)
from fullbatch.report.wording import (
    NOTHING,
    counted,
    difference_text,
    duration,
    is_number,
    setting_text,
    short_number,
)
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


def search_page(summary: SummaryFile) -> Page:
    metrics = [
        SearchMetric(
            plain(row.get("name"), 120),
            plain(row.get("short") or row.get("name"), 120),
            row.get("maximise") is not False,
            row.get("share") is True,
        )
        for row in summary.rows("metrics")
    ] or [SearchMetric("value", "value", True, False)]
    phases = {str(phase.get("name")): _trials(phase, metrics) for phase in summary.rows("phases")}
    return Page(
        title=f"{plain(summary.name, 80)} · fullbatch",
        header=_header(summary, metrics),
        sections=present(
            _winner(summary),
            _finalists(summary, metrics),
            _front(summary, phases, metrics),
            *(
                _phase(phase, phases[str(phase.get("name"))], metrics[0], summary)
                for phase in summary.rows("phases")
                if phase.get("name") != "finals"
            ),
            _ranked(summary, phases, metrics),
            _cost(summary),
            _plan(summary),
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# what search.json says


def _trials(phase: Fields, metrics: Sequence[SearchMetric]) -> list[EndedTrial]:
    trials = []
    for row in records_of(phase, "trials"):
        if not isinstance(row.get("slot"), int):
            continue
        params, values = mapping_of(row.get("params")), _values(row.get("values"), len(metrics))
        label, status = plain(row.get("label"), 80), plain(row.get("status"), 20)
        error = plain(row.get("error") or "", 200)
        trials.append(
            EndedTrial(
                slot=row["slot"],
                rank=row["rank"] if isinstance(row.get("rank"), int) else None,
                label=label,
                status=status,
                params=params,
                values=values,
                evaluations=tuple(_evaluations(row.get("evaluations"))),
                tip=_tip(f"{label} (trial {row['slot']}), {status}", metrics, values, params, error),
            )
        )
    return trials


def _tip(
    label: str, metrics: Sequence[SearchMetric], values: Sequence[object], params: Mapping[str, Any], error: str = ""
) -> str:
    scores = ", ".join(f"{metric.short} {metric.text(value)}" for metric, value in zip(metrics, values, strict=False))
    return "\n".join(line for line in (label, scores, _settings(params), error) if line)


def _values(written: object, count: int) -> tuple[float | None, ...]:
    if not isinstance(written, list) or len(written) != count:
        return ()
    return tuple(float(value) if is_number(value) else None for value in written)


def _evaluations(written: object) -> list[tuple[float, float]]:
    pairs = [pair for pair in written if isinstance(pair, list) and len(pair) == 2] if isinstance(written, list) else []
    return [
        (float(step), float(values[0]))
        for step, values in pairs
        if is_number(step) and isinstance(values, list) and values and is_number(values[0])
    ]


def _settings(params: Mapping[str, Any], skipped: Sequence[str] = ()) -> str:
    """In four figures, which tell two trials apart; the files have all."""
    return ", ".join(
        f"{plain(name, 60)} = {plain(f'{value:.4g}' if isinstance(value, float) else setting_text(value), 60)}"
        for name, value in params.items()
        if name not in skipped
    )


def _settings_cell(params: Mapping[str, Any], skipped: Sequence[str] = ()) -> Html:
    return node("td", _settings(params, skipped) or NOTHING, class_="said-settings")


# ---------------------------------------------------------------------------------------------------------------------
# what came of it


def _header(summary: SummaryFile, metrics: Sequence[SearchMetric]) -> Html:
    cost = mapping_of(summary.content.get("cost"))
    rows = [row for phase in summary.rows("phases") for row in records_of(phase, "trials")]
    statuses = {name: sum(row.get("status") == name for row in rows) for name in _STATUSES}
    running = sum(len(records_of(phase, "running")) for phase in summary.rows("phases"))
    owed, left = cost.get("trials_owed"), cost.get("left_seconds")
    facts = [
        ("metric" if len(metrics) == 1 else "metrics", "; ".join(metric.name for metric in metrics)),
        ("trials", f"{len(rows)} of {owed}" if is_number(owed) else f"{len(rows)}"),
        ("ended as", ", ".join(f"{count} {name}" for name, count in statuses.items() if count) or "none yet"),
        ("running", str(running) if running else ""),
        ("device-hours", short_number(cost.get("device_hours"))),
        ("left", f"about {duration(left)}" if is_number(left) and cost.get("trials_done") != owed else ""),
    ]
    known = [(name, value) for name, value in facts if value]
    return page_header("a search", plain(summary.name, 120), known, _failed(summary))


def _failed(summary: SummaryFile) -> Html | None:
    items: list[Child] = []
    for phase in summary.rows("phases"):
        for row in (row for row in records_of(phase, "trials") if row.get("status") == "failed"):
            name, label = f"{plain(phase.get('name'), 20)} {row.get('slot')}", plain(row.get("label"), 80)
            which = "" if label == name else f" ({label})"
            reason = plain(row.get("error") or "no reason given")
            items.append(joined(node("strong", name), f"{which} failed: ", reason))
    if not items:
        return None
    if len(items) > _MOST_ERRORS:
        items[_MOST_ERRORS:] = [f"and {len(items) - _MOST_ERRORS} more, in search.csv"]
    return node("div", node("p", "Trials that could not be trained:"), listing(items), class_="notice")


def _winner(summary: SummaryFile) -> Section:
    winner = mapping_of(summary.content.get("winner"))
    if not winner:
        return Section("winner", "In short", notice("No trial has ended with a value yet, so there is no winner."))
    settings = [
        (plain(name, 60), plain(setting_text(value))) for name, value in mapping_of(winner.get("params")).items()
    ]
    body = joined(
        listing([plain(winner.get("said"), 1200)], "verdicts"),
        table(("the winner's settings", "value"), settings, "settings") if settings else None,
        note(joined("Its whole config is best.yaml: ", node("code", "fullbatch train --config best.yaml"))),
    )
    return Section("winner", "In short", body)


def _finalists(summary: SummaryFile, metrics: Sequence[SearchMetric]) -> Section | None:
    rows = [row for row in summary.rows("finalists") if isinstance(row.get("mean"), list) and row["mean"]]
    if not rows:
        return None
    pieces: list[Child] = []
    for number, metric in enumerate(metrics):
        read = [_finalist(row, number) for row in rows]
        pieces.append(finalists(f"metric-{number}", [row for row in read if row is not None], metric))
    unfit = [
        f"{plain(row.get('name') or row.get('label'), 80)}: {row.get('diverged') or 0} seeds diverged, "
        f"{row.get('missing') or 0} ended without a value"
        for row in summary.rows("finalists")
        if row.get("missing") or row.get("diverged")
    ]
    elsewhere = mapping_of(summary.content.get("winner")).get("elsewhere") is True
    lead = "The same configs and the baselines over seeds" + (
        ", measured on sets that nothing was picked by."
        if elsewhere
        else ". A winner picked as the best of several on the same evaluation sets looks a little better than it is."
    )
    body = joined(*pieces, _paired(summary, metrics), notice(listing(unfit)) if unfit else None)
    return Section("finalists", "Finalists", body, lead)


def _finalist(row: Fields, number: int) -> FinalistRow | None:
    """In the metric of this number; None where the file does not have it whole."""
    values = [seed[number] for seed in row.get("values") or () if isinstance(seed, list) and len(seed) > number]
    mean, sds, seeds = row["mean"], row.get("sd") or [], row.get("seeds") or []
    if number >= len(mean) or len(seeds) != len(values) or not all(map(is_number, [mean[number], *values])):
        return None
    sd = sds[number] if number < len(sds) and is_number(sds[number]) else None
    params, baseline = mapping_of(row.get("params")), row.get("kind") == "baseline"
    chosen = [plain(params[name], 40) for name in ("optimizer", "method") if name in params]
    detail = "baseline" if baseline else " + ".join(chosen)
    return FinalistRow(
        plain(row.get("label"), 80), detail, baseline, seeds, values, mean[number], sd, _settings(params)
    )


def _paired(summary: SummaryFile, metrics: Sequence[SearchMetric]) -> Html | None:
    """Differences from the winner, seed by seed."""
    rows: list[list[Child]] = []
    by_name = {metric.name: metric for metric in metrics}
    for row in records_of(mapping_of(summary.content.get("winner")), "paired"):
        metric, mean = by_name.get(plain(row.get("metric"), 120), metrics[0]), row.get("mean")
        if not is_number(mean):
            continue
        values = [value for value in row.get("values") or () if is_number(value)]
        rows.append(
            [
                f"{plain(row.get('against'), 80)}{' (baseline)' if row.get('kind') == 'baseline' else ''}",
                *([metric.short] if len(metrics) > 1 else []),
                difference_text(mean, metric.share, row.get("sd")),
                ", ".join(difference_text(value, metric.share) for value in values),
                "yes" if row.get("seen") is True else "no",
            ]
        )
    if not rows:
        return None
    head = ["the winner less", *(["metric"] if len(metrics) > 1 else []), "mean ± sd", "seed by seed", "told apart"]
    unit = "Shares in points" if any(metric.share for metric in metrics) else "In the unit of the metric"
    under = (
        f"{unit}. Told apart: the 95 % interval of the paired mean (Student's t) leaves 0 out, with at least "
        f"{SEEDS_TO_TELL} seeds."
    )
    return joined(node("h3", "Paired differences"), table(head, rows, "numbers"), node("p", under, class_="note"))


def _front(
    summary: SummaryFile, phases: Mapping[str, Sequence[EndedTrial]], metrics: Sequence[SearchMetric]
) -> Section | None:
    rows = [row for row in summary.rows("pareto") if _values(row.get("values"), len(metrics))]
    if len(metrics) < 2 or not rows:
        return None
    finals = [row for row in summary.rows("finalists") if _values(row.get("mean"), len(metrics))]
    last = next((name for name in ("fine", "grid", "choices") if phases.get(name)), "")
    shown = [_by_means(row, metrics) for row in finals] or phases.get(last, ())
    pairs = [_values(row.get("values"), 2) for row in rows]
    corners = [(pair[0], pair[1]) for pair in pairs if pair and pair[0] is not None and pair[1] is not None]
    cells: list[list[Child]] = [
        [
            plain(row.get("label"), 80),
            *(metric.text(value) for metric, value in zip(metrics, row["values"], strict=True)),
            _settings_cell(mapping_of(row.get("params"))),
        ]
        for row in rows
    ]
    head = ["on the front", *(metric.short for metric in metrics), "settings"]
    body = joined(front(shown, corners, metrics), table(head, cells, "trials"))
    of = "finalists, by their means over seeds" if finals else f"whole trials of the phase {last}"
    return Section("front", "Front", body, f"Not beaten in every metric, among the {of}.")


def _by_means(row: Fields, metrics: Sequence[SearchMetric]) -> EndedTrial:
    """A finalist as a point."""
    label, means = plain(row.get("name") or row.get("label"), 80), _values(row.get("mean"), len(metrics))
    tip = _tip(label, metrics, means, mapping_of(row.get("params")))
    return EndedTrial(0, None, label, "done", {}, means, (), tip)


# ---------------------------------------------------------------------------------------------------------------------
# phases


def _phase(phase: Fields, trials: Sequence[EndedTrial], metric: SearchMetric, summary: SummaryFile) -> Section:
    name = str(phase.get("name"))
    key = plain(name, 40)
    title, lead = _PHASES.get(name, (key, ""))
    owed, running = phase.get("owed"), len(records_of(phase, "running"))
    count = (
        f"{len(trials)} of {counted(int(owed), 'trial')}" if isinstance(owed, int) else counted(len(trials), "trial")
    )
    lead = f"{lead} {count} ended{f', {running} running' if running else ''}."
    if not trials:
        return Section(key, title, notice("No trial has ended yet."), lead)
    shown = _some(trials)
    if len(shown) < len(trials):
        lead += f" The figures show {len(shown)}: the best half of them, and a part of the others."
    log_scaled = [str(setting) for setting in summary.content.get("log_scaled") or ()]
    choosing = name != "fine"
    bars = importance(key, mapping_of(phase.get("importance")))
    why = plain(phase.get("why_none") or "", 200)
    charts = [
        by_choice(key, shown, "optimizer", "method", metric) if choosing else None,
        by_choice(key, shown, "method", "optimizer", metric) if choosing else None,
        progression(key, shown, metric, "method" if choosing else None),
        bars,
        learning_curves(key, shown, metric),
    ]
    varied = [trial for trial in shown if trial.params]
    sliced = [_without_choices(trial) for trial in varied] if choosing else varied
    body = joined(
        figures([chart for chart in charts if chart is not None]),
        node("p", f"No importance: {why}.", class_="note") if bars is None and why else None,
        slices(key, sliced, log_scaled, metric),
        parallel(key, varied, log_scaled, metric),
    )
    return Section(key, title, body, lead)


def _some(trials: Sequence[EndedTrial]) -> list[EndedTrial]:
    """All, or so many that a page can hold: the best half, and of the others every so many-th."""
    if len(trials) <= _MOST_DRAWN:
        return list(trials)
    order = _by_rank(trials)
    first, others = order[: _MOST_DRAWN // 2], order[_MOST_DRAWN // 2 :]
    stride = -(-len(others) // (_MOST_DRAWN // 2))
    return sorted([*first, *others[::stride]], key=lambda trial: trial.slot)


def _by_rank(trials: Sequence[EndedTrial]) -> list[EndedTrial]:
    return sorted(trials, key=lambda trial: (trial.rank is None, trial.rank or 0, trial.slot))


def _without_choices(trial: EndedTrial) -> EndedTrial:
    """The charts by choice have shown these."""
    kept = {name: value for name, value in trial.params.items() if name not in ("method", "optimizer")}
    return replace(trial, params=kept)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def _ranked(
    summary: SummaryFile, phases: Mapping[str, Sequence[EndedTrial]], metrics: Sequence[SearchMetric]
) -> Section | None:
    """A table a phase, the last one first."""
    made: list[Child] = []
    head = ["trial", "rank", *(metric.short for metric in metrics), "status", "settings", "time"]
    for phase in reversed(summary.rows("phases")):
        name = str(phase.get("name"))
        trials = _by_rank(phases[name])
        if not trials:
            continue
        title = _PHASES.get(name, (plain(name, 40), ""))[0]
        common = [
            setting
            for setting, value in trials[0].params.items()
            if len(trials) > 1 and all(trial.params.get(setting, ...) == value for trial in trials)
        ]
        written = {row.get("slot"): row for row in records_of(phase, "trials")}
        rows = [_trial_row(trial, metrics, common, written[trial.slot], name == "finals") for trial in trials]
        alike = _settings({setting: trials[0].params[setting] for setting in common})
        made += [node("h3", title), node("p", f"All with {alike}.", class_="note") if alike else None]
        made.append(table(head, rows[:_FIRST_ROWS], "trials"))
        more = rows[_FIRST_ROWS:_MOST_ROWS]
        made.append(folded(f"{len(more)} more of {title.lower()}", table(head, more, "trials")) if more else None)
        if len(rows) > _MOST_ROWS:
            made.append(node("p", f"{len(rows) - _MOST_ROWS} more are in search.csv.", class_="note"))
    if not made:
        return None
    by = "by value" if len(metrics) == 1 else "by fronts, within a front by the first metric"
    lead = f"Whole trials {by}, then pruned ones, whose value is that of a shorter training, then diverged ones."
    return Section("ranked", "All trials", joined(*made), lead)


def _trial_row(
    trial: EndedTrial, metrics: Sequence[SearchMetric], common: Sequence[str], row: Fields, final: bool
) -> list[Child]:
    values = [metric.text(value) for metric, value in zip(metrics, trial.values or [None] * len(metrics), strict=True)]
    which = f"seed {plain(row.get('seed'), 20)}" if final else f"trial {trial.slot}"
    hidden = not final and str(trial.slot) in trial.label
    return [
        joined(trial.label, None if hidden else node("span", which, class_="kind")),
        NOTHING if trial.rank is None else str(trial.rank),
        best(values[0], trial.rank == 1 and trial.status in WHOLE),
        *values[1:],
        trial.status,
        _settings_cell(trial.params, common),
        duration(row.get("seconds")),
    ]


def _cost(summary: SummaryFile) -> Section | None:
    phases = [(phase.get("name"), records_of(phase, "trials")) for phase in summary.rows("phases")]
    named = [(_PHASES.get(str(name), ("?", ""))[0], trials) for name, trials in phases if trials]
    if not named:
        return None
    rows: list[list[Child]] = []
    for name, trials in [*named, ("together", [row for _, rows_of in named for row in rows_of])]:
        seconds, hours = (
            sum(float(row[key]) for row in trials if is_number(row.get(key))) for key in ("seconds", "device_hours")
        )
        retries = sum(int(row["attempts"]) - 1 for row in trials if isinstance(row.get("attempts"), int))
        mean = duration(seconds / len(trials))
        rows.append([name, str(len(trials)), duration(seconds), mean, short_number(hours), str(retries)])
    head = ("phase", "trials", "time of all", "mean a trial", "device-hours", "retries")
    lead = "The time of all trials one after the other; device-hours are wall-clock hours by the number of devices."
    return Section("cost", "Cost", table(head, rows, "numbers"), lead)


def _plan(summary: SummaryFile) -> Section | None:
    plan = mapping_of(summary.content.get("plan"))
    if not plan:
        return None
    short = {key: value for key, value in plan.items() if key != "base"}
    base = node("pre", node("code", write_values(mapping_of(plan.get("base")))))
    body = joined(node("pre", node("code", write_values(short))), folded("the base config of all trials", base))
    return Section("plan", "Plan", body)
