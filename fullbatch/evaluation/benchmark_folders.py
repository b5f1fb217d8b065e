"""Folders of CLIP_benchmark's ``wds`` layout, which DataComp's evaluation sets have too.

FOLDER/
  classnames.txt                          a class a line; the label of an image is its number there, from 0
  zeroshot_classification_templates.txt   a prompt a line, with {c} for the class's name
  dataset_type.txt                        "retrieval" where images have captions instead of classes; else absent
  test/nshards.txt                        how many shards there are
  test/0.tar ...                          KEY.jpg (or .png, .webp) with KEY.cls, or KEY.txt with a caption a line;
                                          DataComp's also KEY.npy, whole numbers that say which groups it belongs to
"""

# N: samples   M: numbers that describe a sample

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullbatch.data import sample
from fullbatch.data.tar_headers import walk_members
from fullbatch.data.tar_shards import split_key

_CLASSES, _TEMPLATES, _TYPE = "classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt"
_SPLIT = "test"


class TarMember(NamedTuple):
    offset: int
    size: int


class ShardSamples(sample.Samples):
    """The samples of a folder's shards, in order.  A classified image has one caption, the name of its class."""

    def __init__(self, name: str, shards: list[Path], classes: tuple[str, ...] | None) -> None:
        self.name, self._shards, self._classes = name, shards, classes
        self._rows: list[tuple[int, str, dict[str, TarMember]]] = []
        for number, shard in enumerate(shards):
            members: dict[str, dict[str, TarMember]] = {}
            for member, offset, size in walk_members(str(shard)):
                if parts := split_key(member):
                    members.setdefault(parts[0], {}).setdefault(parts[1], TarMember(offset, size))
            self._rows += [(number, key, of_key) for key, of_key in members.items()]
        self.count = len(self._rows)
        if not self.count:
            raise ValueError(f"The shards in {shards[0].parent} hold no sample.")
        described = [part for s in shards for part in (s.name, s.stat().st_size, s.stat().st_mtime_ns)]
        self.fingerprint = sample.fingerprint_of("benchmark", *(classes or ()), *described)

    def label(self, index: int) -> str:
        shard, key, _ = self._rows[index]
        return f"{self.name}/{self._shards[shard].name}:{key}"

    def raw(self, index: int, extension: str) -> bytes | None:
        shard, _, members = self._rows[index]
        member = members.get(extension)
        if member is None:
            return None
        with self._shards[shard].open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)

    def class_of(self, index: int) -> int:
        """The number in its .cls member; ValueError where that is no class."""
        assert self._classes is not None
        raw = self.raw(index, "cls")
        text = None if raw is None else raw.decode("utf-8", "replace")
        if text is None or not text.strip().isdigit() or int(text) >= len(self._classes):
            there = "is missing" if text is None else f"holds {text.strip()[:20]!r}"
            wanted = f"a class number of at most {len(self._classes) - 1}, a line of {_CLASSES}"
            raise ValueError(f"{self.label(index)}: the .cls member {there}, expected {wanted}.")
        return int(text)

    def _read(self, index: int) -> sample.RawSample:
        label, members = self.label(index), self._rows[index][2]
        kind = next((extension for extension in sample.IMAGE_EXTENSIONS if extension in members), None)
        if kind is None:
            raise sample.BadSample(label, "no image member (.jpg, .png, .webp, ...)")
        sample.check_image_size(label, members[kind].size)
        if self._classes is not None:
            captions: tuple[str, ...] = (self._classes[self.class_of(index)],)
        else:
            if "txt" in members and members["txt"].size > sample.MAX_TEXT_BYTES:
                raise sample.BadSample(label, f"the captions have {members['txt'].size:,} bytes")
            captions = sample.checked_captions(label, sample.utf8(label, self.raw(index, "txt") or b"").splitlines())
        image = self.raw(index, kind)
        assert image is not None
        return sample.RawSample(label, image, captions)


@dataclass(frozen=True)
class Classified:
    samples: ShardSamples
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    labels_N: Tensor  # of all samples, by their place
    groups_NM: Tensor | None  # likewise; None where the shards have no .npy


def open_benchmark(folder: Path, kind: str = "") -> Classified | ShardSamples:
    """Of captioned images the samples; ``kind`` goes before dataset_type.txt.  ValueError where parts do not fit."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {str(folder)!r}.")
    shards = _shards(folder)
    written = _lines(folder / _TYPE)[0].lower() if (folder / _TYPE).is_file() else "classification"
    kind = kind or written
    if kind == "retrieval":
        return ShardSamples(folder.name, shards, None)
    if kind != "classification":
        raise ValueError(f"{folder / _TYPE} says {kind!r}; this program knows 'retrieval' and 'classification'.")
    classes = tuple(_lines(folder / _CLASSES, blank=True))
    if len(classes) < 2:
        raise ValueError(f"{folder / _CLASSES} names one class ({classes[0]!r}): any model would be right.")
    templates = tuple(_lines(folder / _TEMPLATES)) if (folder / _TEMPLATES).is_file() else ()
    for template in templates:
        if "{c}" not in template and "{}" not in template:
            raise ValueError(f"{folder / _TEMPLATES}: the prompt {template!r} has no {{c}} for the class's name.")
    samples = ShardSamples(folder.name, shards, classes)
    labels_N = torch.tensor([samples.class_of(index) for index in range(len(samples))])
    return Classified(samples, classes, templates, labels_N, _groups(samples))


def _shards(folder: Path) -> list[Path]:
    """All that nshards.txt counts: with one of them missing the numbers would be those of another test."""
    inside = folder / _SPLIT
    counted = inside / "nshards.txt"
    text = _lines(counted)[0]
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{counted} must hold the number of shards, got {text[:40]!r}.")
    shards = [inside / f"{number}.tar" for number in range(int(text))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{inside} lacks {len(missing)} of the {len(shards)} shards that nshards.txt counts ({few}).")
    return shards


def _lines(path: Path, blank: bool = False) -> list[str]:
    """Stripped; with ``blank``, empty lines in between are kept, for lines are numbered."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").strip().splitlines()]
    except FileNotFoundError:
        raise ValueError(f"There is no {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    if not any(lines):
        raise ValueError(f"{path} is empty.")
    if blank and not all(lines):
        raise ValueError(f"{path}: line {lines.index('') + 1} is empty, and lines are counted there.")
    return [line for line in lines if line]


def _groups(samples: ShardSamples) -> Tensor | None:
    rows = []
    for index in range(len(samples)):
        raw = samples.raw(index, "npy")
        if raw is None:
            return None
        try:
            row = np.atleast_1d(np.load(io.BytesIO(raw), allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{samples.label(index)}: the .npy member cannot be read ({error}).") from None
        with np.errstate(invalid="ignore"):
            whole = row.astype(np.int64) if row.dtype.kind in "biuf" else None
        if whole is None or not bool((whole == row).all()):  # 0.2 and 0.9 must not become one group
            shown = np.array2string(row.ravel()[:4], threshold=4)[:80]
            raise ValueError(
                f"{samples.label(index)}: the .npy member holds {shown} ({row.dtype}), expected whole numbers that say "
                "which groups it is in."
            )
        rows.append(whole)
    if len({row.shape for row in rows}) > 1 or rows[0].ndim != 1:
        raise ValueError(f"The .npy members of {samples.name} have different shapes.")
    return torch.from_numpy(np.stack(rows))
