"""Tables of images and captions: CSV, TSV, parquet, and sets that Hugging Face's ``datasets`` saved to disk.  CSV, TSV
and parquet may lie in a store: the bytes that are wanted of them come by way of the cache."""

from __future__ import annotations

import csv
import functools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fullbatch.config.data import is_url
from fullbatch.config.messages import nearest
from fullbatch.data.files import AnyFile, looked_up, name_of, name_on_disk, opened, size_of
from fullbatch.data.picture_files import PictureFiles, RemotePicture
from fullbatch.data.remote import RemoteBlock, RemoteStream, blocks_of
from fullbatch.data.sample import (
    BadSample,
    PackedStrings,
    RawSample,
    Samples,
    caption_texts,
    checked_captions,
    checked_image,
    fingerprint_of,
    utf8,
)
from fullbatch.data.store_requests import StoreError

IMAGE_COLUMNS = ("image", "filepath", "file_path", "path", "image_path", "filename", "jpg")
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "txt", "TEXT")
_ROW_GROUP_BYTES = 256 << 20  # of row groups kept in memory
_SLOW_ROW_GROUP = 16 << 20
_END = 65536  # bytes
_OPEN_FILES = 8  # each keeps its footer

log = logging.getLogger("fullbatch")


def choose_columns(
    where: str, there: Sequence[str], image: str, captions: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The image column and the caption columns: those that were named, else the first usual ones that are there."""
    how = f"Its columns are {', '.join(map(repr, there))}; say which with PATH?image=COLUMN&captions=COLUMN."
    for column in (*([image] if image else []), *captions):
        if column not in there:
            raise ValueError(f"{where} has no column {column!r}{nearest(column, there)} {how}")
    image = image or next((column for column in IMAGE_COLUMNS if column in there), "")
    captions = captions or tuple([column for column in CAPTION_COLUMNS if column in there][:1])
    if not image or not captions:
        missing = "an image" if not image else "a caption"
        raise ValueError(f"{where} has no column with the usual name of {missing} column. {how}")
    return image, captions


class _Row(NamedTuple):
    label: str
    pictures: PictureFiles
    path: str  # of the image
    captions: tuple[str, ...]


class CsvTable(Samples):
    """Rows of CSV or TSV files.  Relative image paths start at ``root``, by default each file's folder, and may not
    leave it; absolute paths and URLs are taken as they are."""

    def __init__(self, paths: list[str], image: str = "", captions: tuple[str, ...] = (), root: str = "") -> None:
        self.name = paths[0]
        self._pictures = [PictureFiles.beside(path, root) for path in paths]
        self._labels = [os.path.basename(name_on_disk(path)) for path in paths]
        self._width = 2 + len(captions or ("caption",))
        starts, by_url = [0], any(is_url(pictures.root) for pictures in self._pictures)

        def fields() -> Iterator[bytes]:
            nonlocal by_url
            for file in looked_up(paths):
                rows = 0
                for row in _csv_rows(file, image, captions):
                    rows += 1
                    by_url = by_url or b"://" in row[1]  # the image
                    yield from row
                starts.append(starts[-1] + rows)

        self._fields = PackedStrings(fields())
        self._starts, self.count = np.array(starts), starts[-1]
        self.fingerprint = fingerprint_of("csv", image, *captions, *self._labels, *self._fields)
        self.remote_bytes = self.count if by_url else 0  # at least; how large pictures are, no table tells

    def _read(self, index: int) -> RawSample:
        row = self._row(index)
        return RawSample(row.label, row.pictures.read(row.label, row.path), row.captions)

    def remote_pieces(self, indices_P: NDArray[np.int64]) -> list[RemotePicture]:
        pieces: list[RemotePicture] = []
        for index in indices_P.tolist():
            with suppress(BadSample):
                row = self._row(index)
                pieces += filter(None, [row.pictures.remote(row.label, row.path)])
        return pieces

    def picture(self, index: int) -> str | None:
        """The file that a row names; None where the row cannot be used."""
        try:
            row = self._row(index)
        except BadSample:
            return None
        return row.pictures.place(row.path)

    def captions(self, index: int) -> tuple[str, ...]:
        return self._row(index).captions

    def _row(self, index: int) -> _Row:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        problem, path, *captions = (self._fields[index * self._width + column] for column in range(self._width))
        label = f"{self._labels[file]}:row {index - int(self._starts[file])}"
        if problem:
            raise BadSample(label, problem.decode())
        checked = checked_captions(label, [utf8(label, caption) for caption in captions])
        return _Row(label, self._pictures[file], os.fsdecode(path).strip(), checked)


class ByPicture(Samples):
    """The pictures of a table that has a row a caption: rows that name the same file are one sample."""

    def __init__(self, table: CsvTable) -> None:
        self.name, self.fingerprint = table.name, fingerprint_of("by picture", table.fingerprint)
        self._table = table
        rows: dict[str | int, list[int]] = {}
        for index in range(len(table)):
            rows.setdefault(table.picture(index) or index, []).append(index)
        self._rows, self.count, self.remote_bytes = list(rows.values()), len(rows), table.remote_bytes

    def rows_of(self, pictures: Iterable[int]) -> NDArray[np.int64]:
        """Where the table names these."""
        return np.array([row for picture in pictures for row in self._rows[picture]], np.int64)

    def remote_pieces(self, indices_P: NDArray[np.int64]) -> list[RemotePicture]:
        return self._table.remote_pieces(np.array([self._rows[index][0] for index in indices_P], np.int64))

    def _read(self, index: int) -> RawSample:
        first, *others = self._rows[index]
        raw = self._table.read(first)
        captions = [*raw.captions, *(caption for row in others for caption in self._table.captions(row))]
        return RawSample(raw.name, raw.image, tuple(dict.fromkeys(captions)))


def _csv_rows(table: AnyFile, image: str, captions: tuple[str, ...]) -> Iterator[tuple[bytes, ...]]:
    """A row is (what is wrong with it or b"", image path, captions ...); a row that cannot be used keeps its place."""
    path = name_of(table)
    with TextIOWrapper(opened(table), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline()
        separators = ("\t",) if path.lower().endswith(".tsv") else (",", "\t", ";")
        separator = max(separators, key=header.count)  # the first of equals
        columns = next(_records([header], separator))[0] if header.strip() else []
        columns = [column.strip() for column in columns]
        image, captions = choose_columns(repr(path), columns, image, captions)
        places = [columns.index(column) for column in (image, *captions)]
        for row, problem in _records(file, separator):
            if not row and not problem:
                continue
            if not problem and len(row) != len(columns):
                problem = (
                    f"has {len(row)} fields where the header has {len(columns)}; quote fields that hold {separator!r}"
                )
            picked = [""] * len(places) if problem else [row[place] for place in places]
            yield (problem.encode(), *(text.encode("utf-8", "surrogateescape") for text in picked))


def _records(lines: Iterable[str], separator: str) -> Iterator[tuple[list[str], str]]:
    """Rows of the csv module, which goes on after a row that it cannot read.  A NUL, which Python 3.10 cannot read,
    becomes a byte that is not UTF-8: its row is bad as a caption and as a path."""
    reader = csv.reader((line.replace("\0", "\udc80") for line in lines), delimiter=separator)
    while True:
        try:
            yield next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            yield [], f"cannot be read: {error}"


class ParquetTable(Samples):
    """Rows of parquet files whose images are bytes, Hugging Face's {bytes, path}, or paths and URLs as in CSV.  A row
    is read with its whole row group, and the last groups stay in memory: images at random are slow."""

    def __init__(self, paths: list[str], image: str = "", captions: tuple[str, ...] = (), root: str = "") -> None:
        self.name = paths[0]
        self._labels = [os.path.basename(name_on_disk(path)) for path in paths]
        self._pictures = [PictureFiles.beside(path, root) for path in paths]
        self._files = looked_up(paths)
        with ThreadPoolExecutor(max_workers=8) as pool:
            tables = list(pool.map(lambda file: _outline(file, image, captions), self._files))
        self._columns = [table.columns for table in tables]
        places = [(number, place) for number, table in enumerate(tables) for place in range(len(table.groups))]
        groups = [group for table in tables for group in table.groups]
        self._groups = np.array(places, np.int64).reshape(-1, 2)
        self._starts = np.cumsum([0, *(group.rows for group in groups)])
        self.count = int(self._starts[-1])
        spans = [(number, *span) for number, group in enumerate(groups) for span in group.remote_spans]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)  # row group, first byte, the byte after the last
        self.remote_bytes = int((self._spans[:, 2] - self._spans[:, 1]).sum())
        _warn_if_slow(paths[0], tables[0])
        described: list[object] = []
        for label, file, table in zip(self._labels, self._files, tables, strict=True):
            described += [label, size_of(file), table.end]
        self.fingerprint = fingerprint_of("parquet", image, *captions, *described, len(self))
        self._forget()

    def _forget(self) -> None:
        self._loaded: OrderedDict[int, Any] = OrderedDict()
        self._opened = functools.lru_cache(_OPEN_FILES)(_open_parquet)
        self._lock, self._process = threading.Lock(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_loaded", "_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _group(self, number: int) -> Any:
        """The columns of a row group as a pyarrow table."""
        if self._process != os.getpid():
            self._forget()  # a fork may have copied a held lock
        with self._lock:
            if number not in self._loaded:
                file_number, group = self._groups[number].tolist()
                image, captions = self._columns[file_number]
                table = self._opened(self._files[file_number]).read_row_group(
                    group, columns=list(dict.fromkeys([image, *captions])), use_threads=False
                )
                self._loaded[number] = table
                while len(self._loaded) > 1 and sum(t.nbytes for t in self._loaded.values()) > _ROW_GROUP_BYTES:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(number)
            return self._loaded[number]

    def remote_pieces(self, indices_P: NDArray[np.int64]) -> list[RemoteBlock]:
        groups_P = np.searchsorted(self._starts, indices_P, side="right") - 1
        spans_K3 = self._spans[np.isin(self._spans[:, 0], groups_P)]
        return blocks_of(self._files, self._groups[spans_K3[:, 0], 0], spans_K3[:, 1], spans_K3[:, 2])

    def _read(self, index: int) -> RawSample:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        file = int(self._groups[number, 0])
        first = int(np.searchsorted(self._groups[:, 0], file))  # the file's first row group
        label = f"{self._labels[file]}:row {index - int(self._starts[first])}"
        image, captions = self._columns[file]
        try:
            table, row = self._group(number), index - int(self._starts[number])
            values = {column: table[column][row].as_py() for column in (image, *captions)}
        except StoreError:  # not this sample's fault
            raise
        except (OSError, ValueError, ArithmeticError, NotImplementedError) as error:  # pyarrow's errors are these
            raise BadSample(label, f"cannot be read: {error}") from None
        return sample_of_row(label, self._pictures[file], values, image, captions)


def sample_of_row(
    label: str, pictures: PictureFiles, row: Mapping[str, Any], image: str, captions: Sequence[str]
) -> RawSample:
    checked = checked_captions(label, [text for column in captions for text in caption_texts(row[column])])
    return RawSample(label, image_of_field(label, pictures, row[image]), checked)


def image_of_field(label: str, pictures: PictureFiles, value: object) -> bytes:
    """An image field holds bytes, a path, or Hugging Face's {bytes, path}."""
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None:
        raise BadSample(label, "the image is missing")
    return pictures.read(label, value) if isinstance(value, str) else checked_image(label, value)


def _open_parquet(file: AnyFile) -> Any:
    path = name_of(file)
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'Reading {path!r} needs pyarrow: pip install "fullbatch[parquet]".') from None
    try:
        return pyarrow.parquet.ParquetFile(path if isinstance(file, str) else RemoteStream(file), memory_map=True)
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path!r} is not a readable parquet file: {error}.") from error


