"""Zero-shot classification: an image goes to the class whose prompts, embedded and averaged, are nearest."""

# N: images   C: classes   D: width

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch.evaluation.embed import Embedder


def class_embeddings(embedder: Embedder, classes: list[str], templates: tuple[str, ...]) -> Tensor:
    """The mean of each class's unit prompt embeddings, made unit again (Radford et al. 2021)."""
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    embedded = embedder.captions(prompts).view(len(classes), len(templates), -1)
    return normalize(embedded.mean(dim=1), dim=-1)


def accuracies(image_ND: Tensor, classes_CD: Tensor, labels_N: Tensor) -> dict[str, float]:
    """Top-1 and top-5, and the mean over classes of top-1."""
    sim_NC = image_ND @ classes_CD.T
    top = sim_NC.topk(min(5, sim_NC.shape[1]), dim=1).indices
    hit_N = top[:, 0] == labels_N
    by_class = [hit_N[labels_N == label].double().mean().item() for label in torch.unique(labels_N).tolist()]
    return {
        "accuracy": hit_N.double().mean().item(),
        "accuracy_top5": (top == labels_N[:, None]).any(dim=1).double().mean().item(),
        "mean_per_class": sum(by_class) / len(by_class),
    }
