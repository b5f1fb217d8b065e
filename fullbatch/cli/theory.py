"""``fullbatch theory``: the synthetic study of batch selection, as numbers and one page of figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from fullbatch.theory.study import Study

NUMBERS, PAGE = "numbers.json", "theory.html"


@dataclass(frozen=True)
class _Theory:
    """Watch free embeddings descend the loss of chosen batches: which optimum they reach, and how fast (minutes on a
    CPU; no data, no model)."""

    output: Path = Path("theory")  # the folder for numbers.json and theory.html
    # optimum: where full batch, all batches and subsets end; convergence: SGD, OSGD and spectral batches; toy: four
    # points; angle: the two losses along one angle
    part: Literal["all", "optimum", "convergence", "toy", "angle"] = "all"
    quick: bool = False  # small N and fewer settings: well under a minute
    seeds: int = 10  # random starts, descended side by side
    batch_size: int = 2  # pairs of a batch, 2 to 6; of the toy and the angle always 2


def theory(arguments: list[str]) -> int:
    options = tyro.cli(_Theory, args=arguments, prog="fullbatch theory")
    import json

    from rich.console import Console

    from fullbatch.report.page import fitting
    from fullbatch.report.theory_page import theory_page
    from fullbatch.theory.study import PARTS, numbers, quick, study, whole
    from fullbatch.training.display import print_line
    from fullbatch.training.run_folder import replace_text

    extent = (quick if options.quick else whole)(options.seeds, options.batch_size)
    options.output.mkdir(parents=True, exist_ok=True)
    parts = PARTS if options.part == "all" else (options.part,)
    done = study(parts, extent, partial(print_line, Console(stderr=True, highlight=False)))
    replace_text(options.output / NUMBERS, json.dumps(numbers(done), indent=1, allow_nan=False) + "\n")
    replace_text(options.output / PAGE, fitting(theory_page(done)))
    print("\n".join(_lines(done)))
    print(options.output / PAGE)
    return 0


def _lines(done: Study) -> list[str]:
    """The tables of the page."""
    from fullbatch.cli.printing import columns
    from fullbatch.theory.study import optimum_rows, race_rows, toy_rows, unproven_rows

    races = groupby(done.races, key=lambda race: race.reading)
    tables = [("", optimum_rows(done.minima)), ("", unproven_rows(done.unproven))]
    tables += [(str(reading), race_rows(list(of_reading))) for reading, of_reading in races]
    lines = list[str]()
    for title, rows in [*tables, ("", toy_rows(done.walks))]:
        if len(rows) > 1:  # not only a head
            lines += [*([title] if title else []), *columns(rows, left=1), ""]
    if done.turn is not None:
        least, greatest = done.turn.ratio.values()
        lines.append(f"along one angle: full-batch over mini-batch loss goes from {least:.3f} to {greatest:.3f}")
    return lines
