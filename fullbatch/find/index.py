"""An index of a folder's pictures: which file has which embedding.  It only grows, a batch at a time, so a kill costs a
batch and the next run goes on.  In its folder:

    index.json          which model, and which folder
    embeddings.f32      a row of float32 each; mapped into memory
    files.jsonl         a line a file: path, size, time of change, digest of its bytes, row; or why it has none
    .thumbnails/        small pictures by digest, made when a page first shows them

Rows are on the disk before the lines that speak of them.  A later line about a path replaces an earlier one.
"""

# R: rows of the file, also those of pictures that are gone   B: new rows   D: width

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fullbatch.data.cache_folder import cache_folder
from fullbatch.data.durable import sync, told_if_full
from fullbatch.data.images import EvalTransform
from fullbatch.data.sample import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_BYTES,
    BadSample,
    checked_image,
    fingerprint_of,
    images_below,
    read_file,
)
from fullbatch.encoder import Encoder, batched, read_in_threads
from fullbatch.evaluation.embed import check_finite, fingerprint_of_model
from fullbatch.training.run_folder import alone_in, replace_text

HEAD, EMBEDDINGS, FILES = "index.json", "embeddings.f32", "files.jsonl"
THUMBNAILS = ".thumbnails"  # hidden, lest an index within the folder finds its own thumbnails
_VERSION = 1  # of the files, and of how pictures are read

Stamp = tuple[int, int]  # of a file: its size, and when it was changed, in nanoseconds


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """What a line says of a file."""

    path: str  # from the folder on
    size: int
    modified: int  # nanoseconds
    digest: str | None  # of its bytes; None: it could not be read
    row: int | None  # of its embedding; None: it has none
    bad: str | None = None  # why


@dataclass(frozen=True)
class _Head:
    version: int
    model: str
    folder: str


@dataclass(frozen=True)
class Changes:
    """What an update did, in pictures."""

    embedded: int = 0
    known: int = 0  # moved, copied or touched: their bytes had a row already
    unchanged: int = 0  # not read
    gone: int = 0
    bad: tuple[IndexedFile, ...] = ()  # all that have no embedding, also those of earlier runs


class NotWritable(ValueError):
    """The index cannot be updated here and now; it may be searched as it is."""


