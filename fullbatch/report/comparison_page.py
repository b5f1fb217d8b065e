"""The page of `fullbatch compare`: methods against batch sizes, with their spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fullbatch.config.shown import plain
from fullbatch.report.blocks import Page, Section, best, chart_place, curves_section, folded, listing, notice, table
from fullbatch.report.collect import ComparisonData, Record
from fullbatch.report.curves import COLORS, DASHES, Chart, Line, charts_of, for_script
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import (
    MINUS,
    NOTHING,
    counted,
    duration,
    is_number,
    is_share,
    lower_is_better,
    metric_words,
    number,
    percent,
    setting_text,
    signed,
    value_text,
)
from fullbatch.trials.statistics import SEEDS_TO_TELL, half_interval, student_t

_MOST_METRICS = 60
_MOST_CHARTS = 6
_MOST_COLUMNS = 8
_MOST_NAMES = 8
_MANY_RUNS = 16  # beyond, only the main curves are drawn, in more detail


def comparison_page(found: ComparisonData) -> Page:
    rows = found.rows("runs")
    methods = _methods(found)
    batch_sizes = sorted({int(row["batch_size"]) for row in rows if is_number(row.get("batch_size"))})
    metrics, mains = _metrics(found)
    points = _against_batch_size(found, methods, metrics[: min(max(mains, 1), _MOST_CHARTS)])
    shown = [(row, found.runs[str(row.get("name"))]) for row in rows if str(row.get("name")) in found.runs]
    curves = charts_of(
        [run for _, run in shown],
        [plain(row.get("method", "?"), 60) for row, _ in shown],
        [methods.get(str(row.get("method")), 0) for row, _ in shown],
    )
    if len(shown) > _MANY_RUNS:
        curves = [chart for chart in curves if not chart.more]
    sections = [
        _verdicts(found),
        _tables(found, methods, batch_sizes, metrics, mains),
        _points_section(points),
        _differences(found, batch_sizes, metrics, mains),
        _costs(found, methods, batch_sizes),
        curves_section(curves, [str(size) for size in batch_sizes], "One line a run; seeds share a colour."),
        _all_runs(found, metrics),
    ]
    return Page(
        title=f"{plain(found.said.get('name') or found.path.name, 80)} · fullbatch",
        header=_header(found, methods, batch_sizes),
        sections=[section for section in sections if section is not None],
        charts=[*points, *curves],
        runs=[for_script(run, row.get("batch_size")) for row, run in shown],
        filters=[str(size) for size in batch_sizes],
        shared=True,
    )


def _methods(found: ComparisonData) -> dict[str, int]:
    """Each method's colour."""
    names = dict.fromkeys(str(row.get("method")) for row in found.rows("runs"))
    return {name: place % (COLORS * DASHES) for place, name in enumerate(names)}


def _metrics(found: ComparisonData) -> tuple[list[str], int]:
    """The one to look at first, then the other tasks' main ones (so many are main), then the rest."""
    names = list(dict.fromkeys(str(row.get("metric")) for row in found.rows("table")))
    named = str(found.said.get("metric", ""))
    mains = {f"{result['task']} {result.get('main')}" for run in found.runs.values() for result in run.results}
    first = [name for name in names if name == named or name.endswith(f" {named}")]
    second = [name for name in names if name in mains and name not in first]
    rest = [name for name in names if name not in first and name not in second]
    return (first + second + rest)[:_MOST_METRICS], len(first + second)


def _metric_html(metric: str) -> Html:
    source, what = metric_words(metric)
    return joined(node("span", plain(source, 120), class_="source"), node("span", plain(what, 80), class_="kind"))


