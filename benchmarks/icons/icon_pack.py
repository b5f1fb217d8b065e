"""The pack: one tar of picture sheets and a table, and the way back.  Reading needs numpy and Pillow only.

icons.tar
  sets.json         set -> title, author, url, license, license_url, version
  icons.jsonl.xz    a line an icon, in the order of the sheets:
                    {"set", "name", "split": "train" | "test", "style", "category", "captions"}
  ATTRIBUTION.md    the sets, their authors and licences
  sheets/grey-0000-1024.webp ... sheets/colour-0000-1024.webp ...
                    1024 icons in rows of 8; grey ones have 16 levels, coloured ones 64 colours an icon;
                    lossless WebP, which takes three quarters of the bytes of PNG here
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

COLUMNS = 8  # few, so that an icon finds others of its set near above it
ICONS_A_SHEET = 1024
# The most effort (quality 100, method 6) saves an eighth of the bytes in twenty times the time and more.
ENCODING: Mapping[str, Any] = {"lossless": True, "quality": 75, "method": 4, "exact": True}

# N: icons of a sheet   H, W: pixels of an icon   C: channels
Sheet = npt.NDArray[np.uint8]  # NHW or NHWC


@dataclass(frozen=True)
class Entry:
    set: str
    name: str
    split: str
    style: str
    category: str
    captions: tuple[str, ...]


def tiled(icons: Sheet, columns: int = COLUMNS) -> Image.Image:
    """Icons in rows of ``columns``; what is left of the last row is white."""
    _, height, width, *channels = icons.shape
    rows = -(-len(icons) // columns)
    full = np.full((rows * columns, height, width, *channels), 255, np.uint8)
    full[: len(icons)] = icons
    tiles = full.reshape(rows, columns, height, width, *channels).swapaxes(1, 2)
    return Image.fromarray(np.ascontiguousarray(tiles).reshape(rows * height, columns * width, *channels))


def untiled(sheet: Image.Image, count: int, pixels: int | None = None) -> Sheet:
    """The inverse of ``tiled``, NHWC for a colour sheet and NHW for a grey one; ``pixels`` None: of a pack's sheet."""
    grid = np.asarray(sheet)
    pixels = pixels or sheet.width // COLUMNS
    rows, columns = grid.shape[0] // pixels, grid.shape[1] // pixels
    tiles = grid.reshape(rows, pixels, columns, pixels, *grid.shape[2:]).swapaxes(1, 2)
    icons: Sheet = tiles.reshape(rows * columns, pixels, pixels, *grid.shape[2:])[:count]
    return icons


def encoded_sheet(icons: Sheet) -> bytes:
    encoded = io.BytesIO()
    tiled(icons).convert("RGB").save(encoded, "webp", **ENCODING)
    return encoded.getvalue()


def table(entries: Sequence[Entry]) -> bytes:
    lines = "".join(json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in entries)
    return lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)


def write_pack(
    path: Path, sets: dict[str, dict[str, str]], entries: Sequence[Entry], sheets: dict[str, bytes], notes: str
) -> None:
    """Written beside and put in place at the end, so that a reader meets the old pack or the new one."""
    members = {
        "sets.json": json.dumps(sets, indent=1, ensure_ascii=False).encode(),
        "icons.jsonl.xz": table(entries),
        "ATTRIBUTION.md": notes.encode(),
        **{f"sheets/{name}.webp": content for name, content in sheets.items()},
    }
    unfinished = path.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)  # owner and time are 0
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    os.replace(unfinished, path)


@dataclass(frozen=True)
class Pack:
    sets: dict[str, dict[str, str]]
    entries: list[Entry]
    sheets: dict[str, bytes]  # in the order of the entries
    attribution: str

    def parts(self) -> Iterator[tuple[bytes, bool, list[Entry]]]:
        """Of each sheet: its bytes, whether it is grey, and what it shows."""
        start = 0
        for name, content in self.sheets.items():
            kind, _, count = name.removesuffix(".webp").split("-")
            yield content, kind == "grey", self.entries[start : start + int(count)]
            start += int(count)


def read_pack(path: Path) -> Pack:
    try:
        with tarfile.open(path, "r:") as archive:
            members = {member.name: archive.extractfile(member) for member in archive}
            content = {name: file.read() for name, file in members.items() if file is not None}
        lines = lzma.decompress(content["icons.jsonl.xz"]).decode().splitlines()
        entries = [Entry(**{**json.loads(line), "captions": tuple(json.loads(line)["captions"])}) for line in lines]
        sheets = {name.removeprefix("sheets/"): raw for name, raw in content.items() if name.startswith("sheets/")}
        return Pack(json.loads(content["sets.json"]), entries, sheets, content["ATTRIBUTION.md"].decode())
    except (tarfile.TarError, KeyError, lzma.LZMAError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a pack of benchmarks/icons/build.py: {error}") from None
