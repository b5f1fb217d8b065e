"""``fullbatch report``: runs in, one page out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class _Report:
    """Write one self-contained HTML page about a run, several runs, a comparison, or a search."""

    # run folders, or one comparison or search folder; none: the newest run in runs/
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...")] = ()
    output: Path | None = None  # the page; None: report.html in the run folder, or above several
    pictures: bool = True  # embed data with the model for picture grids and suspects
    # embed at most so many samples of a data set; None: 4,000 on a CPU, 20,000 on a GPU, for several runs 2,000 and
    # 15,000
    samples: int | None = None
    baseline: Path | None = None  # a run folder to compare with


def report(arguments: list[str]) -> int:
    options = tyro.cli(_Report, args=arguments, prog="fullbatch report")
    from fullbatch.report.collect import newest_run
    from fullbatch.report.page import write_page

    flags = {name: value for name, value in vars(options).items() if name != "runs"}
    print(write_page(options.runs or [newest_run(Path("runs"))], **flags))
    return 0
