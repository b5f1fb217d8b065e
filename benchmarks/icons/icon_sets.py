"""Which icon sets take part, and how they are read from the npm packages.

A set takes part when its licence lets anyone use and pass on its pictures, at most for naming the author: no clause
against commercial use, no clause on what is built from them.  Logos are left out whatever their licence says, since a
licence of the drawing is none of the trade mark.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# package, version, first digits of the SHA-256 of its tarball
ICONS = ("@iconify/json", "2.2.535", "1a545f86fa224d65")
WORDS = ("emojibase-data", "17.0.0", "d01d0e2ca4e22cb4")

PERMISSIVE = {
    *("MIT", "ISC", "BSD-3-Clause", "Apache-2.0", "Unlicense", "CC0-1.0"),
    *("CC-BY-3.0", "CC-BY-4.0", "OFL-1.1"),
}
LOGO_SETS = {  # brands that stand in other categories than "Logos"
    *("vscode-icons", "material-icon-theme", "file-icons", "catppuccin", "gcp", "k8s", "unjs", "academicons"),
    *("devicon", "devicon-plain", "skill-icons", "fa-brands", "fa6-brands", "fa7-brands"),
}
UNFIT_SETS = {
    "line-md": "animated: a still shows nothing or half of it",
    "svg-spinners": "animated",
    "nrk": "many names are Norwegian",
    "whh": "names are written without spaces",
    "ls": "names are written without spaces",
    "ginetex": "the care symbols are trade marks",
    "pepicons": "an older release of pepicons-pop and pepicons-print",
    "material-symbols-light": "material-symbols in a thinner line",
    "heroicons-outline": "an older release of heroicons",
    "heroicons-solid": "an older release of heroicons",
    "bx": "an older release of boxicons",
    "bxs": "an older release of boxicons",
    "fa": "an older release of fa7",
    "fa-solid": "an older release of fa7",
    "fa-regular": "an older release of fa7",
    "fa6-solid": "an older release of fa7",
    "fa6-regular": "an older release of fa7",
    "feather": "lucide went on from it",
}
FLAG_SETS = {"circle-flags", "flag", "flagpack", "cif"}  # named by country code

BRAND_LISTS = ("simple-icons", "logos", "cib", "fa7-brands", "bxl", "devicon")
WORD_LISTS = ("game-icons", "pinhead", "maki", "temaki", "healthicons", "roentgen", "twemoji")  # no brands in them
MORE_BRANDS = {  # in fewer of those lists, or words elsewhere too
    *("android", "twitter", "ubisoft", "tesla", "cadillac", "vespa", "jeep", "ford", "emirates", "4chan", "adidas"),
    *("alibaba", "aliexpress", "amex", "audi", "aviato", "bbc", "beatport", "bereal", "binance", "bittorrent", "bmw"),
    *("btc", "bytedance", "cardano", "chromecast", "coinbase", "copilot", "datastax", "dogecoin", "dolby", "ericsson"),
    *("etcd", "fandom", "fiverr", "giphy", "grok", "hackernoon", "icons8", "imgur", "itunes", "kagi", "kakao", "rexx"),
    *("kakaotalk", "lastpass", "litecoin", "mdx", "microbit", "misskey", "mqtt", "myspace", "napster", "nasa", "naver"),
    *("nike", "nintendo", "nissan", "norton", "payoneer", "peerlist", "pexels", "picasa", "polkadot", "proton", "xml"),
    *("solana", "solidjs", "speedtest", "statista", "stumbleupon", "taobao", "tencent", "tether", "tmux", "toyota"),
    *("vkontakte", "vlc", "volkswagen", "weibo", "weixin", "wii", "xiaohongshu", "yandex", "zhihu", "macbook", "imac"),
    *("ipod", "iphone", "ipad", "airpods", "playstation", "xbox", "mastercard", "visa", "lego", "disney", "pokemon"),
}
WORDS_THAT_ARE_BRANDS = {"bluetooth", "windows", "scan", "processing", "eraser", "icon", "foundation", "less", "now"}


@dataclass(frozen=True)
class IconSet:
    """One set as its json file has it.  ``icons`` without the hidden ones, which the set itself has withdrawn."""

    prefix: str
    title: str
    author: str
    url: str
    license: str
    license_url: str
    version: str
    kind: str  # "Emoji", "UI 24px", ...
    icons: dict[str, str]  # name -> SVG
    category_of: dict[str, str]
    styles: dict[str, str]  # what the set says of its endings: "outline" -> "Outline"
    style_prefixes: dict[str, str]
    hexcodes: dict[str, str]  # emoji: name -> hexcode


@dataclass(frozen=True)
class Emoji:
    """A Unicode emoji: ``group`` is such as "animals nature"."""

    label: str
    keywords: tuple[str, ...]
    group: str


def download(package: str, version: str, sha256: str, folder: Path) -> Path:
    """The npm package unpacked below ``folder``; what is there already is not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    tarball = folder / f"{package.lstrip('@').replace('/', '-')}-{version}.tgz"
    target = tarball.with_suffix("")
    if not (target / "complete").exists():
        if not tarball.exists():
            command = ["npm", "pack", f"{package}@{version}", "--pack-destination", str(folder.absolute())]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise ValueError(f"npm could not fetch {package}@{version}: {lines[0]}")
        found = hashlib.sha256(tarball.read_bytes()).hexdigest()
        if not found.startswith(sha256):
            raise ValueError(f"{tarball} has SHA-256 {found}, expected it to start with {sha256}; remove it.")
        with tarfile.open(tarball) as archive:
            archive.extractall(target, filter="data")
        (target / "complete").touch()
    return target / "package"


