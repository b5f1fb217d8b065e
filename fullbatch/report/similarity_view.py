"""The false-negative view, TuneCLIP Figure 11: similarities of true pairs, near and far negatives, model by model."""

# N: pairs   D: width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fullbatch.config.messages import plain
from fullbatch.evaluation.retrieval import equal_captions, recalls
from fullbatch.evaluation.similarities import (
    FAR,
    NEAREST,
    Distribution,
    merged_bins,
    near_negatives,
    similarity_distributions,
)
from fullbatch.finetuning.record import BASE, TUNED
from fullbatch.report.blocks import Section, folded, note, notices, table
from fullbatch.report.charts import Axis, Chart, figures
from fullbatch.report.collect import RunData
from fullbatch.report.curves import area
from fullbatch.report.embedded import UNUSABLE, Embedded, model_of, training_pool
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import MINUS, NOTHING, percent

MOST_PAIRS = 15_000  # as many as the paper takes
MOST_RUNS = 6
_PAIRS_ON_CPU = 2_000  # a run, where there are several
Direction = Literal["image_to_text", "text_to_image"]
_DIRECTIONS: dict[Direction, str] = {"image_to_text": "picture → captions", "text_to_image": "caption → pictures"}
_FAR = f"negatives {FAR[0]} to {FAR[1]}"  # there are none in a small sample
_BANDS = ("positives", f"{NEAREST} nearest negatives", _FAR, "farther half of negatives")
_ANCHORS = 8  # pictures whose nearest captions are named


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
    bands = zip(_BANDS, (similar.positives, similar.nearest, similar.far, similar.lower), strict=True)
    return {name: band for name, band in bands if band is not None}


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
    number = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
    groups_N = torch.tensor([number[caption] for caption in captions])
    rows: list[list[Child]] = []
    for near in near_negatives([view.tables for view in views], groups_N, _ANCHORS):
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
                views.append(view_of(name, model_of(run, name).embed(training.pool, most)))
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
            model = model_of(run, name)
            most = samples or (MOST_PAIRS if model.device.type == "cuda" else _PAIRS_ON_CPU)
            views.append(view_of(label, model.embed(training_pool(model.config.data), most)))
        except UNUSABLE as error:
            gaps.append(f"{label}: similarities on training pairs are not shown, because {plain(error)}")
    return views, gaps
