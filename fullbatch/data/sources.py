"""From the description of a source to its samples, to a part of them, and to a fingerprint of what they hold."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
from typing_extensions import assert_never

from fullbatch.config.data import BUILTIN, Data, Source, SourceKind, is_url
from fullbatch.config.messages import listed, nearest
from fullbatch.data.order import Ints, key_of, shuffled
from fullbatch.data.remote import look_up, matching
from fullbatch.data.sample import BadSample, CocoCaptions, ImageFolder, RawSample, Remote, Samples, fingerprint_of
from fullbatch.data.table_files import ByPicture, CsvTable, HuggingFaceSet, ParquetTable
from fullbatch.data.tar_shards import TAR_ENDINGS, TarShards


def _is_builtin(source: Source) -> bool:
    return source.kind == "builtin" or (source.kind == "auto" and source.path in BUILTIN)


def builtin_path(name: str, split: str = "train") -> str:
    """The packed tar file of a split."""
    if name not in BUILTIN:
        raise ValueError(f"There is no built-in set {name!r}{nearest(name, BUILTIN)} There are {listed(BUILTIN)}.")
    if split not in BUILTIN[name]:
        guess = nearest(split, BUILTIN[name])
        raise ValueError(f"The built-in set {name!r} has no split {split!r}{guess} It has {listed(BUILTIN[name])}.")
    path = resources.files("fullbatch.data") / name / f"{split}.tar.xz"
    if not path.is_file():
        raise ValueError(
            f"The built-in set {name!r} is missing from this installation ({path}); install fullbatch again."
        )
    return str(path)


_ENDINGS: dict[SourceKind, tuple[str, ...]] = {
    "tar": TAR_ENDINGS,
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "coco": (".json",),
}
_HUGGING_FACE_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
_MOST_PATHS = 1_000_000


def open_source(source: Source) -> Samples:
    """The samples of a source; ValueError where it cannot be opened, with what to do about it."""
    if _is_builtin(source):
        samples: Samples = TarShards([builtin_path(source.path, source.split)], source.image, source.captions)
        samples.name = f"{source.path}/{source.split}"
    else:
        samples = _opened(source)
        samples.name = source.path
    return part_of(samples, source.part)


def _opened(source: Source) -> Samples:
    paths = expand_pattern(source.path)
    kinds = sorted({_kind_of(path) for path in paths}) if source.kind == "auto" else [source.kind]
    if len(kinds) > 1:
        raise ValueError(f"{source.path!r} mixes {' and '.join(kinds)} sources; name them apart: --data A B.")
    kind, root = kinds[0], source.root.removeprefix("file://")
    if kind == "coco" and is_url(root):
        raise ValueError(
            f"{source.path!r}: the images of a COCO file lie on a disk; root must be a folder, got {root!r}."
        )
    if kind not in ("tar", "csv", "parquet") and any(map(is_url, paths)):
        raise ValueError(
            f"{source.path!r}: only tar shards, CSV and parquet are read by URL; copy what is of kind {kind} to a disk."
        )
    match kind:
        case "tar":
            return TarShards(_files(paths, kind), source.image, source.captions)
        case "csv" | "parquet":
            table = CsvTable if kind == "csv" else ParquetTable
            return table(_files(paths, kind), source.image, source.captions, root)
        case "folder":
            captions = source.captions
            _refuse_options(source, captions not in ((), ("folder",), ("none",)), "captions=folder or captions=none")
            return ImageFolder(_only(paths, source.path), captions == ("folder",), captions == ("none",))
        case "coco":
            _refuse_options(source, bool(source.captions), "root")
            return CocoCaptions(_only(paths, source.path), root)
        case "huggingface":
            path = _only(paths, source.path)
            return HuggingFaceSet(path, source.split, source.image, source.captions, root)
        case "builtin" | "auto":
            raise AssertionError("built-in sets were opened above, and auto was decided")
        case _:
            assert_never(kind)


def _refuse_options(source: Source, captions: bool, taken: str) -> None:
    """An option that would be ignored is a mistake."""
    given = [name for name, wrong in (("image", bool(source.image)), ("captions", captions)) if wrong]
    if source.root and taken != "root":
        given.append("root")
    if given:
        raise ValueError(f"The source {str(source)!r} takes no {' or '.join(given)} option, only {taken}.")


def _kind_of(path: str) -> SourceKind:
    name = path.lower()
    if os.path.isdir(path):
        there = [entry.lower() for entry in os.listdir(path)]
        if any(entry in _HUGGING_FACE_FILES for entry in there):
            return "huggingface"
        if any(entry.endswith(TAR_ENDINGS) for entry in there):
            return "tar"
        return "parquet" if any(entry.endswith(".parquet") for entry in there) else "folder"
    for kind, endings in _ENDINGS.items():
        if name.endswith(endings):
            return kind
    raise ValueError(
        f"Cannot tell from its name what {path!r} is: expected {', '.join(TAR_ENDINGS)}, .csv, .tsv, .parquet, "
        "a COCO .json or a folder; say it with PATH?kind=tar (or csv, parquet, coco, folder, huggingface)."
    )


def _files(paths: list[str], kind: SourceKind) -> list[str]:
    """The files themselves, folders replaced by what lies in them."""
    files, endings = [], _ENDINGS[kind]
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        inside = [entry for entry in sorted(os.listdir(path)) if entry.lower().endswith(endings)]
        if not inside:
            raise ValueError(f"The folder {path!r} holds no {' or '.join(endings)} file; {_what_is_in(path)}.")
        files += [os.path.join(path, entry) for entry in inside]
    return files


def _only(paths: list[str], pattern: str) -> str:
    if len(paths) > 1:
        raise ValueError(
            f"{pattern!r} names {len(paths)} files or folders of a kind that is opened one by one; "
            "name them apart: --data A B."
        )
    return paths[0]


def expand_pattern(pattern: str) -> list[str]:
    """Paths in order: ``::`` joins patterns, ``{000..331}`` and ``{a,b}`` are written out, globs are sorted."""
    paths: list[str] = []
    for part in pattern.split("::"):
        if part.startswith("pipe:"):
            raise ValueError(
                f"{part!r} is no place: samples are drawn at random from all shards, so each must be a file, or a URL."
            )
        if not part:
            raise ValueError(f"{pattern!r} holds an empty pattern between '::'.")
        part = part.removeprefix("file://")
        paths += _expand_url(part) if is_url(part) else _expand_part(os.path.expanduser(part))
    return paths


def _expand_url(part: str) -> list[str]:
    """Whether the files are there is seen when they are opened, many at a time."""
    return [url for text in expand_braces(part) for url in (matching(text) if glob.has_magic(text) else [text])]


def _expand_part(part: str) -> list[str]:
    if os.path.exists(part):  # also a file whose own name holds * or {
        return [part]
    paths: list[str] = []
    for path in expand_braces(part):
        if os.path.exists(path):
            paths.append(path)
            continue
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
        if not matches:
            folder = os.path.dirname(path) or "."
            while glob.has_magic(folder):
                folder = os.path.dirname(folder) or "."
            missing = "Nothing matches" if glob.has_magic(path) else "There is no"
            of = f" (of {part!r})" if path != part else ""
            raise ValueError(f"{missing} {path!r}{of}; {_what_is_in(folder)}.")
        paths += matches
    return paths


def _what_is_in(folder: str) -> str:
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r} either"
    there = sorted(os.listdir(folder))
    shown = ", ".join(map(repr, there[:6])) + (f" and {len(there) - 6} more" if len(there) > 6 else "")
    return f"{folder!r} holds {shown or 'nothing'}"


def expand_braces(text: str) -> list[str]:
    """Every ``{000..331}`` and ``{a,b}`` written out, the first one slowest; they are not nested.

    >>> expand_braces("{a,b}/{08..10}.tar")[:4]
    ['a/08.tar', 'a/09.tar', 'a/10.tar', 'b/08.tar']
    """
    parts = re.split(r"\{(\d+\.\.\d+|[^{}]*,[^{}]*)\}", text)  # every second one stood in braces
    choices = [_words(part) if place % 2 else [part] for place, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MOST_PATHS:
        raise ValueError(f"{text!r} stands for more than {_MOST_PATHS:,} paths; name fewer.")
    return ["".join(words) for words in itertools.product(*choices)]


def _words(braced: str) -> list[str]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", braced)
    if ends is None:
        return braced.split(",")
    first, last = int(ends[1]), int(ends[2])
    step, width = 1 if first <= last else -1, len(ends[1]) if ends[1].startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + step, step)[: _MOST_PATHS + 1]]


# -- where a source lies -----------------------------------------------------------------------------------------------


def shuffle_for(config: Data) -> Literal["full", "blocks"]:
    """What "auto" means for these sources: blocks where reading here and there is slow."""
    if config.shuffle != "auto":
        return config.shuffle
    of_files = [source for source in config.sources if not _is_builtin(source)]
    paths = [path.removeprefix("file://") for source in of_files for path in source.path.split("::")]
    slow = any(is_url(path) or _rotates(path) for path in paths)
    return "blocks" if slow and not config.in_memory else "full"


def _rotates(path: str) -> bool:
    try:
        return _disk_rotates(_disk_of(path))
    except (OSError, ValueError, RuntimeError):  # another system, or a path that is none
        return False


def _disk_rotates(disk: Path) -> bool:
    """As far as Linux knows; of a virtual machine's disk it does not know, and says yes."""
    disk = disk if (disk / "queue").is_dir() else disk.parent  # of a partition
    below = [*(disk / "slaves").glob("*")]  # of a volume or an array
    if below:
        return any(_disk_rotates(part.resolve()) for part in below)
    known = not any(kind in str(disk) for kind in ("/virtual/", "/virtio", "/vbd-"))
    return known and (disk / "queue" / "rotational").read_text().strip() == "1"


