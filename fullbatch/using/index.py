"""An index of a folder's pictures: which file has which embedding.  It grows by appending, a batch at a time, so a kill
costs a batch and the next run goes on.  In its folder:

    index.json          which model, which folder, and which generation of the two files below counts
    rows-G.f32          embeddings, float32, a row each; mapped into memory
    lines-G.jsonl       a line a file: path, size, time of change, digest of its bytes, row; or why it has none
    .thumbnails/        small pictures by digest, made when a page first shows them

Rows are on the disk before the lines that speak of them.  A later line about a path replaces an earlier one.
"""

# R: rows of the file, also those of pictures that are gone   B: new rows   D: width

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

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
from fullbatch.data.tar_shards import cache_folder
from fullbatch.evaluation.embed import fingerprint_of_model
from fullbatch.training.checkpoint import sync, told_if_full
from fullbatch.training.run_folder import alone_in, refuse, replace_text
from fullbatch.using.encoder import PIXELS, Encoder

HEAD, THUMBNAILS = "index.json", ".thumbnails"  # hidden, lest an index within the folder finds its own thumbnails
_VERSION = 1  # of the files, and of how pictures are read
_AHEAD = 2  # batches that are read and decoded while one is embedded
_FEW_LINES = 1000  # so many replaced lines are not worth rewriting
_COPIED = 65_536  # rows at a time

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
    width: int
    folder: str
    generation: int = 0


@dataclass(frozen=True)
class Changes:
    """What an update did, in files."""

    embedded: int = 0
    known: int = 0  # moved, copied or touched: their bytes had a row already
    unchanged: int = 0  # not read
    gone: int = 0
    bad: tuple[IndexedFile, ...] = ()  # all that have no embedding, also those of earlier runs


