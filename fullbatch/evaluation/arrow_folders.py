"""Tables as Hugging Face's ``datasets`` leaves them on a disk: saved ones, and what it keeps of a download.

DataComp's download puts Flickr, MSCOCO and WinoGAViL into ROOT/hf_cache this way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullbatch.data.sample import BadSample, RawSample, caption_texts, check_index, checked_captions, fingerprint_of
from fullbatch.data.table_files import image_of_field

_PART = re.compile(r"(?:-\d+-of-(\d+))?\.arrow$")  # NAME-00000-of-00002.arrow: one of two files of a table
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class ArrowRows:
    """The rows of the test split below a folder, or of the only table there; columns as saved."""

    def __init__(self, folder: Path, columns: Sequence[str]) -> None:
        self.files = files_of_test_split(folder)
        self.name, self._columns, self._table = folder.name, list(columns), None
        missing = [column for column in columns if column not in self._rows().column_names]
        if missing:
            there = ", ".join(self._rows().column_names)
            raise ValueError(f"{self.files[0]} has no column {', '.join(missing)}; its columns are {there}.")
        described = [part for path in self.files for part in (path.name, path.stat().st_size, path.stat().st_mtime_ns)]
        self.fingerprint = fingerprint_of("arrow", *columns, *described)

    def __len__(self) -> int:
        return int(self._rows().num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    def row(self, index: int) -> dict[str, Any]:
        sliced = self._rows().select(self._columns).slice(index, 1)
        return dict(sliced.to_pylist()[0])

    def column(self, name: str) -> list[Any]:
        return list(self._rows().column(name).to_pylist())

    def _rows(self) -> Any:
        if self._table is None:
            try:
                import pyarrow as pa
            except ImportError:
                raise ValueError(f'Reading {self.name!r} needs pyarrow: pip install "fullbatch[parquet]".') from None
            try:
                tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in self.files]
                self._table = pa.concat_tables(tables)
            except (OSError, ValueError) as error:  # pyarrow's errors are these
                raise ValueError(f"{self.files[0]} is not a readable table of datasets: {error}.") from None
        return self._table


def files_of_test_split(folder: Path) -> list[Path]:
    """Of one table: the test split, by the file's name (NAME-test.arrow) or its folder's (test/), and the newest of
    several cached revisions.  ValueError where several remain: together they would be another test."""
    found = [path for path in folder.rglob("*.arrow") if not path.name.startswith("cache-")]
    found = sorted(path for path in found if not path.parent.name.endswith(".incomplete"))  # a download cut off
    if not found:
        raise ValueError(f"The folder {str(folder)!r} holds no .arrow file of a test split.")
    named = [path for path in found if _PART.sub("", path.name).endswith("-test")]
    inside = [path for path in found if "test" in path.relative_to(folder).parent.parts]
    tables: dict[tuple[Path, str], list[Path]] = {}
    for path in named or inside or found:
        part = _PART.search(path.name)
        of = part[1] if part is not None and part[1] else "1"
        tables.setdefault((path.parent, f"{_PART.sub('', path.name)} of {of}"), []).append(path)
    candidates = _newest(list(tables.values()))
    if len(candidates) > 1:
        few = ", ".join(str(files[0].relative_to(folder)) for files in candidates[:4])
        raise ValueError(
            f"The folder {str(folder)!r} holds {len(candidates)} tables that may be the test split "
            f"({few}{', ...' if len(candidates) > 4 else ''}); leave only the one to measure there."
        )
    return candidates[0]


def _newest(tables: list[list[Path]]) -> list[list[Path]]:
    """Where all are revisions of one thing, as the cache keeps them (CONFIG/VERSION/HASH/), the one written last."""
    homes = {files[0].parent.parent.parent for files in tables}
    revisions = {files[0].parent for files in tables}
    cached = all(_VERSION.fullmatch(revision.parent.name) for revision in revisions)
    if len(homes) > 1 or len(revisions) < len(tables) or not cached:
        return tables
    written = [max(path.stat().st_mtime_ns for path in files) for files in tables]
    return [files for files, when in zip(tables, written, strict=True) if when == max(written)]


class ArrowPairs:
    """Images with their captions."""

    def __init__(self, folder: Path, image: str = "image", captions: str = "caption") -> None:
        self._rows, self._image, self._captions = ArrowRows(folder, (image, captions)), image, captions
        self.name, self.fingerprint = folder.name, self._rows.fingerprint
        self._folder = str(folder)
        if len(self._rows) == 0:
            raise ValueError(f"The tables in {str(folder)!r} hold no row.")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> RawSample:
        check_index(index, len(self), self.name)
        label, row = f"{self.name}:row {index}", self._rows.row(index)
        captions = checked_captions(label, caption_texts(row[self._captions]))
        return RawSample(label, image_of_field(label, self._folder, row[self._image]), captions)


class CandidateImages:
    """The images among which an association is sought, WinoGAViL's: one after the other, row by row."""

    def __init__(self, folder: Path) -> None:
        self._rows = ArrowRows(folder, ("candidate_images",))
        self.table = ArrowRows(folder, ("cue", "candidates", "associations"))
        self.name, self.fingerprint, self._folder = folder.name, self._rows.fingerprint, str(folder)
        candidates = self.table.column("candidates")
        self.candidates: list[list[str]] = candidates
        self._places = [(row, place) for row, names in enumerate(candidates) for place in range(len(names))]

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> RawSample:
        check_index(index, len(self), self.name)
        row, place = self._places[index]
        label, images = f"{self.name}:row {row}, candidate {place}", self._rows.row(row)["candidate_images"]
        if len(images) != len(self.candidates[row]):
            raise BadSample(label, f"{len(images)} images for {len(self.candidates[row])} candidates")
        return RawSample(label, image_of_field(label, self._folder, images[place]), (self.candidates[row][place],))
