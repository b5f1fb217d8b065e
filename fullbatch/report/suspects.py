"""Training samples to look at: duplicates and false negatives, found by captions, pixels, similarities, u_i and tau_i.

A false negative is a pair of samples that training pushes apart although they say the same.
"""

# N: samples at hand

from __future__ import annotations

import csv
from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fullbatch.audit.exact import exact_log_normalizers
from fullbatch.config.messages import cell
from fullbatch.report import embedded as near
from fullbatch.report.blocks import Child, Section, folded, joined, node, note, notices
from fullbatch.report.embedded import Embedded, Pictures, RunModel
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder

Kind = Literal["duplicate", "same_picture", "same_caption", "interchangeable", "crowded", "temperature"]
MOST = 1000  # rows a kind in the table
_ALIKE = 4.0 / 255.0  # root mean squared difference at 16 x 16 pixels
_PUNCTUATION = '.,;:!?"()[]'
_SINGLES = 100
_EXTREMES = 20
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


class Suspect(NamedTuple):
    first: int  # a row of the embedded samples
    other: int | None  # another; None where one sample is meant
    score: float  # larger is more suspect, within its kind
    reason: str


@dataclass(frozen=True)
class Memory:
    """What the run kept for each sample at hand: NaN where it never saw it, None where its method keeps none."""

    log_u_N: Tensor | None = None
    tau_N: Tensor | None = None
    gap: str = ""


@dataclass(frozen=True)
class Suspects:
    embedded: Embedded
    by_kind: dict[Kind, list[Suspect]]  # most suspect first
    about: str  # how the normalizers came about
    gaps: Sequence[str]


def find_suspects(run: Path, model: RunModel, embedded: Embedded) -> Suspects:
    memory = read_memory(run, embedded)
    crowded, about = _crowded(model, embedded, memory)
    by_kind: dict[Kind, list[Suspect]] = {
        **copies(embedded),
        "interchangeable": _interchangeable(embedded),
        "crowded": crowded,
        "temperature": extreme_temperatures(memory),
    }
    return Suspects(embedded, by_kind, about, [memory.gap] if memory.gap else [])


def read_memory(run: Path, embedded: Embedded) -> Memory:
    """The per-sample tables of the last checkpoint, both directions averaged.

    A sample's row is its place in the data set, so they mean nothing once the data have changed.
    """
    folder = checkpoint.last_good(Folder(run).checkpoints)
    if folder is None:
        return Memory()
    parts = checkpoint.read(folder, ("objective", "position"))
    state, ids = parts["objective"], torch.tensor(embedded.ids)
    tables = {}
    for name in ("log_u", "tau"):
        values = [value for key, value in state.items() if key.endswith(f".{name}.values")]
        if values and parts["position"]["data"] != embedded.pool.fingerprint:
            return Memory(gap="The data have changed since the run, so its per-sample numbers (u, τ) are left out.")
        if values:
            tables[name] = torch.stack([value[ids].float() for value in values]).mean(dim=0)
    return Memory(tables.get("log_u"), tables.get("tau"))


# ---------------------------------------------------------------------------------------------------------------------
# what captions and pixels say


def words_of(caption: str) -> tuple[str, ...]:
    """A caption but for case, the punctuation around words, order and repetition."""
    words = {word.strip(_PUNCTUATION) or word for word in caption.casefold().split()}
    return tuple(sorted(words))


