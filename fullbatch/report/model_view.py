"""What a run's model makes of data: pictures found for captions, captions for pictures, the pairs it confuses most; and
the false-negative view, TuneCLIP Figure 11: similarities of true pairs, near and far negatives, model by model.

Right and wrong are told by a symbol and a frame, not by colour alone.
"""

# N: samples or pairs   D: width   Q: queries   A: possible answers

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fullbatch.config.data import Source
from fullbatch.config.messages import plain
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import parse_task
from fullbatch.evaluation.retrieval import equal_captions, recalls
from fullbatch.evaluation.similarities import (
    FAR,
    NEAREST,
    Distribution,
    merged_bins,
    near_negatives,
    similarity_distributions,
)
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.finetuning.record import BASE, TUNED
from fullbatch.report.blocks import Section, folded, note, notices, table
from fullbatch.report.charts import Axis, Chart, figures
from fullbatch.report.collect import RunData
from fullbatch.report.curves import area
from fullbatch.report.embedded import (
    CAPTION,
    UNUSABLE,
    Embedded,
    Pair,
    Pictures,
    RunModel,
    fits_the_other,
    groups_of,
    training_pool,
)
from fullbatch.report.markup import Child, Html, joined, node, quoted
from fullbatch.report.wording import MINUS, NOTHING, percent

_MOST_TASKS = 2
_QUERIES = 10
_PICTURES, _CAPTIONS = 6, 5  # answers to a query
_CONFUSED = 8
_CANDIDATES = 400
MOST_PAIRS = 15_000  # as many as the paper takes
MOST_RUNS = 6
_PAIRS_ON_CPU = 2_000  # a run, where there are several
Direction = Literal["image_to_text", "text_to_image"]
_DIRECTIONS: dict[Direction, str] = {"image_to_text": "picture → captions", "text_to_image": "caption → pictures"}
_FAR = f"negatives {FAR[0]} to {FAR[1]}"  # there are none in a small sample
_BANDS = ("positives", f"{NEAREST} nearest negatives", _FAR, "farther half of negatives")
_ANCHORS = 8  # pictures whose nearest captions are named


def sources_to_show(config: RunConfig) -> list[tuple[str, Source]]:
    """The run's retrieval tasks; else its zero-shot tasks, whose captions are class names.

    Folders of benchmarks have layouts of their own.
    """
    tasks = [(text, parse_task(text)) for text in tasks_of(config)]
    retrieval = [(text, task.source) for text, task in tasks if task.kind == "retrieval"]
    zero_shot = [(text, task.source) for text, task in tasks if task.kind == "zero_shot"]
    return (retrieval or zero_shot)[:_MOST_TASKS]


def examples_section(tasks: Sequence[tuple[str, Embedded]], pictures: Pictures, gaps: Sequence[str]) -> Section:
    body = [notices(gaps)]
    for task, embedded in tasks:
        count, of = len(embedded.ids), embedded.of
        body += [
            node("h3", node("span", plain(task, 160), class_="source")),
            note(f"Among {count:,} pictures{f', drawn from {of:,}' if count < of else ''}."),
            node("h4", "Text to pictures"),
            node("div", _queries(embedded, pictures, to_pictures=True), class_="queries"),
            node("h4", "Picture to texts"),
            node("div", _queries(embedded, pictures, to_pictures=False), class_="cards"),
        ]
        pairs = fits_the_other(embedded.image_ND, embedded.text_ND, embedded.groups_N, _CANDIDATES)
        confused = without_repeats([pair for pair in pairs if pair[2] > 0.0], _CONFUSED)
        cards = [pictures.card(embedded, first, other, f"by {score:.3f}") for first, other, score in confused]
        if cards:
            body.append(node("h4", "Most confused pairs"))
            body.append(note("Each picture is nearer to the other's caption than to its own."))
            body.append(node("div", cards, class_="cards"))
    legend = "✓ in a thick frame is right, ✗ in a dashed one is wrong. The queries are spread evenly, not chosen."
    return Section("pictures", "What the model finds", joined(*body), legend if tasks else "")