def _header(found: ComparisonData, methods: Mapping[str, int], batch_sizes: Sequence[int]) -> Html:
    rows = found.rows("runs")
    seeds = len({row.get("seed") for row in rows})
    status = {name: sum(row.get("status") == name for row in rows) for name in ("done", "failed", "open")}
    said = ", ".join(f"{count} {name}" for name, count in status.items() if count)
    facts = [
        ("methods", _some_names(list(methods))),
        ("batch sizes", ", ".join(map(str, batch_sizes))),
        ("seeds", f"{seeds}"),
        ("budget", _budget(found.said.get("budget"))),
        ("runs", said or "none"),
        ("baseline", plain(found.said.get("baseline") or NOTHING, 60)),
    ]
    return joined(
        node("p", "fullbatch · a comparison", class_="eyebrow"),
        node("h1", plain(found.said.get("name") or found.path.resolve().name, 120)),
        node("dl", [node("div", node("dt", name), node("dd", value)) for name, value in facts], class_="facts"),
        _unfinished(rows),
    )


def _some_names(names: Sequence[str]) -> str:
    shown = ", ".join(plain(name, 80) for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown}, and {len(names) - _MOST_NAMES} more"


def _budget(said: object) -> str:
    known = {key: value for key, value in said.items() if value is not None} if isinstance(said, dict) else said
    return plain(setting_text(known), 200)


def _unfinished(rows: Sequence[Record]) -> Html | None:
    """Failed runs by name: a mean over fewer seeds must not pass for a whole one."""
    failed = [row for row in rows if row.get("status") == "failed"]
    waiting = [row for row in rows if row.get("status") == "open"]
    if not failed and not waiting:
        return None
    items = [
        joined(node("strong", plain(row.get("name"), 80)), " failed: ", plain(row.get("error") or "no reason given"))
        for row in failed[:40]
    ]
    if waiting:
        items.append(
            joined(f"{len(waiting)} not finished yet: ", _some_names([str(row.get("name")) for row in waiting]))
        )
    return node("div", node("p", "Not everything ran:"), listing(items), class_="notice")


def _verdicts(found: ComparisonData) -> Section | None:
    texts = [row["text"] for row in found.rows("matches") if isinstance(row.get("text"), str)]
    if not texts:
        return None
    return Section("matches", "In short", listing((plain(text) for text in texts[:40]), "verdicts"))


# ---------------------------------------------------------------------------------------------------------------------
# tables and charts of means


def _mean_sd(row: Record | None, metric: str) -> str:
    if row is None or not is_number(row.get("mean")):
        return NOTHING
    mean, spread, count = float(row["mean"]), row.get("sd"), len(row.get("values") or ())
    scale = 100.0 if is_share(metric) else 1.0
    unit = "%" if is_share(metric) else ""
    if count > 1 and spread is not None and is_number(spread):
        return f"{_figures(scale * mean, unit)} ± {_figures(scale * float(spread), unit)}{unit}"
    return f"{_figures(scale * mean, unit)}{unit}"


