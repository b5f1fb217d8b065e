"""What `fullbatch finetune` did: a verdict, before and after, the curves from the base on, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Section, chart_place, folded, named_task, notice, table
from fullbatch.report.collect import Record, RunData, records_of
from fullbatch.report.curves import COLORS, DASHES, SEEN, Chart, Format, Line, Mark, short_name, trained_on
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import (
    NOTHING,
    counted,
    is_number,
    is_share,
    metric_words,
    percent,
    signed,
    value_text,
)

_CHARTS = 6  # of tasks that stand open; the others are folded
_MOST_REASONS = 5  # of the verdict
_MOST_NAMED = 5  # tasks in a row of mixtures
_ALPHA = "share of the tuned weights"


@dataclass(frozen=True)
class Finetuning:
    """A section and the charts that page.js draws into it."""

    section: Section
    charts: Sequence[Chart]


def finetuning_of(run: RunData) -> Finetuning | None:
    """None for a run that is no fine-tuning."""
    if not run.finetune:
        return None
    tasks = task_charts(run)
    mixture = mixture_chart(run.interpolation)
    places = [chart_place(chart) for chart in tasks]
    more = places[_CHARTS:]
    body = joined(
        _verdict(run),
        _before_after(run),
        node("h3", "From the base on"),
        node("div", places[:_CHARTS], class_="charts") if places else notice("No task has been measured yet."),
        folded(counted(len(more), "more task"), node("div", more, class_="charts")) if more else None,
        _mixtures(run, mixture),
    )
    lead = (
        f"Base: {plain(run.finetune.get('model', NOTHING), 120)}. The base's values are those measured before the "
        "first step, on the same tasks."
    )
    charts = tasks if mixture is None else [*tasks, mixture]
    return Finetuning(Section("finetuning", "Fine-tuning", body, lead), charts)


# ---------------------------------------------------------------------------------------------------------------------
# in words


def _verdict(run: RunData) -> Html:
    said = run.finetune
    lines: list[Child] = []
    match said.get("outcome"):
        case "tuned":
            lines.append(f"The tuned model is kept{_best(said)}. No task lost more than {_tolerance(said)}.")
        case "kept_base":
            why = said.get("reasons")
            reasons = [plain(reason) for reason in why] if isinstance(why, list) else []
            lines.append(joined("The base is kept", ": " if reasons else ".", "; ".join(reasons[:_MOST_REASONS])))
            if len(reasons) > _MOST_REASONS:
                lines.append(f"There are {counted(len(reasons) - _MOST_REASONS, 'more reason')}; see the table.")
            if not run.interpolation and said.get("best_step") is not None:
                command = node("code", f"fullbatch interpolate {plain(run.path, 200)}")
                lines.append(joined("A mixture of both may keep what either knows: ", command))
        case _:
            lines.append("The fine-tuning has not ended, so there is no verdict yet.")
    if (mixed := run.interpolation.get("best_alpha")) is not None and is_number(mixed):
        written = run.interpolation.get("written")
        where = f", in {plain(written, 60)}/" if written else ""
        if float(mixed) == 0.0:
            lines.append("No mixture of base and tuned weights beats the base without letting a task fall.")
        else:
            lines.append(
                f"Of the mixtures of base and tuned weights the best has {percent(float(mixed))} of the tuned{where}."
            )
    return node("ul", [node("li", line) for line in lines], class_="verdicts")


def _best(said: Record) -> str:
    metric, best = plain(said.get("metric", ""), 160), said.get("best_step")
    epochs = records_of(said, "epochs")
    found = next((epoch for epoch in epochs if epoch.get("step") == best), None)
    if found is None:
        return ""
    by = "the mean over the tasks" if metric == "mean" else metric
    base = next((epoch.get("score") for epoch in epochs if epoch.get("step") == 0), None)
    scores = f" ({value_text(base, metric)} → {value_text(found.get('score'), metric)})"
    return f", as it was after epoch {plain(found.get('epoch'), 20)}, the best by {by}{scores}"


def _named(tasks: Sequence[str]) -> str:
    shown = ", ".join(plain(task, 120) for task in tasks[:_MOST_NAMED])
    left = len(tasks) - _MOST_NAMED
    return f"{shown} and {counted(left, 'other task')}" if left > 0 else shown


def _tolerance(said: Record) -> str:
    found = said.get("tolerance")
    if found is None or not is_number(found):
        return "the tolerance"
    points = f"{100.0 * float(found):g}"
    return "1 point" if points == "1" else f"{points} points"


# ---------------------------------------------------------------------------------------------------------------------
# in numbers


def _before_after(run: RunData) -> Html | None:
    rows: list[list[Child]] = []
    for task in records_of(run.finetune, "tasks"):
        name, metric = str(task.get("task")), str(task.get("metric", ""))
        chance, change = task.get("chance"), task.get("change")
        known = chance is not None and is_number(chance) and is_share(metric)
        moved = signed(float(change), metric) if change is not None and is_number(change) else NOTHING
        regressed = task.get("regressed") is True
        rows.append(
            [
                named_task(name, metric),
                node("td", percent(float(chance)) if known and chance is not None else NOTHING, data_label="chance"),
                node("td", value_text(task.get("base"), metric), data_label="base"),
                node("td", value_text(task.get("tuned"), metric), class_="value", data_label="tuned"),
                node("td", moved, class_="below-chance" if regressed else None, data_label="change"),
                node("td", node("span", "▼ regressed", class_="below-chance") if regressed else None),
            ]
        )
    return table(("task", "chance", "base", "tuned", "change", ""), rows, "results tuning") if rows else None


def task_charts(run: RunData) -> list[Chart]:
    """A chart a task: the base's value at step 0, still the same when the recovery ends, then one an epoch."""
    epochs = [epoch for epoch in records_of(run.finetune, "epochs") if is_number(epoch.get("step"))]
    values = [(int(epoch["step"]), epoch["values"]) for epoch in epochs if isinstance(epoch.get("values"), dict)]
    values.sort(key=lambda each: each[0])
    keys = list(dict.fromkeys(str(key) for _, found in values for key in found))
    recovery, best = run.recovery_steps, run.finetune.get("best_step")
    charts = []
    for place, key in enumerate(keys):
        points = [(step, float(found[key])) for step, found in values if is_number(found.get(key))]
        marks = [Mark("base", value) for step, value in points if step == 0]
        if marks and recovery and all(step != recovery for step, _ in points):
            points = sorted([*points, (recovery, marks[0].y)])
        source, what = metric_words(key)
        note = f"{what}{SEEN * trained_on(run, key)}"
        note += f"; the best epoch ends at step {best:,}" if isinstance(best, int) and best > 0 else ""
        line = Line("tuned", 0, 0, [step for step, _ in points], [value for _, value in points])
        title = plain(source or what, 120)
        charts.append(Chart(f"task-{place}", title, plain(note, 160), [line], _format(key), marks=marks))
    return [chart for chart in charts if chart.lines[0].x]


