"""What a run's model makes of data: pictures found for captions, captions for pictures, the pairs it confuses most; and
the false-negative view, TuneCLIP Figure 11: similarities of true pairs, near and far negatives, model by model.

Right and wrong are told by a symbol and a frame, not by colour alone.
"""

# N: samples or pairs   D: width   Q: queries   A: possible answers

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from fullbatch.config.data import Source
from fullbatch.config.messages import plain
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import parse_task
from fullbatch.evaluation import similarities
from fullbatch.evaluation.retrieval import equal_captions, recalls
from fullbatch.evaluation.similarities import FAR, NEAREST, Distribution
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.finetuning.record import BASE, TUNED
from fullbatch.report.blocks import Child, Html, Section, folded, joined, node, note, notices, quoted, table
from fullbatch.report.charts import Axis, Chart, figures
from fullbatch.report.collect import RunData
from fullbatch.report.curves import area
from fullbatch.report.embedded import CAPTION, UNUSABLE, Embedded, Pictures, RunModel, fits_the_other, without_repeats
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
    """The run's retrieval tasks; else its zero-shot tasks, whose captions are class names."""
    tasks = [(text, parse_task(text)) for text in tasks_of(config)]
    retrieval = [(text, task.source) for text, task in tasks if task.kind == "retrieval"]
    zero_shot = [(text, task.source) for text, task in tasks if task.kind == "zero_shot"]
    return (retrieval or zero_shot)[:_MOST_TASKS]


def examples_section(tasks: Sequence[tuple[str, Embedded]], pictures: Pictures, gaps: Sequence[str]) -> Section:
    body = [notices(gaps)]
    for task, embedded in tasks:
        count, of = len(embedded.ids), len(embedded.pool)
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


