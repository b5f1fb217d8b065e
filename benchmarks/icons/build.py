"""Builds the icon corpus: about a hundred thousand icons of 64 pixels with their names, in one pack below 45 MB.

    pip install pillow==13.0.0 resvg-py==0.5.0
    python benchmarks/icons/build.py OUT              # OUT/icons.tar, OUT/ATTRIBUTION.md; six minutes on two busy cores
    python benchmarks/icons/build.py OUT --limit 2000  # a trial: OUT/icons-2000.tar, with fewer test pairs
    python benchmarks/icons/unpack.py OUT/icons.tar DATA

The icons come from the npm package @iconify/json, the words for emoji from emojibase-data; npm must be installed.
Packages, drawings and sheets are kept in OUT/cache, so that a build that was stopped goes on where it was.  The same
packages and the two versions above give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import icon_choice
import numpy as np
from icon_drawing import Drawing, draw
from icon_names import EmojiNames, Icon, captioned, stable_order
from icon_pack import COLUMNS, ENCODING, ICONS_A_SHEET, Entry, Sheet, encoded_sheet, write_pack
from icon_sets import ICONS, WORDS, IconSet, download, read_brands, read_emoji, read_sets

LARGEST_PACK = 45_000_000
SMALLEST_PACK_WITH_ALL_TEST_PAIRS = 20_000


def draw_set(icons: list[tuple[Icon, str]], cache: Path) -> list[Drawing | None]:
    """The drawings of one set; from the cache where the same SVGs were drawn before."""
    key = hashlib.sha256("\0".join(svg for _, svg in icons).encode()).hexdigest()[:16]
    path = cache / f"drawings/{icons[0][0].set}-{key}.npz"
    if not path.exists():
        drawings = [draw(svg) for _, svg in icons]
        greys = [drawing.pixels for drawing in drawings if drawing and drawing.is_grey]
        colours = [drawing.pixels for drawing in drawings if drawing and not drawing.is_grey]
        kinds = [0 if drawing is None else 1 if drawing.is_grey else 2 for drawing in drawings]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            np.savez_compressed(file, kinds=np.array(kinds), greys=np.array(greys), colours=np.array(colours))
        os.replace(unfinished, path)
    with np.load(path) as saved:
        of_kind = {0: iter(()), 1: iter(saved["greys"]), 2: iter(saved["colours"])}
        return [Drawing(next(of_kind[kind])) if kind else None for kind in saved["kinds"].tolist()]


def make_sheet(icons: Sheet, cache: Path) -> bytes:
    key = hashlib.sha256(f"{COLUMNS} {ENCODING}".encode() + icons.tobytes()).hexdigest()[:24]
    path = cache / f"sheets/{key}.webp"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(encoded_sheet(icons))
        os.replace(unfinished, path)
    return path.read_bytes()


def make_sheets(drawings: Sequence[Drawing], cache: Path, workers: int) -> dict[str, bytes]:
    """By name; grey drawings come first."""
    names, pixels = [], []
    for kind, grey in (("grey", True), ("colour", False)):
        of_kind = [drawing.pixels for drawing in drawings if drawing.is_grey == grey]
        for number, start in enumerate(range(0, len(of_kind), ICONS_A_SHEET)):
            pixels.append(np.stack(of_kind[start : start + ICONS_A_SHEET]))
            names.append(f"{kind}-{number:04d}-{len(pixels[-1])}")
    with ProcessPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(partial(make_sheet, cache=cache), pixels), strict=True))


def draw_all(icons: list[Icon], sets: Iterable[IconSet], cache: Path, workers: int) -> list[tuple[Icon, Drawing]]:
    """Set by set; without those that show nothing."""
    svgs = {icon_set.prefix: icon_set.icons for icon_set in sets}
    by_set: dict[str, list[tuple[Icon, str]]] = {}
    for icon in icons:
        by_set.setdefault(icon.set, []).append((icon, svgs[icon.set][icon.name]))
    with ProcessPoolExecutor(workers) as pool:
        drawn = pool.map(partial(draw_set, cache=cache), by_set.values())
        return [
            (icon, drawing)
            for members, drawings in zip(by_set.values(), drawn, strict=True)
            for (icon, _), drawing in zip(members, drawings, strict=True)
            if drawing is not None
        ]


def attribution(sets: list[IconSet], used: Counter[str], pixels: int = 64) -> str:
    """What the licences ask for: who drew what, under which terms, and that we changed it."""
    lines = [
        "# Icons of the corpus: sets, authors and licences",
        "",
        f"Every icon was drawn at {pixels} x {pixels} pixels on white from the SVG that the npm package",
        f"`{ICONS[0]}` {ICONS[1]} holds of its set, and reduced to 16 greys or 64 colours; that is the only change.",
        f"Names and keywords of emoji are Unicode CLDR's, from `{WORDS[0]}` {WORDS[1]} (MIT).",
        "No author endorses this collection.  A set without a version gives none.",
        "",
        "| set | icons | title | author | licence | version |",
        "|---|---:|---|---|---|---|",
    ]
    for one in sorted(sets, key=lambda one: one.prefix):
        if used[one.prefix]:
            author = f"[{one.author}]({one.url})" if one.url else one.author
            terms = f"[{one.license}]({one.license_url})" if one.license_url else one.license
            lines.append(
                f"| {one.prefix} | {used[one.prefix]:,} | {one.title} | {author} | {terms} | {one.version or '-'} |"
            )
    return "\n".join(lines) + "\n"


def about(one: IconSet) -> dict[str, str]:
    keys = ("title", "author", "url", "license", "license_url", "version", "kind")
    return {key: getattr(one, key) for key in keys}


def build(out: Path, limit: int, workers: int) -> Path:
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    cache = out / "cache"
    package, words = download(*ICONS, cache / "npm"), download(*WORDS, cache / "npm")
    emoji = read_emoji(words)
    brands, sets = read_brands(package, emoji), read_sets(package)
    named = [icon for one in sets for icon in captioned(one, EmojiNames(emoji), brands)]
    tell(f"{sum(len(one.icons) for one in sets):,} icons in {len(sets)} sets, {len(named):,} with a name to use")

    icons = icon_choice.some_styles(named)
    icons = [icons[index] for index in icon_choice.capped(icons)]
    icons = [icons[index] for index in icon_choice.most_shared(icons)]
    if limit:
        chosen = set(sorted(icons, key=lambda icon: stable_order("limit", icon.set, icon.name))[:limit])
        icons = [icon for icon in icons if icon in chosen]
    tell(f"{len(icons):,} chosen to be drawn")

    drawn = draw_all(icons, sets, cache, workers)
    tell(f"{len(drawn):,} drawn")
    thumbnails = np.array([drawing.thumbnail().ravel() for _, drawing in drawn])
    kept = icon_choice.distinct([icon for icon, _ in drawn], [drawing.digest for _, drawing in drawn], thumbnails)
    drawn = [drawn[index] for index in kept]
    tell(f"{len(drawn):,} without pictures that are there already")

    tests = icon_choice.TEST_PAIRS if len(drawn) >= SMALLEST_PACK_WITH_ALL_TEST_PAIRS else len(drawn) // 20
    train, test = icon_choice.held_out([icon for icon, _ in drawn], tests)
    split = {**dict.fromkeys(train, "train"), **dict.fromkeys(test, "test")}
    samples = [(*drawn[index], split[index]) for index in sorted(split)]
    samples.sort(key=lambda sample: not sample[1].is_grey)  # greys first, else in the order of the sets
    entries = [Entry(i.set, i.name, part, i.style, i.category, i.captions) for i, _, part in samples]
    tell(f"{len(train):,} training and {len(test):,} test pairs")

    sheets = make_sheets([drawing for _, drawing, _ in samples], cache, workers)
    used = Counter(entry.set for entry in entries)
    notes = attribution(sets, used)
    path = out / (f"icons-{limit}.tar" if limit else "icons.tar")
    write_pack(path, {one.prefix: about(one) for one in sets if used[one.prefix]}, entries, sheets, notes)
    (out / "ATTRIBUTION.md").write_text(notes, encoding="utf-8")
    size = path.stat().st_size
    tell(f"{path}: {size:,} bytes, {len(entries):,} icons of {len(used)} sets")
    tell(
        ", ".join(f"{count:,} {kind}" for kind, count in Counter(name.split("-")[0] for name in sheets).items())
        + " sheets"
    )
    if size > LARGEST_PACK:
        raise ValueError(f"{path} takes {size:,} bytes, more than the {LARGEST_PACK:,} allowed.")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the icon corpus.")
    parser.add_argument("out", type=Path, help="folder for icons.tar and the cache")
    parser.add_argument("--limit", type=int, default=0, help="icons to draw, for a trial; 0: all")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    try:
        build(arguments.out, arguments.limit, arguments.workers)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