def _format(key: str) -> Format:
    return "percent" if is_share(key) else "number"


# ---------------------------------------------------------------------------------------------------------------------
# mixtures of base and tuned


def mixture_chart(found: Record) -> Chart | None:
    points = [point for point in records_of(found, "points") if is_number(point.get("alpha"))]
    points.sort(key=lambda point: float(point["alpha"]))
    if len(points) < 2:
        return None
    series: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        values = point.get("values")
        known = values.items() if isinstance(values, dict) else ()
        shares = {short_name(str(key)): value for key, value in known if is_share(str(key))}  # ranks have another scale
        mean = {"the mean": point.get("score")} if found.get("metric") == "mean" else {}
        for label, value in {**mean, **shares}.items():
            if value is not None and is_number(value):
                series.setdefault(plain(label, 120), []).append((float(point["alpha"]), float(value)))
    lines = [
        Line(label, place % (COLORS * DASHES), -1, [x for x, _ in line], [y for _, y in line])
        for place, (label, line) in enumerate(series.items())
    ]
    note = "weight by weight, from the base at 0 to the tuned model at 1"
    return (
        Chart("mixtures", "Between base and tuned", note, lines, "percent", x=_ALPHA, shape="even") if lines else None
    )


def _mixtures(run: RunData, chart: Chart | None) -> Html | None:
    if chart is None:
        return None
    rows: list[list[Child]] = []
    for point in records_of(run.interpolation, "points"):
        lost = point.get("regressed")
        named = [str(task) for task in lost] if isinstance(lost, list) else []
        best = point.get("alpha") == run.interpolation.get("best_alpha")
        score = value_text(point.get("score"), str(run.interpolation.get("metric", "")))
        rows.append(
            [
                f"{plain(point.get('alpha'), 20)}{' (best)' if best else ''}",
                score,
                node("span", f"▼ {_named(named)}", class_="below-chance") if named else "none",
            ]
        )
    return joined(
        node("h3", "Mixtures"),
        node("div", chart_place(chart), class_="charts"),
        folded("every mixture", table((_ALPHA, "score", "regressed beyond the tolerance"), rows, "settings")),
    )
