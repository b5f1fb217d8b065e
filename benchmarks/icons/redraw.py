"""Some of the corpus's icons, larger: for towers that were trained on larger pictures.

    pip install pillow==13.0.0 resvg-py==0.5.0
    python benchmarks/icons/redraw.py OUT/icons.tar OUT --pixels 96 --train 10000 --test 2000   # OUT/icons-96.tar
    python benchmarks/icons/unpack.py OUT/icons-96.tar DATA --captions name

The pack is one of build.py; its captions and its held-out pairs stay as they are.  Training pairs are the first ones of
its shards, test pairs the first ones whose words each occur in at least two of those.  The npm package is looked for
in OUT/cache.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from icon_names import Icon
from icon_pack import Entry, read_pack, write_pack
from icon_sets import ICONS, download, read_sets
from unpack import draw_order

FEWEST = 2  # chosen training captions with each word of a test caption


def chosen(entries: list[Entry], train: int, test: int) -> list[Entry]:
    """In the pack's order."""
    in_order = sorted(entries, key=draw_order)
    kept = [entry for entry in in_order if entry.split == "train"][:train]
    uses = Counter(word for entry in kept for word in set(entry.captions[0].split()))
    known = [
        entry
        for entry in in_order
        if entry.split == "test" and all(uses[word] >= FEWEST for word in entry.captions[0].split())
    ]
    wanted = {*kept, *known[:test]}
    return [entry for entry in entries if entry in wanted]


def redraw(pack_path: Path, out: Path, pixels: int, train: int, test: int, workers: int) -> Path:
    from build import about, attribution, draw_all, make_sheets  # draws by resvg, which choosing does not need

    cache = out / "cache"
    entries = {(entry.set, entry.name): entry for entry in chosen(read_pack(pack_path).entries, train, test)}
    sets = read_sets(download(*ICONS, cache / "npm"), pixels)
    icons = [Icon(one.set, one.name, one.captions, one.category, one.style) for one in entries.values()]
    drawn = draw_all(icons, sets, cache, workers)
    drawn.sort(key=lambda icon_drawing: not icon_drawing[1].is_grey)  # greys first, as in the sheets
    sheets = make_sheets([drawing for _, drawing in drawn], cache, workers)
    kept = [entries[icon.set, icon.name] for icon, _ in drawn]
    used = Counter(entry.set for entry in kept)
    notes = attribution(sets, used, pixels)
    path = out / f"icons-{pixels}.tar"
    write_pack(path, {one.prefix: about(one) for one in sets if used[one.prefix]}, kept, sheets, notes)
    counts = Counter(entry.split for entry in kept)
    print(f"{path}: {path.stat().st_size:,} bytes, {counts['train']:,} training and {counts['test']:,} test pairs")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw some icons of the corpus larger.")
    parser.add_argument("pack", type=Path, help="icons.tar of build.py")
    parser.add_argument("out", type=Path, help="folder for the new pack and the cache")
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument("--train", type=int, default=10_000, help="training pairs")
    parser.add_argument("--test", type=int, default=2_000, help="test pairs")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    try:
        redraw(options.pack, options.out, options.pixels, options.train, options.test, options.workers)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
