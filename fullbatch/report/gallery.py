"""Grids and suspects as HTML.  Right and wrong are told by a symbol and a frame, not by colour alone."""

from __future__ import annotations

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Section, folded, gaps_of, notice
from fullbatch.report.grids import Answer, Grid, Query, without_repeats
from fullbatch.report.markup import Child, Html, joined, node, quoted
from fullbatch.report.pictures import Pictures
from fullbatch.report.samples import Embedded
from fullbatch.report.suspects import KINDS, MOST, Kind, Suspect, Suspects

_CAPTION = 160  # characters shown of a caption
_SHOWN = 8  # suspects a kind
_TITLES: dict[Kind, tuple[str, str]] = {
    "duplicate": ("Duplicates", "The same picture with the same caption, twice: keep one."),
    "same_picture": (
        "One picture, different captions",
        "Training pushes each picture away from the other's caption, which may be as right as its own.",
    ),
    "same_caption": (
        "One caption, different pictures",
        "Where both are in a batch, training pushes a picture away from its very caption.",
    ),
    "interchangeable": (
        "Each fits the other's caption",
        "The model finds each picture at least as near to the other's caption as either is to its own: a false "
        "negative, swapped captions, or a distinction the model has not learned.",
    ),
    "crowded": (
        "Largest normalizers u",
        "Their negatives look like positives. Beside each, the other sample whose caption is nearest to its picture.",
    ),
    "temperature": (
        "Extreme temperatures τ",
        "The method gave them a temperature of their own: large for those with many look-alikes, small for rare ones.",
    ),
}


