"""What a run cost, stage by stage, as TuneCLIP's Tables 16 to 18 count it."""

from __future__ import annotations

from collections.abc import Sequence

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Section, table
from fullbatch.report.collect import Record, RunData, records_of
from fullbatch.report.markup import Child, Html
from fullbatch.report.wording import NOTHING, counted, duration, is_number

_WORDS = {"recovery": "recovery (frozen weights)"}


def cost_section(runs: Sequence[RunData], labels: Sequence[str] = ()) -> Section | None:
    """``labels`` name the runs where there are several; None where no run knows its cost."""
    known = [(run.cost, labels[place] if labels else "") for place, run in enumerate(runs) if _stages(run.cost)]
    if not known:
        return None
    lead = "Device-hours are wall-clock hours by the number of devices."
    return Section("cost", "Cost by stage", _table(known, bool(labels)), lead)


def _stages(cost: Record) -> list[Record]:
    return [stage for stage in records_of(cost, "stages") if is_number(stage.get("seconds"))]


def _table(known: Sequence[tuple[Record, str]], several: bool) -> Html:
    rows: list[list[Child]] = []
    for cost, label in known:
        stages = _stages(cost)
        for stage in stages:
            name = str(stage.get("stage"))
            rows.append([_WORDS.get(name, plain(name, 60)), *_numbers(stage)])
            if several:
                rows[-1].insert(0, label)
        if len(stages) > 1:
            rows.append([_together(cost), *_numbers(_sum(stages))])
            if several:
                rows[-1].insert(0, label)
    head = ["stage", "steps", "pairs", "time", "device-hours"]
    return table(["run", *head] if several else head, rows, "numbers")


def _sum(stages: Sequence[Record]) -> Record:
    """Evaluations have no steps of their own, so they add none."""
    names = ("steps", "samples", "seconds", "device_hours")
    return {name: sum(stage[name] for stage in stages if is_number(stage.get(name))) for name in names}


def _together(cost: Record) -> str:
    devices = cost.get("devices")
    return f"together, {counted(devices, 'device')}" if isinstance(devices, int) else "together"


def _numbers(stage: Record) -> list[Child]:
    hours = stage.get("device_hours")
    return [
        *(f"{int(stage[name]):,}" if is_number(stage.get(name)) else NOTHING for name in ("steps", "samples")),
        duration(float(stage["seconds"])),
        f"{float(hours):,.3g}" if hours is not None and is_number(hours) else NOTHING,
    ]
