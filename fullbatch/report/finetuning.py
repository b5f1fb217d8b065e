"""What `fullbatch finetune` did: a verdict, before and after, the curves from the base on, and mixtures; and what
each stage of a run cost."""

from __future__ import annotations

from collections.abc import Sequence

from fullbatch.config.messages import plain
from fullbatch.report import blocks
from fullbatch.report import wording as say
from fullbatch.report.blocks import Child, Html, Section, joined, node, table
from fullbatch.report.charts import Axis, Chart, Mark, Series, figure, figures
from fullbatch.report.collect import Fields, RunData, fields_of, records_of
from fullbatch.report.curves import SEEN, metric_axis, short_name, trained_on
from fullbatch.report.wording import NOTHING, is_number, is_share, percent, value_text

_CHARTS = 6  # of tasks that stand open; the others are folded
_MOST_REASONS = 5  # of the verdict
_MOST_NAMED = 5  # tasks in a row of mixtures
_ALPHA = "share of the tuned weights"


def finetuning_section(run: RunData) -> Section:
    """Empty for a run that is no fine-tuning."""
    if not run.finetune:
        return Section("finetuning", "Fine-tuning", Html(""))
    places = [figure(chart) for chart in task_charts(run)]
    shown = blocks.first_shown(places, _CHARTS, "task", "charts")
    if not places:
        shown = blocks.notice("No task has been measured yet.")
    body = joined(_verdict(run), _before_after(run), node("h3", "From the base on"), shown, _mixtures(run))
    lead = (
        f"Base: {plain(run.finetune.get('model', NOTHING), 120)}. The base's values are those measured before the "
        "first step, on the same tasks."
    )
    return Section("finetuning", "Fine-tuning", body, lead)


def _verdict(run: RunData) -> Html:
    record, lines = run.finetune, list[Child]()
    match record.get("outcome"):
        case "tuned":
            tolerance = record.get("tolerance")
            points = f"{100.0 * tolerance:g} points" if is_number(tolerance) else "the tolerance"
            points = "1 point" if points == "1 points" else points
            lines.append(f"The tuned model is kept{_best(record)}. No task lost more than {points}.")
        case "kept_base":
            why = record.get("reasons")
            reasons = [plain(reason) for reason in why] if isinstance(why, list) else []
            lines.append(joined("The base is kept", ": " if reasons else ".", "; ".join(reasons[:_MOST_REASONS])))
            if len(reasons) > _MOST_REASONS:
                lines.append(f"There are {say.counted(len(reasons) - _MOST_REASONS, 'more reason')}; see the table.")
            if not run.interpolation and record.get("best_step") is not None:
                command = node("code", f"fullbatch interpolate {plain(run.path, 200)}")
                lines.append(joined("A mixture of both may keep what either knows: ", command))
        case _:
            lines.append("The fine-tuning has not ended, so there is no verdict yet.")
    mixed, written = run.interpolation.get("best_alpha"), run.interpolation.get("written")
    if is_number(mixed) and mixed == 0:
        lines.append("No mixture of base and tuned weights beats the base without letting a task fall.")
    elif is_number(mixed):
        where = f", in {plain(written, 60)}/" if written else ""
        lines.append(f"Of the mixtures of base and tuned weights the best has {percent(mixed)} of the tuned{where}.")
    return blocks.listing(lines, "verdicts")


def _best(record: Fields) -> str:
    metric = plain(record.get("metric", ""), 160)
    epochs = {epoch["step"]: epoch for epoch in records_of(record, "epochs") if is_number(epoch.get("step"))}
    chosen = epochs.get(record.get("best_step"))
    if chosen is None:
        return ""
    by = "the mean over the tasks" if metric == "mean" else metric
    scores = " → ".join(value_text(epoch.get("score"), metric) for epoch in (epochs.get(0, {}), chosen))
    return f", as it was after epoch {plain(chosen.get('epoch'), 20)}, the best by {by} ({scores})"


def _before_after(run: RunData) -> Html:
    rows: list[list[Child]] = []
    for task in records_of(run.finetune, "tasks"):
        metric = str(task.get("metric", ""))
        chance = percent(task.get("chance")) if is_share(metric) else NOTHING
        lost = "below-chance" if task.get("regressed") is True else None
        cells: list[Child] = [
            node("td", chance, data_label="chance"),
            node("td", value_text(task.get("base"), metric), data_label="base"),
            node("td", value_text(task.get("tuned"), metric), class_="value", data_label="tuned"),
            node("td", say.signed(task.get("change"), metric), class_=lost, data_label="change"),
            node("span", "▼ regressed", class_=lost) if lost else None,
        ]
        rows.append([blocks.named_metric(f"{task.get('task')} {metric}"), *cells])
    return table(("task", "chance", "base", "tuned", "change", ""), rows, "results tuning")