class PictureIndex:
    """The index of a folder, as it was when it was opened or updated last.  It lies in the folder ``place``, by default
    one in the cache folder."""

    def __init__(self, folder: Path, encoder: Encoder, place: Path | None = None) -> None:
        require_folder(folder)
        self.folder, self.encoder, self.width = folder, encoder, encoder.width
        self.model = fingerprint_of("find", _VERSION, fingerprint_of_model(encoder.model), encoder.precision)
        self.place = _usual_place(folder, self.model) if place is None else place
        self._load()

    @property
    def pictures(self) -> list[IndexedFile]:
        """Those that can be found, by path."""
        return sorted((entry for entry in self.entries.values() if entry.row is not None), key=lambda entry: entry.path)

    @property
    def bad(self) -> list[IndexedFile]:
        return sorted((entry for entry in self.entries.values() if entry.row is None), key=lambda entry: entry.path)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.entries: dict[str, IndexedFile] = {}  # by path
        self._row_of: dict[str, int] = {}  # of a digest, also of pictures that are gone
        self._row_count = self._whole_bytes = 0  # rows that lines speak of; bytes of whole lines
        self.embeddings = torch.empty(0, self.width)  # all rows, (R, D), mapped: only what is used is read
        self._head = self._read_head()
        if self._head is None or not (self.place / FILES).is_file() or not (self.place / EMBEDDINGS).is_file():
            return
        raw = (self.place / FILES).read_bytes()  # before the rows: another process may be adding both
        rows = (self.place / EMBEDDINGS).stat().st_size // (4 * self.width)
        self._whole_bytes = raw.rfind(b"\n") + 1
        for line in raw[: self._whole_bytes].splitlines():
            with suppress(
                ValueError, KeyError, TypeError, AttributeError
            ):  # damaged: what it said will be found out again
                self._take(json.loads(line), rows)
        self._map()

    def _map(self) -> None:
        if self._row_count:
            shape = self._row_count, self.width
            self.embeddings = torch.from_numpy(np.memmap(self.place / EMBEDDINGS, np.float32, "c", shape=shape))

    def _take(self, line: dict[str, Any], rows: int) -> None:
        if line.get("gone"):
            self.entries.pop(line["path"], None)
            return
        entry = IndexedFile(**line)
        if entry.row is not None:
            if not 0 <= entry.row < rows:
                raise ValueError("a row that is not there")
            self._row_count = max(self._row_count, entry.row + 1)
            self._row_of[str(entry.digest)] = entry.row
        self.entries[entry.path] = entry

    def _read_head(self) -> _Head | None:
        path = self.place / HEAD
        if self.place.exists() and not self.place.is_dir():
            raise ValueError(f"--index {self.place} is a file; name a folder.")
        if not path.exists():
            if self.place.is_dir() and any(each.name[0] != "." for each in self.place.iterdir()):
                raise ValueError(f"--index {self.place} is no index, and not empty: name a new folder.")
            return None
        try:
            head = _Head(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove {self.place} to index anew.") from None
        if (head.version, head.model) != (_VERSION, self.model):
            raise ValueError(
                f"{self.place} is the index of another model, or of another --precision; name another --index, or "
                "remove it."
            )
        return head

    # -- writing ------------------------------------------------------------------------------------------------------

    def update(self, watch: Callable[[int, int], None] = lambda done, total: None) -> Changes:
        """Make it what the folder is now.  ``watch`` is told how many files are done, of how many that are read."""
        there = stamps_below(self.folder)
        with self._to_write():
            self._load()
            head = _Head(_VERSION, self.model, str(self.folder.resolve()))
            if self._head is None:
                self._write_head(head)
            same_folder = self._head == head  # in another, equal size and time say nothing
            fresh = [path for path, stamp in there.items() if not (same_folder and self._is_as_it_was(path, stamp))]
            gone = [path for path in self.entries if path not in there]
            lost = sum(self.entries[path].row is not None for path in gone)
            embedded = self._add({path: there[path] for path in fresh}, gone, watch)
            if not same_folder:
                self._write_head(head)
        self._map()
        bad, looked_at = tuple(self.bad), set(fresh)
        bad_now = sum(entry.path in looked_at for entry in bad)
        unchanged = len(there) - len(fresh) - (len(bad) - bad_now)
        return Changes(embedded, len(fresh) - embedded - bad_now, unchanged, lost, bad)

    @contextmanager
    def _to_write(self) -> Iterator[None]:
        def busy() -> NoReturn:
            raise NotWritable(f"Another process is writing the index {self.place}; wait for it, or stop it.")

        try:
            with alone_in(self.place, busy):
                yield
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            reason = f"The index {self.place} cannot be written ({error.strerror}); name another with --index."
            raise NotWritable(reason) from None

    def _write_head(self, head: _Head) -> None:
        replace_text(self.place / HEAD, json.dumps(asdict(head), indent=1))
        self._head = head

    def _is_as_it_was(self, path: str, stamp: Stamp) -> bool:
        entry = self.entries.get(path)
        return entry is not None and entry.digest is not None and (entry.size, entry.modified) == stamp

    def _add(self, fresh: dict[str, Stamp], gone: list[str], watch: Callable[[int, int], None]) -> int:
        """Read and embed what is new, batch by batch; how many pictures were embedded."""
        size, embedded, done = self.encoder.batch_size, 0, 0
        read = partial(_read, self.folder, self.encoder.transform, self._row_of)
        told = told_if_full(self.place / EMBEDDINGS)  # closing tries once more to write what found no room
        with told, (self.place / EMBEDDINGS).open("ab") as rows, (self.place / FILES).open("ab") as lines:
            rows.truncate(4 * self.width * self._row_count)  # what a killed run wrote of a batch that was not finished
            lines.truncate(self._whole_bytes)
            sync(self.place)
            self._append(rows, lines, torch.empty(0, self.width), [{"path": path, "gone": True} for path in gone])
            watch(done, len(fresh))
            for batch in batched(read_in_threads(read, fresh.items(), 2 * size), size):
                entries, rows_BD = self._embedded(batch)
                self._append(rows, lines, rows_BD, [asdict(entry) for entry in entries])
                embedded, done = embedded + len(rows_BD), done + len(batch)
                watch(done, len(fresh))
        return embedded

    def _embedded(self, batch: Sequence[_ReadFile]) -> tuple[list[IndexedFile], Tensor]:
        """The files of a batch with their rows; bytes that are known, or twice in it, are embedded once."""
        new: dict[str, _ReadFile] = {}  # by digest, in the order of their rows to come
        for file in batch:
            if file.square is not None and str(file.entry.digest) not in self._row_of:
                new.setdefault(str(file.entry.digest), file)
        rows_BD = torch.empty(0, self.width)
        if new:
            rows_BD = self.encoder.embed_squares([file.square for file in new.values() if file.square is not None])
            check_finite(rows_BD, [file.entry.path for file in new.values()], "pictures")
        row_to_be = {digest: self._row_count + place for place, digest in enumerate(new)}
        entries = []
        for file in batch:
            digest = str(file.entry.digest)
            row = None if file.entry.bad is not None else self._row_of.get(digest, row_to_be.get(digest))
            entries.append(replace(file.entry, row=row))
        return entries, rows_BD

    def _append(self, rows: IO[bytes], lines: IO[bytes], rows_BD: Tensor, said: list[dict[str, Any]]) -> None:
        _write_through(rows, rows_BD.contiguous().numpy().tobytes())
        text = b"".join(json.dumps(line).encode() + b"\n" for line in said)
        _write_through(lines, text)
        self._whole_bytes += len(text)
        there = self._row_count + len(rows_BD)
        for line in said:
            self._take(line, there)


def _write_through(file: IO[bytes], raw: bytes) -> None:
    if not raw:
        return
    with told_if_full(Path(file.name)):
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _usual_place(folder: Path, model: str) -> Path:
    """In the cache folder, one for each model and folder."""
    home = cache_folder()
    if home is None:
        raise ValueError("The cache folder cannot be written; say with --index where the index is to lie.")
    return home / "find" / fingerprint_of(folder.resolve(), model)


# -- the folder --------------------------------------------------------------------------------------------------------


def require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder." if folder.exists() else f"There is no folder {folder}.")


def stamps_below(folder: Path) -> dict[str, Stamp]:
    """The size and time of change of every picture, in the order of their paths.  A folder that cannot be read is among
    them, as a file that cannot."""
    require_folder(folder)
    stamps: dict[str, Stamp] = {}

    def unread(error: OSError) -> None:
        path = os.path.relpath(error.filename, folder)
        if path == ".":
            raise ValueError(f"The folder {folder} cannot be read ({error.strerror}).")
        stamps[path] = (0, 0)

    for path in sorted(images_below(str(folder), unread)):
        try:
            status = os.stat(folder / path)
        except OSError:  # a link that leads nowhere, or gone by now
            stamps[path] = (0, 0)
        else:
            stamps[path] = (status.st_size, status.st_mtime_ns)
    if not stamps:
        endings = ", ".join(f".{extension}" for extension in IMAGE_EXTENSIONS)
        raise ValueError(f"The folder {folder} holds no pictures ({endings}); name one that does.")
    return stamps


def digest_of(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


@dataclass(frozen=True)
class _ReadFile:
    entry: IndexedFile  # still without its row
    square: Tensor | None  # for the image tower; None: bad, or its bytes are known


def _read(folder: Path, transform: EvalTransform, known: dict[str, int], file: tuple[str, Stamp]) -> _ReadFile:
    """The stamp is older than the bytes: a file that changes meanwhile will look changed to the next run."""
    path, stamp = file
    digest = None
    try:
        raw = read_file(path, str(folder / path), MAX_IMAGE_BYTES)
        digest = digest_of(raw)
        square = None if digest in known else transform(checked_image(path, raw), path)
    except BadSample as bad:
        return _ReadFile(IndexedFile(path, *stamp, digest, None, bad.reason), None)
    return _ReadFile(IndexedFile(path, *stamp, digest, None), square)
