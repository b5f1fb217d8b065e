"""The page of `fullbatch compare`: methods against batch sizes, with their spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fullbatch.config.messages import plain
from fullbatch.report import blocks
from fullbatch.report import wording as say
from fullbatch.report.blocks import Child, Html, Page, Section, joined, node, table
from fullbatch.report.charts import Axis, Chart, Series, figures
from fullbatch.report.collect import Fields, RunData, SummaryFile, fields_of, numbers_of, records_of
from fullbatch.report.curves import curves_section, for_script, metric_axis, run_charts
from fullbatch.report.wording import MINUS, NOTHING, is_number, is_share, setting_text, value_text
from fullbatch.trials.statistics import SEEDS_TO_TELL, half_interval

_MOST_METRICS = 60
_MOST_CHARTS = 6
_MOST_COLUMNS = 8
_MOST_NAMES = 8
_MANY_RUNS = 16  # beyond, only the main curves are drawn, in more detail
_BATCH_SIZE = Axis("batch size", "doubling")
_COSTS = ("seconds", "samples_per_second", "memory_gib", "gpu_gib", "normalizer_error")


def comparison_page(summary: SummaryFile) -> Page:
    cells = _Cells(summary)
    sizes, shown = [str(size) for size in cells.batch_sizes], cells.shown_runs
    methods = [str(row.get("method")) for row, _ in shown]
    colors = [cells.colors[method] for method in methods]
    curves = run_charts([run for _, run in shown], [plain(method, 60) for method in methods], colors)
    if len(shown) > _MANY_RUNS:
        curves = [chart for chart in curves if not chart.more]
    return Page(
        title=f"{plain(summary.name, 80)} · fullbatch",
        header=_header(cells),
        sections=[
            _verdicts(summary),
            _means(cells),
            _against_batch_size(cells),
            _differences(cells),
            _costs(cells),
            curves_section(curves, sizes, "One line a run; seeds share a colour."),
            _every_run(cells),
        ],
        runs=[for_script(run, row.get("batch_size")) for row, run in shown],
        filters=sizes,
        shared=True,
    )


class _Cells:
    """The rows of a comparison by method, batch size and metric: first the metric to look at, then the other tasks'
    main ones (``mains`` are main), then the rest."""

    def __init__(self, summary: SummaryFile) -> None:
        self.summary, self.runs = summary, records_of(summary.content, "runs")
        names = dict.fromkeys(str(row.get("method")) for row in self.runs)
        self.colors = {name: place for place, name in enumerate(names)}
        self.batch_sizes = sorted({int(row["batch_size"]) for row in self.runs if is_number(row.get("batch_size"))})
        self.shown_runs: list[tuple[Fields, RunData]] = [
            (row, summary.runs[str(row.get("name"))]) for row in self.runs if str(row.get("name")) in summary.runs
        ]
        rows = records_of(summary.content, "table")
        self._means = {(str(row.get("method")), row.get("batch_size"), str(row.get("metric"))): row for row in rows}
        named = str(summary.content.get("metric", ""))
        main = {key for run in summary.runs.values() for key in run.main_results()}
        metrics = dict.fromkeys(metric for _, _, metric in self._means)
        order = {key: 0 if key == named or key.endswith(f" {named}") else 1 if key in main else 2 for key in metrics}
        self.metrics = sorted(order, key=order.__getitem__)[:_MOST_METRICS]
        self.mains = max(sum(rank < 2 for rank in order.values()), 1)

    def mean(self, method: str, size: int, metric: str) -> Fields:
        """mean, sd and values; empty where there are none."""
        row = self._means.get((method, size, metric), {})
        return row if is_number(row.get("mean")) else {}

    def of_runs(self, method: str, size: int, key: str) -> Fields:
        """The same of what the finished runs of a cell say under this key."""
        cell = (method, size, "done")
        rows = [row for row in self.runs if (row.get("method"), row.get("batch_size"), row.get("status")) == cell]
        values = [float(row[key]) for row in rows if is_number(row.get(key))]
        sd = statistics.stdev(values) if len(values) > 1 else None
        return {"mean": statistics.fmean(values), "sd": sd, "values": values} if values else {}


def _header(cells: _Cells) -> Html:
    content, rows = cells.summary.content, cells.runs
    status = [row.get("status") for row in rows]
    counts = [f"{status.count(name)} {name}" for name in ("done", "failed", "open") if name in status]
    known = {key: value for key, value in fields_of(cells.summary.content, "budget").items() if value is not None}
    facts = [
        ("methods", blocks.some_names(list(cells.colors), _MOST_NAMES)),
        ("batch sizes", ", ".join(map(str, cells.batch_sizes))),
        ("seeds", str(len({row.get("seed") for row in rows}))),
        ("budget", plain(setting_text(known), 200)),
        ("runs", ", ".join(counts) or "none"),
        ("baseline", plain(content.get("baseline") or NOTHING, 60)),
    ]
    return blocks.page_header("a comparison", plain(cells.summary.name, 120), facts, _unfinished(rows))


def _unfinished(rows: Sequence[Fields]) -> Html:
    """Failed runs by name: a mean over fewer seeds must not pass for a whole one."""
    items = [
        joined(node("strong", plain(row.get("name"), 80)), " failed: ", plain(row.get("error") or "no reason given"))
        for row in rows
        if row.get("status") == "failed"
    ][:40]
    waiting = [str(row.get("name")) for row in rows if row.get("status") == "open"]
    if waiting:
        items.append(joined(f"{len(waiting)} not finished yet: ", blocks.some_names(waiting, _MOST_NAMES)))
    return node("div", node("p", "Not everything ran:"), blocks.listing(items), class_="notice") if items else Html("")


def _verdicts(summary: SummaryFile) -> Section:
    texts = [plain(row["text"]) for row in records_of(summary.content, "matches") if isinstance(row.get("text"), str)]
    return Section("matches", "In short", blocks.listing(texts[:40], "verdicts"))


# ---------------------------------------------------------------------------------------------------------------------
# means and differences


def _by_metric(
    cells: _Cells, first: str, names: Callable[[str], Iterable[str]], cell: Callable[[str, str, int], Child]
) -> list[Child]:
    """A table a metric, with a row a name and a column a batch size."""
    made: list[Child] = []
    head = (first, *(f"batch {size}" for size in cells.batch_sizes))
    for metric in cells.metrics:
        rows = [[plain(name, 120), *(cell(metric, name, size) for size in cells.batch_sizes)] for name in names(metric)]
        if rows:
            made.append(joined(node("h3", blocks.named_metric(metric)), table(head, rows, "numbers")))
    return made


def _spread(row: Fields) -> object:
    """One value has none."""
    return row.get("sd") if len(numbers_of(row, "values")) > 1 else None


def _means(cells: _Cells) -> Section:
    if not cells.metrics:
        return Section("results", "Results", blocks.notice("No run has finished yet."))

    def cell(metric: str, method: str, size: int) -> Html:
        row = cells.mean(method, size, metric)
        top = say.best_of((cells.mean(other, size, metric).get("mean") for other in cells.colors), metric)
        text = say.mean_text(row.get("mean"), is_share(metric), _spread(row))
        return blocks.best(text, bool(row) and row["mean"] == top)

    lead = "Mean ± standard deviation over seeds; ★ marks the best mean of a column."
    tables = _by_metric(cells, "method", lambda _: cells.colors, cell)
    return Section("results", "Results", blocks.first_shown(tables, cells.mains, "metric"), lead)


def _differences(cells: _Cells) -> Section:
    by_cell = {
        (str(row.get("metric")), f"{row.get('method')} {MINUS} {row.get('against')}", row.get("batch_size")): row
        for row in records_of(cells.summary.content, "differences")
    }

    def cell(metric: str, name: str, size: int) -> Html:
        row = by_cell.get((metric, name, size), {})
        mean, sd, count = row.get("mean"), _spread(row), len(numbers_of(row, "values"))
        if not is_number(mean):
            return node("td", NOTHING)
        clear = is_number(sd) and count >= SEEDS_TO_TELL and abs(mean) > half_interval(float(sd), count)
        text = say.difference_text(mean, is_share(metric), sd)
        return node("td", text, node("span", f" ({count})", class_="quiet"), node("span", " ●") if clear else None)

    def names(metric: str) -> Iterable[str]:
        return dict.fromkeys(name for of_metric, name, _ in by_cell if of_metric == metric)

    at_three, at_five = (half_interval(seeds**0.5, seeds) for seeds in (3, 5))
    lead = (
        "Seed by seed, in points: mean ± standard deviation, and the number of seeds. ● marks a mean whose 95 % "
        f"interval (Student's t, one degree of freedom fewer than seeds: ± {at_three:.2f} standard errors at 3, "
        f"± {at_five:.2f} at 5) leaves 0 out, where there are at least {SEEDS_TO_TELL} seeds. The intervals are of "
        "one difference each: of twenty without any effect, one is marked by chance."
    )
    tables = _by_metric(cells, "difference", names, cell)
    return Section("differences", "Paired differences", blocks.first_shown(tables, cells.mains, "metric"), lead)


def _against_batch_size(cells: _Cells) -> Section:
    """Charts of the main metrics, and of what the runs cost."""
    charts = []
    for place, metric in enumerate(cells.metrics[: min(cells.mains, _MOST_CHARTS)]):
        source, what = say.metric_words(metric)
        series = _bars(cells, partial(cells.mean, metric=metric))
        charts.append(Chart(f"points-{place}", source or what, what, series, metric_axis(metric), _BATCH_SIZE))
    probed = "mean squared log error, by the last probe during training"
    for key, title, note, y in (
        ("normalizer_error", "Normalizer error", probed, Axis(scale="log")),
        ("samples_per_second", "Throughput", "pairs per second", Axis()),
    ):
        series = _bars(cells, partial(cells.of_runs, key=key))
        charts.append(Chart(f"points-{key}", title, note, series, y, _BATCH_SIZE))
    drawn = figures([chart for chart in charts if len({x for series in chart.series for x in series.x}) > 1])
    legend = node("div", node("div", class_="legend shared"), class_="controls")
    lead = "Bars are one standard deviation over seeds."
    return Section("batch-size", "Against batch size", joined(legend, drawn) if drawn else drawn, lead)


def _bars(cells: _Cells, row_of: Callable[[str, int], Fields]) -> list[Series]:
    """A line a method through its means, with their standard deviations."""
    series = []
    for method, color in cells.colors.items():
        rows = {size: row for size in cells.batch_sizes if (row := row_of(method, size))}
        spreads = [(float(row["mean"]), row["sd"] if is_number(row.get("sd")) else 0.0) for row in rows.values()]
        means, low, high = ([mean + sign * spread for mean, spread in spreads] for sign in (0, -1, 1))
        if rows:
            series.append(Series(plain(method, 60), list(rows), means, color, low, high, style="errors"))
    return series


# ---------------------------------------------------------------------------------------------------------------------
# cost, and every run


def _costs(cells: _Cells) -> Section:
    rows: list[list[Child]] = []
    for method in cells.colors:
        for size in cells.batch_sizes:
            seconds, *others = (cells.of_runs(method, size, key).get("mean") for key in _COSTS)
            numbers = [NOTHING if value is None else say.number(float(f"{value:.3g}")) for value in others]
            if any(value is not None for value in (seconds, *others)):
                rows.append([plain(method, 60), str(size), say.duration(seconds), *numbers])
    head = ("method", "batch size", "time", "pairs/s", "memory GiB", "GPU GiB", "normalizer error")
    return Section("cost", "Time, memory, normalizer error", table(head, rows, "numbers"), "Means over seeds.")


def _every_run(cells: _Cells) -> Section:
    """With the main metrics first; a run whose folder is gone is named as such."""
    results = [fields_of(row, "results") for row in cells.runs]
    keys = [metric for metric in cells.metrics if any(metric in of_run for of_run in results)][:_MOST_COLUMNS]
    written: list[list[Child]] = []
    for row, of_run in zip(cells.runs, results, strict=True):
        gone = row.get("status") == "done" and str(row.get("name")) not in cells.summary.runs
        status = plain(row.get("status"), 20) + (", folder gone" if gone else "")
        settings = plain(setting_text(row["settings"])) if row.get("settings") else NOTHING
        facts = [status, f"{row.get('seed', NOTHING)}", value_text(row.get("steps"), "seconds"), settings]
        written.append([plain(row.get("name"), 80), *facts, *(value_text(of_run.get(key), key) for key in keys)])
    head: list[Child] = ["run", "status", "seed", "steps", "settings", *(blocks.named_metric(key) for key in keys)]
    every = blocks.folded(say.counted(len(cells.runs), "run"), table(head, written, "numbers"))
    return Section("runs", "Every run", every)
