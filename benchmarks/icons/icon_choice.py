"""Which icons are kept, and which of them are held out.

Many sets draw the same thing, which is what makes the pairs worth learning from: one name, many drawings.  What is
dropped is what teaches nothing: the third style of a drawing, the same picture again, the two-hundredth "home".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from icon_names import Icon, stable_order

FILLED = {"filled", "fill", "solid", "bold", "baseline", "f", "flat"}
LINES = {"outline", "outlined", "line", "linear", "regular", "stroke", "o", "light", "thin", "broken"}
RARE = {"sharp", "rounded", "round", "light", "thin", "broken", "alt", "remix", "small", "inverse", "tone", "line"}
BEST_SIZE = 24

STYLES_PER_DRAWING = 2
PER_CAPTION = 16
PER_CAPTION_AND_SET = 3
PER_SET = 2500
TEST_PAIRS = 3000
TEST_WORDS = (1, 5)  # words in a test caption
WORD_SEEN = 5  # each of them stands in this many training captions at least
NEAR = 6.0  # mean difference of two 16 x 16 thumbnails, of 255, below which they are one drawing

Thumbnails = npt.NDArray[np.uint8]  # (icons, 16 * 16)


def look(style: str) -> str:
    """What catches the eye of a style: lines, areas, or two tones."""
    parts = set(style.split())
    if parts & {"duotone", "twotone", "duo", "tone"}:
        return "two tones"
    return "areas" if parts & FILLED else "lines" if parts & LINES else "plain"


def plainness(icon: Icon) -> tuple[int, int, str]:
    """Sorts the styles of one look: the ordinary one before sharp or thin ones, 24 pixels before other grids."""
    parts = icon.style.split()
    sizes = [int(part.removesuffix("px")) for part in parts if part.removesuffix("px").isdigit()]
    return sum(part in RARE for part in parts), abs(sizes[0] - BEST_SIZE) if sizes else 0, icon.name


def some_styles(icons: Iterable[Icon]) -> list[Icon]:
    """Of each drawing of a set, two looks at most: lines and areas before two tones."""
    drawings: dict[tuple[str, str], list[Icon]] = defaultdict(list)
    for icon in icons:
        base = icon.name
        for part in reversed(icon.style.split()):  # "home-1" and "home-2" are two drawings with one caption
            base = base.removesuffix(f"-{part}").removeprefix(f"{part}-")
        drawings[icon.set, base].append(icon)
    kept = []
    for variants in drawings.values():
        looks: dict[str, list[Icon]] = defaultdict(list)
        for icon in sorted(variants, key=plainness):
            looks[look(icon.style)].append(icon)
        order = [name for name in ("plain", "areas", "lines", "two tones") if name in looks]
        kept += [looks[name][0] for name in order[:STYLES_PER_DRAWING]]
    return kept


def most_shared(icons: Sequence[Icon]) -> list[int]:
    """At most PER_SET of a set: those whose rarest word the most sets use, so that the names can be learned."""
    sets_of_word: dict[str, set[str]] = defaultdict(set)
    by_set: dict[str, list[int]] = defaultdict(list)
    for index, icon in enumerate(icons):
        by_set[icon.set].append(index)
        for word in icon.caption.split():
            sets_of_word[word].add(icon.set)

    def rank(index: int) -> tuple[int, str]:
        icon = icons[index]
        return -min(len(sets_of_word[word]) for word in icon.caption.split()), stable_order(icon.set, icon.caption)

    return sorted(index for members in by_set.values() for index in sorted(members, key=rank)[:PER_SET])


def capped(icons: Sequence[Icon]) -> list[int]:
    """At most PER_CAPTION of a caption, in turn from every set: the first drawing of each, then the second of each."""
    by_caption: dict[str, list[int]] = defaultdict(list)
    for index, icon in enumerate(icons):
        by_caption[icon.caption].append(index)
    kept: list[int] = []
    for members in by_caption.values():
        members.sort(key=lambda index: stable_order(icons[index].set, icons[index].name))
        turn: Counter[str] = Counter()
        turns = []
        for index in members:
            turn[icons[index].set] += 1
            if turn[icons[index].set] <= PER_CAPTION_AND_SET:
                turns.append((turn[icons[index].set], index))
        kept += [index for _, index in sorted(turns, key=lambda pair: pair[0])[:PER_CAPTION]]
    return sorted(kept)


def distinct(icons: Sequence[Icon], digests: Sequence[str], thumbnails: Thumbnails) -> list[int]:
    """Without pictures that are there already: the same pixels anywhere, or nearly the same under one caption."""
    seen: set[str] = set()
    by_caption: dict[str, list[int]] = defaultdict(list)
    kept = []
    for index, icon in enumerate(icons):
        if digests[index] in seen:
            continue
        seen.add(digests[index])
        others = by_caption[icon.caption]
        if others:
            differences = np.abs(thumbnails[others].astype(np.int16) - thumbnails[index]).mean(axis=1)
            if differences.min() < NEAR:
                continue
        others.append(index)
        kept.append(index)
    return kept


def concept(caption: str) -> str:
    """The same for "arrow circle down", "down arrow circle" and "arrows circle down"."""
    words = [word for word in caption.split() if word not in ("and", "with")]
    return " ".join(sorted({word.removesuffix("s") if len(word) > 3 else word for word in words}))


def held_out(icons: Sequence[Icon], count: int = TEST_PAIRS) -> tuple[list[int], list[int]]:
    """Indices of the training and of the test pairs.

    Whole concepts are held out, drawn by hash among those whose words training knows well; of each, one picture is
    tested and the others are left out.
    """
    by_concept: dict[str, list[int]] = defaultdict(list)
    for index, icon in enumerate(icons):
        by_concept[concept(icon.caption)].append(index)
    left = Counter(word for icon in icons for word in set(icon.caption.split()))
    test: list[int] = []
    taken: set[int] = set()
    for name in sorted(by_concept, key=lambda name: stable_order("test", name)):
        if len(test) == count:
            break
        members = by_concept[name]
        tested = min(members, key=lambda index: stable_order("test", icons[index].set, icons[index].name))
        words = icons[tested].caption.split()
        lost = Counter(word for index in members for word in set(icons[index].caption.split()))
        plain = TEST_WORDS[0] <= len(words) <= TEST_WORDS[1] and all(re.fullmatch("[a-z]{2,}", word) for word in words)
        if plain and all(left[word] - lost[word] >= WORD_SEEN for word in words):
            test.append(tested)
            taken.update(members)
            left -= lost
    if len(test) < count:
        raise ValueError(f"Only {len(test)} of {len(by_concept)} concepts can be held out, {count} are wanted.")
    return [index for index in range(len(icons)) if index not in taken], sorted(test)