def digest_of(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def name_of_model(encoder: Encoder) -> str:
    """What the rows of an index depend on but for the pictures."""
    return fingerprint_of("find", _VERSION, fingerprint_of_model(encoder.model), encoder.precision)


def usual_place(folder: Path, model: str) -> Path:
    """In the cache folder, one for each model and folder."""
    home = cache_folder()
    if home is None:
        raise ValueError("The cache folder cannot be written; say with --index where the index is to lie.")
    return home / "find" / fingerprint_of(folder.resolve(), model)


class PictureIndex:
    """The index in the folder ``place``, as it was when it was opened or updated last."""

    def __init__(self, place: Path, model: str, width: int) -> None:
        self.place, self.model, self.width = place, model, width
        self.entries: dict[str, IndexedFile] = {}  # by path
        self._head: _Head | None = None
        self._rows = self._lines = self._whole = 0  # rows and lines that count, bytes of whole lines
        self._row_of: dict[str, int] = {}  # of a digest, also of pictures that are gone
        self.embeddings = torch.empty(0, width)  # all rows, (R, D), mapped: only what is used is read
        self._load()

    @property
    def pictures(self) -> list[IndexedFile]:
        """Those that can be found, by path."""
        return sorted((entry for entry in self.entries.values() if entry.row is not None), key=lambda entry: entry.path)

    @property
    def bad(self) -> list[IndexedFile]:
        return sorted((entry for entry in self.entries.values() if entry.row is None), key=lambda entry: entry.path)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _file(self, kind: str, generation: int | None = None) -> Path:
        number = self._head.generation if generation is None and self._head is not None else generation
        return self.place / f"{kind}-{number}.{'f32' if kind == 'rows' else 'jsonl'}"

    def _load(self) -> None:
        head = self._read_head()
        while True:
            self._head, self.entries, self._row_of = head, {}, {}
            self._rows = self._lines = self._whole = 0
            self.embeddings = torch.empty(0, self.width)
            if head is None:
                return
            try:
                self._read_files()
                return
            except FileNotFoundError:  # a new one, or another process has just rewritten it
                before, head = head, self._read_head()
                if head == before:
                    return

    def _read_files(self) -> None:
        raw, there = self._file("lines").read_bytes(), self._file("rows").stat().st_size
        self._whole = raw.rfind(b"\n") + 1
        for line in raw[: self._whole].splitlines():
            with suppress(ValueError, KeyError, TypeError):  # damaged: what it said will be found out again
                self._take(json.loads(line), there // (4 * self.width))
        self._map()

    def _map(self) -> None:
        """Once mapped, the rows stay readable, even when another process replaces their file."""
        if self._rows:
            mapped_RD = np.memmap(self._file("rows"), np.float32, "c", shape=(self._rows, self.width))
            self.embeddings = torch.from_numpy(mapped_RD)

    def _take(self, said: dict[str, Any], rows: int) -> None:
        self._lines += 1
        path = said["path"]
        if said.get("gone"):
            self.entries.pop(path, None)
            return
        entry = IndexedFile(path, said["size"], said["modified"], said["digest"], said["row"], said.get("bad"))
        if entry.row is not None:
            if not 0 <= entry.row < rows:
                raise ValueError("a row that is not there")
            self._rows = max(self._rows, entry.row + 1)
            self._row_of[str(entry.digest)] = entry.row
        self.entries[path] = entry

    def _read_head(self) -> _Head | None:
        path = self.place / HEAD
        if self.place.exists() and not self.place.is_dir():
            raise ValueError(f"--index {self.place} is a file; name a folder.")
        if not path.exists():
            others = [each for each in self.place.iterdir() if each.name[0] != "."] if self.place.is_dir() else []
            if others:
                raise ValueError(f"--index {self.place} is no index, and not empty: name a new folder.")
            return None
        try:
            head = _Head(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove {self.place} to index anew.") from None
        if (head.version, head.model, head.width) != (_VERSION, self.model, self.width):
            raise ValueError(
                f"{self.place} is the index of another model, or of another --precision; name another --index, or "
                "remove it."
            )
        return head

    # -- writing ------------------------------------------------------------------------------------------------------

    def update(
        self, folder: Path, encoder: Encoder, watch: Callable[[int, int], None] = lambda done, total: None
    ) -> Changes:
        """Make it what the folder is now.  ``watch`` is told how many files are done, of how many that are read."""
        there = stamps_below(folder)
        self.place.mkdir(parents=True, exist_ok=True)
        busy = f"Another process is writing the index {self.place}; wait for it, or stop it."
        with alone_in(self.place, partial(refuse, busy)):
            self._load()
            head = self._head or _Head(_VERSION, self.model, self.width, str(folder.resolve()))
            if self._head is None:
                self._write_head(head)
            self._sweep()
            changes = self._follow(folder, there, encoder, watch)
            if head.folder != str(folder.resolve()):
                self._write_head(replace(head, folder=str(folder.resolve())))
            if self._is_wasteful():
                self._rewrite()
        return changes

    def _follow(
        self, folder: Path, there: dict[str, Stamp], encoder: Encoder, watch: Callable[[int, int], None]
    ) -> Changes:
        assert self._head is not None
        same_folder = self._head.folder == str(folder.resolve())  # in another, equal size and time say nothing
        fresh = [path for path, stamp in there.items() if not (same_folder and self._is_as_it_was(path, stamp))]
        gone = [path for path in self.entries if path not in there]
        transform, embedded, total = EvalTransform(encoder.model.image_size, PIXELS), 0, len(fresh)
        read = partial(_read, folder, transform, self._row_of)
        with self._file("rows").open("ab") as rows, self._file("lines").open("ab") as lines:
            rows.truncate(4 * self.width * self._rows)  # what a killed run wrote of a batch that was not finished
            lines.truncate(self._whole)
            sync(self.place)
            if gone:
                self._append(rows, lines, torch.empty(0, self.width), [{"path": path, "gone": True} for path in gone])
            done = 0
            watch(done, total)
            for batch in _ahead([(path, there[path]) for path in fresh], encoder.batch_size, read):
                entries, rows_BD = self._embedded(batch, encoder)
                self._append(rows, lines, rows_BD, [asdict(entry) for entry in entries])
                embedded, done = embedded + len(rows_BD), done + len(batch)
                watch(done, total)
        self._map()
        bad, looked_at = tuple(self.bad), set(fresh)
        known = total - embedded - sum(entry.path in looked_at for entry in bad)
        return Changes(embedded, known, len(there) - total, len(gone), bad)

    def _is_as_it_was(self, path: str, stamp: Stamp) -> bool:
        entry = self.entries.get(path)
        return entry is not None and entry.digest is not None and (entry.size, entry.modified) == stamp

    def _embedded(self, batch: Sequence[_Read], encoder: Encoder) -> tuple[list[IndexedFile], Tensor]:
        """The files of a batch with their rows; bytes that are known, or twice in it, are embedded once."""
        new: dict[str, int] = {}  # rows to come
        firsts: list[_Read] = []
        for one in batch:
            digest = str(one.entry.digest)
            if one.square is not None and digest not in self._row_of and digest not in new:
                new[digest] = self._rows + len(firsts)
                firsts.append(one)
        rows_BD = torch.empty(0, self.width)
        if firsts:
            rows_BD = encoder.embed_squares([one.square for one in firsts if one.square is not None])
            _check_finite(rows_BD, [one.entry.path for one in firsts])
        entries = []
        for one in batch:
            digest = str(one.entry.digest)
            row = None if one.entry.bad is not None else self._row_of.get(digest, new.get(digest))
            entries.append(replace(one.entry, row=row))
        return entries, rows_BD

    def _append(self, rows: IO[bytes], lines: IO[bytes], rows_BD: Tensor, said: list[dict[str, Any]]) -> None:
        _written(rows, self._file("rows"), rows_BD.contiguous().numpy().tobytes())
        text = b"".join(json.dumps(line).encode() + b"\n" for line in said)
        _written(lines, self._file("lines"), text)
        self._whole += len(text)
        for line in said:
            self._take(line, self._rows + len(rows_BD))

    def _write_head(self, head: _Head) -> None:
        replace_text(self.place / HEAD, json.dumps(asdict(head), indent=1))
        self._head = head

    def _sweep(self) -> None:
        """What a killed process left: other generations, and files that were to replace others."""
        kept = {self._file("rows"), self._file("lines")}
        for path in (*self.place.glob("rows-*.f32"), *self.place.glob("lines-*.jsonl"), *self.place.glob(f".{HEAD}.*")):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _is_wasteful(self) -> bool:
        alive = len({entry.row for entry in self.entries.values() if entry.row is not None})
        return self._rows > 2 * alive or self._lines > 2 * len(self.entries) + _FEW_LINES

    def _rewrite(self) -> None:
        """The rows and lines that count, as the next generation; readers keep the one that they have mapped."""
        assert self._head is not None
        new = replace(self._head, generation=self._head.generation + 1)
        rows_RD, old = self.embeddings, sorted({entry.row for entry in self.pictures if entry.row is not None})
        place_of = {row: place for place, row in enumerate(old)}
        with self._file("rows", new.generation).open("wb") as rows:
            for start in range(0, len(old), _COPIED):
                part = rows_RD[torch.tensor(old[start : start + _COPIED])]
                _written(rows, Path(rows.name), part.numpy().tobytes())
        with self._file("lines", new.generation).open("wb") as lines:
            entries = sorted(self.entries.values(), key=lambda entry: entry.path)
            moved = (replace(one, row=None if one.row is None else place_of[one.row]) for one in entries)
            _written(lines, Path(lines.name), b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in moved))
        sync(self.place)
        self._write_head(new)
        self._sweep()
        self._load()
        self._drop_thumbnails()

    def _drop_thumbnails(self) -> None:
        wanted = {entry.digest for entry in self.entries.values()}
        for path in (self.place / THUMBNAILS).glob("*/*"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)


def _written(file: IO[bytes], path: Path, raw: bytes) -> None:
    if not raw:
        return
    with told_if_full(path):
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _check_finite(rows_BD: Tensor, names: list[str]) -> None:
    broken_B = ~rows_BD.isfinite().all(dim=1)
    if bool(broken_B.any()):
        raise ValueError(
            f"The model's embedding of {names[int(broken_B.nonzero()[0])]} is not finite; are its weights? Try "
            "--precision fp32."
        )


# -- the folder --------------------------------------------------------------------------------------------------------


def require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder." if folder.exists() else f"There is no folder {folder}.")


def stamps_below(folder: Path) -> dict[str, Stamp]:
    """The size and time of change of every picture, in the order of their paths."""
    require_folder(folder)
    stamps = {}
    for path in sorted(images_below(str(folder))):
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


@dataclass(frozen=True)
class _Read:
    entry: IndexedFile  # still without its row
    square: Tensor | None  # for the image tower; None: bad, or its bytes are known


def _read(folder: Path, transform: EvalTransform, known: dict[str, int], path: str, stamp: Stamp) -> _Read:
    """The stamp is older than the bytes: a file that changes meanwhile will look changed to the next run."""
    digest = None
    try:
        raw = read_file(path, str(folder / path), MAX_IMAGE_BYTES)
        digest = digest_of(raw)
        square = None if digest in known else transform(checked_image(path, raw), path)
    except BadSample as bad:
        return _Read(IndexedFile(path, *stamp, digest, None, bad.reason), None)
    return _Read(IndexedFile(path, *stamp, digest, None), square)


def _ahead(files: Sequence[tuple[str, Stamp]], size: int, read: Callable[[str, Stamp], _Read]) -> Iterator[list[_Read]]:
    """Batches of so many files, the next ones being read in threads meanwhile."""
    threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
    waiting: deque[list[Future[_Read]]] = deque()
    try:
        for start in range(0, len(files), size):
            waiting.append([threads.submit(read, *file) for file in files[start : start + size]])
            if len(waiting) > _AHEAD:
                yield [future.result() for future in waiting.popleft()]
        while waiting:
            yield [future.result() for future in waiting.popleft()]
    finally:
        threads.shutdown(cancel_futures=True)