def without_repeats(pairs: Sequence[Pair], most: int, often: int = 2) -> list[Pair]:
    """The first pairs, no sample in more than a few: one strange sample would fill the list."""
    seen: Counter[int] = Counter()
    kept: list[Pair] = []
    for pair in pairs:
        if len(kept) < most and max(seen[pair[0]], seen[pair[1]]) < often:
            seen.update(pair[:2])
            kept.append(pair)
    return kept


def _queries(embedded: Embedded, pictures: Pictures, to_pictures: bool) -> list[Html]:
    """Captions that look for pictures, or pictures that look for captions: each with its nearest answers, and the rank
    of the first that bears the query's caption."""
    groups_N, every = embedded.groups_N, list(range(len(embedded.ids)))
    first_rows: dict[int, int] = {}  # equal captions are one
    for row, group in enumerate(groups_N.tolist()):
        first_rows.setdefault(group, row)
    queries, answers = list(first_rows.values()), every
    tables = embedded.text_ND, embedded.image_ND
    if not to_pictures:
        queries, answers, tables = answers, queries, tables[::-1]
    queries = _spread(queries)
    rows_Q, rows_A = torch.tensor(queries), torch.tensor(answers)
    query_QD, answer_AD = (table[rows.to(table.device)] for table, rows in zip(tables, (rows_Q, rows_A), strict=True))
    sim_QA = (query_QD @ answer_AD.T).cpu()
    right_QA = groups_N[rows_Q][:, None] == groups_N[rows_A][None, :]
    best_Q1 = sim_QA.masked_fill(~right_QA, -torch.inf).amax(dim=1, keepdim=True)
    rank_Q = ((sim_QA > best_Q1) & ~right_QA).sum(dim=1) + 1
    places_Q = sim_QA.topk(min(_PICTURES if to_pictures else _CAPTIONS, len(answers)), dim=1).indices.tolist()
    shown = []
    for query, row in enumerate(queries):
        hits = [
            _hit(
                embedded,
                answers[at],
                float(sim_QA[query, at]),
                bool(right_QA[query, at]),
                pictures if to_pictures else None,
            )
            for at in places_Q[query]
        ]
        rank = node("span", f"rank {int(rank_Q[query]):,} of {len(answers):,}", class_="rank")
        asked = node("p", quoted(embedded.captions[row], CAPTION), rank)
        if to_pictures:
            shown.append(node("div", asked, node("ol", hits, class_="hits"), class_="query"))
        else:
            texts = node("div", asked, node("ol", hits))
            shown.append(node("div", pictures.shown(embedded, row), texts, class_="card texts"))
    return shown