class _RowGroup(NamedTuple):
    rows: int
    size: int  # bytes of all columns, of which images are by far the largest
    remote_spans: list[tuple[int, int]]  # the bytes of a file in a store that hold the columns


class _Outline(NamedTuple):
    """Of a parquet file."""

    columns: tuple[str, tuple[str, ...]]  # of images and of captions
    groups: list[_RowGroup]
    end: bytes  # says where each piece of each column lies, so it tells the order


def _outline(file: AnyFile, image: str, captions: tuple[str, ...]) -> _Outline:
    table = _open_parquet(file)
    image, captions = choose_columns(repr(name_of(file)), table.schema_arrow.names, image, captions)
    groups = []
    for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
        spans = []
        # only where it must be: asked for a column, pyarrow ends the process if the file is damaged there
        for column in () if isinstance(file, str) else map(group.column, range(group.num_columns)):
            if column.path_in_schema.split(".")[0] in (image, *captions):
                start = column.dictionary_page_offset or column.data_page_offset
                spans.append((start, start + column.total_compressed_size))
        groups.append(_RowGroup(group.num_rows, group.total_byte_size, spans))
    with opened(file) as raw:
        raw.seek(max(0, size_of(file) - _END))
        return _Outline((image, captions), groups, raw.read())


def _warn_if_slow(path: str, table: _Outline) -> None:
    if table.groups and table.groups[0].size > _SLOW_ROW_GROUP:
        log.warning(
            "%s holds %d MB of images a row group, which are read for every sample drawn at random; "
            "tar shards, or row groups of some 10 rows, are much faster.",
            path,
            table.groups[0].size >> 20,
        )


