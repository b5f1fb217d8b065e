"""Builds the embedded emoji data set: fullbatch/data/emoji/{train,new_style,new_concept}.tar.xz

    pip install pillow==13.0.0 resvg-py==0.5.0
    python tools/build_emoji.py

Three vendors drew the same emoji, and Unicode gave every emoji a name and keywords.  So one small collection asks two
different questions of a model trained on two vendors:
  new_style    concepts that training has, as a third vendor draws them
  new_concept  concepts that training never names nor shows, one picture each
Country flags cannot take part: only the held-out vendor's package draws them.

The same packages and the two versions above give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import resvg_py
from PIL import Image

# style -> npm package, version, first digits of the SHA-256 of its tarball
PACKAGES = {
    "noto": ("@iconify-json/noto", "1.2.9", "3e918d88fc945c0b"),
    "fluent": ("@iconify-json/fluent-emoji-flat", "1.2.6", "7d064769dee69081"),
    "twemoji": ("@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce"),
}
WORDS = ("emojibase-data", "17.0.0", "d01d0e2ca4e22cb4")
TRAINING_STYLES = ("noto", "fluent")  # in the order of preference where only one picture is wanted
HELD_OUT_STYLE = "twemoji"

PIXELS = 64
HELD_OUT_SHARE = 0.12
SMALLEST_SUBGROUP_TO_SPLIT = 4
LARGEST_TOTAL_BYTES = 8_000_000

VARIATION_SELECTOR, JOINER = "fe0f", "200d"
PEOPLE = {"1f468", "1f469", "1f9d1", "1f466", "1f467", "1f9d2"}  # man, woman, person, boy, girl, child
PEOPLE_WORDS = re.compile(r"\b(man|woman|person|men|women|people|adult|boy|girl|child)\b")
# Gender variants that Unicode gave neither a common codepoint nor a common word.
OTHER_NAMES = {"princess": "prince", "person with crown": "prince", "older person": "old man"}
OTHER_NAMES |= {"mrs. claus": "santa claus", "mx claus": "santa claus"}
OTHER_NAMES |= {"woman and man holding hands": "people holding hands"}


@dataclass(frozen=True)
class Concept:
    hexcode: str  # lower case, without variation selectors: packages disagree on those
    name: str
    keywords: tuple[str, ...]
    group: str
    subgroup: str


def stable_order(*parts: str) -> str:
    """A key to sort by that looks random and never changes."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def download(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Unpacks one npm package below ``folder`` and returns where."""
    command = ["npm", "pack", f"{package}@{version}", "--json", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    tarball = folder / f"{package.lstrip('@').replace('/', '-')}-{version}.tgz"
    found = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if not found.startswith(sha256):
        raise ValueError(f"{package}@{version} has SHA-256 {found}, expected it to start with {sha256}.")
    target = tarball.with_suffix("")
    with tarfile.open(tarball) as archive:
        archive.extractall(target, filter="data")
    return target / "package"


def plain_hexcode(hexcode: str) -> str:
    return "-".join(code for code in hexcode.lower().split("-") if code != VARIATION_SELECTOR)


def read_concepts(package: Path) -> list[Concept]:
    """All emoji but components (hair, skin); skin tones are nested below their emoji there, so they stay out too."""
    words = json.loads((package / "en/data.json").read_text(encoding="utf-8"))
    titles = json.loads((package / "meta/groups.json").read_text(encoding="utf-8"))
    concepts = []
    for word in sorted((w for w in words if "group" in w), key=lambda w: w["order"]):
        group, subgroup = titles["groups"][str(word["group"])], titles["subgroups"][str(word["subgroup"])]
        if group != "component":
            hexcode = plain_hexcode(word["hexcode"])
            concepts.append(Concept(hexcode, word["label"], tuple(word.get("tags", ())), group, subgroup))
    return concepts


def read_icons(package: Path) -> dict[str, str]:
    """hexcode -> a square SVG; an icon that is not square is centred."""
    icon_set = json.loads((package / "icons.json").read_text(encoding="utf-8"))
    names = json.loads((package / "chars.json").read_text(encoding="utf-8"))
    drawings = {}
    for characters, name in sorted(names.items()):
        if icon := icon_set["icons"].get(name):
            box = [{**icon_set, **icon}.get(side, 0) for side in ("left", "top", "width", "height")]
            drawings[plain_hexcode(characters)] = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'width="{PIXELS}" height="{PIXELS}" viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'
            )
    return drawings


def family_keys(concept: Concept) -> list[str]:
    """Concepts that share any of these keys are variants of one thing and fall on the same side of the split."""
    codes = concept.hexcode.split("-")
    if codes[0] in PEOPLE:  # the judges, the firefighters: told apart by what follows the person
        keys = ["person " + next((c for c in codes if c not in PEOPLE and c != JOINER), "")]
    else:  # black cat with cat, woman running with person running
        keys = [codes[0]]
    if concept.group == "people-body":
        name = OTHER_NAMES.get(concept.name.lower(), concept.name.lower())
        before, _, after = PEOPLE_WORDS.sub("", name).partition(":")
        keys.append("name " + " ".join((before.strip(" ,") or after.strip(" ,")).split()))
    return keys


