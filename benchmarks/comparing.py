"""What the studies share: a stage of one is a plan of ``fullbatch compare`` or ``fullbatch search``, run to its end."""

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
    comparison = _run("compare", plan, out, ["--comparisons", str(out), *more]) or {"runs": []}
    left = sum(run["status"] == "open" for run in comparison["runs"])
    if left or not comparison["runs"]:  # a run that failed is a result, one that has not ended is not
        raise SystemExit(f"{left or 'all'} runs of {plan['name']!r} have not ended: go on with the same command")
    return comparison


def search(plan: Mapping[str, Any], out: Path, more: Sequence[str]) -> dict[str, Any]:
    """Its search.json, likewise."""
    _run("search", plan, out, ["--searches", str(out), *more])
    return ended_search(out, str(plan["name"]))


def ended_search(out: Path, name: str) -> dict[str, Any]:
    """The summary of a search that has come to its end."""
    summary = _read(out / name / "search.json")
    left = summary["cost"]["trials_owed"] - summary["cost"]["trials_done"] if summary else "all"
    if left:
        raise SystemExit(f"{left} trials of {name!r} have not ended: go on with its command")
    return summary


def _run(command: str, plan: Mapping[str, Any], out: Path, flags: Sequence[str]) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{plan['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(plan), sort_keys=False))
    code = fullbatch([command, "--plan", str(path), "--quiet", "--no-page", *flags])
    if code not in ((0, 1) if command == "compare" else (0,)):  # a comparison's 1: some runs failed; else why is said
        raise SystemExit(code)
    return _read(out / str(plan["name"]) / ("comparison.json" if command == "compare" else "search.json"))


def _read(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
