"""``fullbatch audit``: how wrong were the normalizers of a run?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fullbatch.audit import Options


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
    audited = audit_run(options.run, options, lambda text: print_lines([text] if first else []))
    if first:
        head, written = "mean squared error of the log-normalizers, and bias (estimate - exact)", "audit.json"
        lines, notes = _lines(audited.results), _notes(audited.results)
        print_lines(("", head, *lines, "", *notes, f"written: {audited.folder / written}"))
    return 0


def _lines(results: Mapping[str, Any]) -> list[str]:
    from fullbatch.cli.printing import columns

    heads = ("step", "samples seen", "τ", "normalizer", "bias", "image", "text", "in use", "bias", "one batch", "bias")
    rows: list[tuple[str, ...]] = [(*heads, "")]
    audits = results["checkpoints"]
    for audited in (*audits, results["mean"]) if len(audits) > 1 else audits:
        normalizer, in_use, batch = (
            (_number(audited[f"{name}_error"]), _number(audited[f"{name}_bias"], "+.3f"))
            for name in ("normalizer", "in_use", "batch")
        )
        place, directions = ("mean", ""), ["", ""]
        if "step" in audited:
            place = f"{audited['step']:,}", f"{audited['samples_seen']:,}"
            directions = [_number(errors["normalizer_error"]) for errors in audited["by_direction"].values()]
        rows.append((*place, f"{audited['tau']:.4f}", *normalizer, *directions, *in_use, *batch, ""))
    return columns(rows, left=0)


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else f"{value:{form}}"


def _notes(results: Mapping[str, Any]) -> list[str]:
    notes, audits = [], results["checkpoints"]
    if not results["has_normalizer"]:
        notes.append(
            f"{results['method']} has no normalizer: there is nothing to be wrong. What one batch would say at its "
            "temperature is given for comparison."
        )
    unseen = [audited["unseen"] for audited in audits]
    if any(unseen):
        counts = ", ".join(f"{count:,}" for count in unseen)
        notes.append(
            f"Anchors the moving average had not met yet, by checkpoint: {counts} of {results['anchors']:,}. They are "
            "left out of 'normalizer' and its directions."
        )
    worst = max(audited["unreadable"] for audited in audits)
    if worst > 0.0:
        notes.append(
            f"In up to {worst:.1%} of the estimates the constant that the method adds hides what it believes; see "
            "'unreadable' in docs/how-to/audit.md."
        )
    notes.append(
        "Errors at different τ do not compare; the error of one batch on the same checkpoint is the yardstick."
    )
    return notes
