"""The page of `fullbatch search`: what won and how sure that is, phase by phase what was tried, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Page, Section, listing, notice, table
from fullbatch.report.collect import Record, SearchData, records_of
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.search_figures import (
    Measure,
    Trial,
    by_choice,
    importance,
    parallel,
    progression,
    slices,
)
from fullbatch.report.search_results import Row, curves, finalists, front
from fullbatch.report.search_tables import (
    TITLES,
    cost_section,
    hours_said,
    mapping_of,
    paired_table,
    plan_section,
    ranked_section,
    settings_said,
)
from fullbatch.report.wording import counted, duration, is_number, setting_text

_MOST_DRAWN = 600  # trials of a phase; beyond, the best half of these and some of the others
_MOST_ERRORS = 20


def search_page(found: SearchData) -> Page:
    measures = _measures(found)
    phases = {str(phase.get("name")): _trials(phase, measures) for phase in found.rows("phases")}
    sections = [
        _short(found),
        _finalists(found, measures),
        _front(found, phases, measures),
        *(
            _phase(phase, phases[str(phase.get("name"))], measures[0], found)
            for phase in found.rows("phases")
            if phase.get("name") != "finals"
        ),
        ranked_section(found, phases, measures),
        cost_section(found),
        plan_section(found),
    ]
    return Page(
        title=f"{plain(found.name, 80)} · fullbatch",
        header=_header(found, measures),
        sections=[section for section in sections if section is not None],
    )


def _measures(found: SearchData) -> list[Measure]:
    known = [
        Measure(
            plain(row.get("name"), 120),
            plain(row.get("short") or row.get("name"), 120),
            row.get("maximise") is not False,
            row.get("share") is True,
        )
        for row in found.rows("metrics")
    ]
    return known or [Measure("value", "value", True, False)]


def _trials(phase: Record, measures: Sequence[Measure]) -> list[Trial]:
    found = []
    for row in records_of(phase, "trials"):
        if not isinstance(row.get("slot"), int):
            continue
        params = mapping_of(row.get("params"))
        values = _values(row.get("values"), len(measures))
        label, status = plain(row.get("label"), 80), plain(row.get("status"), 20)
        said = ", ".join(f"{one.short} {one.said(value)}" for one, value in zip(measures, values, strict=False))
        lines = [
            f"{label} (trial {row['slot']}), {status}",
            said,
            settings_said(params),
            plain(row.get("error") or "", 200),
        ]
        found.append(
            Trial(
                slot=row["slot"],
                rank=row["rank"] if isinstance(row.get("rank"), int) else None,
                label=label,
                status=status,
                params=params,
                values=values,
                evaluations=tuple(_evaluations(row.get("evaluations"))),
                tip="\n".join(line for line in lines if line),
            )
        )
    return found


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


# ---------------------------------------------------------------------------------------------------------------------
# what came of it


def _header(found: SearchData, measures: Sequence[Measure]) -> Html:
    cost = mapping_of(found.said.get("cost"))
    rows = [row for phase in found.rows("phases") for row in records_of(phase, "trials")]
    statuses = {name: sum(row.get("status") == name for row in rows) for name in _STATUSES}
    ended = ", ".join(f"{count} {name}" for name, count in statuses.items() if count)
    running = sum(len(records_of(phase, "running")) for phase in found.rows("phases"))
    owed = cost.get("trials_owed")
    facts = [
        ("metric" if len(measures) == 1 else "metrics", "; ".join(one.name for one in measures)),
        ("trials", f"{len(rows)} of {owed}" if is_number(owed) else f"{len(rows)}"),
        ("ended as", ended or "none yet"),
        ("running", str(running)) if running else None,
        ("device-hours", hours_said(cost.get("device_hours"))),
        ("left", _left(cost)) if _left(cost) else None,
    ]
    return joined(
        node("p", "fullbatch · a search", class_="eyebrow"),
        node("h1", plain(found.name, 120)),
        node("dl", [node("div", node("dt", fact[0]), node("dd", fact[1])) for fact in facts if fact], class_="facts"),
        _failed(found),
    )


_STATUSES = ("done", "stopped", "pruned", "diverged", "failed")


def _left(cost: Mapping[str, Any]) -> str:
    left, done, owed = cost.get("left_seconds"), cost.get("trials_done"), cost.get("trials_owed")
    if not isinstance(left, int | float) or not is_number(left) or done == owed:
        return ""
    return f"about {duration(float(left))}"


def _failed(found: SearchData) -> Html | None:
    items = []
    for phase in found.rows("phases"):
        for row in (row for row in records_of(phase, "trials") if row.get("status") == "failed"):
            name, label = f"{plain(phase.get('name'), 20)} {row.get('slot')}", plain(row.get("label"), 80)
            which = "" if label == name else f" ({label})"
            items.append(
                joined(node("strong", name), f"{which} failed: ", plain(row.get("error") or "no reason given"))
            )
    if not items:
        return None
    more = f"and {len(items) - _MOST_ERRORS} more, in search.csv" if len(items) > _MOST_ERRORS else None
    shown = listing([*items[:_MOST_ERRORS], *([more] if more else [])])
    return node("div", node("p", "Trials that could not be trained:"), shown, class_="notice")


def _short(found: SearchData) -> Section:
    winner = mapping_of(found.said.get("winner"))
    if not winner:
        return Section("winner", "In short", notice("No trial has ended with a value yet, so there is no winner."))
    said = listing([plain(winner.get("said"), 1200)], "verdicts")
    settings = [
        (plain(name, 60), plain(setting_text(value))) for name, value in mapping_of(winner.get("params")).items()
    ]
    shown = table(("the winner's settings", "value"), settings, "settings") if settings else None
    hint = node(
        "p", "Its whole config is best.yaml: ", node("code", "fullbatch train --config best.yaml"), class_="quiet"
    )
    return Section("winner", "In short", joined(said, shown, hint))


def _finalists(found: SearchData, measures: Sequence[Measure]) -> Section | None:
    rows = [row for row in found.rows("finalists") if isinstance(row.get("mean"), list) and row["mean"]]
    if not rows:
        return None
    pieces: list[Child] = []
    for number, measure in enumerate(measures):
        made = [_row(row, number) for row in rows]
        pieces.append(finalists([one for one in made if one is not None], measure))
    pieces.append(paired_table(found, measures))
    unfit = [row for row in found.rows("finalists") if row.get("missing") or row.get("diverged")]
    said = [
        f"{plain(row.get('name') or row.get('label'), 80)}: {row.get('diverged') or 0} seeds diverged, "
        f"{row.get('missing') or 0} ended without a value"
        for row in unfit
    ]
    elsewhere = mapping_of(found.said.get("winner")).get("elsewhere") is True
    lead = "The same configs and the baselines over seeds" + (
        ", measured on sets that nothing was picked by."
        if elsewhere
        else ". A winner picked as the best of several on the same evaluation sets looks a little better than it is."
    )
    return Section("finalists", "Finalists", joined(*pieces, notice(listing(said)) if said else None), lead)


def _row(row: Record, number: int) -> Row | None:
    values = [one[number] for one in row.get("values") or () if isinstance(one, list) and len(one) > number]
    mean, sds = row["mean"], row.get("sd") or []
    seeds = row.get("seeds") or []
    if (
        number >= len(mean)
        or not is_number(mean[number])
        or not all(map(is_number, values))
        or len(seeds) != len(values)
    ):
        return None
    sd = sds[number] if number < len(sds) and is_number(sds[number]) else None
    params, baseline = mapping_of(row.get("params")), row.get("kind") == "baseline"
    chosen = [plain(params[name], 40) for name in ("optimizer", "method") if name in params]
    detail = "baseline" if baseline else " + ".join(chosen)
    return Row(plain(row.get("label"), 80), detail, baseline, seeds, values, mean[number], sd, settings_said(params))


def _front(found: SearchData, phases: Mapping[str, Sequence[Trial]], measures: Sequence[Measure]) -> Section | None:
    rows = [row for row in found.rows("pareto") if _values(row.get("values"), len(measures))]
    if len(measures) < 2 or not rows:
        return None
    finals = [row for row in found.rows("finalists") if _values(row.get("mean"), len(measures))]
    last = next((name for name in ("fine", "grid", "choices") if phases.get(name)), "")
    shown = [_as_trial(row, measures) for row in finals] or phases.get(last, ())
    pairs = [_values(row.get("values"), 2) for row in rows]
    drawn = front(shown, [(x, y) for x, y in pairs if x is not None and y is not None] if pairs[0] else [], measures)
    head = ["on the front", *(measure.short for measure in measures), "settings"]
    cells: list[list[Child]] = [
        [
            plain(row.get("label"), 80),
            *(measure.said(value) for measure, value in zip(measures, row["values"], strict=True)),
            node("td", settings_said(mapping_of(row.get("params"))), class_="said-settings"),
        ]
        for row in rows
    ]
    of = "finalists, by their means over seeds" if finals else f"whole trials of the phase {last}"
    return Section(
        "front", "Front", joined(drawn, table(head, cells, "trials")), f"Not beaten in every metric, among the {of}."
    )


def _as_trial(row: Record, measures: Sequence[Measure]) -> Trial:
    """A finalist as a point: by its means."""
    label, means = plain(row.get("name") or row.get("label"), 80), _values(row.get("mean"), len(measures))
    said = ", ".join(f"{one.short} {one.said(value)}" for one, value in zip(measures, means, strict=True))
    return Trial(
        0, None, label, "done", {}, means, (), f"{label}\n{said}\n{settings_said(mapping_of(row.get('params')))}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# phases


def _drawn_ones(trials: Sequence[Trial]) -> list[Trial]:
    """All, or so many that a page can hold: the best half, and of the others every so many-th."""
    if len(trials) <= _MOST_DRAWN:
        return list(trials)
    order = sorted(trials, key=lambda one: (one.rank is None, one.rank or 0, one.slot))
    first, others = order[: _MOST_DRAWN // 2], order[_MOST_DRAWN // 2 :]
    stride = -(-len(others) // (_MOST_DRAWN // 2))
    return sorted([*first, *others[::stride]], key=lambda one: one.slot)


def _phase(phase: Record, trials: Sequence[Trial], measure: Measure, found: SearchData) -> Section:
    name = str(phase.get("name"))
    title, lead = TITLES.get(name, (plain(name, 40), ""))
    owed, running = phase.get("owed"), len(records_of(phase, "running"))
    count = (
        f"{len(trials)} of {counted(int(owed), 'trial')}" if isinstance(owed, int) else counted(len(trials), "trial")
    )
    lead = f"{lead} {count} ended{f', {running} running' if running else ''}."
    if not trials:
        return Section(plain(name, 40), title, notice("No trial has ended yet."), lead)
    shown = _drawn_ones(trials)
    if len(shown) < len(trials):
        lead += f" The figures show {len(shown)}: the best half of them, and a part of the others."
    log_scaled = [str(one) for one in found.said.get("log_scaled") or ()]
    choosing = name != "fine"
    both = ("optimizer", "method")
    pairs = [by_choice(shown, along, other, measure) for along, other in (both, both[::-1])] if choosing else []
    said = mapping_of(phase.get("importance"))
    bars = importance(said) if said else None
    why = plain(phase.get("why_none") or "", 200)
    figures = [*pairs, progression(shown, measure, "method" if choosing else None), bars, curves(shown, measure)]
    varied = [one for one in shown if one.params]
    body = joined(
        node("div", [one for one in figures if one is not None], class_="charts"),
        node("p", f"No importance: {why}.", class_="note") if bars is None and why else None,
        slices(_without_choices(varied) if choosing else varied, log_scaled, measure),
        parallel(varied, log_scaled, measure),
    )
    return Section(plain(name, 40), title, body, lead)


def _without_choices(trials: Sequence[Trial]) -> list[Trial]:
    """The figures by choice have shown these."""
    kept = [
        {name: value for name, value in one.params.items() if name not in ("method", "optimizer")} for one in trials
    ]
    return [replace(one, params=params) for one, params in zip(trials, kept, strict=True)]