class HuggingFaceSet(Samples):
    """Rows of a saved data set; its image column holds images, bytes or paths below ``root``."""

    def __init__(
        self, path: str, split: str = "train", image: str = "", captions: tuple[str, ...] = (), root: str = ""
    ) -> None:
        self.name = path
        self._pictures = PictureFiles(root or os.path.abspath(path))
        self._label = os.path.basename(os.path.abspath(path))
        rows = _load(path, split)
        self._image, self._captions = choose_columns(repr(path), rows.column_names, image, captions)
        self._rows = rows.select_columns(list(dict.fromkeys([self._image, *self._captions])))
        if hasattr(rows.features[self._image], "decode"):  # we decode the bytes that were saved ourselves
            self._rows = self._rows.cast_column(self._image, replace(rows.features[self._image], decode=False))
        names = [file["filename"] for file in rows.cache_files]
        files = [part for name in names for part in (os.path.basename(name), os.path.getsize(name))]
        self.count = len(rows)
        self.fingerprint = fingerprint_of("huggingface", self._image, *self._captions, len(rows), *files)

    def _read(self, index: int) -> RawSample:
        label = f"{self._label}:row {index}"
        try:
            row = self._rows[index]
        except (OSError, ValueError) as error:  # pyarrow's errors are these
            raise BadSample(label, f"cannot be read: {error}") from None
        return sample_of_row(label, self._pictures, row, self._image, self._captions)


def _load(path: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f'Reading {path!r} needs datasets: pip install "fullbatch[huggingface]".') from None
    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # of many kinds, some of them datasets' own
        raise ValueError(f"{path!r} is not a data set that save_to_disk wrote: {error}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        there = list(loaded)
        raise ValueError(
            f"{path!r} has no split {split!r}{nearest(split, there)} "
            f"Its splits are {', '.join(there)}; say which with PATH?split=NAME."
        )
    return loaded[split]
