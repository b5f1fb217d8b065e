"""What the model finds: pictures for captions, captions for pictures, and the pairs it confuses most.

Right and wrong are told by a symbol and a frame, not by colour alone.
"""

# N: samples   Q: queries   A: possible answers

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch.config.data import Source
from fullbatch.config.messages import plain
from fullbatch.config.run import RunConfig
from fullbatch.config.tasks import Retrieval, ZeroShot, parse_task
from fullbatch.data.loader import SamplePool
from fullbatch.data.sources import open_source
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.report.blocks import Section, note, notices
from fullbatch.report.embedded import CAPTION, Embedded, Pair, Pictures, fits_the_other
from fullbatch.report.markup import Html, joined, node, quoted

_MOST_TASKS = 2
_QUERIES = 10
_PICTURES, _CAPTIONS = 6, 5  # answers to a query
_CONFUSED = 8
_CANDIDATES = 400


@dataclass(frozen=True)
class Answer:
    """row    of the embedded samples: its picture, or its caption
    right  it bears the query's caption
    """

    row: int
    similarity: float
    right: bool


@dataclass(frozen=True)
class Query:
    """rank   of the first right answer ``among`` all"""

    row: int
    rank: int
    among: int
    answers: Sequence[Answer]


def sources_to_show(config: RunConfig) -> list[tuple[str, Source]]:
    """The run's retrieval tasks; else its zero-shot tasks, whose captions are class names."""
    retrieval, zero_shot = [], []
    for text in tasks_of(config):
        match parse_task(text):
            case Retrieval(source):
                retrieval.append((text, source))
            case ZeroShot(source):
                zero_shot.append((text, source))
            case _:  # folders of benchmarks have layouts of their own
                continue
    return (retrieval or zero_shot)[:_MOST_TASKS]


def open_task(source: Source) -> SamplePool:
    return SamplePool([open_source(source)])


def examples_section(tasks: Sequence[tuple[str, Embedded]], pictures: Pictures, gaps: Sequence[str]) -> Section:
    body = [notices(gaps)]
    for task, embedded in tasks:
        count, of = len(embedded.ids), embedded.of
        body += [
            node("h3", node("span", plain(task, 160), class_="source")),
            note(f"Among {count:,} pictures{f', drawn from {of:,}' if count < of else ''}."),
            *_answers(embedded, pictures),
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


def _answers(embedded: Embedded, pictures: Pictures) -> list[Html]:
    groups_N, image_ND, text_ND = embedded.groups_N, embedded.image_ND, embedded.text_ND
    every = list(range(len(groups_N)))
    first_rows: dict[int, int] = {}  # equal captions are one answer
    for row, group in enumerate(groups_N.tolist()):
        first_rows.setdefault(group, row)
    captions = list(first_rows.values())
    to_pictures = _ask(_spread(captions), every, text_ND, image_ND, groups_N, _PICTURES)
    to_captions = _ask(_spread(every), captions, image_ND, text_ND, groups_N, _CAPTIONS)
    return [
        node("h4", "Text to pictures"),
        node("div", [_pictures_for(query, embedded, pictures) for query in to_pictures], class_="queries"),
        node("h4", "Picture to texts"),
        node("div", [_captions_for(query, embedded, pictures) for query in to_captions], class_="cards"),
    ]


def _spread(rows: Sequence[int]) -> list[int]:
    """Some, evenly spread: chosen by no one, so that the share of right answers is honest."""
    shown = min(len(rows), _QUERIES)
    return [rows[(2 * place + 1) * len(rows) // (2 * shown)] for place in range(shown)]


def _ask(
    asked: list[int], possible: list[int], query_ND: Tensor, answer_ND: Tensor, groups_N: Tensor, most: int
) -> list[Query]:
    """Each query's nearest answers among the rows that are ``possible``."""
    rows_Q, rows_A = torch.tensor(asked), torch.tensor(possible)
    sim_QA = (query_ND[rows_Q.to(query_ND.device)] @ answer_ND[rows_A.to(answer_ND.device)].T).cpu()
    right_QA = groups_N[rows_Q][:, None] == groups_N[rows_A][None, :]
    best_Q1 = sim_QA.masked_fill(~right_QA, -torch.inf).amax(dim=1, keepdim=True)
    rank_Q = ((sim_QA > best_Q1) & ~right_QA).sum(dim=1) + 1
    places_Q = sim_QA.topk(min(most, len(possible)), dim=1).indices.tolist()
    return [
        Query(
            row,
            int(rank_Q[query]),
            len(possible),
            [Answer(possible[at], float(sim_QA[query, at]), bool(right_QA[query, at])) for at in places_Q[query]],
        )
        for query, row in enumerate(asked)
    ]


def _pictures_for(query: Query, embedded: Embedded, pictures: Pictures) -> Html:
    hits = [
        node(
            "li",
            pictures.shown(embedded, answer.row),
            _sign(answer),
            _score(answer),
            class_="right" if answer.right else "wrong",
            title=plain(embedded.captions[answer.row], CAPTION),
        )
        for answer in query.answers
    ]
    return node("div", _asked(query, embedded), node("ol", hits, class_="hits"), class_="query")


def _captions_for(query: Query, embedded: Embedded, pictures: Pictures) -> Html:
    lines = [
        node(
            "li",
            _sign(answer),
            quoted(embedded.captions[answer.row], CAPTION),
            _score(answer),
            class_="right" if answer.right else "wrong",
        )
        for answer in query.answers
    ]
    texts = node("div", _asked(query, embedded), node("ol", lines))
    return node("div", pictures.shown(embedded, query.row), texts, class_="card texts")


def _asked(query: Query, embedded: Embedded) -> Html:
    rank = node("span", f"rank {query.rank:,} of {query.among:,}", class_="rank")
    return node("p", quoted(embedded.captions[query.row], CAPTION), rank)


def _sign(answer: Answer) -> Html:
    sign, word = ("✓", "right") if answer.right else ("✗", "wrong")
    return node("span", sign, class_="sign", role="img", aria_label=word)


def _score(answer: Answer) -> Html:
    return node("span", f"{answer.similarity:.2f}", class_="score")
