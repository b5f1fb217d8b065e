"""From an icon's name to its captions: "bell-off-24-filled" is a "bell off" in the style "24 filled"."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from icon_sets import FLAG_SETS, Brands, Emoji, IconSet, plain_hexcode

STYLES = {  # always a style where they end a name
    *(
        "outline",
        "outlined",
        "filled",
        "fill",
        "duotone",
        "twotone",
        "tone",
        "rounded",
        "linear",
        "alt",
        "remix",
        "stroke",
    ),
    *("24px", "20px", "16px", "32px", "48px", "xs", "sm", "md", "lg", "xl"),
}
PERHAPS_STYLES = {  # a style only where the set has the same name without it or with another: not "traffic-light"
    *("light", "thin", "regular", "bold", "solid", "line", "sharp", "round", "broken", "flat", "duo"),
    *("o", "f", "small", "two", "expressive", "inverse"),
    *("8", "10", "12", "14", "15", "16", "20", "24", "28", "32", "48", "96"),
}
COUNTED = {  # what a number belongs to; after other words it numbers drawings: "audio-wave-02"
    *("dice", "die", "number", "numbers", "numeric", "digit", "looks", "rank", "heading", "header", "level", "battery"),
    *("signal", "clock", "time", "timer", "counter", "channel", "forward", "backward", "replay", "rewind", "beaufort"),
    *("tarot", "keycap", "skip", "hexagon", "circle", "square", "filter", "exposure", "x", "pm", "top", "domino"),
}
EMPTY_CATEGORIES = {
    "",
    "other",
    "others",
    "core",
    "essential",
    "extras",
    "misc",
    "miscellaneous",
    "general",
    "regular",
    "newicons",
}
EMPTY_CATEGORIES |= {"common", "base", "parts", "operate", "like", "connect", "ui", "interface", "interface essential"}
EMOJI_SETS_WITH_ODD_NAMES = {"fluent-emoji", "fluent-emoji-flat", "fluent-emoji-high-contrast", "fxemoji"}
SETS_THAT_NAME_THE_CATEGORY = {"streamline-pixel", "covid"}  # "interface-essential-battery"
SETS_THAT_COUNT_IN_WORDS = {"icon-park", "icon-park-outline", "icon-park-solid", "icon-park-twotone"}  # "add-one"
SKIN = re.compile(r"skin-tone|skin-type|(^|-)(light|medium|dark)(-|$)")
MOST_WORDS = 8
FIRST_REGIONAL_LETTER = 0x1F1E6


@dataclass(frozen=True)
class Icon:
    set: str
    name: str
    captions: tuple[str, ...]  # the first is the name alone; the others add a category or keywords
    category: str
    style: str

    @property
    def caption(self) -> str:
        return self.captions[0]


def stable_order(*parts: str) -> str:
    """A key to sort by that looks random and never changes."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def without_ending(name: str, endings: Collection[str]) -> tuple[str, str]:
    """("home-24", "filled") of "home-24-filled"; ("home", "") where no style ends the name."""
    base, _, ending = name.rpartition("-")
    return (base, ending) if base and ending in endings else (name, "")


def declared_ending(name: str, names: Collection[str], declared: Collection[str]) -> str:
    """The longest of the endings that the set lists as styles, if the name stands there with another one too."""
    for ending in sorted(declared, key=len, reverse=True):
        base = name.removesuffix(f"-{ending}")
        if ending and base != name:
            others = [base] + [f"{base}-{other}" for other in declared if other not in ("", ending)]
            if any(part.isdigit() for part in ending.split("-")) or any(other in names for other in others):
                return ending
    return ""


def split_style(
    name: str, names: Collection[str], used: Collection[str], declared: Collection[str] = ()
) -> tuple[str, str]:
    """The name without its style, and the style.  ``used``: endings of PERHAPS_STYLES that are styles in this set."""
    ending = declared_ending(name, names, declared)
    base = name.removesuffix(f"-{ending}") if ending else name
    styles = ending.split("-")[::-1] if ending else []
    while True:
        shorter, style = without_ending(base, STYLES)
        if not style:
            shorter, style = without_ending(base, used)
            if style and not any(f"{shorter}{other}" in names for other in _partners(style, used)):
                style = ""
        if not style:
            return base, " ".join(reversed(styles))
        styles.append(style)
        base = shorter


def _partners(style: str, used: Collection[str]) -> list[str]:
    return [""] + [f"-{other}" for other in (*STYLES, *used) if other != style]


def styles_in_use(names: Collection[str], declared: Collection[str]) -> set[str]:
    """The doubtful endings that the set lists as styles, or that end many of its names."""
    counts = Counter(ending for name in names for ending in [without_ending(name, PERHAPS_STYLES)[1]] if ending)
    often = {ending for ending, count in counts.items() if count >= max(10, 0.03 * len(names))}
    return often | {part for ending in declared for part in ending.split("-")} & PERHAPS_STYLES


