"""What the studies share: a stage of one is a plan of ``fullbatch compare`` or ``fullbatch search``, run to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullbatch.cli import main as fullbatch

BEGAN = time.monotonic()  # --stop-after counts from here, however many plans a stage runs one after the other


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
    summary = out / str(plan["name"]) / ("comparison.json" if command == "compare" else "search.json")
    before = summary.stat().st_mtime_ns if summary.is_file() else None
    code = fullbatch([command, "--plan", str(path), "--quiet", "--no-page", *_until(flags)])
    written = summary.is_file() and summary.stat().st_mtime_ns != before
    if code and not (command == "compare" and code == 1 and written):  # which says that some runs failed
        raise SystemExit(code)
    return _read(summary)


def _until(flags: Sequence[str]) -> list[str]:
    """With what is left of the minutes after which no run is started."""
    flags = list(flags)
    if "--stop-after" in flags:
        place = flags.index("--stop-after") + 1
        flags[place] = str(max(float(flags[place]) - (time.monotonic() - BEGAN) / 60.0, 1e-6))
    return flags


def _read(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
