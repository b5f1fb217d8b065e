"""``fullbatch audit``: how wrong were the normalizers of a run?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from fullbatch.audit import Audit


@dataclass(frozen=True)
class _Audit:
    """How wrong were the normalizers of a run?  Exact ones over the training set against what the method believed.

    Writes audit.json into the run folder; docs/normalizer.md says what the numbers mean.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a run folder, or one of its checkpoints")]
    checkpoint: Annotated[
        str | None, tyro.conf.arg(help="only this checkpoint: its step or folder; else all that are kept")
    ] = None
    anchors: Annotated[int, tyro.conf.arg(help="random samples whose normalizers are compared")] = 10_000
    seed: Annotated[int, tyro.conf.arg(help="of the anchors and of the random batches")] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, tyro.conf.arg(help="of the towers; else that of the training")
    ] = None
    data: Annotated[tuple[str, ...], tyro.conf.arg(help="where the training data lies now, if it was moved")] = ()
    workers: Annotated[int | None, tyro.conf.arg(help="processes that read images; else as in training")] = None
    batch_losses: Annotated[
        bool, tyro.conf.arg(help="also the losses of spectral batches beside uniform ones; the run's page draws them")
    ] = False


def audit(arguments: list[str]) -> int:
    options = tyro.cli(_Audit, args=arguments, prog="fullbatch audit")
    from rich.console import Console

    from fullbatch.audit import Options, audit_run
    from fullbatch.training.display import print_line

    first = int(os.environ.get("RANK", "0")) == 0
    console = Console(highlight=False)
    chosen = {name: value for name, value in vars(options).items() if name != "run"}
    found = audit_run(options.run, Options(**chosen), partial(print_line, console) if first else lambda text: None)
    if first:
        console.print("\nmean squared error of the log-normalizers, and bias (estimate - exact)")
        for line in (*_lines(found), "", *_notes(found)):
            print_line(console, line)
    return 0


def _lines(audit: Audit) -> list[str]:
    """Plain columns, so that no number is cut, however narrow the terminal."""
    heads = ("step", "samples seen", "τ", "normalizer", "bias", "image", "text", "in use", "bias", "one batch", "bias")
    rows: list[tuple[str, ...]] = [heads]
    for each in audit.checkpoints:
        numbers = each.numbers
        directions = (_error(numbers.image.normalizer_error), _error(numbers.text.normalizer_error))
        rows.append(_row(f"{each.step:,}", f"{each.samples_seen:,}", numbers.tau, vars(numbers.total), directions))
    if len(audit.checkpoints) > 1:
        mean = audit.mean()
        rows.append(_row("mean", "", mean["tau"], mean, ("", "")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(
    step: str, seen: str, tau: float, errors: Mapping[str, float | None], directions: tuple[str, str]
) -> tuple[str, ...]:
    normalizer, in_use, batch = (
        (_error(errors[f"{name}_error"]), _bias(errors[f"{name}_bias"])) for name in ("normalizer", "in_use", "batch")
    )
    return step, seen, f"{tau:.4f}", *normalizer, *directions, *in_use, *batch


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _bias(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _notes(audit: Audit) -> list[str]:
    last = audit.checkpoints[-1].numbers
    notes = []
    if not audit.has_normalizer:
        notes.append(
            f"{audit.method} has no normalizer: there is nothing to be wrong. What one batch would say at its "
            "temperature is given for comparison."
        )
    unseen = [each.numbers.unseen for each in audit.checkpoints]
    if any(unseen):
        counts = ", ".join(f"{count:,}" for count in unseen)
        notes.append(
            f"Anchors the moving average had not met yet, by checkpoint: {counts} of {last.anchors:,}. They are left "
            "out of 'normalizer' and its directions."
        )
    worst = max(each.numbers.unreadable for each in audit.checkpoints)
    if worst > 0.0:
        notes.append(
            f"In up to {worst:.1%} of the estimates the constant that the method adds hides what it believes; see "
            "'unreadable' in docs/normalizer.md."
        )
    notes.append(
        "Errors at different τ do not compare; the error of one batch on the same checkpoint is the yardstick."
    )
    notes.append(f"written: {audit.folder / 'audit.json'}")
    return notes