def is_wanted(prefix: str, info: dict[str, Any]) -> bool:
    permissive = info["license"].get("spdx") in PERMISSIVE
    logos = info.get("category") == "Logos" or prefix in LOGO_SETS
    return permissive and not logos and prefix not in UNFIT_SETS


def as_svg(icon: dict[str, Any], defaults: dict[str, Any], pixels: int = 64) -> str:
    """The SVG of an icon, centred where it is not square."""
    plain = {"left": 0, "top": 0, "width": 16, "height": 16}
    box = [icon.get(key, defaults.get(key, value)) for key, value in plain.items()]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{pixels}" height="{pixels}" viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'
    )


def read_set(path: Path, info: dict[str, Any], pixels: int = 64) -> IconSet:
    content = json.loads(path.read_text(encoding="utf-8"))
    category_of: dict[str, str] = {}
    for category, names in content.get("categories", {}).items():
        for name in names:
            category_of.setdefault(name, category)
    return IconSet(
        prefix=path.stem,
        title=info["name"],
        author=info["author"]["name"],
        url=info["author"].get("url", ""),
        license=info["license"]["spdx"],
        license_url=info["license"].get("url", ""),
        version=info.get("version", ""),
        kind=info.get("category", ""),
        icons={n: as_svg(icon, content, pixels) for n, icon in content["icons"].items() if not icon.get("hidden")},
        category_of=category_of,
        styles=content.get("suffixes", {}),
        style_prefixes=content.get("prefixes", {}),
        hexcodes={name: hexcode for hexcode, name in content.get("chars", {}).items()},
    )


def read_sets(package: Path, pixels: int = 64) -> list[IconSet]:
    """The sets that take part, in the order of the collection: sets that are kept up to date come first."""
    collection = json.loads((package / "collections.json").read_text(encoding="utf-8"))
    return [
        read_set(package / f"json/{prefix}.json", info, pixels)
        for prefix, info in collection.items()
        if is_wanted(prefix, info)
    ]


def plain_hexcode(hexcode: str) -> str:
    """Lower case, without variation selectors, which packages write or do not."""
    return "-".join(code for code in hexcode.lower().split("-") if code != "fe0f")


def read_emoji(package: Path) -> dict[str, Emoji]:
    """hexcode -> emoji.  Skin tones lie nested below their emoji there and stay out."""
    entries = json.loads((package / "en/data.json").read_text(encoding="utf-8"))
    titles = json.loads((package / "meta/groups.json").read_text(encoding="utf-8"))["groups"]
    return {
        plain_hexcode(entry["hexcode"]): Emoji(
            entry["label"], tuple(entry.get("tags", ())), titles[str(entry["group"])].replace("-", " ")
        )
        for entry in entries
        if "group" in entry
    }


@dataclass(frozen=True)
class Brands:
    """``words`` mark a logo wherever they stand, ``names`` (without spaces) only where nothing else stands there."""

    words: frozenset[str]
    names: frozenset[str]


def read_brands(package: Path, emoji: dict[str, Emoji]) -> Brands:
    """Brands are what several sets of logos draw; a word stays one where sets without logos use it too ("apple")."""

    def names(prefix: str) -> set[str]:
        return set(json.loads((package / f"json/{prefix}.json").read_text(encoding="utf-8"))["icons"])

    drawn = Counter(name for prefix in BRAND_LISTS for name in {name.replace("-", "") for name in names(prefix)})
    words = {word for prefix in WORD_LISTS for name in names(prefix) for word in name.split("-")}
    for one in emoji.values():
        words.update(re.findall(r"\w+", " ".join([one.label, *one.keywords]).lower()))
    often = {name for name, count in drawn.items() if count >= 3 and len(name) > 2} - WORDS_THAT_ARE_BRANDS
    twice = {name for name, count in drawn.items() if count == 2 and len(name) > 2} - WORDS_THAT_ARE_BRANDS
    return Brands(
        words=frozenset(often - words | MORE_BRANDS),
        names=frozenset(often | (twice - words)),
    )