def _figures(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit else f"{value:.3g}"


def _cells(found: ComparisonData) -> dict[tuple[str, int, str], Record]:
    return {
        (str(row.get("method")), int(row["batch_size"]), str(row.get("metric"))): row
        for row in found.rows("table")
        if is_number(row.get("batch_size"))
    }


def _tables(
    found: ComparisonData, methods: Mapping[str, int], batch_sizes: Sequence[int], metrics: Sequence[str], mains: int
) -> Section | None:
    if not metrics:
        return Section("results", "Results", notice("No run has finished yet."))
    cells = _cells(found)
    made = []
    for metric in metrics:
        pick = min if lower_is_better(metric) else max
        tops = {}
        for size in batch_sizes:
            known = [
                cells[name, size, metric]["mean"] for name in methods if _has_mean(cells.get((name, size, metric)))
            ]
            tops[size] = pick(known) if len(set(known)) > 1 else None  # of equals, none is best
        rows: list[list[Child]] = []
        for name in methods:
            row: list[Child] = [plain(name, 60)]
            for size in batch_sizes:
                cell = cells.get((name, size, metric))
                row.append(best(_mean_sd(cell, metric), _has_mean(cell) and cell["mean"] == tops[size]))  # type: ignore[index]
            rows.append(row)
        head: list[Child] = ["method", *(f"batch {size}" for size in batch_sizes)]
        made.append(joined(node("h3", _metric_html(metric)), table(head, rows, "numbers")))
    body = _first_shown(made, mains)
    return Section(
        "results", "Results", body, "Mean ± standard deviation over seeds; ★ marks the best mean of a column."
    )


def _first_shown(made: Sequence[Child], mains: int) -> Html:
    """Every task's main metric, then a fold with the others."""
    shown = max(mains, 1)
    rest = made[shown:]
    return joined(*made[:shown], folded(counted(len(rest), "more metric"), *rest) if rest else None)


def _has_mean(row: Record | None) -> bool:
    return row is not None and is_number(row.get("mean"))


def _against_batch_size(found: ComparisonData, methods: Mapping[str, int], metrics: Sequence[str]) -> list[Chart]:
    cells = _cells(found)
    charts = []
    for place, metric in enumerate(metrics):
        lines = []
        for name, color in methods.items():
            mine = sorted(
                (size, row)
                for (method, size, what), row in cells.items()
                if (method, what) == (name, metric) and _has_mean(row)
            )
            means = [float(row["mean"]) for _, row in mine]
            spreads = [float(row["sd"]) if is_number(row.get("sd")) else 0.0 for _, row in mine]
            lines.append(_bars(name, color, [size for size, _ in mine], means, spreads))
        source, what = metric_words(metric)
        kept = [line for line in lines if line.x]
        charts.append(
            Chart(
                f"points-{place}",
                source or what,
                what,
                kept,
                "percent" if is_share(metric) else "number",
                x="batch size",
            )
        )
    for key, title, note in (
        ("normalizer_error", "Normalizer error", "mean squared log error, by the last probe during training"),
        ("samples_per_second", "Throughput", "pairs per second"),
    ):
        lines = [_of_runs(found, name, color, key) for name, color in methods.items()]
        kept = [line for line in lines if line.x]
        if kept:
            charts.append(Chart(f"points-{key}", title, note, kept, log=key == "normalizer_error", x="batch size"))
    return [chart for chart in charts if len({x for line in chart.lines for x in line.x}) > 1]


def _bars(name: str, color: int, sizes: Sequence[int], means: Sequence[float], spreads: Sequence[float]) -> Line:
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    return Line(plain(name, 60), color, -1, list(sizes), list(means), low, high)


def _of_runs(found: ComparisonData, name: str, color: int, key: str) -> Line:
    by_size = _values(found, name, key)
    means = [statistics.fmean(values) for values in by_size.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_size.values()]
    return _bars(name, color, list(by_size), means, spreads)


def _values(found: ComparisonData, method: str, key: str) -> dict[int, list[float]]:
    by_size: dict[int, list[float]] = {}
    for row in found.rows("runs"):
        if row.get("method") == method and row.get("status") == "done" and is_number(row.get(key)):
            by_size.setdefault(int(row["batch_size"]), []).append(float(row[key]))
    return dict(sorted(by_size.items()))


def _points_section(charts: Sequence[Chart]) -> Section | None:
    if not charts:
        return None
    body = joined(
        node("div", node("div", class_="legend shared"), class_="controls"),
        node("div", [chart_place(chart) for chart in charts], class_="charts"),
    )
    return Section("batch-size", "Against batch size", body, "Bars are one standard deviation over seeds.")


def _differences(
    found: ComparisonData, batch_sizes: Sequence[int], metrics: Sequence[str], mains: int
) -> Section | None:
    rows = found.rows("differences")
    made = []
    for metric in metrics:
        mine = [row for row in rows if row.get("metric") == metric]
        pairs = dict.fromkeys((str(row.get("method")), str(row.get("against"))) for row in mine)
        cells = {(str(row.get("method")), str(row.get("against")), row.get("batch_size")): row for row in mine}
        written: list[list[Child]] = []
        for method, against in pairs:
            line: list[Child] = [plain(f"{method} {MINUS} {against}", 120)]
            line += [_difference(cells.get((method, against, size)), metric) for size in batch_sizes]
            written.append(line)
        if written:
            head: list[Child] = ["difference", *(f"batch {size}" for size in batch_sizes)]
            made.append(joined(node("h3", _metric_html(metric)), table(head, written, "numbers")))
    if not made:
        return None
    body = _first_shown(made, mains)
    lead = (
        "Seed by seed, in points: mean ± standard deviation, and the number of seeds. ● marks a mean whose 95 % "
        f"interval (Student's t, one degree of freedom fewer than seeds: ± {student_t(2):.2f} standard errors at 3, "
        f"± {student_t(4):.2f} at 5) leaves 0 out, where there are at least {SEEDS_TO_TELL} seeds. The intervals are "
        "of one difference each: of twenty without any effect, one is marked by chance."
    )
    return Section("differences", "Paired differences", body, lead)


def _difference(row: Record | None, metric: str) -> Html:
    if row is None or not is_number(row.get("mean")):
        return node("td", NOTHING)
    mean, spread, count = float(row["mean"]), row.get("sd"), len(row.get("values") or ())
    text = signed(mean, metric).removesuffix(" points")
    clear = False
    if spread is not None and is_number(spread) and count > 1:
        scale = 100.0 if is_share(metric) else 1.0
        text += f" ± {_figures(scale * float(spread), '%' if is_share(metric) else '')}"
        clear = count >= SEEDS_TO_TELL and abs(mean) > half_interval(float(spread), count)
    return node("td", text, node("span", f" ({count})", class_="quiet"), node("span", " ●") if clear else None)


# ---------------------------------------------------------------------------------------------------------------------
# cost, and every run


def _costs(found: ComparisonData, methods: Mapping[str, int], batch_sizes: Sequence[int]) -> Section | None:
    rows: list[list[Child]] = []
    for name in methods:
        known = {
            key: _values(found, name, key)
            for key in ("seconds", "samples_per_second", "memory_gib", "gpu_gib", "normalizer_error")
        }
        for size in batch_sizes:
            mean = {key: statistics.fmean(values[size]) if size in values else None for key, values in known.items()}
            if all(value is None for value in mean.values()):
                continue
            rows.append(
                [
                    plain(name, 60),
                    f"{size}",
                    NOTHING if mean["seconds"] is None else duration(mean["seconds"]),
                    *(NOTHING if mean[key] is None else number(float(f"{mean[key]:.3g}")) for key in list(known)[1:]),
                ]
            )
    if not rows:
        return None
    head = ("method", "batch size", "time", "pairs/s", "memory GiB", "GPU GiB", "normalizer error")
    return Section("cost", "Time, memory, normalizer error", table(head, rows, "numbers"), "Means over seeds.")


def _all_runs(found: ComparisonData, metrics: Sequence[str]) -> Section:
    """With the main metrics first; a run whose folder is gone is named as such."""
    rows = found.rows("runs")
    there = {key for row in rows for key in _results_of(row)}
    keys = [metric for metric in metrics if metric in there][:_MOST_COLUMNS]
    written: list[list[Child]] = []
    for row in rows:
        results = _results_of(row)
        written.append(
            [
                plain(row.get("name"), 80),
                plain(row.get("status"), 20) + ("" if _is_there(found, row) else ", folder gone"),
                f"{row.get('seed', NOTHING)}",
                value_text(row.get("steps"), "seconds"),
                plain(setting_text(row.get("settings") or None)) if row.get("settings") else NOTHING,
                *(_result(results.get(key), key) for key in keys),
            ]
        )
    head: list[Child] = ["run", "status", "seed", "steps", "settings", *(_metric_html(key) for key in keys)]
    return Section("runs", "Every run", folded(counted(len(rows), "run"), table(head, written, "numbers")))


def _is_there(found: ComparisonData, row: Record) -> bool:
    return row.get("status") != "done" or str(row.get("name")) in found.runs


def _results_of(row: Record) -> dict[str, Any]:
    found = row.get("results")
    return found if isinstance(found, dict) else {}


def _result(value: object, metric: str) -> str:
    return percent(float(value)) if isinstance(value, int | float) and is_share(metric) else value_text(value, metric)
