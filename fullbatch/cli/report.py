"""``fullbatch report``: runs in, one page out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class _Report:
    """Write one self-contained HTML page about a run, several runs, a comparison, or a search."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(
            metavar="RUN...", help="run folders, or one comparison or search folder; none: the newest run in runs/"
        ),
    ] = ()
    output: Annotated[
        Path | None, tyro.conf.arg(help="the page; None: report.html in the run folder, or above several")
    ] = None
    pictures: Annotated[bool, tyro.conf.arg(help="embed data with the model for picture grids and suspects")] = True
    samples: Annotated[
        int | None,
        tyro.conf.arg(
            help="embed at most so many samples of a data set; None: 4,000 on a CPU, 20,000 on a GPU, "
            "for several runs 2,000 and 15,000"
        ),
    ] = None
    baseline: Annotated[Path | None, tyro.conf.arg(help="a run folder to compare with")] = None


def report(arguments: list[str]) -> int:
    options = tyro.cli(_Report, args=arguments, prog="fullbatch report")
    from fullbatch.report.collect import newest_run
    from fullbatch.report.page import write_page

    page = write_page(
        options.runs or [newest_run(Path("runs"))],
        options.output,
        pictures=options.pictures,
        samples=options.samples,
        baseline=options.baseline,
    )
    print(page)
    return 0