def families(concepts: Iterable[Concept]) -> list[list[Concept]]:
    """Joins concepts that share a key, directly or through others."""
    family_of_key: dict[str, list[Concept]] = {}
    for concept in concepts:
        keys, members = family_keys(concept), [concept]
        for family in {id(f): f for f in map(family_of_key.get, keys) if f is not None}.values():
            members = family + members
        for member in members:
            family_of_key |= dict.fromkeys(family_keys(member), members)
    return list({id(family): family for family in family_of_key.values()}.values())


def choose_held_out(concepts: Iterable[Concept]) -> set[Concept]:
    """About HELD_OUT_SHARE of each subgroup, in whole families, never the whole of a subgroup."""
    by_subgroup: dict[str, list[list[Concept]]] = defaultdict(list)
    for family in families(concepts):
        [(subgroup, _)] = Counter(c.subgroup for c in family).most_common(1)
        by_subgroup[subgroup].append(family)
    held_out: set[Concept] = set()
    for members in by_subgroup.values():
        size = sum(map(len, members))
        room = max(1, round(HELD_OUT_SHARE * size)) if size >= SMALLEST_SUBGROUP_TO_SPLIT else 0
        for family in sorted(members, key=lambda f: stable_order(min(c.hexcode for c in f))):
            if len(family) <= room:
                held_out.update(family)
                room -= len(family)
    return held_out


def captions(concept: Concept, style: str) -> list[str]:
    """The name, then one to three captions with keywords; another vendor's picture gets other keywords."""
    spoken = set(re.findall(r"\w+", concept.name.lower()))
    fresh = [k for k in concept.keywords if not set(re.findall(r"\w+", k.lower())) <= spoken]
    fresh.sort(key=lambda keyword: stable_order(concept.hexcode, style, keyword))
    texts = [concept.name]
    if fresh:
        texts.append(", ".join([concept.name, *fresh[:2]]))
    if len(fresh) >= 4:
        texts.append(f"{', '.join(fresh[2:4])}: {concept.name}")
    else:
        texts.append(f"{concept.name} emoji")
    if len(fresh) >= 5:
        texts.append(", ".join(fresh[-4:]))  # without the name
    return list(dict.fromkeys(texts))


def draw(svg: str) -> bytes:
    """As lossless WebP: at this size lossy WebP of quality 80 saves little and blurs the colours."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True))
    encoded = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(encoded, "webp", lossless=True, quality=100, method=6)
    return encoded.getvalue()


def draw_all(concepts: Iterable[Concept], drawings: dict[str, str]) -> dict[Concept, bytes]:
    """One vendor's pictures.  Where it gives several emoji one picture, only the shortest name keeps it."""
    pictures: dict[Concept, bytes] = {}
    taken: set[bytes] = set()
    for concept in sorted(concepts, key=lambda c: (len(c.name), c.hexcode)):
        picture = draw(drawings[concept.hexcode]) if concept.hexcode in drawings else None
        if picture is not None and picture not in taken:
            pictures[concept] = picture
            taken.add(picture)
    return pictures


def write_shard(path: Path, samples: list[tuple[str, Concept]], pictures: dict[str, dict[Concept, bytes]]) -> None:
    """Members named and ordered as img2dataset does: per key, first .json, then .webp."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for style, concept in sorted(samples, key=lambda sample: (sample[0], sample[1].hexcode)):
            texts = captions(concept, style)
            about = {"caption": texts[0], "captions": texts, **vars(concept), "style": style}
            content = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
            for ending, data in (("json", content), ("webp", pictures[style][concept])):
                member = tarfile.TarInfo(f"{style}-{concept.hexcode}.{ending}")  # owner and time are 0
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    path.write_bytes(lzma.compress(shard.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the embedded emoji data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "fullbatch/data/emoji")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as temporary:
        concepts = read_concepts(download(*WORDS, Path(temporary)))
        drawings = {style: read_icons(download(*package, Path(temporary))) for style, package in PACKAGES.items()}

    pictures = {style: draw_all(concepts, drawings[style]) for style in PACKAGES}
    drawn = {c: [style for style in TRAINING_STYLES if c in pictures[style]] for c in concepts}
    held_out = choose_held_out(c for c in concepts if drawn[c])
    seen = [c for c in concepts if drawn[c] and c not in held_out]
    splits: dict[str, list[tuple[str, Concept]]] = {
        "train": [(style, c) for c in seen for style in drawn[c]],
        "new_style": [(HELD_OUT_STYLE, c) for c in seen if c in pictures[HELD_OUT_STYLE]],
        "new_concept": [(drawn[c][0], c) for c in concepts if c in held_out],
    }

    left_out = Counter(c.subgroup for c in concepts if not drawn[c])
    print(f"concepts: {len(seen)} seen, {len(held_out)} held out; without a training picture: {dict(left_out)}")
    total = 0
    for split, samples in splits.items():
        path = out / f"{split}.tar.xz"
        write_shard(path, samples, pictures)
        total += path.stat().st_size
        print(f"{split}: {len(samples)} pictures, {path.stat().st_size:,} bytes")
        print(f"  {dict(Counter(style for style, _ in samples))}\n  {dict(Counter(c.group for _, c in samples))}")
    if total > LARGEST_TOTAL_BYTES:
        raise ValueError(f"The shards take {total:,} bytes, more than the {LARGEST_TOTAL_BYTES:,} allowed.")
    print(f"total: {total:,} bytes")


if __name__ == "__main__":
    main()