def _queries(embedded: Embedded, pictures: Pictures, to_pictures: bool) -> list[Html]:
    """Captions that look for pictures, or pictures that look for captions: each with its nearest answers, and the rank
    of the first that bears the query's caption.  Spread evenly, so that the share of right answers is honest."""
    groups_N, every = embedded.groups_N, list(range(len(embedded.ids)))
    different = np.unique(groups_N.numpy(), return_index=True)[1].tolist()  # equal captions are one
    queries, answers = (different, every) if to_pictures else (every, different)
    tables = (embedded.text_ND, embedded.image_ND)[:: 1 if to_pictures else -1]
    shown = min(len(queries), _QUERIES)
    queries = [queries[(2 * place + 1) * len(queries) // (2 * shown)] for place in range(shown)]
    sim_QA = (tables[0][queries] @ tables[1][answers].T).cpu()
    right_QA = groups_N[queries][:, None] == groups_N[answers][None, :]
    best_Q1 = sim_QA.masked_fill(~right_QA, -torch.inf).amax(dim=1, keepdim=True)
    rank_Q = ((sim_QA > best_Q1) & ~right_QA).sum(dim=1) + 1
    places_Q = sim_QA.topk(min(_PICTURES if to_pictures else _CAPTIONS, len(answers)), dim=1).indices.tolist()
    made, shelf = [], pictures if to_pictures else None
    for query, row in enumerate(queries):
        hits = [
            _hit(embedded, answers[at], float(sim_QA[query, at]), bool(right_QA[query, at]), shelf)
            for at in places_Q[query]
        ]
        rank = node("span", f"rank {int(rank_Q[query]):,} of {len(answers):,}", class_="rank")
        asked = node("p", quoted(embedded.captions[row], CAPTION), rank)
        if to_pictures:
            made.append(node("div", asked, node("ol", hits, class_="hits"), class_="query"))
        else:
            texts = node("div", asked, node("ol", hits))
            made.append(node("div", pictures.shown(embedded, row), texts, class_="card texts"))
    return made


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
    """One model's similarities on a sample of training pairs."""

    label: str  # "base", "tuned", or a run's name
    embedded: Embedded  # these pairs
    bands: dict[Direction, dict[str, Distribution]]  # by name: positives, near and far negatives
    recall: dict[Direction, float]  # R@1 among the sample; equal captions are equally right

    @property
    def same(self) -> tuple[str, int]:
        """Which data and pairs these were: only views of the same ones compare."""
        return self.embedded.pool.fingerprint, len(self.embedded.ids)


def view_of(label: str, embedded: Embedded, most: int = MOST_PAIRS) -> SimilarityView:
    """Evenly spread over the pairs at hand, where these are more than ``most``."""
    count = len(embedded.ids)
    if count > most:
        embedded = embedded.part([place * count // most for place in range(most)])
    image_ND, text_ND = embedded.image_ND, embedded.text_ND
    recalled = recalls(image_ND, text_ND, equal_captions([[caption] for caption in embedded.captions]))
    bands: dict[Direction, dict[str, Distribution]] = {}
    for direction, tables in zip(_DIRECTIONS, ((image_ND, text_ND), (text_ND, image_ND)), strict=True):
        similar = similarities.similarity_distributions(*tables)
        named = zip(_BANDS, ("positives", "nearest", "far", "lower"), strict=True)
        bands[direction] = {name: similar[band] for name, band in named if band in similar}
    return SimilarityView(label, embedded, bands, {direction: recalled[f"{direction}_r1"] for direction in _DIRECTIONS})


def similarity_charts(views: Sequence[SimilarityView]) -> list[Chart]:
    """A chart a model and direction; those of a direction have the same bins and axes."""
    charts: list[Chart] = []
    for direction, words in _DIRECTIONS.items() if views else ():
        known = [(view, name, band) for view in views for name, band in view.bands[direction].items()]
        middles, shares = similarities.merged_bins([band for _, _, band in known])
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


def similarities_section(views: Sequence[SimilarityView], gaps: Sequence[str]) -> Section:
    title = "Positives and negatives"
    if not views:
        return Section("similarities", title, notices(gaps))
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
    first, captions = plain(views[0].label, 80), views[0].embedded.captions
    tables = [(view.embedded.image_ND, view.embedded.text_ND) for view in views]
    rows = [
        [plain(captions[near.anchor], 80), plain(captions[other], 80), *map(_signed, values)]
        for near in similarities.near_negatives(tables, views[0].embedded.groups_N, _ANCHORS)
        for other, values in zip(near.others, zip(*near.similarities, strict=True), strict=True)
    ]
    head = ("picture of", "a caption of another pair", *(plain(view.label, 80) for view in views))
    lead = (
        f"As TuneCLIP's Table 21: the {_ANCHORS} pictures that fit the caption of another pair best, compared with "
        f"their own, by {first}; their nearest captions of others, many of them false negatives, and the similarity "
        "that each model gives them."
    )
    return folded("Near negatives, model by model", note(lead), table(head, rows, "numbers"))


def _has_far(views: Sequence[SimilarityView]) -> bool:
    return any(_FAR in bands for view in views for bands in view.bands.values())


def _lead(views: Sequence[SimilarityView]) -> str:
    sizes = list(dict.fromkeys((len(view.embedded.ids), len(view.embedded.pool)) for view in views))
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


Views = tuple[list[SimilarityView], list[str]]  # and why others are missing


def views_of_run(run: RunData, shown: str | None, training: Embedded, most: int) -> Views:
    """Of a fine-tuning base and tuned, else the one model; ``training`` are pairs as embedded by ``shown``."""
    tuned = [name for name in (BASE, TUNED) if name == shown or (run.path / name).is_dir()]

    def embedded(name: str | None) -> Embedded:
        return training if name == shown else RunModel.load(run.path, name).embed(training.pool, most)

    wanted = [
        (name or plain(run.name, 80), f"The similarities of {name or run.name}", partial(embedded, name))
        for name in (tuned if run.finetune else [None])
    ]
    return _views(wanted)


def views_of_runs(runs: Sequence[RunData], labels: Sequence[str], samples: int | None) -> Views:
    """Side by side; where fine-tunings start from one base, it comes first."""
    if len(runs) > MOST_RUNS:
        return [], [f"Similarities on training pairs are shown for up to {MOST_RUNS} runs side by side."]
    models = [
        (run, label, TUNED if (run.path / TUNED).is_dir() else None) for run, label in zip(runs, labels, strict=True)
    ]
    bases = {str(run.finetune.get("model")) for run in runs if run.finetune}
    first = next((run for run in runs if run.finetune and (run.path / BASE).is_dir()), None)
    if first is not None and len(bases) == 1:
        models.insert(0, (first, BASE, BASE))

    def embedded(run: RunData, name: str | None) -> Embedded:
        model = RunModel.load(run.path, name)
        return model.training(samples or (MOST_PAIRS if model.device.type == "cuda" else _PAIRS_ON_CPU))

    words = "similarities on training pairs"
    return _views([(label, f"{label}: {words}", partial(embedded, run, name)) for run, label, name in models])


_Wanted = tuple[str, str, Callable[[], Embedded]]  # a model's label, what is missing without it, its embeddings


def _views(wanted: Sequence[_Wanted]) -> Views:
    views, gaps = [], []
    for label, words, embedded in wanted:
        try:
            views.append(view_of(label, embedded()))
        except UNUSABLE as error:
            gaps.append(f"{words} are not shown, because {plain(error)}")
    return views, gaps
