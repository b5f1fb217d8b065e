"""Tasks by name: what is measured, on which source, and what chance would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.data.sources import open_source
from fullbatch.evaluation.embed import Embedder, Pairs
from fullbatch.evaluation.retrieval import recalls
from fullbatch.evaluation.zero_shot import accuracies, class_embeddings

EXAMPLES = 8

# What is measured after training on a built-in set, unless the user says otherwise.
BUILTIN_TASKS = {
    "emoji": (
        "retrieval:emoji?split=new_style",
        "retrieval:emoji?split=new_concept",
        "zero_shot:emoji?split=new_style&captions=group",
        "zero_shot:emoji?split=new_style&captions=subgroup",
        "zero_shot:emoji?split=new_concept&captions=group",
        "zero_shot:emoji?split=new_concept&captions=subgroup",
    )
}


@dataclass(frozen=True)
class Result:
    """task      as it was asked for
    metrics   name -> share (or rank)
    main      the metric to look at
    chance    what guessing gives for it
    size      images (and captions) in the gallery, or classes
    examples  of retrieval: an image's caption, its rank, and the captions nearest to the image
    """

    task: str
    metrics: dict[str, float]
    main: str
    chance: float
    size: int
    examples: tuple[dict[str, Any], ...] = ()

    @property
    def value(self) -> float:
        return self.metrics[self.main]

    def as_dict(self) -> dict[str, Any]:
        named = {"task": self.task, "main": self.main, "chance": self.chance, "size": self.size, **self.metrics}
        return {**named, "examples": self.examples}


def tasks_of(config: RunConfig) -> tuple[str, ...]:
    if config.evaluation.evaluate is not None:
        return config.evaluation.evaluate
    trained_on = {source.path for source in config.data.sources}
    return tuple(task for name, tasks in BUILTIN_TASKS.items() if name in trained_on for task in tasks)


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Say now, not after hours of training, that a source is not there, or empty."""
    for task in tasks:
        if len(open_source(Source.parse(task.partition(":")[2]))) == 0:
            raise ValueError(f"The task {task!r} has no sample.")


def run_task(task: str, embedder: Embedder, templates: tuple[str, ...]) -> Result:
    kind, _, text = task.partition(":")
    source = Source.parse(text)
    return _retrieval(task, source, embedder) if kind == "retrieval" else _zero_shot(task, source, embedder, templates)


def _retrieval(task: str, source: Source, embedder: Embedder) -> Result:
    pairs = embedder.pairs(source)
    numbers = {caption: number for number, caption in enumerate(dict.fromkeys(pairs.captions))}
    groups = torch.tensor([numbers[caption] for caption in pairs.captions])
    size = len(groups)
    chance = groups.bincount()[groups].double().mean().item() / size
    found = recalls(pairs.image_ND, pairs.text_ND, groups)
    return Result(task, found, "mean_r1", chance, size, _examples(pairs))


def _examples(pairs: Pairs) -> tuple[dict[str, Any], ...]:
    """For a few images, evenly spread: the caption, its rank, and the three nearest captions."""
    captions = pairs.captions
    shown = torch.arange(0, len(captions), max(1, len(captions) // EXAMPLES))[:EXAMPLES]
    sim_EN = pairs.image_ND[shown] @ pairs.text_ND.T
    nearest = sim_EN.topk(min(3, len(captions)), dim=1).indices.tolist()
    ranks = (sim_EN > sim_EN.gather(1, shown[:, None])).sum(dim=1) + 1
    return tuple(
        {"caption": captions[image], "rank": rank, "nearest": [captions[text] for text in texts]}
        for image, rank, texts in zip(shown.tolist(), ranks.tolist(), nearest, strict=True)
    )


def _zero_shot(task: str, source: Source, embedder: Embedder, templates: tuple[str, ...]) -> Result:
    pairs = embedder.pairs(source)
    classes = sorted(set(pairs.captions))
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers[name] for name in pairs.captions])
    classes_CD = class_embeddings(embedder, classes, templates)
    return Result(task, accuracies(pairs.image_ND, classes_CD, labels), "accuracy", 1.0 / len(classes), len(classes))