def _spread(rows: Sequence[int]) -> list[int]:
    """Some, evenly spread: chosen by no one, so that the share of right answers is honest."""
    shown = min(len(rows), _QUERIES)
    return [rows[(2 * place + 1) * len(rows) // (2 * shown)] for place in range(shown)]


def _hit(embedded: Embedded, row: int, similarity: float, right: bool, pictures: Pictures | None) -> Html:
    """An answer to a query: the picture of this row, or without ``pictures`` its caption."""
    symbol, word = ("✓", "right") if right else ("✗", "wrong")
    sign = node("span", symbol, class_="sign", role="img", aria_label=word)
    score, caption = node("span", f"{similarity:.2f}", class_="score"), embedded.captions[row]
    if pictures is None:
        return node("li", sign, quoted(caption, CAPTION), score, class_=word)
    return node("li", pictures.shown(embedded, row), sign, score, class_=word, title=plain(caption, CAPTION))


# ---------------------------------------------------------------------------------------------------------------------
# similarities


@dataclass(frozen=True)
class SimilarityView:
    """One model's similarities on a sample of training pairs.

    label     of the model: "base", "tuned", or a run's name
    bands     by direction, then by name: positives, near and far negatives
    recall    R@1 among the sample, by direction; equal captions are equally right
    pairs, of   how many pairs were looked at, of how many there are
    same      which data and pairs these were: only views of the same ones compare
    captions, tables   of these pairs: what they say, and the embedded pictures and captions
    """

    label: str
    bands: dict[Direction, dict[str, Distribution]]
    recall: dict[Direction, float]
    pairs: int
    of: int
    same: tuple[str, int]
    captions: list[str]
    tables: tuple[Tensor, Tensor]


def view_of(label: str, embedded: Embedded, most: int = MOST_PAIRS) -> SimilarityView:
    """Evenly spread over the pairs at hand, where these are more than ``most``."""
    count = len(embedded.ids)
    kept = [place * count // most for place in range(most)] if count > most else list(range(count))
    captions, rows_N = [embedded.captions[row] for row in kept], torch.tensor(kept, device=embedded.image_ND.device)
    image_ND, text_ND = embedded.image_ND[rows_N], embedded.text_ND[rows_N]
    recalled = recalls(image_ND, text_ND, equal_captions([[caption] for caption in captions]))
    return SimilarityView(
        label=label,
        bands={"image_to_text": _bands(image_ND, text_ND), "text_to_image": _bands(text_ND, image_ND)},
        recall={direction: recalled[f"{direction}_r1"] for direction in _DIRECTIONS},
        pairs=len(kept),
        of=embedded.of,
        same=(embedded.pool.fingerprint, len(kept)),
        captions=captions,
        tables=(image_ND, text_ND),
    )


def _bands(query_ND: Tensor, answer_ND: Tensor) -> dict[str, Distribution]:
    similar = similarity_distributions(query_ND, answer_ND)
    bands = zip(_BANDS, ("positives", "nearest", "far", "lower"), strict=True)
    return {name: similar[band] for name, band in bands if band in similar}


def similarity_charts(views: Sequence[SimilarityView]) -> list[Chart]:
    """A chart a model and direction; those of a direction have the same bins and axes."""
    charts: list[Chart] = []
    for direction, words in _DIRECTIONS.items() if views else ():
        known = [(view, name, band) for view in views for name, band in view.bands[direction].items()]
        middles, shares = merged_bins([band for _, _, band in known])
        y = Axis(percent=True, reach=[max(max(row) for row in shares)])
        for place, view in enumerate(views):
            series = [
                area(name, _BANDS.index(name), middles, row)
                for (owner, name, _), row in zip(known, shares, strict=True)
                if owner is view
            ]
            key, about = f"similarity-{direction}-{place}", f"{words}; share of the similarities in each bin"
            charts.append(Chart(key, view.label, about, series, y, Axis("similarity")))
    return charts


def similarities_section(views: Sequence[SimilarityView], gaps: Sequence[str]) -> Section | None:
    title = "Positives and negatives"
    if not views:
        return Section("similarities", title, joined(notices(gaps))) if gaps else None
    charts = similarity_charts(views)
    first, other = (figures([chart for chart in charts if direction in chart.key]) for direction in _DIRECTIONS)
    gaps = list(gaps)
    if len({view.same for view in views}) > 1:
        gaps.append("The models were not looked at on the same pairs (their training data differ): compare with care.")
    body = joined(
        notices(gaps),
        _numbers(views),
        first,
        folded("caption → pictures", other),
        _near_negatives([view for view in views if view.same == views[0].same]),
    )
    return Section("similarities", title, body, _lead(views))


def _near_negatives(views: Sequence[SimilarityView]) -> Html | None:
    """A few pictures, their nearest captions of other pairs by the first model, and what each model makes of them."""
    if len(views) < 2:
        return None
    captions = views[0].captions
    rows: list[list[Child]] = []
    for near in near_negatives([view.tables for view in views], groups_of(captions), _ANCHORS):
        for other, values in zip(near.others, zip(*near.similarities, strict=True), strict=True):
            rows.append([plain(captions[near.anchor], 80), plain(captions[other], 80), *map(_signed, values)])
    head = ("picture of", "a caption of another pair", *(plain(view.label, 80) for view in views))
    lead = (
        f"As TuneCLIP's Table 21: the {_ANCHORS} pictures that fit the caption of another pair best, compared with "
        f"their own, by {plain(views[0].label, 80)}; their nearest captions of others, many of them false negatives, "
        "and the similarity that each model gives them."
    )
    return folded("Near negatives, model by model", note(lead), table(head, rows, "numbers"))


def _has_far(views: Sequence[SimilarityView]) -> bool:
    return any(_FAR in bands for view in views for bands in view.bands.values())


def _lead(views: Sequence[SimilarityView]) -> str:
    sizes = list(dict.fromkeys((view.pairs, view.of) for view in views))
    taken = "; ".join(f"{pairs:,} of {of:,}" if pairs < of else f"all {of:,}" for pairs, of in sizes)
    far = f", those at ranks {FAR[0]} to {FAR[1]} (which the paper takes for true negatives)" if _has_far(views) else ""
    return (
        f"Similarities on training pairs ({taken}), as in TuneCLIP's Figure 11: of true pairs, and of negatives, "
        f"which are all other pairs, also those of an equal caption. For each picture, or each caption: the {NEAREST} "
        f"nearest, among which the false negatives are{far}, and the farther half of all. The paper finds the nearest "
        "spread out by a loss that pushes every negative, and compact and close to the positives with a margin."
    )


def _numbers(views: Sequence[SimilarityView]) -> Html:
    shown = [name for name in _BANDS if name != _FAR or _has_far(views)]
    rows: list[list[Child]] = []
    for direction, words in _DIRECTIONS.items():
        for view in views:
            bands = view.bands[direction]
            texts = {name: f"{_signed(band.mean)} ± {band.deviation:.3f}" for name, band in bands.items()}
            gap = _signed(bands[_BANDS[0]].mean - bands[_BANDS[1]].mean)
            label = joined(plain(view.label, 80), node("span", words, class_="kind"))
            rows.append([label, *(texts.get(name, NOTHING) for name in shown), gap, percent(view.recall[direction])])
    head = ("model", *shown, "positives over nearest", "R@1 here")
    under = (
        "Mean ± standard deviation. R@1 is among these pairs: retrieval on training data, equal captions being right."
    )
    return joined(table(head, rows, "numbers"), note(under))


def _signed(value: float) -> str:
    return f"{value:.3f}".replace("-", MINUS)


# ---------------------------------------------------------------------------------------------------------------------
# which models are looked at


def views_of_run(
    run: RunData, shown: str | None, training: Embedded, most: int
) -> tuple[list[SimilarityView], list[str]]:
    """Of a fine-tuning base and tuned, of another run its one model; and why something is missing.

    ``training`` are pairs as the model ``shown`` embeds them.
    """
    views, gaps = [], []
    for name in (BASE, TUNED) if run.finetune else (None,):
        try:
            if name == shown:
                views.append(view_of(name or plain(run.name, 80), training))
            elif name is not None and (run.path / name).is_dir():
                views.append(view_of(name, RunModel.load(run.path, name).embed(training.pool, most)))
        except UNUSABLE as error:
            gaps.append(f"The similarities of {name or run.name} are not shown, because {plain(error)}")
    return views, gaps


def views_of_runs(
    runs: Sequence[RunData], labels: Sequence[str], samples: int | None
) -> tuple[list[SimilarityView], list[str]]:
    """Side by side; where fine-tunings start from one base, it comes first."""
    if len(runs) > MOST_RUNS:
        return [], [f"Similarities on training pairs are shown for up to {MOST_RUNS} runs side by side."]
    wanted = [
        (run, label, TUNED if (run.path / TUNED).is_dir() else None) for run, label in zip(runs, labels, strict=True)
    ]
    bases = {str(run.finetune.get("model")) for run in runs if run.finetune}
    first = next((run for run in runs if run.finetune and (run.path / BASE).is_dir()), None)
    if first is not None and len(bases) == 1:
        wanted.insert(0, (first, BASE, BASE))
    views, gaps = [], []
    for run, label, name in wanted:
        try:
            model = RunModel.load(run.path, name)
            most = samples or (MOST_PAIRS if model.device.type == "cuda" else _PAIRS_ON_CPU)
            views.append(view_of(label, model.embed(training_pool(model.config.data), most)))
        except UNUSABLE as error:
            gaps.append(f"{label}: similarities on training pairs are not shown, because {plain(error)}")
    return views, gaps
