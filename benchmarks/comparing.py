"""What the studies share: a stage of one is a plan of ``fullbatch compare`` or ``fullbatch search``, run to its end."""

from __future__ import annotations

import json
import shutil
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


KEPT = ("config.yaml", "outcome.json", "results.json", "hits.json", "purity.json", "batches/losses.jsonl")


def keep_runs(out: Path, target: Path, stages: Sequence[str], most: int = 20) -> None:
    """What is worth keeping of the runs that ended: enough for a later call to count them as done, and of their lines
    of training steps about ``most``."""
    target.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        for path in [*sorted((out / stage).glob("plan.yaml")), *sorted((out / stage).glob("comparison.*"))]:
            (target / stage).mkdir(exist_ok=True)
            shutil.copy(path, target / stage / path.name)
        for outcome in sorted((out / stage / "runs").glob("*/outcome.json")):
            run, kept = outcome.parent, target / stage / "runs" / outcome.parent.name
            for name in KEPT:
                if (run / name).is_file():
                    (kept / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(run / name, kept / name)
            if (run / "metrics.jsonl").is_file():  # one that died at its start has none
                lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
                (kept / "metrics.jsonl").write_text("".join(thinned(lines, most)))


def thinned(lines: Sequence[str], most: int = 20) -> list[str]:
    """All but lines of training steps, of which about so many stay, the last among them."""
    steps = [place for place, line in enumerate(lines) if "kind" not in json.loads(line)]
    dropped = {*steps} - {*steps[::-1][:: max(1, len(steps) // most)]}
    return [line for place, line in enumerate(lines) if place not in dropped]
