"""``fullbatch audit``: how wrong were the normalizers of a run?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from fullbatch.audit import Options

if TYPE_CHECKING:
    from fullbatch.audit.finished_run import Audit


@dataclass(frozen=True, kw_only=True)
class _Audit(Options):
    """How wrong were the normalizers of a run?  Exact ones over the training set against what the method believed.

    Writes audit.json into the run folder; docs/how-to/audit.md says what the numbers mean.
    """

    run: tyro.conf.Positional[Path]  # a run folder, or one of its checkpoints


def audit(arguments: list[str]) -> int:
    options = tyro.cli(_Audit, args=arguments, prog="fullbatch audit")
    from fullbatch.audit.finished_run import audit_run
    from fullbatch.cli.printing import print_lines

    first = int(os.environ.get("RANK", "0")) == 0
    result = audit_run(options.run, options, lambda text: print_lines([text] if first else []))
    if first:
        head = ("", "mean squared error of the log-normalizers, and bias (estimate - exact)")
        print_lines((*head, *_lines(result), "", *_notes(result)))
    return 0


def _lines(audit: Audit) -> list[str]:
    from fullbatch.cli.printing import columns

    heads = ("step", "samples seen", "τ", "normalizer", "bias", "image", "text", "in use", "bias", "one batch", "bias")
    rows: list[tuple[str, ...]] = [(*heads, "")]

    def add(step: str, seen: str, tau: float, errors: Mapping[str, float | None], directions: tuple[str, str]) -> None:
        normalizer, in_use, batch = (
            (_number(errors[f"{name}_error"]), _number(errors[f"{name}_bias"], "+.3f"))
            for name in ("normalizer", "in_use", "batch")
        )
        rows.append((step, seen, f"{tau:.4f}", *normalizer, *directions, *in_use, *batch, ""))

    for audited in audit.checkpoints:
        numbers = audited.numbers
        directions = _number(numbers.image.normalizer_error), _number(numbers.text.normalizer_error)
        add(f"{audited.step:,}", f"{audited.samples_seen:,}", numbers.tau, vars(numbers.total), directions)
    if len(audit.checkpoints) > 1:
        mean = audit.mean()
        add("mean", "", mean["tau"], mean, ("", ""))
    return columns(rows, left=0)


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else f"{value:{form}}"


def _notes(audit: Audit) -> list[str]:
    last = audit.checkpoints[-1].numbers
    notes = []
    if not audit.has_normalizer:
        notes.append(
            f"{audit.method} has no normalizer: there is nothing to be wrong. What one batch would say at its "
            "temperature is given for comparison."
        )
    unseen = [audited.numbers.unseen for audited in audit.checkpoints]
    if any(unseen):
        counts = ", ".join(f"{count:,}" for count in unseen)
        notes.append(
            f"Anchors the moving average had not met yet, by checkpoint: {counts} of {last.anchors:,}. They are left "
            "out of 'normalizer' and its directions."
        )
    worst = max(audited.numbers.unreadable for audited in audit.checkpoints)
    if worst > 0.0:
        notes.append(
            f"In up to {worst:.1%} of the estimates the constant that the method adds hides what it believes; see "
            "'unreadable' in docs/how-to/audit.md."
        )
    notes.append(
        "Errors at different τ do not compare; the error of one batch on the same checkpoint is the yardstick."
    )
    notes.append(f"written: {audit.folder / 'audit.json'}")
    return notes