def _disk_of(path: str) -> Path:
    """Where Linux tells of it."""
    there = Path(path).expanduser().absolute()
    while not there.exists():  # of a pattern, the folder that it begins with
        there = there.parent
    device = there.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)


# -- parts of a source: the same samples for every seed, method and rank -----------------------------------------------


_SHARE_KEY, _HELD_OUT_KEY = key_of(0x5A4E), key_of(0x4E1D)
HELD_OUT = 0.1  # of the pictures
FEWEST, MOST_HELD_OUT = 50, 1000  # pictures a source must have; pictures it gives
LARGE = 1_000_000  # samples; nobody splits a larger source without being asked: the list of its parts takes memory


class Share(Samples):
    """Some samples of a source or a pool, under numbers of their own.  Its fingerprint is its own, since a memory
    per sample goes by these numbers; ``described`` says which they are."""

    def __init__(self, whole: Samples, ids: Ints | Sequence[int], *described: object) -> None:
        self.whole, self.name, self.ids, self.count = whole, whole.name, np.sort(ids), len(ids)
        self.fingerprint = fingerprint_of("share", whole.fingerprint, *described)
        self.remote_bytes = whole.remote_bytes * len(ids) // max(len(whole), 1)

    def _read(self, index: int) -> RawSample:
        return self.whole.read(int(self.ids[index]))

    def remote_pieces(self, indices_P: Ints) -> Sequence[Remote]:
        return self.whole.remote_pieces(self.ids[indices_P])


