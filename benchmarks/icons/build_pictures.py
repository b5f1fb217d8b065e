"""Builds the second corpus: emoji of every vendor and pictures of the Open Clip Art Library, with their names.

    pip install pillow==13.0.0 resvg-py==0.5.0
    apt-get download openclipart-svg openclipart-png && for p in *.deb; do dpkg-deb -x $p CLIPART; done
    python benchmarks/icons/build_pictures.py CLIPART OUT    # OUT/pictures.tar, OUT/ATTRIBUTION.md
    python benchmarks/icons/unpack.py OUT/pictures.tar DATA --captions name

Coloured pictures, where the first corpus is mostly grey glyphs.  Licences, captions of emoji, duplicates and test pairs
are treated as there (build.py); every emoji of a vendor is taken, not 2,500 of a set.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from html import unescape
from pathlib import Path

import icon_choice
import numpy as np
from build import about, attribution, draw_all, make_sheets
from icon_drawing import PIXELS, Drawing, reduced
from icon_names import EMOJI_SETS_WITH_ODD_NAMES, EmojiNames, Icon, captioned, spoken
from icon_pack import Entry, write_pack
from icon_sets import FLAG_SETS, ICONS, WORDS, IconSet, download, read_brands, read_emoji, read_sets
from PIL import Image

Image.MAX_IMAGE_PIXELS = None  # MOST_PIXELS is asked before anything is decoded
TEST_PAIRS = 1000
CLIPART = IconSet(
    prefix="openclipart",
    title="Open Clip Art Library",
    author="its contributors",
    url="https://openclipart.org",
    license="CC0-1.0",
    license_url="https://creativecommons.org/publicdomain/zero/1.0/",
    version="0.18",
    kind="Pictures",
    icons={},
    category_of={},
    styles={},
    style_prefixes={},
    hexcodes={},
)
# Folders whose pictures go by the name of their collection, and logos.
UNNAMED = ("computer/icons", "logos", "special", "shapes/stars", "shapes/jigsaw", "recreation/games/cards", "unsorted")
NOT_A_NAME = re.compile(
    r"\b(by|collection|theme|clip ?art|icons?|symbols?|gramastar|untitled|unnamed|svg|\d{4})\b", re.IGNORECASE
)
MOST_WORDS = 6
MOST_PIXELS = 20_000_000  # of a drawing as the library holds it; some are as large as a wall


def clipart_title(svg: str) -> str:
    """The picture's own title; "" where that of its collection stands there."""
    titles = re.findall(r"<dc:title>(.*?)</dc:title>", svg, re.DOTALL)
    title = unescape(titles[0]).strip() if titles else ""
    words = spoken(re.sub(r"[\d_]+", " ", title))
    return "" if NOT_A_NAME.search(title) or not 1 <= len(words.split()) <= MOST_WORDS else words


def squared(path: Path) -> Drawing | None:
    """On white, centred, at the corpus's size; None where it is too large to be read."""
    with Image.open(path) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            return None
        image = opened.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return Drawing(reduced(square.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)))


def read_clipart(folder: Path) -> list[tuple[Icon, Drawing]]:
    pictures, texts = folder / "usr/share/openclipart/png", folder / "usr/share/openclipart/svg"
    if not texts.is_dir() or not pictures.is_dir():
        raise ValueError(f"{folder} does not hold the unpacked packages openclipart-svg and openclipart-png.")
    drawn = []
    for path in sorted(texts.rglob("*.svg")):
        name = path.relative_to(texts).with_suffix("")
        picture = (pictures / name).with_name(f"{name.name}.png")
        title = clipart_title(path.read_text(encoding="utf-8", errors="replace"))
        if title and picture.is_file() and not str(name).startswith(UNNAMED):
            drawing = squared(picture)
            category = spoken(str(name.parent).replace("/", " "))
            if drawing is not None:
                drawn.append((Icon(CLIPART.prefix, str(name), (title,), category, ""), drawing))
    return drawn


def build(clipart: Path, out: Path, workers: int) -> Path:
    cache = out / "cache"
    package, words = download(*ICONS, cache / "npm"), download(*WORDS, cache / "npm")
    emoji = read_emoji(words)
    vendors = [one for one in read_sets(package) if _is_emoji(one)]
    brands = read_brands(package, emoji)
    named = [icon for one in vendors for icon in captioned(one, EmojiNames(emoji), brands)]
    drawn = [*draw_all(named, vendors, cache, workers), *read_clipart(clipart)]
    print(f"{len(drawn):,} drawn, of {Counter(icon.set for icon, _ in drawn)}", flush=True)
    thumbnails = np.array([drawing.thumbnail().ravel() for _, drawing in drawn])
    kept = icon_choice.distinct([icon for icon, _ in drawn], [drawing.digest for _, drawing in drawn], thumbnails)
    drawn = [drawn[index] for index in kept]
    train, test = icon_choice.held_out([icon for icon, _ in drawn], TEST_PAIRS)
    split = {**dict.fromkeys(train, "train"), **dict.fromkeys(test, "test")}
    samples = [(*drawn[index], split[index]) for index in sorted(split)]
    samples.sort(key=lambda sample: not sample[1].is_grey)
    entries = [Entry(icon.set, icon.name, part, icon.style, icon.category, icon.captions) for icon, _, part in samples]
    sheets = make_sheets([drawing for _, drawing, _ in samples], cache, workers)
    used = Counter(entry.set for entry in entries)
    sets = [*vendors, CLIPART]
    notes = attribution(sets, used)
    path = out / "pictures.tar"
    write_pack(path, {one.prefix: about(one) for one in sets if used[one.prefix]}, entries, sheets, notes)
    (out / "ATTRIBUTION.md").write_text(notes, encoding="utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes, {len(train):,} training and {len(test):,} test pairs", flush=True)
    print(f"{len({entry.captions[0] for entry in entries}):,} captions; {dict(used)}")
    return path


def _is_emoji(one: IconSet) -> bool:
    return one.kind == "Emoji" or one.prefix in EMOJI_SETS_WITH_ODD_NAMES | FLAG_SETS


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the corpus of emoji and clip art.")
    parser.add_argument("clipart", type=Path, help="where the two Debian packages are unpacked")
    parser.add_argument("out", type=Path, help="folder for pictures.tar and the cache")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    try:
        build(arguments.clipart, arguments.out, arguments.workers)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
