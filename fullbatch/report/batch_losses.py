"""How hard the selected batches were beside uniform ones, as in Figures 3 and 5 of "Mini-Batch Optimization of
Contrastive Loss" (Cho et al. 2023): from RUN/batches/losses.jsonl, a line a plan; and how hard spectral ones would have
been, whatever the run was trained on, from `fullbatch audit --batch-losses`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fullbatch.report.blocks import Section, chart_place
from fullbatch.report.collect import Record, RunData
from fullbatch.report.curves import Chart, Line
from fullbatch.report.markup import joined, node
from fullbatch.report.wording import is_number

MOST = 4  # periods shown, evenly spread; the last is one of them


def batch_loss_charts(run: RunData) -> list[Chart]:
    audited = [
        {**each["batch_losses"], "step": each["step"]}
        for each in run.audits
        if isinstance(each.get("batch_losses"), dict)
    ]
    charts = [
        _chart(line, name, label)
        for lines, name, label in ((run.batch_losses, "period", "selected"), (audited, "step", "spectral"))
        for line in spread_out([line for line in lines if _is_whole(line, name)], MOST)
    ]
    return charts


def batch_losses_section(run: RunData, charts: Sequence[Chart]) -> Section | None:
    if not charts:
        return None
    kind = run.setting("selection", "batches")
    lead = (
        f"Losses of the {kind} batches of some periods, and of as many uniform batches of the same samples, both by "
        "the embeddings that the plan was made from."
        if run.batch_losses
        else "Losses of an epoch's spectral batches, which the run was not trained on, and of its uniform ones, by "
        "the embeddings of a checkpoint."
    )
    lead += " Harder batches lie to the right."
    body = joined(node("div", [chart_place(chart) for chart in charts], class_="charts"))
    return Section("batch-losses", "How hard the batches were", body, lead)


def spread_out(lines: Sequence[Record], most: int) -> list[Record]:
    """
    >>> spread_out([{"period": n} for n in range(10)], 4)
    [{'period': 0}, {'period': 3}, {'period': 6}, {'period': 9}]
    """
    if len(lines) <= most:
        return list(lines)
    return [lines[round(place * (len(lines) - 1) / (most - 1))] for place in range(most)]


def _is_whole(line: Record, name: str) -> bool:
    counted = [line.get(name) for name in ("edges", "counts", "uniform_counts")]
    if not all(isinstance(values, list) and all(map(is_number, values)) for values in counted):
        return False
    edges, own, uniform = (len(values) for values in counted if isinstance(values, list))
    return edges - 1 == own == uniform > 0 and is_number(line.get(name))


def _chart(line: Record, name: str, label: str) -> Chart:
    edges = [float(edge) for edge in line["edges"]]
    middles = [0.5 * (left + right) for left, right in pairwise(edges)]

    def curve(label: str, color: int, counts: str) -> Line:
        total = max(1, sum(line[counts]))
        shares = [count / total for count in line[counts]]
        return Line(label, color, -1, middles, shares, [0.0] * len(shares), shares)

    lines = [curve(label, 0, "counts"), curve("uniform", 1, "uniform_counts")]
    number = int(line[name])
    note = "share of the batches in each bin"
    return Chart(
        f"batch-losses-{name}-{number}", f"{name} {number}", note, lines, "percent", x="loss of a batch", shape="area"
    )