def share_of(samples: Samples, share: float) -> Samples:
    """The first samples of a shuffle that depends on the source's length alone: a smaller share is part of a larger
    one. ValueError where nothing is left."""
    if share == 1.0 or not len(samples):
        return samples
    count = round(share * len(samples))
    if count == len(samples):
        return samples
    if count == 0:
        raise ValueError(
            f"--data-share {share:g} leaves none of the {len(samples)} samples of {samples.name!r}; take a larger one."
        )
    return Share(samples, shuffled(np.arange(count), len(samples), _SHARE_KEY), count)


def part_of(samples: Samples, part: Literal["all", "train", "held_out"]) -> Samples:
    return samples if part == "all" else parts_of(samples)[part == "held_out"]


def parts_of(samples: Samples) -> tuple[Share, Share]:
    """What is trained on and what is held out: whole pictures, even where a table has a row for each caption.  Rows of
    one picture that is held out are joined."""
    pictures = ByPicture(samples) if isinstance(samples, CsvTable) else samples
    count = len(pictures)
    held = min(round(HELD_OUT * count), MOST_HELD_OUT) if count >= FEWEST else 0
    ids = shuffled(np.arange(count), count, _HELD_OUT_KEY)
    rows = pictures.rows_of(ids[held:]) if isinstance(pictures, ByPicture) else ids[held:]
    return Share(samples, rows, "train"), Share(pictures, ids[:held], "held_out")


# -- what a source holds, not only what its samples are called: for whatever is kept in the cache folder ---------------


_PROBED = 64


def fingerprint_of_samples(samples: Samples, source: Source | None) -> str:
    """Unlike the samples' own fingerprint, this one changes when pictures are replaced under their old names: it looks
    at sizes, times and some of the bytes too."""
    parts: list[object] = [samples.fingerprint, len(samples)]
    if source is not None and not _is_builtin(source):
        parts += [part for path in expand_pattern(source.path) for part in _sizes_and_times(path)]
    for index in range(0, len(samples), max(1, len(samples) // _PROBED)):
        try:
            sample = samples.read(index)
            parts += [sample.image, *sample.captions]
        except BadSample as error:
            parts.append(error.reason)
    return fingerprint_of(*parts)


def _sizes_and_times(path: str) -> list[object]:
    if is_url(path):
        there = look_up(path)
        return [os.path.basename(path), there.size, there.version]
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names]
    parts: list[object] = []
    for file in sorted(inside) or [path]:
        status = os.stat(file)
        parts += [os.path.relpath(file, os.path.dirname(path)), status.st_size, status.st_mtime_ns]
    return parts
