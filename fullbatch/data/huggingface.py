"""Data sets that Hugging Face's ``datasets`` saved with ``save_to_disk``."""

from __future__ import annotations

import os
from typing import Any

from fullbatch.config.messages import nearest
from fullbatch.data.sample import BadSample, RawSample, caption_texts, check_index, checked_captions, fingerprint_of
from fullbatch.data.tables import choose_columns, image_of_field


class HuggingFaceSet:
    """Rows of a saved data set; its image column holds images, bytes or paths below ``root``."""

    def __init__(
        self,
        path: str,
        split: str = "train",
        image: str = "",
        captions: tuple[str, ...] = (),
        root: str = "",
        name: str = "",
    ) -> None:
        self.name = name or path
        self._root = root or os.path.abspath(path)
        self._label = os.path.basename(os.path.abspath(path))
        rows = _load(path, split)
        self._image, self._captions = choose_columns(repr(path), rows.column_names, image, captions)
        self._rows = _undecoded(rows.select_columns(list(dict.fromkeys([self._image, *self._captions]))), self._image)
        files = [part for file in rows.cache_files for part in _name_and_size(file["filename"])]
        self.fingerprint = fingerprint_of("huggingface", self._image, *self._captions, len(rows), *files)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> RawSample:
        check_index(index, len(self), self.name)
        label = f"{self._label}:row {index}"
        try:
            row = self._rows[index]
        except (OSError, ValueError) as error:  # pyarrow's errors are these
            raise BadSample(label, f"cannot be read: {error}") from None
        captions = checked_captions(label, [text for c in self._captions for text in caption_texts(row[c])])
        return RawSample(label, image_of_field(label, self._root, row[self._image]), captions)


def _name_and_size(path: str) -> tuple[str, int]:
    return os.path.basename(path), os.path.getsize(path)


def _load(path: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f'Reading {path!r} needs datasets: pip install "fullbatch[huggingface]".') from None
    try:
        found = datasets.load_from_disk(path)
    except Exception as error:  # of many kinds, some of them datasets' own
        raise ValueError(f"{path!r} is not a data set that save_to_disk wrote: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        there = list(found)
        raise ValueError(
            f"{path!r} has no split {split!r}{nearest(split, there)} "
            f"Its splits are {', '.join(there)}; say which with PATH?split=NAME."
        )
    return found[split]


def _undecoded(rows: Any, image: str) -> Any:
    """Images as the bytes that were saved: we decode them ourselves."""
    import datasets

    if isinstance(rows.features[image], datasets.Image):
        return rows.cast_column(image, datasets.Image(decode=False))
    return rows
