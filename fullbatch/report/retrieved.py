"""What the model finds: pictures for captions, captions for pictures, and the pairs it confuses most."""

# N: samples   Q: queries   K: answers shown

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.config.shown import plain
from fullbatch.config.tasks import Retrieval, ZeroShot, parse_task
from fullbatch.data.loader import Pool
from fullbatch.data.sources import open_source
from fullbatch.evaluation.tasks import tasks_of
from fullbatch.report.blocks import Section, note, notices
from fullbatch.report.embedded import Embedded, Pair, fits_the_other
from fullbatch.report.markup import Html, joined, node, quoted
from fullbatch.report.pictures import CAPTION, Pictures

MOST_TASKS = 2
QUERIES = 10
ANSWERS = 6
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
    """rank   of the first right answer among all"""

    row: int
    rank: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class TaskExamples:
    """What the model answers to queries of a task, both ways, and the pairs it confuses."""

    task: str
    embedded: Embedded
    pictures: tuple[Query, ...]
    captions: tuple[Query, ...]
    captions_in_all: int
    confused: tuple[Pair, ...]


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
    return (retrieval or zero_shot)[:MOST_TASKS]


def open_task(source: Source) -> Pool:
    return Pool([open_source(source)])


def examples_of(task: str, embedded: Embedded) -> TaskExamples:
    groups_N = embedded.groups_N
    first_of_group = _first_rows(groups_N)  # equal captions are one answer
    spread = _spread(len(embedded.ids), QUERIES)
    asked = _spread(len(first_of_group), QUERIES)
    pictures = _answered(
        [int(first_of_group[place]) for place in asked],
        embedded.text_ND,
        embedded.image_ND,
        groups_N,
        torch.arange(len(groups_N)),
    )
    captions = _answered(spread, embedded.image_ND, embedded.text_ND, groups_N, first_of_group)
    pairs = fits_the_other(embedded.image_ND, embedded.text_ND, groups_N, _CANDIDATES)
    confused = tuple(without_repeats([pair for pair in pairs if pair[2] > 0.0], _CONFUSED))
    return TaskExamples(task, embedded, pictures, captions, len(first_of_group), confused)


def _spread(count: int, most: int) -> list[int]:
    """Places evenly spread: chosen by no one, so that the share of right answers is honest."""
    shown = min(count, most)
    return [(2 * place + 1) * count // (2 * shown) for place in range(shown)]


def _first_rows(groups_N: Tensor) -> Tensor:
    seen: dict[int, int] = {}
    for row, group in enumerate(groups_N.tolist()):
        seen.setdefault(group, row)
    return torch.tensor(list(seen.values()))


def _answered(
    rows: list[int], query_ND: Tensor, gallery_ND: Tensor, groups_N: Tensor, gallery_rows: Tensor
) -> tuple[Query, ...]:
    rows_Q = torch.tensor(rows)
    sim_QN = (query_ND[rows_Q.to(query_ND.device)] @ gallery_ND[gallery_rows.to(gallery_ND.device)].T).cpu()
    right_QN = groups_N[rows_Q][:, None] == groups_N[gallery_rows][None, :]
    best_Q1 = sim_QN.masked_fill(~right_QN, -torch.inf).amax(dim=1, keepdim=True)
    rank_Q = ((sim_QN > best_Q1) & ~right_QN).sum(dim=1) + 1
    top = sim_QN.topk(min(ANSWERS, sim_QN.shape[1]), dim=1)
    queries = []
    for number, row in enumerate(rows):
        places, values = top.indices[number].tolist(), top.values[number].tolist()
        answers = tuple(
            Answer(int(gallery_rows[place]), value, bool(right_QN[number, place]))
            for place, value in zip(places, values, strict=True)
        )
        queries.append(Query(row, int(rank_Q[number]), answers))
    return tuple(queries)


def without_repeats(pairs: list[Pair], most: int, often: int = 2) -> list[Pair]:
    """The first pairs, no sample in more than a few: one strange sample would fill the list."""
    seen: Counter[int] = Counter()
    kept: list[Pair] = []
    for pair in pairs:
        if len(kept) < most and max(seen[pair[0]], seen[pair[1]]) < often:
            seen.update(pair[:2])
            kept.append(pair)
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# as HTML: right and wrong are told by a symbol and a frame, not by colour alone


def examples_section(tasks: list[TaskExamples], pictures: Pictures, gaps: list[str]) -> Section:
    body = [notices(gaps)]
    for examples in tasks:
        body.append(node("h3", node("span", plain(examples.task, 160), class_="source")))
        body.append(_among(examples.embedded))
        body.append(node("h4", "Text to pictures"))
        body.append(
            node("div", [_found_pictures(query, examples, pictures) for query in examples.pictures], class_="queries")
        )
        body.append(node("h4", "Picture to texts"))
        body.append(
            node("div", [_found_captions(query, examples, pictures) for query in examples.captions], class_="cards")
        )
        if examples.confused:
            body.append(node("h4", "Most confused pairs"))
            body.append(note("Each picture is nearer to the other's caption than to its own."))
            pairs = [
                pictures.card(examples.embedded, first, other, f"by {score:.3f}")
                for first, other, score in examples.confused
            ]
            body.append(node("div", pairs, class_="cards"))
    legend = "✓ in a thick frame is right, ✗ in a dashed one is wrong. The queries are spread evenly, not chosen."
    return Section("pictures", "What the model finds", joined(*body), legend if tasks else "")


def _among(embedded: Embedded) -> Html:
    count = len(embedded.ids)
    part = f", drawn from {embedded.of:,}" if count < embedded.of else ""
    return note(f"Among {count:,} pictures{part}.")


def _mark(right: bool) -> Html:
    sign, word = ("✓", "right") if right else ("✗", "wrong")
    return node("span", sign, class_="sign", role="img", aria_label=word)


def _found_pictures(query: Query, examples: TaskExamples, pictures: Pictures) -> Html:
    hits = [
        node(
            "li",
            pictures.shown(examples.embedded, answer.row),
            _mark(answer.right),
            node("span", f"{answer.similarity:.2f}", class_="score"),
            class_="right" if answer.right else "wrong",
            title=plain(examples.embedded.captions[answer.row], CAPTION),
        )
        for answer in query.answers
    ]
    return node(
        "div",
        node(
            "p", quoted(examples.embedded.captions[query.row], CAPTION), _rank(query.rank, len(examples.embedded.ids))
        ),
        node("ol", hits, class_="hits"),
        class_="query",
    )


def _found_captions(query: Query, examples: TaskExamples, pictures: Pictures) -> Html:
    def line(answer: Answer) -> Html:
        said = quoted(examples.embedded.captions[answer.row], CAPTION)
        score = node("span", f"{answer.similarity:.2f}", class_="score")
        return node("li", _mark(answer.right), said, score, class_="right" if answer.right else "wrong")

    own = quoted(examples.embedded.captions[query.row], CAPTION)
    return node(
        "div",
        pictures.shown(examples.embedded, query.row),
        node(
            "div", node("p", own, _rank(query.rank, examples.captions_in_all)), node("ol", map(line, query.answers[:5]))
        ),
        class_="card texts",
    )


def _rank(rank: int, among: int) -> Html:
    return node("span", f"rank {rank:,} of {among:,}", class_="rank")
