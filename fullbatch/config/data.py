"""What to train on: sources and their mix, what happens to a broken sample, and how two views of an image are made."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import parse_qsl

from fullbatch.config.checks import (
    Chance,
    Checked,
    Count,
    Crop,
    Positive,
    Rule,
    UpToOne,
    Whole,
    at_least,
    is_number,
    is_text,
)
from fullbatch.config.messages import listed, nearest, without_password

# Sets inside the package and their splits, so that a first run needs no download.
BUILTIN: dict[str, tuple[str, ...]] = {"emoji": ("train", "new_style", "new_concept")}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

SourceKind = Literal["auto", "builtin", "tar", "csv", "parquet", "folder", "coco", "huggingface"]


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


@dataclass(frozen=True)
class Source(Checked):
    """One place samples come from."""

    # a built-in set ("emoji"), or a file, folder, glob or brace pattern: "cc3m/{00000..00331}.tar", also by URL
    path: Annotated[str, Rule("name a file, folder, pattern or set", is_text)]
    kind: SourceKind = "auto"  # what it is; "auto" decides by the name
    weight: Positive = 1.0  # how many times an epoch shows each of its samples; 0.5 shows a random half
    image: str = ""  # the column or field with image bytes or paths; "" tries the usual names
    # the columns or fields with captions; () tries the usual names; of a folder: "folder" is the name of the folder an
    # image lies in, "none" is no captions, for training on two views
    captions: tuple[str, ...] = ()
    root: str = ""  # the folder or URL that relative image paths start from; "" is the folder of the file itself
    split: str = "train"  # the part of a built-in or Hugging Face set
    # "held_out": every tenth picture, up to 1,000, the same ones in every run; "train": all others
    part: Literal["all", "train", "held_out"] = "all"

    @classmethod
    def parse(cls, text: str) -> Source:
        """A source as it is written on the command line: ``PATH`` or ``PATH?weight=2&captions=title,alt``.

        >>> Source.parse("a.csv?weight=2&captions=title,alt").captions
        ('title', 'alt')
        """
        match = re.fullmatch(r"(?P<path>.+?)\?(?P<options>\w+=.*)", text)
        if match is None:
            return cls(text)
        if "://" in text:
            text = f"{cls(match['path']).path}?..."  # checked first; a query of its own may hold a secret
        options: dict[str, object] = {}
        known = [field.name for field in dataclasses.fields(cls) if field.name != "path"]
        for key, value in parse_qsl(match["options"], keep_blank_values=True):
            if key not in known:
                raise ValueError(
                    f"Source {text!r} has no option {key!r}{nearest(key, known)} Its options are {listed(known)}."
                )
            if key == "weight":
                try:
                    options[key] = float(value)
                except ValueError:
                    raise ValueError(f"Source {text!r}: weight must be a positive number, got {value!r}.") from None
            else:
                options[key] = tuple(value.split(",")) if key == "captions" else value
        return cls(match["path"], **options)  # type: ignore[arg-type]

    def _check(self) -> None:
        """What is written on a command line is kept in config.yaml and in logs: no place for secrets."""
        for url in filter(is_url, [*self.path.split("::"), self.root]):
            protocol, _, rest = url.partition("://")
            if without_password(url) != url or "@" in rest.partition("/")[0]:
                raise ValueError(
                    f"The URL '{protocol}://...@{rest.rpartition('@')[2].partition('?')[0]}' in a source names a user "
                    "or a password; leave that out: credentials are taken from the environment, where the store's own "
                    "tools look for them."
                )
            if "?" in rest:
                raise ValueError(
                    f"The URL {url.partition('?')[0] + '?...'!r} in a source has a query of its own, which may hold a "
                    "secret; after ? come options of the source alone. For a ? in the name of a file on a web server "
                    "write %3F, in a pattern *."
                )

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        changed = []
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={','.join(value) if isinstance(value, tuple) else value}")
        return self.path + ("?" + "&".join(changed) if changed else "")


_SOURCES = Rule(
    "be a list of at least one source",
    lambda texts: isinstance(texts, (tuple, list)) and bool(texts) and all(isinstance(text, str) for text in texts),
)


@dataclass(frozen=True)
class Data(Checked):
    """Where samples come from."""

    # the training sources: PATH, or PATH?weight=2&captions=title
    data: Annotated[tuple[str, ...], _SOURCES] = ("emoji",)
    data_share: UpToOne = 1.0  # train on this share of each source's samples, the same ones in every run
    # "full": any sample may come anywhere in an epoch; "blocks": blocks of neighbours come in random order, and samples
    # are mixed within a window of some blocks, so that storage is read in long pieces, each about once an epoch;
    # "auto": blocks where samples lie in a store, on a web server or on a rotating disk
    shuffle: Literal["auto", "full", "blocks"] = "auto"
    block_samples: Count = 1024  # blocks: samples of a block
    window_blocks: Count = 64  # blocks: blocks of a window
    workers: Whole = 2  # processes that read and decode; 0: the training process itself
    image_size: Annotated[int, at_least(8)] | None = None  # pixels a side; None: what the model wants
    crop: Crop = (0.9, 1.0)  # share of the image's area that a training crop keeps, least and most
    flip: bool = False  # mirror half of the training images
    max_pixels: Count = 50_000_000  # larger images are refused before they are decoded (decompression bombs)
    in_memory: bool = False  # decode the data set once and keep it in the device's memory; for sets that fit there
    max_bad: Chance = 0.05  # the run stops when more than this share of the samples cannot be read

    def _check(self) -> None:
        for text in self.data:
            Source.parse(text)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(Source.parse(text) for text in self.data)


_FOUR = Rule(
    "be four numbers in [0, 1], the last, for the hue, at most 0.5",
    lambda moves: len(moves) == 4 and all(is_number(move) and 0.0 <= move <= 1.0 for move in moves) and moves[3] <= 0.5,
)


@dataclass(frozen=True)
class Views(Checked):
    """Each view of an image is cropped, mirrored and coloured by itself; only models with a view_tower have views."""

    view_crop: Crop = (0.08, 1.0)  # share of the area of the middle square that a view keeps, least and most
    view_flip: Chance = 0.5  # chance that it is mirrored
    # how far brightness, contrast, saturation and hue may move; 0: not at all
    view_jitter: Annotated[tuple[float, float, float, float], _FOUR] = (0.4, 0.4, 0.4, 0.1)
    view_jitter_chance: Chance = 0.8  # chance that they do
    view_grey: Chance = 0.2  # chance that it is grey
    view_blur: Chance = 0.0  # chance that it is blurred, with a sigma of 0.1 to 2 pixels at 224 pixels a side