def spoken(name: str) -> str:
    """Small ASCII letters, digits and single spaces."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    plain = re.sub(r"['.]", "", plain)
    return " ".join(re.findall(r"[a-z0-9]+", plain.replace("&", " and ")))


def without_number(words: str) -> str:
    """Without the number of a drawing: "folder 2", "folder2", "folder 02" are a "folder"; "dice 6" and "mp3" stay."""
    found = re.fullmatch(r"(?:(.*[a-z]) |(.*[a-z]{4}))\d+", words)
    before = found and (found.group(1) or found.group(2))
    return words if not before or before.split()[-1] in COUNTED else before


def category_words(category: str) -> str:
    """ "ComputerDevices" -> "computer devices" """
    words = spoken(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", category))
    return "" if words in EMPTY_CATEGORIES else words


def is_logo(words: str, category: str, kind: str, brands: Brands) -> bool:
    parts = set(words.split())
    interface = kind not in ("Emoji", "Thematic", "Flags / Maps")
    return (
        bool(parts & {"logo", "logos", "brand"})
        or words.startswith("social ")
        or bool({"brand", "brands", "logo", "logos"} & set(category.split()))
        or bool(parts & brands.words)
        or (interface and words.replace(" ", "") in brands.names)
    )


def squashed(name: str) -> str:
    return spoken(name).replace(" ", "")


def of_emoji(label: str, one: Emoji, key: str) -> tuple[str, ...]:
    """The name; the name with two of its keywords; the name with its group."""
    said = set(label.split())
    keywords = [words for words in map(spoken, one.keywords) if words and not set(words.split()) <= said]
    keywords.sort(key=lambda words: stable_order(key, words))
    texts = [label]
    if keywords:
        texts.append(", ".join([label, *keywords[:2]]))
    if not set(one.group.split()) <= said:
        texts.append(f"{label}, {one.group}")
    return tuple(texts)


class EmojiNames:
    """Finds the emoji that a vendor drew: by its code where the set gives it, else by its name."""

    def __init__(self, emoji: dict[str, Emoji]) -> None:
        self.by_code = emoji
        self.by_name = {squashed(one.label): one for one in reversed(emoji.values())}

    def find(self, icons: IconSet, name: str) -> Emoji | None:
        if icons.prefix in FLAG_SETS:
            code = name.removesuffix("-4x3")
            if not re.fullmatch("[a-z]{2}", code):
                return None
            letters = (f"{FIRST_REGIONAL_LETTER + ord(letter) - ord('a'):x}" for letter in code)
            return self.by_code.get("-".join(letters))
        if name in icons.hexcodes:
            return self.by_code.get(plain_hexcode(icons.hexcodes[name]))
        plain = name.replace("flag-for-", "flag-")
        return self.by_name.get(squashed(plain)) or self.by_name.get(squashed(re.sub(r"-?\d+$", "", plain)))


def captioned(icons: IconSet, emoji: EmojiNames, brands: Brands) -> list[Icon]:
    """The icons of a set that have a usable name, with their captions."""
    is_emoji = icons.kind == "Emoji" or icons.prefix in EMOJI_SETS_WITH_ODD_NAMES | FLAG_SETS
    used = styles_in_use(icons.icons, icons.styles)
    chosen = []
    for name in icons.icons:
        if is_emoji and (one := emoji.find(icons, name)):
            captions = of_emoji(spoken(one.label), one, icons.prefix)
            chosen.append(Icon(icons.prefix, name, captions, one.group, ""))
            continue
        odd = icons.prefix in EMOJI_SETS_WITH_ODD_NAMES | FLAG_SETS
        if is_emoji and (odd or name in icons.hexcodes or SKIN.search(name)):
            continue
        category = category_words(icons.category_of.get(name, ""))
        bare, style = name, ""
        for prefix in icons.style_prefixes:
            if prefix and bare.startswith(f"{prefix}-"):
                bare, style = bare.removeprefix(f"{prefix}-"), prefix
        bare, ending = split_style(bare, icons.icons, used, icons.styles)
        bare = re.sub("-(outline|solid|line)(-badged|-alerted)$", r"\2", bare)  # of clarity
        words = without_number(spoken(bare))
        if icons.prefix in SETS_THAT_NAME_THE_CATEGORY and category:
            words = words.removeprefix(f"{category} ")
        if icons.prefix in SETS_THAT_COUNT_IN_WORDS:
            words = re.sub(r" (one|two|three|four|five|six)$", "", words)
        enough = re.search("[a-z]{2}", words) and len(words.split()) <= MOST_WORDS
        if enough and not is_logo(words, category, icons.kind, brands):
            adds = category and not set(category.split()) <= set(words.split())
            captions = (words, f"{words}, {category}") if adds else (words,)
            chosen.append(Icon(icons.prefix, name, captions, category, f"{style} {ending}".strip()))
    return chosen
