"""What the studies share: a stage of one is a plan of ``fullbatch compare``, run to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullbatch.cli import main as fullbatch


def compare(plan: Mapping[str, Any], out: Path, more: Sequence[str]) -> dict[str, Any]:
    """Its comparison.json; while runs have not ended, the study stops here.

    more   further flags of `fullbatch compare`
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{plan['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(plan), sort_keys=False))
    code = fullbatch(["compare", "--plan", str(path), "--comparisons", str(out), "--quiet", "--no-page", *more])
    if code not in (0, 1):  # 1: some runs failed; else it was refused or stopped, and has said why
        raise SystemExit(code)
    summary = out / str(plan["name"]) / "comparison.json"
    comparison: dict[str, Any] = json.loads(summary.read_text()) if summary.is_file() else {"runs": []}
    left = sum(run["status"] == "open" for run in comparison["runs"])
    if left or not comparison["runs"]:  # a run that failed is a result, one that has not ended is not
        raise SystemExit(f"{left or 'all'} runs of {plan['name']!r} have not ended: go on with the same command")
    return comparison
