"""What the benchmarks share: a measurement is a row of a CSV file, which says when, where and with what it was made."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Iterable, Sequence

import torch

import fullbatch as fb

HEAD = ("date", "machine", "python", "torch", "fullbatch")


def machine_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def append_rows(path: str, columns: Sequence[str], rows: Iterable[Sequence[object]], device: str) -> None:
    """Add rows to the file; a new one begins with the names of the columns."""
    today = datetime.date.today().isoformat()
    head = [today, machine_name(device), platform.python_version(), torch.__version__, fb.__version__]
    with open(path, "a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow([*HEAD, *columns])
        for row in rows:
            writer.writerow([*head, *(f"{value:.4g}" if isinstance(value, float) else value for value in row)])