def copies(embedded: Embedded) -> dict[Kind, list[Suspect]]:
    """Duplicates, pictures with different captions, captions with different pictures; most suspect first."""
    captions, words = embedded.captions, [words_of(caption) for caption in embedded.captions]
    by_words, duplicates, pictures, texts = _groups(words), list[Suspect](), list[Suspect](), list[Suspect]()

    def equal_how(first: int, other: int) -> str:
        how = "the same caption" if captions[first] == captions[other] else "the same words in the caption"
        times = len(by_words[words[first]])
        return f"{how}, {times} times in the sample" if times > 2 else how

    for (first, other), (nearness, reason) in sorted(same_pictures(embedded).items(), key=lambda item: -item[1][0]):
        equal = words[first] == words[other]
        reason += f"; {equal_how(first, other) if equal else 'the captions differ'}"
        (duplicates if equal else pictures).append(Suspect(first, other, nearness, reason))
    for first, other in (pair for rows in by_words.values() for pair in pairwise(rows)):
        cosine = float(embedded.image_ND[first] @ embedded.image_ND[other])
        reason = f"{equal_how(first, other)}; the pictures' embeddings have similarity {cosine:.2f}"
        texts.append(Suspect(first, other, cosine, reason))
    chains = _Chains(len(captions))
    duplicates = _unchained(duplicates, chains)
    pictures, texts = (_unchained(suspects, deepcopy(chains)) for suspects in (pictures, texts))
    texts.sort(key=lambda suspect: -suspect.score)
    return {"duplicate": duplicates, "same_picture": pictures, "same_caption": texts}


class _Chains:
    """Rows that pairs have joined, directly or by way of others (union-find)."""

    def __init__(self, rows: int) -> None:
        self._next = list(range(rows))  # towards the end of the chain, which is its own next

    def _end(self, row: int) -> int:
        while (following := self._next[row]) != row:
            self._next[row] = row = self._next[following]  # half as far the next time
        return row

    def join(self, first: int, other: int) -> bool:
        """Whether they were apart."""
        first, other = self._end(first), self._end(other)
        self._next[first] = other
        return first != other


def _unchained(suspects: Sequence[Suspect], chains: _Chains) -> list[Suspect]:
    """Those that join rows which no pair before has joined: of g copies g - 1 pairs are told, not g squared."""
    pairs = ((suspect, suspect.other) for suspect in suspects)
    return [suspect for suspect, other in pairs if other is not None and chains.join(suspect.first, other)]


def same_pictures(embedded: Embedded) -> dict[tuple[int, int], tuple[float, str]]:
    """How alike, up to 1, and why.  Of copies byte for byte neighbours are told, those with equal captions first."""
    alike: dict[tuple[int, int], tuple[float, str]] = {}
    for rows in _groups([digest for _, digest in embedded.origins]).values():
        by_caption = sorted(rows, key=lambda row: (words_of(embedded.captions[row]), row))
        for pair in pairwise(by_caption):
            alike[min(pair), max(pair)] = (1.0, "the same picture, byte for byte")
    for first, other, score in near.looks_alike(embedded.tiny_NP, MOST, _ALIKE):
        reason = f"near-identical pictures (pixels differ by {-score * 255.0:.1f} of 255)"
        alike.setdefault((first, other), (1.0 + score, reason))
    return alike


