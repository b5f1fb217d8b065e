"""From predictions to numbers: each metric of DataComp's tasks is one function."""

# N: images   C: classes   G: groups of images

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def share(hit_N: Tensor) -> float:
    return int(hit_N.sum()) / len(hit_N)


def mean_per_class(hit_N: Tensor, labels_N: Tensor) -> float:
    """The mean over the classes that occur of the share of their images that are right (balanced accuracy)."""
    count_C = labels_N.bincount()
    right_C = labels_N[hit_N].bincount(minlength=len(count_C))
    there_C = count_C > 0
    return float(np.mean(right_C[there_C].numpy() / count_C[there_C].numpy()))


def worst_group(hit_N: Tensor, groups_N: Tensor) -> float:
    """The least share of right images among the groups that occur, however small."""
    _, group_N, count_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    right_G = group_N[hit_N].bincount(minlength=len(count_G))
    return float((right_G.double() / count_G.double()).min())


def macro_f1(predicted_N: Tensor, labels_N: Tensor) -> float:
    """The mean over the classes that occur of 2 hits / (predicted as it + members), as WILDS averages it."""
    size = int(max(predicted_N.max(), labels_N.max())) + 1
    members_C, guessed_C = labels_N.bincount(minlength=size), predicted_N.bincount(minlength=size)
    right_C = labels_N[predicted_N == labels_N].bincount(minlength=size)
    there_C = members_C > 0
    return float(np.mean((2 * right_C[there_C]).numpy() / (members_C + guessed_C)[there_C].numpy()))


def macro_f1_of_guessing(labels_N: Tensor, classes: int) -> float:
    """What guessing evenly among the classes gives for many images: precision is prevalence, recall 1 / C."""
    prevalence_C = labels_N.bincount().double().numpy() / len(labels_N)
    there_C = prevalence_C[prevalence_C > 0]
    return float(np.mean(2.0 * there_C / (classes * there_C + 1.0)))