def task_charts(run: RunData) -> list[Chart]:
    """A chart a task: the base's value at step 0, still the same when the recovery ends, then one an epoch."""
    epochs = [epoch for epoch in records_of(run.finetune, "epochs") if is_number(epoch.get("step"))]
    values = {int(epoch["step"]): fields_of(epoch, "values") for epoch in epochs}
    keys = list(dict.fromkeys(str(key) for at_step in values.values() for key in at_step))
    recovery, best = run.recovery_steps, run.finetune.get("best_step")
    charts = []
    for place, key in enumerate(keys):
        points = {step: float(at_step[key]) for step, at_step in values.items() if is_number(at_step.get(key))}
        if not points:
            continue
        marks = [Mark("base", points[0])] if 0 in points else []
        if marks and recovery:
            points.setdefault(recovery, marks[0].y)
        source, what = say.metric_words(key)
        note = f"{what}{SEEN * trained_on(run, key)}"
        note += f"; the best epoch ends at step {best:,}" if isinstance(best, int) and best > 0 else ""
        curve = Series("tuned", sorted(points), [points[step] for step in sorted(points)], run=0)
        title = plain(source or what, 120)
        charts.append(Chart(f"task-{place}", title, plain(note, 160), [curve], metric_axis(key), marks=marks))
    return charts


def mixture_chart(record: Fields) -> Chart | None:
    points = [point for point in records_of(record, "points") if is_number(point.get("alpha"))]
    if len(points) < 2:
        return None
    curves: dict[str, dict[float, float]] = {}
    for point in sorted(points, key=lambda point: float(point["alpha"])):
        values = {"the mean": point.get("score")} if record.get("metric") == "mean" else {}
        shares = {key: value for key, value in fields_of(point, "values").items() if is_share(key)}  # ranks do not fit
        values |= {short_name(key): value for key, value in shares.items()}
        for label, value in values.items():
            if is_number(value):
                curves.setdefault(plain(label, 120), {})[float(point["alpha"])] = float(value)
    series = [
        Series(label, list(curve), list(curve.values()), place, style="errors")
        for place, (label, curve) in enumerate(curves.items())
    ]
    note = "weight by weight, from the base at 0 to the tuned model at 1"
    title = "Between base and tuned"
    return Chart("mixtures", title, note, series, Axis(percent=True), Axis(_ALPHA)) if series else None


def _mixtures(run: RunData) -> Html | None:
    chart = mixture_chart(run.interpolation)
    if chart is None:
        return None
    rows: list[list[Child]] = []
    for point in records_of(run.interpolation, "points"):
        lost = point.get("regressed")
        named = [str(task) for task in lost] if isinstance(lost, list) else []
        best = " (best)" if point.get("alpha") == run.interpolation.get("best_alpha") else ""
        score = value_text(point.get("score"), str(run.interpolation.get("metric", "")))
        below = node("span", f"▼ {blocks.some_names(named, _MOST_NAMED, 'task')}", class_="below-chance")
        rows.append([f"{plain(point.get('alpha'), 20)}{best}", score, below if named else "none"])
    every = table((_ALPHA, "score", "regressed beyond the tolerance"), rows, "settings")
    return joined(node("h3", "Mixtures"), figures([chart]), blocks.folded("every mixture", every))


# ---------------------------------------------------------------------------------------------------------------------
# cost, as TuneCLIP's Tables 16 to 18 count it


def cost_section(runs: Sequence[RunData], labels: Sequence[str] = ()) -> Section:
    """Stage by stage; ``labels`` name the runs where there are several; empty where no run knows its cost."""
    rows: list[list[Child]] = []
    for place, run in enumerate(runs):
        stages = [stage for stage in records_of(run.cost, "stages") if is_number(stage.get("seconds"))]
        named = [(plain(stage.get("stage"), 60), stage) for stage in stages]
        if len(stages) > 1:
            devices = run.cost.get("devices")
            by = f", {say.counted(devices, 'device')}" if isinstance(devices, int) else ""
            names = ("steps", "samples", "seconds", "device_hours")
            sums = {name: sum(stage[name] for stage in stages if is_number(stage.get(name))) for name in names}
            named.append((f"together{by}", sums))
        for name, stage in named:
            cells: list[Child] = [
                "recovery (frozen weights)" if name == "recovery" else name,
                say.count_text(stage.get("steps")),
                say.count_text(stage.get("samples")),
                say.duration(stage["seconds"]),
                say.short_number(stage.get("device_hours")),
            ]
            rows.append([labels[place], *cells] if labels else cells)
    head = [*(["run"] if labels else []), "stage", "steps", "pairs", "time", "device-hours"]
    lead = "Device-hours are wall-clock hours by the number of devices."
    return Section("cost", "Cost by stage", table(head, rows, "numbers"), lead)
