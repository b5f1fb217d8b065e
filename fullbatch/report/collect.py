"""Reads run, comparison and search folders.  Nothing here needs the model or the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, read_yaml, to_dict
from fullbatch.data.durable import read_lines
from fullbatch.finetuning import interpolation, record
from fullbatch.report.wording import is_number
from fullbatch.training.run_folder import EVALUATION, LOSSES, Folder
from fullbatch.training.stages import RECOVERY, Stages

COMPARISON = "comparison.json"
SEARCH = "search.json"
AUDIT = "audit"  # the kind of a line of metrics.jsonl
PROBED, AUDITED = "probe during training", "fullbatch audit"  # on a part of the data set, and on the whole of it
_MOST_LOG_BYTES = 4 << 20
Fields = Mapping[str, Any]  # an object of a JSON file


@dataclass(frozen=True)
class MainResult:
    """Of one task, as results.json has it; ``size`` is among how many."""

    value: object
    chance: object
    size: object


@dataclass(frozen=True)
class RunData:
    path: Path
    name: str
    settings: Fields  # the whole config, defaults filled in
    training: Sequence[Fields]  # the lines of metrics.jsonl about steps; evaluations and probes are the others
    evaluations: Sequence[Fields]
    probes: Sequence[Fields]  # normalizer errors on a part of the data set, measured during training
    audits: Sequence[Fields]  # those on the whole of it, by checkpoint: audit.json
    results: Sequence[Fields]  # of the last evaluation, and what `fullbatch evaluate` found since
    results_step: int | None
    averages: Sequence[tuple[str, str]]  # over the tasks of a suite, as text
    unmeasured: Sequence[str]  # tasks without a number, and why
    environment: Fields
    warnings: Sequence[str]  # lines of log.txt
    gaps: Sequence[str]  # what is missing or cannot be read, to be said on the page
    finetune: Fields  # finetune.json as it stands, of a run that `fullbatch finetune` made; else empty
    interpolation: Fields  # interpolation.json likewise
    cost: Fields  # by stage, as finetune.json or results.json has it
    batch_losses: Sequence[Fields]  # lines of batches/losses.jsonl, of a run that selects its batches

    def setting(self, group: str, name: str) -> Any:
        return self.settings[group].get(name)

    @property
    def method(self) -> str:
        return str(self.setting("objective", "method"))

    @property
    def batch_size(self) -> int:
        return int(self.setting("training", "batch_size"))

    @property
    def last(self) -> Fields:
        return self.training[-1] if self.training else {}

    @property
    def steps(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def pairs_seen(self) -> int:
        return self.clock[-1][2] if self.clock else 0

    @property
    def seconds(self) -> float | None:
        """Of training so far."""
        return self.clock[-1][1] if self.clock else None

    @property
    def recovery_steps(self) -> int:
        """How many of the steps so far had frozen weights."""
        return max((line["step"] for line in self.training if line.get("stage") == RECOVERY), default=0)

    @property
    def planned_steps(self) -> int | None:
        """How many steps the config asks for, as far as the log tells: of the recovery and of training."""
        epoch = self.last.get("epoch")
        per_epoch = round(self.pairs_seen / self.batch_size / float(epoch)) if epoch else None
        try:
            config = from_dict(RunConfig, self.settings)
        except ValueError:  # settings of another version
            return None
        if per_epoch is None and (config.training.samples is None or config.recovery.recovery_epochs):
            return None
        return Stages.of(config, per_epoch or 1).total

    @cached_property
    def clock(self) -> list[tuple[int, float, int]]:
        """Steps, seconds of training and pairs so far; seconds from the throughput where the run did not write them.

        A step of the recovery may see more pairs than a batch.
        """
        clock, seconds, before = [], 0.0, 0
        for line in self.training:
            step, pairs, speed = line["step"], line.get("samples"), line.get("samples_per_second")
            if is_number(line.get("seconds")):
                seconds = float(line["seconds"])
            elif is_number(speed) and speed > 0:
                seconds += (step - before) * self.batch_size / speed
            before = step
            clock.append((step, seconds, int(pairs) if is_number(pairs) else step * self.batch_size))
        return clock

    def main_results(self) -> dict[str, MainResult]:
        """Those of the last evaluation, by "TASK METRIC"."""
        return {
            f"{result.get('task')} {main}": MainResult(result.get(main), result.get("chance"), result.get("size"))
            for result in self.results
            for main in [str(result.get("main", ""))]
        }

    def last_normalizer_error(self) -> str:
        """That of the last audited checkpoint, or the last probe's, and which of the two: they do not compare."""
        for lines, source in ((self.audits, AUDITED), (self.probes, PROBED)):
            known = [line for line in lines if is_number(line.get("normalizer_error"))]
            if known:
                return f"{known[-1]['normalizer_error']:.3g} ({source}, step {known[-1]['step']:,})"
        return ""


