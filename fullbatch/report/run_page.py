"""The pages of one run, and of several: curves over each other, results side by side, and how their configs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullbatch.config.messages import plain
from fullbatch.data.loader import SamplePool
from fullbatch.data.sources import open_source
from fullbatch.report import blocks, model_view
from fullbatch.report import wording as say
from fullbatch.report.blocks import Child, Html, Page, Section, joined, named_metric, node, notice, notices, table
from fullbatch.report.charts import BASELINE
from fullbatch.report.collect import MainResult, RunData, records_of
from fullbatch.report.curves import batch_losses_section, curves_section, for_script, run_charts
from fullbatch.report.embedded import UNUSABLE, Pictures, RunModel, shown_model
from fullbatch.report.finetuning import cost_section, finetuning_section
from fullbatch.report.suspects import find_suspects, suspects_section, write_suspects
from fullbatch.report.wording import NOTHING, TIMES, is_number, signed, value_text

SUSPECTS = "suspects.csv"
_HEADLINES = 4
_SAMPLES_ON_CPU, _SAMPLES_ON_GPU = 4_000, 20_000  # embedded by default: some seconds of a small model's time
_UNKNOWN = MainResult(None, None, None)


def run_page(run: RunData, baseline: RunData | None, beside: Path, pictures: bool, samples: int | None) -> Page:
    """``beside`` is the folder the page goes to, where the table of suspects is written too."""
    runs = [run] if baseline is None else [run, baseline]
    labels = [run.name] if baseline is None else [run.name, f"{baseline.name} (baseline)"]
    shelf = Pictures(int(run.setting("data", "max_pixels") or 1))
    of_data = [Section("pictures", "Pictures", notice("Pictures were left out (--no-pictures)."))]
    return Page(
        title=f"{run.name} · fullbatch",
        header=_header(run, baseline),
        sections=[
            finetuning_section(run),
            _results_section(run, baseline),
            curves_section(run_charts(runs, labels, [0, BASELINE][: len(runs)])),
            *(_picture_sections(run, shelf, beside, samples) if pictures else of_data),
            batch_losses_section(run),
            cost_section([run]),
            blocks.settings_section(run),
        ],
        runs=[for_script(shown) for shown in runs],
        pictures=shelf,
        shared=len(runs) > 1,
    )


def _header(run: RunData, baseline: RunData | None) -> Html:
    named = run.finetune.get("model")  # the config of a fine-tuning names its own folder base/
    model = named or run.setting("model", "image_tower") or run.setting("model", "model")
    planned, epoch = run.planned_steps, run.last.get("epoch")
    epochs = f" ({say.number(round(float(epoch), 1))} epochs)" if is_number(epoch) else ""
    facts = [
        ("method", run.method),
        ("model", plain(str(model).rsplit("/", 1)[-1].removesuffix(".json"), 60)),
        ("data", plain(", ".join(map(str, run.setting("data", "data") or ())), 120)),
        ("batch size", f"{run.batch_size:,}"),
        ("steps", f"{run.steps:,} of {planned:,}" if planned and planned > run.steps else f"{run.steps:,}"),
        ("pairs seen", f"{run.pairs_seen:,}{epochs}"),
        ("training time", say.duration(run.seconds)),
        ("normalizer error", run.last_normalizer_error()),
    ]
    cards = blocks.listing(_tuned_cards(run) or _cards(run, baseline), "headlines")
    return blocks.page_header("one run", plain(run.name, 120), facts, cards, notices(run.gaps))


def _cards(run: RunData, baseline: RunData | None) -> list[Html]:
    theirs = baseline.main_results() if baseline is not None else {}
    cards = []
    for key, result in list(run.main_results().items())[:_HEADLINES]:
        share, change = say.ratio(result.value, result.chance), _difference(result, theirs.get(key, _UNKNOWN))
        below: list[Child] = []
        if share is not None:
            below.append(node("span", f"{say.times(share)} chance", class_="below-chance" if share < 1.0 else None))
        if change is not None:
            below.append(node("span", f"{signed(change, key)} against the baseline"))
        cards.append(blocks.headline(key, value_text(result.value, key), below))
    return cards


def _tuned_cards(run: RunData) -> list[Html]:
    """Of a fine-tuning: what its result is worth, against the base."""
    kept = run.finetune.get("result") == "base"
    cards = []
    for task in records_of(run.finetune, "tasks")[:_HEADLINES]:
        key, change = f"{task.get('task')} {task.get('metric', '')}", task.get("change")
        against = f"{signed(change, key)} against the base" if is_number(change) else NOTHING
        value = value_text(task.get("base" if kept else "tuned"), key)
        cards.append(blocks.headline(key, value, ["the base is kept" if kept else against]))
    return cards


def _difference(result: MainResult, other: MainResult) -> float | None:
    return result.value - other.value if is_number(result.value) and is_number(other.value) else None


def _results_section(run: RunData, baseline: RunData | None) -> Section:
    results, theirs = run.main_results(), baseline.main_results() if baseline is not None else None
    if not results:
        empty = joined(notice("The run has no results yet."), notices(run.unmeasured[:60]))
        return Section("results", "Results", empty)
    ratios = [say.ratio(result.value, result.chance) for result in results.values()]
    greatest = max([2.0, *(share for share in ratios if share is not None)])
    head: list[Child] = ["task", "value"]
    if baseline is not None:
        head += [joined("baseline ", node("span", plain(baseline.name, 40), class_="quiet")), "difference"]
    head += ["chance", f"{TIMES} chance", "", "among"]
    rows = [_result_row(key, result, greatest, theirs) for key, result in results.items()]
    when = f"Measured at step {run.results_step:,}. " if run.results_step is not None else ""
    if when and run.finetune:
        when += "That is the last step, not the best epoch: what came of the tuning stands further up. "
    chance = f"Chance is what guessing gives; the bars are on a log scale from 1{TIMES}"
    mark = ", the tick is the baseline." if baseline is not None else "."
    every = [
        (named_metric(f"{result.get('task')} {metric}"), value_text(value, metric))
        for result in run.results
        for metric, value in result.items()
        if metric not in ("task", "main", "chance", "size", "step") and is_number(value)
    ]
    body = joined(
        table(("average over", "of 100"), run.averages, "settings"),
        table(head, rows, "results"),
        notices(run.unmeasured[:60]),
        blocks.folded("all metrics", table(("task and metric", "value"), every[:400], "settings")),
    )
    return Section("results", "Results", body, when + chance + mark)


def _result_row(key: str, result: MainResult, greatest: float, theirs: dict[str, MainResult] | None) -> list[Child]:
    share, other = say.ratio(result.value, result.chance), (theirs or {}).get(key, _UNKNOWN)
    cells: list[Child] = [named_metric(key), node("td", value_text(result.value, key), class_="value")]
    if theirs is not None:
        cells.append(node("td", value_text(other.value, key), data_label="baseline"))
        cells.append(node("td", signed(_difference(result, other), key), data_label="difference"))
    return [
        *cells,
        node("td", value_text(result.chance, key), data_label="chance"),
        node("td", say.times(share), class_="below-chance" if share is not None and share < 1.0 else None),
        node("td", blocks.ratio_bar(share, greatest, say.ratio(other.value, result.chance)), class_="bars"),
        node("td", say.count_text(result.size), data_label="among"),
    ]


def _picture_sections(run: RunData, shelf: Pictures, beside: Path, samples: int | None) -> list[Section]:
    """What needs the model and the data; where either is missing, the page says why."""
    shown = shown_model(run)
    try:
        model = RunModel.load(run.path, shown)
    except UNUSABLE as error:
        reason = f"There are no pictures, because the model cannot be loaded: {plain(error)}"
        return [Section("pictures", "Pictures", notice(reason))]
    most = samples or (_SAMPLES_ON_GPU if model.device.type == "cuda" else _SAMPLES_ON_CPU)
    examples, gaps = [], []
    for task, source in model_view.sources_to_show(model.config):
        try:
            examples.append((task, model.embed(SamplePool([open_source(source)]), most)))
        except (ValueError, OSError) as error:
            gaps.append(f"There are no pictures of {plain(task, 120)}, because {plain(error)}")
    try:
        training = model.training(most)
    except (ValueError, OSError) as error:
        missing = notice(f"The training data were not looked at, because {plain(error)}")
        return [
            model_view.examples_section(examples, shelf, gaps),
            Section("suspects", "Suspected false negatives and duplicates", missing),
        ]
    if not examples and not gaps:
        examples = [("the training data", training)]
        gaps = ["The run has no retrieval or zero-shot task, so these are pictures it was trained on."]
    suspects = find_suspects(run.path, model, training)
    write_suspects(beside / SUSPECTS, suspects)
    return [
        model_view.examples_section(examples, shelf, gaps),
        suspects_section(suspects, shelf, SUSPECTS),
        model_view.similarities_section(*model_view.views_of_run(run, shown, training, most)),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# several runs


def several_page(runs: Sequence[RunData], baseline: RunData | None, pictures: bool, samples: int | None) -> Page:
    """Without ``pictures`` no model is loaded, so there are no similarities either."""
    if baseline is not None and not any(_is(run, baseline) for run in runs):
        runs = [*runs, baseline]
    names = [run.name for run in runs]  # with the folder above where two are equal
    labels = [
        plain(run.name if names.count(run.name) == 1 else f"{run.path.resolve().parent.name}/{run.name}", 80)
        for run in runs
    ]
    named = list(zip(labels, runs, strict=True))
    methods = ", ".join(dict.fromkeys(run.method for run in runs))
    lead = f"Methods: {plain(methods)}. Pictures and suspects are on each run's own page: fullbatch report RUN."
    gaps = notices([f"{label}: {gap}" for label, run in named for gap in run.gaps][:12])
    title, first = plain(", ".join(labels), 160), node("p", lead, class_="lead")
    environments = [
        blocks.folded(label, blocks.environment_table(run.environment), node("h4", "Warnings"), blocks.warnings_of(run))
        for label, run in named
    ]
    views = model_view.views_of_runs(runs, labels, samples) if pictures else ([], [])
    return Page(
        title=f"{len(runs)} runs · fullbatch",
        header=blocks.page_header(f"{len(runs)} runs", title, (), first, gaps),
        sections=[
            Section("runs", "Runs", _runs_table(named)),
            _side_by_side(named, baseline),
            curves_section(run_charts(runs, labels, range(len(runs)))),
            model_view.similarities_section(*views),
            cost_section(runs, labels),
            _different_settings(named),
            Section("environment", "Environment and warnings", joined(*environments[:40])),
        ],
        runs=[for_script(run) for run in runs],
        shared=True,
    )


def _runs_table(runs: Sequence[tuple[str, RunData]]) -> Html:
    rows: list[list[Child]] = []
    for label, run in runs:
        counts = [f"{count:,}" for count in (run.batch_size, run.steps, run.pairs_seen)]
        tau, error = value_text(run.last.get("tau"), "loss"), run.last_normalizer_error() or NOTHING
        rows.append([label, run.method, *counts, say.duration(run.seconds), tau, error])
    head = ("run", "method", "batch size", "steps", "pairs seen", "time", "τ at the end", "normalizer error")
    return table(head, rows, "numbers")


def _side_by_side(runs: Sequence[tuple[str, RunData]], baseline: RunData | None) -> Section:
    results = [run.main_results() for _, run in runs]
    rows: list[list[Child]] = []
    for key in dict.fromkeys(key for of_run in results for key in of_run):
        mine = [of_run.get(key, _UNKNOWN) for of_run in results]
        top = say.best_of((result.value for result in mine), key)
        chance = next((result.chance for result in mine if is_number(result.chance)), None)
        cells = [blocks.best(value_text(result.value, key), top is not None and result.value == top) for result in mine]
        rows.append([named_metric(key), *cells, node("td", value_text(chance, key), class_="quiet")])
    if not rows:
        return Section("results", "Results", notice("None of the runs has results yet."))
    marked = [
        joined(label, node("span", " baseline", class_="quiet")) if baseline and _is(run, baseline) else label
        for label, run in runs
    ]
    lead = "★ marks the best of a row; between single runs, differences of a point are often noise."
    return Section("results", "Results", table(("task", *marked, "chance"), rows, "numbers"), lead)


def _is(run: RunData, other: RunData) -> bool:
    return run.path.resolve() == other.path.resolve()


def _different_settings(runs: Sequence[tuple[str, RunData]]) -> Section:
    rows: list[list[Child]] = []
    names = dict.fromkeys((group, name) for _, run in runs for group, fields in run.settings.items() for name in fields)
    for group, name in names:
        values = [say.setting_text(run.settings.get(group, {}).get(name)) for _, run in runs]
        if len(set(values)) > 1 and (group, name) != ("run", "name"):
            rows.append([blocks.setting_name(group, name), *map(plain, values)])
    different = table(("setting", *(label for label, _ in runs)), rows, "settings")
    return Section("config", "What differs between the configs", different or notice("The configs are equal."))