def _groups(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Rows with equal keys."""
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# what the model says


def _interchangeable(embedded: Embedded) -> list[Suspect]:
    """s_ij and s_ji at least as large as s_ii and s_jj."""
    groups_N = near.groups_of(map(words_of, embedded.captions))
    pairs = near.fits_the_other(embedded.image_ND, embedded.text_ND, groups_N, MOST)
    reason = "each picture is nearer to the other's caption than to its own, by at least"
    return [Suspect(first, other, score, f"{reason} {score:.3f}") for first, other, score in pairs if score >= 0.0]


def _crowded(model: RunModel, embedded: Embedded, memory: Memory) -> tuple[list[Suspect], str]:
    if len(embedded.ids) < 2:
        return [], ""
    log_u_N, about = memory.log_u_N, "u is what the run's moving averages remember, the mean of both directions."
    if log_u_N is None:
        both = exact_log_normalizers(embedded.image_ND, embedded.text_ND, model.temperature)
        log_u_N = torch.stack([log_g_N.cpu() for log_g_N in both]).mean(dim=0)
        tau = f"{model.temperature:.3g}"
        about = f"The method keeps no u per sample; this one is exact over those at hand, at τ = {tau}."
    known_N = log_u_N.where(log_u_N.isfinite(), torch.nan)
    middle = float(known_N.nanmedian())  # NaN where none is known: then none is larger
    order = known_N.nan_to_num(-torch.inf).argsort(descending=True)
    rows = [row for row in order[:_SINGLES].tolist() if float(known_N[row]) > middle]
    nearest = near.nearest_other(embedded.image_ND, embedded.text_ND, embedded.groups_N, rows)
    crowded = []
    for row, (other, similarity) in zip(rows, nearest, strict=True):
        value = float(log_u_N[row])
        reason = f"log u = {value:.2f}, the median is {middle:.2f}"
        if other is not None:
            reason += f"; its picture's nearest other caption has similarity {similarity:.3f}"
        crowded.append(Suspect(row, other, value, reason))
    return crowded, about


def extreme_temperatures(memory: Memory) -> list[Suspect]:
    """The largest first, then the smallest; none where all are equal, as at a bound."""
    if memory.tau_N is None:
        return []
    known = memory.tau_N.isfinite().nonzero()[:, 0]
    values = memory.tau_N[known]
    if not len(values) or float(values.max() - values.min()) < 1e-6:
        return []
    order = known[values.argsort()].tolist()
    count = min(_EXTREMES, len(order) // 2)
    middle = float(values.median())
    extremes = []
    for words, rows in (("largest", order[::-1][:count]), ("smallest", order[:count])):
        for row in rows:
            value = float(memory.tau_N[row])
            reason = f"among the {words}: τ = {value:.4f}, the median is {middle:.4f}"
            extremes.append(Suspect(row, None, abs(value - middle), reason))
    return extremes


def write_suspects(path: Path, suspects: Suspects) -> None:
    """One row a suspect, to act on: ids are places in the training data, names say where samples lie."""
    ids, captions = suspects.embedded.ids, suspects.embedded.captions
    names = [name for name, _ in suspects.embedded.origins]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("kind", "score", "reason", "id", "name", "caption", "other_id", "other_name", "other_caption"))
        for kind, suspect in ((kind, suspect) for kind, every in suspects.by_kind.items() for suspect in every[:MOST]):
            cells: list[Any] = [kind, f"{suspect.score:.6g}", cell(suspect.reason)]
            for row in (suspect.first, suspect.other):
                cells += ["", "", ""] if row is None else [ids[row], cell(names[row]), cell(captions[row])]
            writer.writerow(cells)


def suspects_section(suspects: Suspects, pictures: Pictures, table_name: str) -> Section:
    count, of = len(suspects.embedded.ids), len(suspects.embedded.pool)
    among = f": {count:,} samples drawn from {of:,}: a pair is found only if both were drawn."
    lead = (
        f"Training samples worth a look{among if count < of else f', among all {count:,}.'} "
        f"{table_name} beside this page lists them, up to 1,000 of a kind, with their ids and names."
    )
    body: list[Child] = [notices(suspects.gaps)]
    for kind, listed in suspects.by_kind.items():
        title, meaning = _TITLES[kind]
        shown = _some(kind, listed)
        cards = [pictures.card(suspects.embedded, first, other, reason) for first, other, _, reason in shown]
        if cards:
            heading = f"{title} ({len(listed):,}{' or more' if len(listed) == MOST else ''})"
            about = note(joined(meaning, " ", suspects.about if kind == "crowded" else ""))
            body.append(folded(heading, about, node("div", cards, class_="cards"), unfolded=True))
    empty = [_TITLES[kind][0].lower() for kind, listed in suspects.by_kind.items() if not listed]
    body.append(note(f"Nothing found under: {', '.join(empty)}.") if empty else None)
    return Section("suspects", "Suspected false negatives and duplicates", joined(*body), lead)


def _some(kind: Kind, listed: list[Suspect]) -> list[Suspect]:
    """The most suspect ones, of temperatures both ends."""
    if kind == "temperature":
        half = len(listed) // 2
        return listed[: _SHOWN // 2] + listed[half : half + _SHOWN // 2]
    if kind == "interchangeable":
        return near.without_repeats(listed, _SHOWN)
    return listed[:_SHOWN]
