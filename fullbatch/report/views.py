"""Which models a page looks at the training pairs with, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence

from fullbatch.config.messages import plain
from fullbatch.finetuning.record import BASE, TUNED
from fullbatch.report.collect import RunData
from fullbatch.report.samples import Embedded, Eye
from fullbatch.report.similarity_view import MOST_PAIRS, View, view_of
from fullbatch.report.suspects import training_pool

MOST_RUNS = 6
_PAIRS_ON_CPU = 2_000  # a run, where there are several
UNUSABLE = (ValueError, OSError, RuntimeError, ImportError)


def shown_model(run: RunData) -> str | None:
    """Which of its two models a fine-tuning says to use; None for other runs, and before there is a result."""
    name = run.finetune.get("result")
    return str(name) if name in (BASE, TUNED) and (run.path / str(name)).is_dir() else None


def eye_of(run: RunData, name: str | None) -> Eye:
    """The model of this name of a fine-tuning; else that of the last checkpoint."""
    if name is None:
        return Eye.of_run(run.path)
    best = run.finetune.get("best_step")
    return Eye.of_export(run.path, name, best if name == TUNED and isinstance(best, int) else 0)


def views_of_run(run: RunData, shown: str | None, training: Embedded, most: int) -> tuple[list[View], list[str]]:
    """Of a fine-tuning base and tuned, of another run its one model; and why something is missing.

    ``training`` are pairs as the model ``shown`` embeds them.
    """
    views, gaps = [], []
    for name in (BASE, TUNED) if run.finetune else (None,):
        try:
            if name == shown:
                views.append(view_of(name or plain(run.name, 80), training))
            elif name is not None and (run.path / name).is_dir():
                views.append(view_of(name, eye_of(run, name).look(training.pool, most)))
        except UNUSABLE as error:
            gaps.append(f"The similarities of {name or run.name} are not shown, because {plain(error)}")
    return views, gaps


def views_of_runs(runs: Sequence[RunData], labels: Sequence[str], samples: int | None) -> tuple[list[View], list[str]]:
    """Side by side; where fine-tunings start from one base, it comes first."""
    if len(runs) > MOST_RUNS:
        return [], [f"Similarities on training pairs are shown for up to {MOST_RUNS} runs side by side."]
    wanted = [
        (run, label, TUNED if (run.path / TUNED).is_dir() else None) for run, label in zip(runs, labels, strict=True)
    ]
    bases = {str(run.finetune.get("model")) for run in runs if run.finetune}
    first = next((run for run in runs if run.finetune and (run.path / BASE).is_dir()), None)
    if first is not None and len(bases) == 1:
        wanted.insert(0, (first, BASE, BASE))
    views, gaps = [], []
    for run, label, name in wanted:
        try:
            eye = eye_of(run, name)
            most = samples or (MOST_PAIRS if eye.device.type == "cuda" else _PAIRS_ON_CPU)
            views.append(view_of(label, eye.look(training_pool(eye.config.data), most)))
        except UNUSABLE as error:
            gaps.append(f"{label}: similarities on training pairs are not shown, because {plain(error)}")
    return views, gaps
