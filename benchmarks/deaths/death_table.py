"""The trials of one campaign or several as a table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

TRIALS = "trials.jsonl"
# how a complaint begins -> what its column is called
WRONG = {
    "divergent": "diverged",
    "lost": "lost",
    "traceback": "tracebacks",
    "would not go on": "would not go on",
    "hung": "hung",
    "crashed": "crashed",
    "ended without": "unclear",
    "names no file": "unclear",
}


def table(trials: list[Path]) -> str:
    """Deaths by case and fault, what went wrong by case, and how long a save holds up training."""
    lines = [json.loads(line) for path in trials for line in path.read_text().splitlines()]
    deaths, wrong, count = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[str]()
    for line in lines:
        deaths[line["case"], line["fault"]] += line["deaths"]
        count[line["case"]] += 1
        for complaint in line["wrong"]:
            wrong[line["case"], next(WRONG[begin] for begin in WRONG if complaint.startswith(begin))] += 1
    faults = sorted({fault for _, fault in deaths})
    columns = list(dict.fromkeys(WRONG.values()))
    rows = [["case", *faults, "deaths", "trials", *columns], ["---"] * (len(faults) + len(columns) + 3)]
    for case in dict.fromkeys(line["case"] for line in lines):
        own = [deaths[case, fault] for fault in faults]
        rows.append([case, *map(str, [*own, sum(own), count[case], *(wrong[case, column] for column in columns)])])
    sums = [sum(deaths[case, fault] for case in count) for fault in faults]
    ends = [sum(wrong[case, column] for case in count) for column in columns]
    rows.append(["all", *map(str, [*sums, sum(sums), sum(count.values()), *ends])])
    blocked = [moment for line in lines for moment in line["blocked"]]
    said = ""
    if blocked:
        middle = statistics.median(blocked)
        said = f"A save held up training for {middle:.1f} ms (median of {len(blocked):,}), at most {max(blocked):.0f}."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{said}\n"
