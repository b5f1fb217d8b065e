"""Sample ids: the row numbers of a data set, which name the same sample in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

ID = "sample_id"


class NumberedRows(Dataset[Any]):
    """A map-style data set whose rows say their number: in a field of a mapping, or at the end of a tuple."""

    def __init__(self, rows: Any, column: str = ID) -> None:
        self.rows, self.column = rows, column

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if isinstance(row, Mapping):
            return {**row, self.column: int(index)}
        return (*row, int(index))


def number_rows(dataset: Any, column: str = ID) -> Any:
    """``dataset`` with its row numbers in ``column``.  A Hugging Face data set stays one, so that it may still be
    shuffled, filtered or split: ids stay with their rows."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            "Row numbers need a data set of known length with random access, but this one can only be iterated over; "
            f"add whole numbers from 0 to num_samples - 1 as {column!r} where its rows are made."
        )
    names = getattr(dataset, "column_names", None)
    if names is not None and hasattr(dataset, "add_column"):
        if column in names:
            raise ValueError(f"The data set has a column {column!r} already; rename or remove it, or use it as it is.")
        return dataset.add_column(column, list(range(len(dataset))))
    return NumberedRows(dataset, column)


def keep_ids(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
    """A collator that hands all but the ids to ``collate`` and adds them to its batch."""
    return _KeepIds(collate)


class _KeepIds:  # a class: data loaders pickle their collator where workers are spawned
    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        missing = [place for place, row in enumerate(rows) if ID not in row]
        if missing:
            raise ValueError(f"Row {missing[0]} of a batch has no {ID!r}; give the trainer with_ids(dataset).")
        batch = self.collate([{key: value for key, value in row.items() if key != ID} for row in rows])
        return {**batch, ID: torch.tensor([int(row[ID]) for row in rows])}