class Shelf:
    """Reads a sample's picture from its pool once it is shown, and says its caption."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def picture(self, embedded: Embedded, row: int) -> Html:
        raw = embedded.read(row)
        number = self.pictures.add(raw.image, raw.name) if raw is not None else None
        caption = plain(embedded.captions[row], _CAPTION)
        if number is None:
            return node("span", "no picture", class_="missing")
        return node("img", data_picture=number, alt=caption)


def grids_section(grids: list[Grid], shelf: Shelf, gaps: list[str]) -> Section:
    body = [gaps_of(gaps)]
    for grid in grids:
        body.append(node("h3", node("span", plain(grid.task, 160), class_="source")))
        body.append(_among(grid.embedded))
        body.append(node("h4", "Text to pictures"))
        body.append(node("div", [_found_pictures(query, grid, shelf) for query in grid.pictures], class_="queries"))
        body.append(node("h4", "Picture to texts"))
        body.append(node("div", [_found_captions(query, grid, shelf) for query in grid.captions], class_="cards"))
        if grid.confused:
            body.append(node("h4", "Most confused pairs"))
            body.append(node("p", "Each picture is nearer to the other's caption than to its own.", class_="quiet"))
            pairs = [
                _pair(grid.embedded, first, other, f"by {score:.3f}", shelf) for first, other, score in grid.confused
            ]
            body.append(node("div", pairs, class_="cards"))
    legend = "✓ in a thick frame is right, ✗ in a dashed one is wrong. The queries are spread evenly, not chosen."
    return Section("pictures", "What the model finds", joined(*body), legend if grids else "")


def _among(embedded: Embedded) -> Html:
    count = len(embedded.ids)
    part = f", drawn from {embedded.of:,}" if count < embedded.of else ""
    return node("p", f"Among {count:,} pictures{part}.", class_="quiet")


def _mark(right: bool) -> Html:
    sign, word = ("✓", "right") if right else ("✗", "wrong")
    return node("span", sign, class_="sign", role="img", aria_label=word)


def _found_pictures(query: Query, grid: Grid, shelf: Shelf) -> Html:
    hits = [
        node(
            "li",
            shelf.picture(grid.embedded, answer.row),
            _mark(answer.right),
            node("span", f"{answer.similarity:.2f}", class_="score"),
            class_="right" if answer.right else "wrong",
            title=plain(grid.embedded.captions[answer.row], _CAPTION),
        )
        for answer in query.answers
    ]
    return node(
        "div",
        node("p", quoted(grid.embedded.captions[query.row], _CAPTION), _rank(query.rank, len(grid.embedded.ids))),
        node("ol", hits, class_="hits"),
        class_="query",
    )


def _found_captions(query: Query, grid: Grid, shelf: Shelf) -> Html:
    def line(answer: Answer) -> Html:
        said = quoted(grid.embedded.captions[answer.row], _CAPTION)
        score = node("span", f"{answer.similarity:.2f}", class_="score")
        return node("li", _mark(answer.right), said, score, class_="right" if answer.right else "wrong")

    own = quoted(grid.embedded.captions[query.row], _CAPTION)
    return node(
        "div",
        shelf.picture(grid.embedded, query.row),
        node("div", node("p", own, _rank(query.rank, grid.captions_in_all)), node("ol", map(line, query.answers[:5]))),
        class_="card texts",
    )


def _rank(rank: int, among: int) -> Html:
    return node("span", f"rank {rank:,} of {among:,}", class_="rank")


def _pair(embedded: Embedded, first: int, other: int | None, reason: Child, shelf: Shelf) -> Html:
    sides = [
        node(
            "div",
            shelf.picture(embedded, row),
            node("p", quoted(embedded.captions[row], _CAPTION)),
            node("p", f"id {embedded.ids[row]}", class_="id"),
            class_="side",
        )
        for row in (first, other)
        if row is not None
    ]
    return node("div", node("div", sides, class_="sides"), node("p", reason, class_="reason"), class_="card pair")


def suspects_section(suspects: Suspects, shelf: Shelf, table_name: str) -> Section:
    count, of = len(suspects.embedded.ids), suspects.embedded.of
    sampled = f" {count:,} samples drawn from {of:,}: a pair is found only if both were drawn." if count < of else ""
    lead = f"Training samples worth a look{':' + sampled if sampled else f', among all {count:,}.'} "
    lead += f"{table_name} beside this page lists them, up to 1,000 of a kind, with their ids and names."
    body: list[Child] = [gaps_of(suspects.gaps)]
    empty = []
    for kind in KINDS:
        found = suspects.found[kind]
        title, meaning = _TITLES[kind]
        if not found:
            empty.append(title.lower())
            continue
        body.append(_kind(kind, found, suspects, title, meaning, shelf))
    if empty:
        body.append(node("p", f"Nothing found under: {', '.join(empty)}.", class_="quiet"))
    return Section("suspects", "Suspected false negatives and duplicates", joined(*body), lead)


def _kind(kind: Kind, found: list[Suspect], suspects: Suspects, title: str, meaning: str, shelf: Shelf) -> Html:
    shown = _some(kind, found)
    cards = [_pair(suspects.embedded, each.first, each.other, each.reason, shelf) for each in shown]
    about = suspects.about if kind == "crowded" else ""
    return folded(
        f"{title} ({len(found):,}{' or more' if len(found) == MOST else ''})",
        node("p", meaning, " ", about, class_="quiet"),
        node("div", cards, class_="cards"),
        unfolded=True,
    )


def _some(kind: Kind, found: list[Suspect]) -> list[Suspect]:
    """The most suspect ones, of temperatures both ends."""
    if kind == "temperature":
        half = len(found) // 2
        return found[: _SHOWN // 2] + found[half : half + _SHOWN // 2]
    if kind == "interchangeable":
        by_pair = {(each.first, each.other): each for each in found}
        kept = without_repeats([(each.first, each.other or 0, each.score) for each in found], _SHOWN)
        return [by_pair[first, other] for first, other, _ in kept]
    return found[:_SHOWN]


def no_pictures(reason: str) -> Section:
    return Section("pictures", "Pictures", notice(reason))
