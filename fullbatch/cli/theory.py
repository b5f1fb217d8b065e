"""``fullbatch theory``: the synthetic study of batch selection, as numbers and one page of figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from fullbatch.theory.study import Study

Flag = tyro.conf.arg
NUMBERS, PAGE = "numbers.json", "theory.html"


@dataclass(frozen=True)
class _Theory:
    """Watch free embeddings descend the loss of chosen batches: which optimum they reach, and how fast (minutes on a
    CPU; no data, no model)."""

    output: Annotated[Path, Flag(help=f"the folder for {NUMBERS} and {PAGE}")] = Path("theory")
    part: Annotated[
        Literal["all", "optimum", "convergence", "toy", "angle"],
        Flag(
            help="optimum: where full batch, all batches and subsets end; convergence: SGD, OSGD and spectral batches; "
            "toy: four points; angle: the two losses along one angle"
        ),
    ] = "all"
    quick: Annotated[bool, Flag(help="small N and fewer settings: well under a minute")] = False
    seeds: Annotated[int, Flag(help="random starts, descended side by side")] = 10
    batch_size: Annotated[int, Flag(help="pairs of a batch, 2 to 6; of the toy and the angle always 2")] = 2


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
    progress = Console(stderr=True, highlight=False)
    parts = PARTS if options.part == "all" else (options.part,)
    done = study(parts, extent, partial(print_line, progress))
    replace_text(options.output / NUMBERS, json.dumps(numbers(done), indent=1, allow_nan=False) + "\n")
    replace_text(options.output / PAGE, fitting(theory_page(done)))
    for line in _lines(done):
        print(line)
    print(options.output / PAGE)
    return 0


def _lines(done: Study) -> list[str]:
    """What came out, in a screenful."""
    from fullbatch.cli.printing import columns
    from fullbatch.theory.study import hitting_times

    lines: list[str] = []
    rows: list[tuple[str, ...]] = [("optimum", "batches", "reached", "distance")]
    for minimum in done.minima:
        reached, far = minimum.descent.reached_R, minimum.descent.distance_R
        met = f"{int((reached >= 0).sum())} of {len(reached)}"
        case = f"N {minimum.count} d {minimum.width}"
        rows.append((case, minimum.batches, met, f"{float(far.min()):.1e}..{float(far.max()):.1e}"))
    lines += [*columns(rows, left=2), ""] if done.minima else []
    for unproven in done.unproven:
        lines.append(
            f"N {unproven.count} d {unproven.width}: minimisers of full batch and all batches differ by "
            f"{unproven.distance:.2g}; mini-batch loss {unproven.all_losses[0]:.7f} and {unproven.all_losses[1]:.7f}"
        )
    if done.races:
        names = list(dict.fromkeys(raced.method for raced in done.races))
        finals: dict[str, dict[str, str]] = {}
        for raced in done.races:
            unit = "epochs" if raced.reading.epochs else "steps"
            label = f"N {raced.count} d {raced.width}, {raced.reading.steps} {unit}"
            finals.setdefault(label, {})[raced.method] = f"{float(raced.race.final_R.mean()):.3f}"
        rows = [(label, *(of_case.get(name, "-") for name in names)) for label, of_case in finals.items()]
        lines += ["", *columns([("distance after the race", *names), *rows], left=1)]
    if done.walks:
        rows = [("steps to the square", "OSGD", "SGD", "all batches", "full batch")]
        for row in (row for walks in done.walks for row in hitting_times(walks)):
            times = (row[method] for method in ("ordered", "uniform", "all_batches", "full"))
            label = f"rate {row['rate']:g} eps {row['epsilon']:.3g} rho {row['rho']:g}"
            rows.append((label, *("never" if steps is None else str(steps) for steps in times)))
        lines += ["", *columns(rows, left=1)]
    if done.turn is not None:
        least, greatest = done.turn.ratios
        lines += ["", f"along one angle: full-batch over mini-batch loss goes from {least:.3f} to {greatest:.3f}"]
    return lines
