"""Cuts the icon corpus into what a base model is trained on and what it is then fine-tuned on.

    python benchmarks/finetune/icon_parts.py icons.tar DATA

Needs numpy and Pillow, and the pack of benchmarks/icons/build.py.  The cut is by icon set, so that the parts differ in
style and subject: the base learns interface icons; tuning is on pictograms, coloured, hand-drawn and pixel icons.
Emoji and flags are in neither.  Every shard holds KEY.png and KEY.json with "caption", the icon's name.

DATA/
  base.tar, tune.tar             training pairs
  base-check.tar, tune-check.tar 1,000 of each, kept out of training: learning rates and epochs are chosen by them
  base-test.tar, tune-test.tar   the corpus's test pairs, whose names no training pair has
  tune-noisy.tar                 tune.tar with three captions in ten handed on to another picture
  tune-once.tar                  of tune.tar one picture a name: every negative is a true one
  tune-often.tar                 as many pictures, of names that several pictures have: many false negatives
  emoji-once.tar                 one emoji a name, none of them Twemoji's, which the built-in new style is made of

With ``--cut clean-up`` the parts are of all sets alike, and differ in how clean their captions are:

DATA/
  base.tar                       four fifths of the training pairs, 35 captions in 100 handed on to another picture
  tune.tar                       the other fifth, as they are: the base has seen none of them, clean or not
  check.tar                      one picture each of 1,500 names that no pair above has; rates are chosen by them
  test.tar                       the corpus's test pairs
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))

from icon_pack import Entry, read_pack
from unpack import as_json, draw_order, pngs, write_shard

EMOJI_SETS = frozenset(
    {
        *("twemoji", "noto", "noto-v1", "emojione", "emojione-monotone", "fxemoji", "streamline-emojis"),
        *("fluent-emoji", "fluent-emoji-flat", "fluent-emoji-high-contrast"),
        *("circle-flags", "flag", "flagpack", "cif"),
    }
)
TUNING_FAMILIES = ("streamline", "icon-park", "pepicons")  # how the names of such sets begin
TUNING_SETS = frozenset(
    {
        *("game-icons", "pinhead", "healthicons", "roentgen", "maki", "temaki", "osmic", "map", "geo", "gis"),
        *("pixelarticons", "pixel", "dinkie-icons", "memory", "picon", "vs"),
        *("guidance", "covid", "medical-icon", "meteocons", "wi"),
        *("marketeq", "flat-color-icons", "fluent-color", "duo-icons", "glyphs-poly"),
    }
)
EMOJI_ONCE = ("noto", "fluent-emoji-flat", "emojione", "fluent-emoji", "noto-v1")  # the first that has a name draws it
CHECKED = 1000
NOISY_SHARE = 0.3
BASE_SHARE, BASE_NOISE, CHECK_NAMES = 0.8, 0.35, 1500  # of the clean-up

Pair = tuple[Entry, bytes]


def part_of(icon_set: str) -> str:
    if icon_set in EMOJI_SETS:
        return "emoji"
    return "tune" if icon_set in TUNING_SETS or icon_set.startswith(TUNING_FAMILIES) else "base"


def name_of(entry: Entry) -> str:
    return entry.captions[0]


def _lot(ticket: str) -> str:
    """A place in a lottery that is the same every time."""
    return hashlib.sha256(ticket.encode()).hexdigest()


def drawn(entry: Entry, what: str) -> str:
    return _lot(f"{what}|{entry.set}|{entry.name}")


def noisy(pairs: Sequence[Pair], share: float = NOISY_SHARE) -> list[Pair]:
    """A share of the captions goes round among its own pictures: each has a caption of the corpus, not its own."""
    order = sorted(range(len(pairs)), key=lambda place: drawn(pairs[place][0], "noise"))
    spoilt = order[: round(share * len(pairs))]
    changed = list(pairs)
    for here, there in zip(spoilt, spoilt[1:] + spoilt[:1], strict=True):
        changed[here] = (replace(pairs[here][0], captions=pairs[there][0].captions), pairs[here][1])
    return changed


def once(pairs: Sequence[Pair]) -> list[Pair]:
    """The first picture of every name."""
    found: dict[str, Pair] = {}
    for pair in pairs:
        found.setdefault(name_of(pair[0]), pair)
    return list(found.values())


def often(pairs: Sequence[Pair], count: int, least: int = 3) -> list[Pair]:
    """``count`` pictures of names that at least ``least`` pictures have, whole names at a time but for the last."""
    counts = Counter(name_of(entry) for entry, _ in pairs)
    names = sorted(
        (name for name in counts if counts[name] >= least), key=lambda name: hashlib.sha256(name.encode()).digest()
    )
    rank = {name: place for place, name in enumerate(names)}
    chosen = sorted((pair for pair in pairs if name_of(pair[0]) in rank), key=lambda pair: rank[name_of(pair[0])])[
        :count
    ]
    return sorted(chosen, key=lambda pair: draw_order(pair[0]))


def domain_parts(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Every file of DATA; ``pairs`` are the whole corpus in the order that was drawn for it."""
    of: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        of.setdefault((part_of(pair[0].set), pair[0].split), []).append(pair)
    found = {}
    for part in ("base", "tune"):
        training = of.get((part, "train"), [])
        kept = min(CHECKED, len(training) // 10)
        found[f"{part}-check"], found[part] = training[:kept], training[kept:]
        found[f"{part}-test"] = of.get((part, "test"), [])
    tuning = found["tune"]
    found["tune-noisy"] = noisy(tuning)
    found["tune-once"] = once(tuning)
    found["tune-often"] = often(tuning, len(found["tune-once"]))
    place = {name: number for number, name in enumerate(EMOJI_ONCE)}
    emoji = [pair for pair in of.get(("emoji", "train"), []) if pair[0].set in place]
    found["emoji-once"] = once(sorted(emoji, key=lambda pair: place[pair[0].set]))
    return {name: chosen for name, chosen in found.items() if chosen}


def clean_up_parts(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The same, where the base's captions are noisy and those it is tuned on are not."""
    training = [pair for pair in pairs if pair[0].split == "train"]
    names = sorted({name_of(entry) for entry, _ in training}, key=lambda name: _lot(f"check|{name}"))
    apart = frozenset(names[: min(CHECK_NAMES, len(names) // 10)])
    learned = [pair for pair in training if name_of(pair[0]) not in apart]
    cut = round(BASE_SHARE * len(learned))
    return {
        "base": noisy(learned[:cut], BASE_NOISE),
        "tune": learned[cut:],
        "check": once([pair for pair in training if name_of(pair[0]) in apart]),
        "test": [pair for pair in pairs if pair[0].split == "test"],
    }


Cut = Callable[[Sequence[Pair]], dict[str, list[Pair]]]
CUTS: Mapping[str, Cut] = {"domain": domain_parts, "clean-up": clean_up_parts}


def write_parts(pack_path: Path, out: Path, workers: int = 0, cut: Cut = domain_parts) -> Mapping[str, int]:
    """Writes DATA and says how many pairs each file has."""
    pack = read_pack(pack_path)
    out.mkdir(parents=True, exist_ok=True)
    contents, greys, entries = zip(*pack.parts(), strict=True)
    with ProcessPoolExecutor(workers or os.cpu_count() or 1) as pool:
        images = [png for sheet in pool.map(pngs, contents, greys, map(len, entries)) for png in sheet]
        pairs = sorted(zip(pack.entries, images, strict=True), key=lambda pair: draw_order(pair[0]))
        found = cut(pairs)
        samples = [
            [
                (f"{number:06d}", png, as_json(entry, pack.sets[entry.set]["license"], every_caption=False))
                for number, (entry, png) in enumerate(chosen)
            ]
            for chosen in found.values()
        ]
        list(pool.map(write_shard, [out / f"{name}.tar" for name in found], samples))
    (out / "ATTRIBUTION.md").write_text(pack.attribution, encoding="utf-8")
    return {name: len(chosen) for name, chosen in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the icon corpus into the parts of the fine-tuning study.")
    parser.add_argument("pack", type=Path, help="icons.tar of benchmarks/icons/build.py")
    parser.add_argument("out", type=Path, help="folder for the parts")
    parser.add_argument("--cut", choices=list(CUTS), default="domain", help="what base and tuning pairs differ in")
    parser.add_argument("--workers", type=int, default=0, help="0: one a core")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        counts = write_parts(arguments.pack, arguments.out, arguments.workers, CUTS[arguments.cut])
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{arguments.out}, {time.monotonic() - began:.0f} s: " + ", ".join(f"{n} {c:,}" for n, c in counts.items()))


if __name__ == "__main__":
    main()
