"""How long `fullbatch find` takes to search: random unit rows, the best 100 of one query at a time.

    python benchmarks/find.py                             # 1,000,000 x 512 on two threads, mapped from a file
    python benchmarks/find.py --rows 100000 --threads 8 --csv find.csv

Each answer is compared with a sort of all scores in float64.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rows import append_rows
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch.find.nearest import Copy, ExactSearch

# R: rows   D: width   Q: queries
COPIES: tuple[Copy, ...] = ("fp32", "bf16")
_PART = 100_000  # rows made at a time


def mapped_rows(path: Path, count: int, width: int) -> Tensor:
    """Random unit rows in a file, as an index has them."""
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        for start in range(0, count, _PART):
            part = torch.randn(min(_PART, count - start), width, generator=generator)
            file.write(normalize(part, dim=1).numpy().tobytes())
    return torch.from_file(str(path), size=count * width, dtype=torch.float32).view(count, width)


def best_in_float64(rows_RD: Tensor, query_D: Tensor, most: int) -> list[int]:
    scores = torch.cat([part.double() @ query_D.double() for part in torch.split(rows_RD, _PART)])
    order: list[int] = scores.sort(descending=True, stable=True).indices[:most].tolist()
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv", help="a file to add the figures to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows_RD = mapped_rows(Path(folder) / "rows.f32", options.rows, options.width)
        generator = torch.Generator().manual_seed(1)
        query_QD = normalize(torch.randn(options.queries, options.width, generator=generator), dim=1)
        measured = []
        for copy in COPIES:
            started = time.perf_counter()
            search = ExactSearch(rows_RD, torch.arange(options.rows), copy)
            making = time.perf_counter() - started
            search.nearest(query_QD[0], options.top)  # the file's pages are in memory from now on
            seconds, right = [], 0
            for query_D in query_QD:
                started = time.perf_counter()
                found = search.nearest(query_D, options.top)
                seconds.append(time.perf_counter() - started)
                right += found.places == best_in_float64(rows_RD, query_D, options.top)
            measured.append((copy, options.rows, options.width, options.top, median(seconds), max(seconds), making))
            print(
                f"{copy}: {1000 * median(seconds):.0f} ms a query (slowest {1000 * max(seconds):.0f} ms), "
                f"{right} of {len(seconds)} answers equal to float64; the copy took {making:.1f} s"
            )
    if options.csv:
        columns = ("copy", "rows", "width", "top", "median_s", "slowest_s", "copying_s")
        append_rows(options.csv, columns, measured, "cpu")


if __name__ == "__main__":
    main()
