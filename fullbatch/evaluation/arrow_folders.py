"""Tables as Hugging Face's ``datasets`` leaves them on a disk: saved ones, and what it keeps of a download.

DataComp's download puts Flickr, MSCOCO and WinoGAViL into ROOT/hf_cache this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullbatch.data.reading import caption_texts, check_index, checked_captions, fingerprint_of
from fullbatch.data.sample import BadSample, RawSample
from fullbatch.data.tables import image_of_field


class ArrowRows:
    """The rows of all tables below a folder, or of those of its test split where names tell; columns as saved."""

    def __init__(self, folder: Path, columns: Sequence[str]) -> None:
        found = sorted(path for path in folder.rglob("*.arrow") if not path.name.startswith("cache-"))
        self.files = [path for path in found if "-test" in path.name] or found
        if not self.files:
            raise ValueError(f"The folder {str(folder)!r} holds no .arrow file of a test split.")
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
