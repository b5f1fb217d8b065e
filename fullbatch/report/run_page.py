"""The page of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullbatch.config.messages import plain
from fullbatch.report.batch_losses import batch_loss_charts, batch_losses_section
from fullbatch.report.blocks import (
    Page,
    Section,
    curves_section,
    folded,
    gaps_of,
    named_task,
    notice,
    ratio_bar,
    settings_section,
    table,
)
from fullbatch.report.collect import Record, RunData, records_of
from fullbatch.report.costs import cost_section
from fullbatch.report.curves import BASELINE, Chart, charts_of, for_script
from fullbatch.report.finetuning import finetuning_of
from fullbatch.report.gallery import Shelf, grids_section, no_pictures, suspects_section
from fullbatch.report.grids import make_grid, open_task, sources_to_show
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.pictures import Pictures
from fullbatch.report.similarity_view import similarities_section, similarity_charts
from fullbatch.report.suspects import find_suspects, training_pool, write_suspects
from fullbatch.report.views import UNUSABLE, eye_of, shown_model, views_of_run
from fullbatch.report.wording import (
    NOTHING,
    TIMES,
    duration,
    is_number,
    is_share,
    metric_name,
    number,
    percent,
    ratio,
    signed,
    task_name,
    times,
    value_text,
)

SUSPECTS = "suspects.csv"
_HEADLINES = 4


def run_page(run: RunData, baseline: RunData | None, beside: Path, pictures: bool, samples: int | None) -> Page:
    """``beside`` is the folder the page goes to, where the table of suspects is written too."""
    runs = [run] if baseline is None else [run, baseline]
    labels = [run.name] if baseline is None else [run.name, f"{baseline.name} (baseline)"]
    curves = charts_of(runs, labels, [0, BASELINE][: len(runs)])
    shelf = Shelf(Pictures(int(run.setting("data", "max_pixels") or 1)))
    tuning = finetuning_of(run)
    sections = [results_section(run, baseline), curves_section(curves)]
    charts = list(curves)
    if tuning is not None:
        sections.insert(0, tuning.section)
        charts += tuning.charts
    if pictures:
        seen, drawn = picture_sections(run, shelf, beside, samples)
        sections += seen
        charts += drawn
    else:
        sections.append(no_pictures("Pictures were left out (--no-pictures)."))
    drawn_losses = batch_loss_charts(run)
    charts += drawn_losses
    sections += [batch_losses_section(run, drawn_losses), cost_section([run]), settings_section(run)]
    return Page(
        title=f"{run.name} · fullbatch",
        header=header(run, baseline),
        sections=[section for section in sections if section is not None],
        charts=charts,
        runs=[for_script(each) for each in runs],
        pictures=shelf.pictures,
        shared=len(runs) > 1,
    )


# ---------------------------------------------------------------------------------------------------------------------
# header and results


def header(run: RunData, baseline: RunData | None) -> Html:
    named = run.finetune.get("model")  # the config of a fine-tuning names its own folder base/
    model = named or run.setting("model", "image_tower") or run.setting("model", "model")
    data = ", ".join(map(str, run.setting("data", "data") or ()))
    clock = run.clock()
    facts: list[tuple[str, str]] = [
        ("method", run.method),
        ("model", plain(str(model).rsplit("/", 1)[-1].removesuffix(".json"), 60)),
        ("data", plain(data, 120)),
        ("batch size", f"{run.batch_size:,}"),
        ("steps", _steps(run)),
        ("pairs seen", f"{run.pairs_seen:,}{_epochs(run)}"),
        ("training time", duration(clock[-1][1]) if clock else NOTHING),
    ]
    error = run.last_normalizer_error()
    if error is not None:
        facts.append(("normalizer error", str(error)))
    return joined(
        node("p", "fullbatch · one run", class_="eyebrow"),
        node("h1", plain(run.name, 120)),
        node("dl", [node("div", node("dt", name), node("dd", value)) for name, value in facts], class_="facts"),
        tuned_headlines(run) or headlines(run, baseline),
        gaps_of(run.gaps),
    )


def _steps(run: RunData) -> str:
    planned = run.planned_steps
    return f"{run.steps:,} of {planned:,}" if planned and planned > run.steps else f"{run.steps:,}"


def _epochs(run: RunData) -> str:
    epoch = run.last.get("epoch")
    return f" ({number(round(float(epoch), 1))} epochs)" if epoch is not None and is_number(epoch) else ""


def headlines(run: RunData, baseline: RunData | None) -> Html | None:
    theirs = _main_values(baseline)
    cards = []
    for result in run.results[:_HEADLINES]:
        metric = str(result.get("main", ""))
        value, chance = result.get(metric), result.get("chance")
        kind, source = task_name(str(result["task"]))
        below: list[Child] = []
        share = ratio(value, chance)
        if share is not None:
            below.append(node("span", f"{times(share)} chance", class_="below-chance" if share < 1.0 else None))
        other = theirs.get((str(result["task"]), metric))
        if other is not None and isinstance(value, int | float) and is_number(value):
            below.append(node("span", f"{signed(float(value) - other, metric)} against the baseline"))
        cards.append(
            node(
                "li",
                node("span", value_text(value, metric), class_="big"),
                node("span", f"{kind} {plain(metric_name(metric), 40)}", class_="what"),
                node("span", plain(source, 60), class_="source"),
                node("span", below, class_="against") if below else None,
            )
        )
    return node("ul", cards, class_="headlines") if cards else None


def tuned_headlines(run: RunData) -> Html | None:
    """Of a fine-tuning: what its result is worth, against the base."""
    result = run.finetune.get("result")
    cards = []
    for task in records_of(run.finetune, "tasks")[:_HEADLINES]:
        metric, change = str(task.get("metric", "")), task.get("change")
        kind, source = task_name(str(task.get("task")))
        against = "the base is kept"
        if result != "base":
            against = (
                f"{signed(float(change), metric)} against the base"
                if is_number(change) and change is not None
                else NOTHING
            )
        cards.append(
            node(
                "li",
                node("span", value_text(task.get("base" if result == "base" else "tuned"), metric), class_="big"),
                node("span", f"{kind} {plain(metric_name(metric), 40)}", class_="what"),
                node("span", plain(source, 60), class_="source"),
                node("span", against, class_="against"),
            )
        )
    return node("ul", cards, class_="headlines") if cards else None


def _main_values(run: RunData | None) -> dict[tuple[str, str], float]:
    values = {}
    for result in run.results if run is not None else ():
        metric = str(result.get("main", ""))
        if is_number(result.get(metric)):
            values[str(result["task"]), metric] = float(result[metric])
    return values


def results_section(run: RunData, baseline: RunData | None) -> Section:
    if not run.results:
        empty = joined(notice("The run has no results yet."), gaps_of(run.unmeasured[:60]))
        return Section("results", "Results", empty)
    theirs = _main_values(baseline)
    ratios = [ratio(result.get(result.get("main", "")), result.get("chance")) for result in run.results]
    greatest = max([2.0, *(share for share in ratios if share is not None)])
    head: list[Child] = ["task", "value"]
    if baseline is not None:
        head += [joined("baseline ", node("span", plain(baseline.name, 40), class_="quiet")), "difference"]
    head += ["chance", f"{TIMES} chance", "", "among"]
    rows = [_row(result, share, greatest, theirs, baseline) for result, share in zip(run.results, ratios, strict=True)]
    when = f"Measured at step {run.results_step:,}. " if run.results_step is not None else ""
    if when and run.finetune:
        when += "That is the last step, not the best epoch: what came of the tuning stands further up. "
    chance = f"Chance is what guessing gives; the bars are on a log scale from 1{TIMES}"
    mark = ", the tick is the baseline." if baseline is not None else "."
    body = joined(
        table(("average over", "of 100"), run.averages, "settings") if run.averages else None,
        table(head, rows, "results"),
        gaps_of(run.unmeasured[:60]),
        folded("all metrics", _all_metrics(run.results)),
    )
    return Section("results", "Results", body, when + chance + mark)


def _row(
    result: Record,
    share: float | None,
    greatest: float,
    theirs: dict[tuple[str, str], float],
    baseline: RunData | None,
) -> list[Child]:
    task, metric = str(result["task"]), str(result.get("main", ""))
    value, chance, size = result.get(metric), result.get("chance"), result.get("size")
    cells: list[Child] = [named_task(task, metric), node("td", value_text(value, metric), class_="value")]
    other = theirs.get((task, metric))
    if baseline is not None:
        known = other is not None and isinstance(value, int | float)
        cells.append(node("td", value_text(other, metric), data_label="baseline"))
        difference = (
            signed(float(value) - other, metric) if known and other is not None and value is not None else NOTHING
        )
        cells.append(node("td", difference, data_label="difference"))
    chance_text = percent(float(chance)) if is_number(chance) and is_share(metric) and chance is not None else NOTHING
    cells.append(node("td", chance_text, data_label="chance"))
    cells.append(node("td", times(share), class_="below-chance" if share is not None and share < 1.0 else None))
    cells.append(node("td", ratio_bar(share, greatest, ratio(other, chance)), class_="bars"))
    cells.append(node("td", f"{int(size):,}" if is_number(size) and size is not None else NOTHING, data_label="among"))
    return cells


def _all_metrics(results: Sequence[Record]) -> Html:
    rows = []
    for result in results:
        for metric, value in result.items():
            if metric not in ("task", "main", "chance", "size", "step") and is_number(value):
                rows.append((named_task(str(result["task"]), metric), value_text(value, metric)))
    return table(("task and metric", "value"), rows[:400], "settings")


# ---------------------------------------------------------------------------------------------------------------------
# pictures


def picture_sections(
    run: RunData, shelf: Shelf, beside: Path, samples: int | None
) -> tuple[list[Section | None], list[Chart]]:
    """What needs the model and the data; where either is missing, the page says why."""
    shown = shown_model(run)
    try:
        eye = eye_of(run, shown)
    except UNUSABLE as error:
        return [no_pictures(f"There are no pictures, because the model cannot be loaded: {plain(error)}")], []
    most = samples if samples is not None else eye.most_samples
    grids, gaps = [], []
    for task, source in sources_to_show(eye.config):
        try:
            grids.append(make_grid(task, eye.look(open_task(source), most)))
        except (ValueError, OSError) as error:
            gaps.append(f"There are no pictures of {plain(task, 120)}, because {plain(error)}")
    try:
        training = eye.look(training_pool(eye.config.data), most)
    except (ValueError, OSError) as error:
        missing = f"The training data were not looked at, because {plain(error)}"
        return [
            grids_section(grids, shelf, gaps) if grids or gaps else None,
            Section("suspects", "Suspected false negatives and duplicates", notice(missing)),
        ], []
    if not grids and not gaps:
        grids = [make_grid("the training data", training)]
        gaps = ["The run has no retrieval or zero-shot task, so these are pictures it was trained on."]
    found = find_suspects(run.path, eye, training)
    write_suspects(beside / SUSPECTS, found)
    views, unseen = views_of_run(run, shown, training, most)
    charts = similarity_charts(views)
    return [
        grids_section(grids, shelf, gaps),
        suspects_section(found, shelf, SUSPECTS),
        similarities_section(views, charts, unseen),
    ], charts
