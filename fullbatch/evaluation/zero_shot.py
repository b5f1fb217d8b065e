"""Zero-shot classification: an image goes to the class whose prompts, embedded and averaged, are nearest."""

# N: images   C: classes   P: prompts a class   D: width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.metrics import mean_per_class, share
from fullbatch.evaluation.prompts import prompted
from fullbatch.evaluation.retrieval import Gallery

FEWEST_FOR_TOP5 = 5  # classes
_ENTRIES = 1 << 24  # similarities held at a time


def class_embeddings(embedder: Embedder, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """The mean of each class's unit prompt embeddings, made unit again (Radford et al. 2021)."""
    prompts = [prompted(template, name) for name in classes for template in templates]
    return mean_of_prompts(embedder.captions(prompts).view(len(classes), len(templates), -1))


def mean_of_prompts(prompts_CPD: Tensor) -> Tensor:
    return normalize(prompts_CPD.mean(dim=1), dim=-1)


@dataclass(frozen=True)
class Guesses:
    """guess_N   the nearest class; of classes that are equally near the first
    place_N   how many classes come before the right one, by the same rule
    """

    guess_N: Tensor
    place_N: Tensor

    @property
    def hit_N(self) -> Tensor:
        return self.place_N == 0


def guesses(image_ND: Tensor, classes_CD: Tensor, labels_N: Tensor) -> Guesses:
    rows = max(1, _ENTRIES // len(classes_CD))
    numbers_C, gallery = torch.arange(len(classes_CD)), Gallery.of(classes_CD)
    found, places = [], []
    for some_ND, label_N in zip(torch.split(image_ND, rows), torch.split(labels_N, rows), strict=True):
        sim_NC = gallery.similarities(some_ND)
        own_N1 = sim_NC.gather(1, label_N[:, None])
        before_NC = (sim_NC > own_N1) | ((sim_NC == own_N1) & (numbers_C < label_N[:, None]))
        found.append(sim_NC.argmax(dim=1))
        places.append(before_NC.sum(dim=1))
    return Guesses(torch.cat(found), torch.cat(places))


def accuracies(guessed: Guesses, labels_N: Tensor, classes: int) -> dict[str, float]:
    """Top-1, top-5 where there are so many classes, and the mean over classes of top-1."""
    results = {"accuracy": share(guessed.hit_N)}
    if classes >= FEWEST_FOR_TOP5:
        results["accuracy_top5"] = share(guessed.place_N < 5)
    return results | {"mean_per_class": mean_per_class(guessed.hit_N, labels_N)}
