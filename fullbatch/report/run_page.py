"""The pages of one run, and of several: curves over each other, results side by side, and how their configs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullbatch.config.messages import plain
from fullbatch.report.blocks import (
    Headline,
    Page,
    Section,
    best,
    curves_section,
    environment_table,
    folded,
    headlines,
    named_metric,
    notice,
    notices,
    page_header,
    present,
    ratio_bar,
    setting_name,
    settings_section,
    table,
    warnings_of,
)
from fullbatch.report.charts import BASELINE, COLORS, DASHES
from fullbatch.report.collect import Fields, RunData, records_of
from fullbatch.report.curves import batch_losses_section, for_script, run_charts
from fullbatch.report.embedded import UNUSABLE, Pictures, model_of, shown_model, training_pool
from fullbatch.report.finetuning import cost_section, finetuning_section
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.retrieved import examples_section, open_task, sources_to_show
from fullbatch.report.similarity_view import similarities_section, views_of_run, views_of_runs
from fullbatch.report.suspects import find_suspects, suspects_section, write_suspects
from fullbatch.report.wording import (
    NOTHING,
    TIMES,
    count_text,
    duration,
    is_number,
    is_share,
    lower_is_better,
    number,
    percent,
    ratio,
    setting_text,
    signed,
    times,
    value_text,
)

SUSPECTS = "suspects.csv"
_HEADLINES = 4


def run_page(run: RunData, baseline: RunData | None, beside: Path, pictures: bool, samples: int | None) -> Page:
    """``beside`` is the folder the page goes to, where the table of suspects is written too."""
    runs = [run] if baseline is None else [run, baseline]
    labels = [run.name] if baseline is None else [run.name, f"{baseline.name} (baseline)"]
    shelf = Pictures(int(run.setting("data", "max_pixels") or 1))
    return Page(
        title=f"{run.name} · fullbatch",
        header=_header(run, baseline),
        sections=present(
            finetuning_section(run),
            _results_section(run, baseline),
            curves_section(run_charts(runs, labels, [0, BASELINE][: len(runs)])),
            *(
                _picture_sections(run, shelf, beside, samples)
                if pictures
                else [Section("pictures", "Pictures", notice("Pictures were left out (--no-pictures)."))]
            ),
            batch_losses_section(run),
            cost_section([run]),
            settings_section(run),
        ),
        runs=[for_script(shown) for shown in runs],
        pictures=shelf,
        shared=len(runs) > 1,
    )


def _header(run: RunData, baseline: RunData | None) -> Html:
    named = run.finetune.get("model")  # the config of a fine-tuning names its own folder base/
    model = named or run.setting("model", "image_tower") or run.setting("model", "model")
    planned, epoch, error = run.planned_steps, run.last.get("epoch"), run.last_normalizer_error()
    epochs = f" ({number(round(float(epoch), 1))} epochs)" if is_number(epoch) else ""
    facts = [
        ("method", run.method),
        ("model", plain(str(model).rsplit("/", 1)[-1].removesuffix(".json"), 60)),
        ("data", plain(", ".join(map(str, run.setting("data", "data") or ())), 120)),
        ("batch size", f"{run.batch_size:,}"),
        ("steps", f"{run.steps:,} of {planned:,}" if planned and planned > run.steps else f"{run.steps:,}"),
        ("pairs seen", f"{run.pairs_seen:,}{epochs}"),
        ("training time", duration(run.seconds)),
    ]
    if error is not None:
        facts.append(("normalizer error", str(error)))
    large = headlines(_tuned_cards(run) or _cards(run, baseline))
    return page_header("one run", plain(run.name, 120), facts, large, notices(run.gaps))


def _cards(run: RunData, baseline: RunData | None) -> list[Headline]:
    theirs = baseline.main_results() if baseline is not None else {}
    cards = []
    for (task, metric), result in list(run.main_results().items())[:_HEADLINES]:
        below: list[Child] = []
        share = ratio(result.get(metric), result.get("chance"))
        if share is not None:
            below.append(node("span", f"{times(share)} chance", class_="below-chance" if share < 1.0 else None))
        difference = _difference(result, theirs.get((task, metric), {}), metric)
        if difference is not None:
            below.append(node("span", f"{signed(difference, metric)} against the baseline"))
        cards.append(Headline(f"{task} {metric}", value_text(result.get(metric), metric), below))
    return cards


def _tuned_cards(run: RunData) -> list[Headline]:
    """Of a fine-tuning: what its result is worth, against the base."""
    kept = run.finetune.get("result") == "base"
    cards = []
    for task in records_of(run.finetune, "tasks")[:_HEADLINES]:
        metric, change = str(task.get("metric", "")), task.get("change")
        against = f"{signed(change, metric)} against the base" if is_number(change) else NOTHING
        value = value_text(task.get("base" if kept else "tuned"), metric)
        cards.append(Headline(f"{task.get('task')} {metric}", value, ["the base is kept" if kept else against]))
    return cards


def _difference(result: Fields, other: Fields, metric: str) -> float | None:
    value, theirs = result.get(metric), other.get(metric)
    return float(value) - float(theirs) if is_number(value) and is_number(theirs) else None


def _results_section(run: RunData, baseline: RunData | None) -> Section:
    if not run.results:
        empty = joined(notice("The run has no results yet."), notices(run.unmeasured[:60]))
        return Section("results", "Results", empty)
    ratios = [ratio(result.get(result.get("main", "")), result.get("chance")) for result in run.results]
    greatest = max([2.0, *(share for share in ratios if share is not None)])
    head: list[Child] = ["task", "value"]
    if baseline is not None:
        head += [joined("baseline ", node("span", plain(baseline.name, 40), class_="quiet")), "difference"]
    head += ["chance", f"{TIMES} chance", "", "among"]
    rows = [_result_row(result, greatest, baseline) for result in run.results]
    when = f"Measured at step {run.results_step:,}. " if run.results_step is not None else ""
    if when and run.finetune:
        when += "That is the last step, not the best epoch: what came of the tuning stands further up. "
    chance = f"Chance is what guessing gives; the bars are on a log scale from 1{TIMES}"
    mark = ", the tick is the baseline." if baseline is not None else "."
    every = [
        (named_metric(f"{result['task']} {metric}"), value_text(value, metric))
        for result in run.results
        for metric, value in result.items()
        if metric not in ("task", "main", "chance", "size", "step") and is_number(value)
    ]
    body = joined(
        table(("average over", "of 100"), run.averages, "settings") if run.averages else None,
        table(head, rows, "results"),
        notices(run.unmeasured[:60]),
        folded("all metrics", table(("task and metric", "value"), every[:400], "settings")),
    )
    return Section("results", "Results", body, when + chance + mark)


def _result_row(result: Fields, greatest: float, baseline: RunData | None) -> list[Child]:
    task, metric = str(result["task"]), str(result.get("main", ""))
    value, chance = result.get(metric), result.get("chance")
    share = ratio(value, chance)
    cells: list[Child] = [named_metric(f"{task} {metric}"), node("td", value_text(value, metric), class_="value")]
    other: Fields = {}
    if baseline is not None:
        other = baseline.main_results().get((task, metric), {})
        cells.append(node("td", value_text(other.get(metric), metric), data_label="baseline"))
        cells.append(node("td", signed(_difference(result, other, metric), metric), data_label="difference"))
    cells.append(node("td", percent(chance) if is_share(metric) else NOTHING, data_label="chance"))
    cells.append(node("td", times(share), class_="below-chance" if share is not None and share < 1.0 else None))
    cells.append(node("td", ratio_bar(share, greatest, ratio(other.get(metric), chance)), class_="bars"))
    cells.append(node("td", count_text(result.get("size")), data_label="among"))
    return cells


def _picture_sections(run: RunData, shelf: Pictures, beside: Path, samples: int | None) -> list[Section | None]:
    """What needs the model and the data; where either is missing, the page says why."""
    shown = shown_model(run)
    try:
        model = model_of(run, shown)
    except UNUSABLE as error:
        reason = f"There are no pictures, because the model cannot be loaded: {plain(error)}"
        return [Section("pictures", "Pictures", notice(reason))]
    most = samples if samples is not None else model.most_samples
    examples, gaps = [], []
    for task, source in sources_to_show(model.config):
        try:
            examples.append((task, model.embed(open_task(source), most)))
        except (ValueError, OSError) as error:
            gaps.append(f"There are no pictures of {plain(task, 120)}, because {plain(error)}")
    try:
        training = model.embed(training_pool(model.config.data), most)
    except (ValueError, OSError) as error:
        missing = notice(f"The training data were not looked at, because {plain(error)}")
        return [
            examples_section(examples, shelf, gaps) if examples or gaps else None,
            Section("suspects", "Suspected false negatives and duplicates", missing),
        ]
    if not examples and not gaps:
        examples = [("the training data", training)]
        gaps = ["The run has no retrieval or zero-shot task, so these are pictures it was trained on."]
    suspects = find_suspects(run.path, model, training)
    write_suspects(beside / SUSPECTS, suspects)
    return [
        examples_section(examples, shelf, gaps),
        suspects_section(suspects, shelf, SUSPECTS),
        similarities_section(*views_of_run(run, shown, training, most)),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# several runs


def several_page(runs: Sequence[RunData], baseline: RunData | None, pictures: bool, samples: int | None) -> Page:
    """Without ``pictures`` no model is loaded, so there are no similarities either."""
    if baseline is not None and not any(_is(run, baseline) for run in runs):
        runs = [*runs, baseline]
    labels = distinct_names(runs)
    colors = [place % (COLORS * DASHES) for place in range(len(runs))]
    methods = ", ".join(dict.fromkeys(run.method for run in runs))
    lead = f"Methods: {plain(methods)}. Pictures and suspects are on each run's own page: fullbatch report RUN."
    gaps = [f"{label}: {gap}" for run, label in zip(runs, labels, strict=True) for gap in run.gaps]
    return Page(
        title=f"{len(runs)} runs · fullbatch",
        header=page_header(
            f"{len(runs)} runs",
            plain(", ".join(labels), 160),
            (),
            node("p", lead, class_="lead"),
            notices(gaps[:12]),
        ),
        sections=present(
            Section("runs", "Runs", _runs_table(runs, labels)),
            _side_by_side(runs, labels, baseline),
            curves_section(run_charts(runs, labels, colors)),
            similarities_section(*views_of_runs(runs, labels, samples)) if pictures else None,
            cost_section(runs, labels),
            _different_settings(runs, labels),
            Section("environment", "Environment and warnings", _environments(runs, labels)),
        ),
        runs=[for_script(run) for run in runs],
        shared=True,
    )


def distinct_names(runs: Sequence[RunData]) -> list[str]:
    """Folder names, with the folder above where two are equal."""
    names = [run.name for run in runs]
    return [
        plain(run.name if names.count(run.name) == 1 else f"{run.path.resolve().parent.name}/{run.name}", 80)
        for run in runs
    ]


def _runs_table(runs: Sequence[RunData], labels: Sequence[str]) -> Html:
    rows: list[list[Child]] = []
    for run, label in zip(runs, labels, strict=True):
        counts = [f"{count:,}" for count in (run.batch_size, run.steps, run.pairs_seen)]
        tau, error = value_text(run.last.get("tau"), "loss"), run.last_normalizer_error()
        rows.append([label, run.method, *counts, duration(run.seconds), tau, NOTHING if error is None else str(error)])
    head = ("run", "method", "batch size", "steps", "pairs seen", "time", "τ at the end", "normalizer error")
    return table(head, rows, "numbers")


def _side_by_side(runs: Sequence[RunData], labels: Sequence[str], baseline: RunData | None) -> Section:
    results = [run.main_results() for run in runs]
    keys = list(dict.fromkeys(key for of_run in results for key in of_run))
    if not keys:
        return Section("results", "Results", notice("None of the runs has results yet."))
    rows: list[list[Child]] = []
    for task, metric in keys:
        values = [of_run.get((task, metric), {}).get(metric) for of_run in results]
        known = [float(value) for value in values if is_number(value)]
        top = (min if lower_is_better(metric) else max)(known) if known else None
        chances = [of_run[task, metric].get("chance") for of_run in results if (task, metric) in of_run]
        row: list[Child] = [named_metric(f"{task} {metric}")]
        row += [best(value_text(value, metric), len(set(known)) > 1 and value == top) for value in values]
        row.append(node("td", percent(next(filter(is_number, chances), None)), class_="quiet"))
        rows.append(row)
    marked = [
        joined(label, node("span", " baseline", class_="quiet")) if baseline and _is(run, baseline) else label
        for run, label in zip(runs, labels, strict=True)
    ]
    lead = "★ marks the best of a row; between single runs, differences of a point are often noise."
    return Section("results", "Results", table(("task", *marked, "chance"), rows, "numbers"), lead)


def _is(run: RunData, other: RunData) -> bool:
    return run.path.resolve() == other.path.resolve()


def _different_settings(runs: Sequence[RunData], labels: Sequence[str]) -> Section:
    rows: list[list[Child]] = []
    names = dict.fromkeys((group, name) for run in runs for group, fields in run.settings.items() for name in fields)
    for group, name in names:
        values = [setting_text(run.settings.get(group, {}).get(name)) for run in runs]
        if len(set(values)) > 1 and (group, name) != ("run", "name"):
            rows.append([setting_name(group, name), *(plain(value) for value in values)])
    body = table(("setting", *labels), rows, "settings") if rows else notice("The configs are equal.")
    return Section("config", "What differs between the configs", body)


def _environments(runs: Sequence[RunData], labels: Sequence[str]) -> Html:
    return joined(
        [
            folded(label, environment_table(run.environment), node("h4", "Warnings"), warnings_of(run))
            for run, label in zip(runs, labels, strict=True)
        ][:40]
    )
