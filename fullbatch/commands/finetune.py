"""``fullbatch finetune``: measure a pretrained model, tune it, and say whether it became better."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from fullbatch.commands.train import Command, train_config
from fullbatch.results import print_cost
from fullbatch.training.display import print_line

if TYPE_CHECKING:
    from fullbatch.finetuning.finetune import Finetuned
    from fullbatch.finetuning.record import Record

ABOUT = """Fine-tune a pretrained CLIP-style model (TuneCLIP), and keep the base where tuning did harm.

--model takes a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip name with
--pretrained. Also: --recipe NAME (tuneclip), --config FILE.yaml, --resume RUN_FOLDER;
--metric "mean" or "TASK METRIC" decides which epoch is best (mean: of the tasks' main metrics);
--tolerance X lets a task fall by at most X, a share (0.01), or the base is kept."""
FINETUNE = Command("finetune", ABOUT, "tuneclip")
_BRING_DATA = ("--data", "--config", "--resume")  # a recipe names the paper's, which nobody has


def finetune(arguments: list[str]) -> int:
    own = argparse.ArgumentParser(prog="fullbatch finetune", add_help=False, allow_abbrev=False)
    own.add_argument("--metric")
    own.add_argument("--tolerance")
    chosen, rest = own.parse_known_args(arguments)
    if not {"--help", "-h"} & set(rest) and not any(word.split("=", 1)[0] in _BRING_DATA for word in rest):
        raise ValueError("--data says what to fine-tune on: tar shards, a CSV file, a folder, ...; see docs/data.md.")
    config, resume = train_config(rest, command=FINETUNE)
    from fullbatch.finetuning import finetune as tuning

    metric = (
        None if chosen.metric is None else deciding(chosen.metric, tuning.measuring(config).evaluation.evaluate or ())
    )
    tuned = tuning.finetune(config, metric, number_of(chosen.tolerance), resume)
    if int(os.environ.get("RANK", "0")) == 0:
        print_finetuned(tuned, Console(highlight=False))
    return 0


def deciding(metric: str, tasks: Sequence[str]) -> str:
    """ "mean", or the "TASK METRIC" that is meant; a name that no task gives is refused before anything is measured."""
    from fullbatch.evaluation.metric_names import metric_named, more_is_better

    if metric == "mean":
        return metric
    named = metric_named(metric, tasks)
    if not more_is_better(named):
        raise ValueError(f"--metric {metric!r}: of a rank less is better; take one of the shares, such as mean_r1.")
    return named


def number_of(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ValueError(f"--tolerance must be a share such as 0.01, got {text!r}.") from None


def print_finetuned(tuned: Finetuned, console: Console) -> None:
    """Epoch by epoch, task by task, what it cost, and what to do now."""

    def say(line: str = "") -> None:
        print_line(console, line)

    run, record = tuned.trained.folder, tuned.record
    for line in (*epoch_lines(record), "", *change_lines(record)):
        say(line)
    print_cost(tuned.trained.results.get("cost", {}), console)
    say()
    best = record.best
    if tuned.verdict.outcome == "tuned":
        assert best is not None and best.score is not None and record.base is not None
        gain = best.score - (record.base.score or 0.0)
        say(f"The tuned model is better by {100 * gain:.2f} points ({record.metric}, epoch {best.epoch:g}).")
        if fell := sum(each.change < 0.0 for each in record.changes):
            say(f"{fell} of {len(record.changes)} numbers fell, none by more than the tolerance, {record.tolerance:g}.")
        say(f"Take {tuned.model}.")
    else:
        say(f"THE BASE IS KEPT: {why_kept(record)}.")
        for reason in tuned.verdict.reasons:
            say(f"  {reason}")
        say(f"Take {tuned.model}, which is the model as it was.")
        if best is not None:
            say("Weights between the two often keep what was learned and lose less; measure them with")
            say(f"  fullbatch interpolate {run}")
    say("Measure it on other tasks, or write it for open_clip or transformers, with")
    say(f"  fullbatch evaluate {tuned.model} --tasks TASK ...")
    say(f"  fullbatch export {tuned.model} FOLDER --format open_clip")
    say()
    say(f"run folder: {run}")


def why_kept(record: Record) -> str:
    base, best = (None if each is None else each.score for each in (record.base, record.best))
    if base is None or best is None:
        return "the tuned model could not be compared with it"
    if best < base or any(change.regressed for change in record.changes):
        return "the tuned model would leave you worse off"
    return "the tuned model is no better"


def epoch_lines(record: Record) -> list[str]:
    lines = [f"epoch      score ({record.metric})"]
    for each in record.epochs:
        score = "none" if each.score is None else f"{each.score:.2%}"
        mark = "  best epoch" if each.step == record.best_step else "  base" if each.epoch == 0 else ""
        lines.append(f"{each.epoch:>5.3g}  {score:>9}{mark}")
    return lines


def change_lines(record: Record) -> list[str]:
    """Plain columns: names are never cut, however narrow the terminal."""
    changes = record.changes
    if not changes:
        return []
    rows: list[tuple[str, ...]] = [("task", "metric", "base", "tuned", "change", "chance", "")]
    for each in changes:
        chance = "" if each.chance is None else f"{each.chance:.2%}"
        fell = "REGRESSED" if each.regressed else ""
        numbers = (f"{each.base:.2%}", f"{each.tuned:.2%}", f"{100 * each.change:+.2f}")
        rows.append((each.task, each.metric, *numbers, chance, fell))
    return columns(rows, left=2)


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The first ``left`` columns begin together, the others end together, but for the last, a remark."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    last = len(widths) - 1
    aligned = ["<" if place < left or place == last else ">" for place in range(len(widths))]
    cells = [[f"{text:{side}{width}}" for text, side, width in zip(row, aligned, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