def read_run(path: Path) -> RunData:
    folder = Folder(path)
    if not folder.config.is_file():
        raise ValueError(_not_a_run(path))
    gaps: list[str] = []
    given = read_yaml(folder.config)
    try:
        folder.config_values()
    except ValueError as error:
        gaps.append(f"{error} What it lacks is shown as the default.")
    default = to_dict(RunConfig())
    settings = merged(default, {key: value for key, value in given.items() if isinstance(value, Mapping)})
    try:
        int(settings["training"]["batch_size"]), str(settings["objective"]["method"])
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"{folder.config} holds no usable batch_size and method; is it a run's config?") from None
    lines = read_lines(folder.metrics) if folder.metrics.is_file() else []
    if not lines:
        gaps.append(f"There are no curves: {folder.metrics.name} holds no line yet.")
    audits = records_of(_read_json(path / "audit.json", gaps), "checkpoints")
    finetune = _read_json(path / record.FILE, gaps)
    losses = folder.batches / LOSSES

    def of_kind(kind: str | None) -> list[Fields]:
        return _in_order([line for line in lines if line.get("kind") == kind])

    return RunData(
        path=path,
        name=path.resolve().name,
        settings=settings,
        training=of_kind(None),
        evaluations=of_kind(EVALUATION),
        probes=of_kind(AUDIT),
        audits=_in_order([line for line in audits if is_number(line.get("step"))]),
        **_results(path, gaps, fields_of(finetune, "cost")),
        environment=_read_json(path / "environment.json", gaps),
        warnings=_warnings(folder.log),
        gaps=gaps,
        finetune=finetune,
        interpolation=_read_json(path / interpolation.FILE, gaps),
        batch_losses=_in_order(read_lines(losses)) if losses.is_file() else (),
    )


def _results(path: Path, gaps: list[str], cost: Fields) -> dict[str, Any]:
    """What the run measured itself, then what `fullbatch evaluate` wrote of the same step or a later one, unless that
    is of weights beside the average, which the run measures."""
    own, later = (_read_json(path / name, gaps) for name in ("results.json", "evaluation.json"))
    is_other = _step(later) < _step(own) or later.get("average") is False
    files = [own] if is_other else [own, later]

    def by(name: str, key: str) -> dict[str, Fields]:
        return {str(record.get(name)): record for file in files for record in records_of(file, key)}

    results = by("task", "results")
    if not results:
        gaps.append("There are no results: the run has not been evaluated (see --evaluate of fullbatch train).")
    return {
        "results": list(results.values()),
        "cost": cost or fields_of(own, "cost"),
        "results_step": max((file["step"] for file in files if isinstance(file.get("step"), int)), default=None),
        "averages": [(name, str(average.get("text"))) for name, average in by("name", "averages").items()],
        "unmeasured": [
            f"{task} is {gap.get('kind')}: {gap.get('reason')}"
            for task, gap in by("task", "gaps").items()
            if task not in results
        ],
    }


def _step(file: Fields) -> float:
    step = file.get("step")
    return float(step) if is_number(step) else 0.0


def fields_of(file: Fields, key: str) -> Fields:
    """An object in a JSON file; empty if it is of another kind."""
    value = file.get(key)
    return value if isinstance(value, Mapping) else {}


def records_of(file: Fields, key: str) -> list[Fields]:
    """The objects of a list in a JSON file; what is of another kind is left out."""
    rows = file.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def numbers_of(file: Fields, key: str) -> list[float]:
    """The numbers of a list in a JSON file; what is of another kind is left out."""
    values = file.get(key)
    return [value for value in values if is_number(value)] if isinstance(values, list) else []


def _in_order(lines: Sequence[Fields]) -> list[Fields]:
    """One line a step, the later one where there are two."""
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def _read_json(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        gaps.append(f"{path.name} cannot be read: {error}.")
        return {}
    return content if isinstance(content, dict) else {}


def _warnings(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        text = file.read(_MOST_LOG_BYTES).decode("utf-8", errors="replace")
    return [line for line in text.splitlines() if " WARNING " in line or " ERROR " in line]


def _not_a_run(path: Path) -> str:
    if not path.exists():
        return f"There is no folder {path}."
    inside = sorted(entry.parent.name for entry in path.glob("*/config.yaml")) if path.is_dir() else []
    hint = f"; it holds run folders, so name one, as {path / inside[-1]}" if inside else ""
    return (
        f"{path} is neither a run folder (no config.yaml in it) nor a comparison (no {COMPARISON}) nor a search (no "
        f"{SEARCH}){hint}."
    )


def newest_run(root: Path) -> Path:
    runs = [path.parent for path in root.glob("*/config.yaml")]
    if not runs:
        raise ValueError(f"There is no run in {root}; train one with `fullbatch train`, or name a run folder.")

    def last_written(run: Path) -> float:
        return max(path.stat().st_mtime for path in (run / "config.yaml", run / "metrics.jsonl") if path.is_file())

    return max(runs, key=last_written)


@dataclass(frozen=True)
class SummaryFile:
    """What a comparison or a search wrote: comparison.json or search.json as it stands."""

    path: Path
    content: Fields
    runs: Mapping[str, RunData]  # the run folders of a comparison that are there, by their names

    @property
    def name(self) -> str:
        return str(self.content.get("name") or self.path.resolve().name)


def read_summary(path: Path, name: str) -> SummaryFile:
    """Of a folder, the file of this name."""
    key, remedy = {
        COMPARISON: ("runs", "run `fullbatch compare` again to write it anew"),
        SEARCH: ("phases", f"`fullbatch search --resume {path}` writes it anew"),
    }[name]
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / name} cannot be read: {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise ValueError(f"{path / name} holds no list of {key}; {remedy}.")
    runs = {}
    for row in records_of(content, "runs"):
        run, written = str(row.get("name", "")), row.get("folder")
        places = [path / "runs" / run]  # also when the comparison has been moved as a whole
        if isinstance(written, str):
            places += [path / written, Path(written)]
        folder = next((place for place in places if run and (place / "config.yaml").is_file()), None)
        if folder is not None:
            runs[run] = read_run(folder)
    return SummaryFile(path, content, runs)
