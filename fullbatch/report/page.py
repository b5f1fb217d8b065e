"""Runs in, one HTML file out.  The file holds everything it needs and may load nothing else: its own policy says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullbatch.report.blocks import Html, Page, embedded_json, filled, node, notice
from fullbatch.report.collect import COMPARISON, SEARCH, read_run, read_summary
from fullbatch.report.comparison_page import comparison_page
from fullbatch.report.run_page import run_page, several_page
from fullbatch.report.search_page import search_page
from fullbatch.report.single_file import FOOTER, asset, content_policy, themed
from fullbatch.training.run_folder import replace_text

PAGE = "report.html"
MAX_BYTES = 5_000_000
_MOST_POINTS = 60_000  # of all curves together
_PAGES = {COMPARISON: comparison_page, SEARCH: search_page}


@dataclass(frozen=True)
class Detail:
    points: int  # of a curve at most
    side: int  # pixels of a picture; 0: no pictures
    quality: int


DETAILS = (Detail(400, 128, 82), Detail(300, 96, 75), Detail(200, 64, 70), Detail(100, 40, 60), Detail(60, 0, 0))


def write_page(
    paths: Sequence[Path],
    output: Path | None = None,
    *,
    pictures: bool = True,
    samples: int | None = None,
    baseline: Path | None = None,
) -> Path:
    """Write the page about a run, several runs, a comparison folder or a search folder, and return where it lies.

    ``output`` is report.html in the folder itself, or in the folder above several runs.  Without ``pictures`` neither
    model nor data are read.  ``samples`` bounds how much of each data set is embedded.  Beside the page of one run
    lies suspects.csv.
    """
    if not paths:
        raise ValueError("Name at least one run folder.")
    if samples is not None and samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}.")
    paths = [Path(path) for path in paths]
    summaries = [(path, name) for name in _PAGES for path in paths if (path / name).is_file()]
    for path, name in summaries:
        kind = name.removesuffix(".json")
        if len(paths) > 1:
            raise ValueError(f"{path} is a {kind}, which has a page of its own; name it alone.")
        if baseline is not None:
            raise ValueError(f"A {kind} has its own baseline; leave --baseline out.")
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.resolve().parent for path in paths]))
    target = above / PAGE if output is None else Path(output)
    if target.is_dir():
        target = target / PAGE
    runs = [] if summaries else [read_run(path) for path in paths]
    other = read_run(baseline) if baseline is not None else None
    target.parent.mkdir(parents=True, exist_ok=True)
    if summaries:
        page = _PAGES[summaries[0][1]](read_summary(*summaries[0]))
    elif len(runs) > 1:
        page = several_page(runs, other, pictures, samples)
    else:
        page = run_page(runs[0], other, target.parent, pictures, samples)
    replace_text(target, fitting(page))
    return target


def fitting(page: Page) -> str:
    """The page in the greatest detail that keeps it small enough to send and to open."""
    for detail in DETAILS:
        text = render(page, detail)
        if len(text.encode("utf-8")) <= MAX_BYTES:
            return text
    raise ValueError(f"The page would be larger than {MAX_BYTES // 10**6} MB even without pictures; name fewer runs.")


def render(page: Page, detail: Detail) -> str:
    style, script = themed(asset("fullbatch.report", "page.css")), asset("fullbatch.report", "page.js")
    shown = [section for section in page.sections if section.body]
    links, words = [node("a", section.title, href=f"#{section.key}") for section in shown], "light or dark"
    theme = node("button", "◐", type="button", id="theme", title=words, aria_label=f"switch between {words}")
    sections = [
        node("section", node("h2", part.title), filled("p", part.lead, class_="lead"), part.body, id=part.key)
        for part in shown
    ]
    lines = sum(len(chart.series) for chart in page.charts)
    points = max(10, min(detail.points, _MOST_POINTS // max(lines, 1)))
    data = {
        "charts": [chart.as_dict(points) for chart in page.charts],
        "runs": list(page.runs),
        "filters": list(page.filters),
        "shared": page.shared,
        "pictures": page.pictures.encoded(detail.side, detail.quality) if page.pictures and detail.side else [],
    }
    named = {"viewport": "width=device-width, initial-scale=1", "referrer": "no-referrer", "color-scheme": "light dark"}
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=content_policy(style, script)),
        [node("meta", name=name, content=content) for name, content in named.items()],
        node("title", page.title),
        node("style", Html(style)),
    )
    off = notice("The charts are drawn by the page's own script, which is switched off.") if page.charts else None
    body = node(
        "body",
        node("nav", node("div", links, class_="links"), theme, aria_label="sections"),
        node("main", node("header", page.header), node("noscript", off), sections),
        node("footer", FOOTER),
        node("script", embedded_json(data), type="application/json", id="data"),
        node("script", Html(script)),
    )
    return f"<!doctype html>\n{node('html', head, body, lang='en')}\n"
