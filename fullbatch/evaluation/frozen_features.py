"""What frozen features say of an image's class: its nearest neighbours, and a linear classifier on top."""

# N: training images   M: test images   C: classes   F: features   k: neighbours

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fullbatch.config.data import Source
from fullbatch.evaluation.embed import Embedder, SourceRows
from fullbatch.evaluation.measure import left_out_note, mean_per_class, share
from fullbatch.evaluation.result import Result

NEIGHBOURS, TEMPERATURE = 200, 0.07  # Wu et al. 2018
FEW = 20
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
_HELD_OUT = 10  # every tenth training image judges the penalty
_STEPS = 200  # of L-BFGS at most
_ENTRIES = 1 << 26  # similarities held at a time


@dataclass(frozen=True)
class Labelled:
    """Features of a set, not normalised, and the numbers of their classes."""

    features_NF: Tensor
    labels_N: Tensor
    classes: tuple[str, ...]
    left_out: tuple[str, ...]


def labelled_features(task: str, train: Source, test: Source, embedder: Embedder) -> tuple[Labelled, Labelled]:
    """Both sets on the embedder's device; classes are those of the training set."""

    def labelled(walked: SourceRows) -> Labelled:
        labels_N = torch.tensor([number[of_image[0]] for of_image in walked.captions], device=embedder.device)
        return Labelled(walked.tables[0].to(embedder.device), labels_N, classes, walked.left_out)

    trained, tested = (
        embedder.walk(source, lambda batch: (embedder.feature_rows(batch.images).float(),)) for source in (train, test)
    )
    classes = tuple(sorted({of_image[0] for of_image in trained.captions}))
    if len(classes) < 2:
        raise ValueError(f"The task {task!r} has one class ({classes[0]!r}): any model would be right.")
    if unknown := sorted({of_image[0] for of_image in tested.captions} - set(classes)):
        raise ValueError(f"The task {task!r}: no training image is of the class {unknown[0]!r}.")
    number = {name: place for place, name in enumerate(classes)}
    return labelled(trained), labelled(tested)


def neighbours(task: str, train: Labelled, test: Labelled) -> Result:
    """``accuracy`` weighs the 200 nearest by exp(cosine / 0.07); ``accuracy_20`` counts the 20 nearest."""
    guess_M, guess_20_M = neighbour_votes(train, test.features_NF)
    return _result(task, guess_M, train, test, {"accuracy_20": share(guess_20_M == test.labels_N)})


def neighbour_votes(train: Labelled, features_MF: Tensor) -> tuple[Tensor, Tensor]:
    """The classes that the weighted 200 and the plain 20 nearest vote for; of equal votes the first class."""
    gallery_NF, classes = F.normalize(train.features_NF, dim=1), len(train.classes)
    many, few = min(NEIGHBOURS, len(gallery_NF)), min(FEW, len(gallery_NF))
    rows = max(1, _ENTRIES // max(len(gallery_NF), many * classes))
    weighted, counted = [], []
    for some_MF in torch.split(F.normalize(features_MF, dim=1), rows):
        sim_Mk, near_Mk = (some_MF @ gallery_NF.T).topk(many, dim=1)
        is_class_MkC = F.one_hot(train.labels_N[near_Mk], classes).to(sim_Mk)
        weight_Mk = torch.exp((sim_Mk - sim_Mk[:, :1]) / TEMPERATURE)  # by the nearest: nothing overflows
        weighted.append((weight_Mk[..., None] * is_class_MkC).sum(dim=1).argmax(dim=1))
        counted.append(is_class_MkC[:, :few].sum(dim=1).argmax(dim=1))
    return torch.cat(weighted), torch.cat(counted)


@dataclass(frozen=True)
class Classifier:
    """Logistic regression on standardised features."""

    mean_F: Tensor
    scale_F: Tensor
    weight_CF: Tensor
    bias_C: Tensor

    def guesses(self, features_MF: Tensor) -> Tensor:
        inputs_MF = (features_MF - self.mean_F) * self.scale_F
        return F.linear(inputs_MF, self.weight_CF, self.bias_C).argmax(dim=1)


def linear_probe(task: str, train: Labelled, test: Labelled) -> Result:
    """The penalty is the one of ``PENALTIES`` that is best on every tenth training image; then all of them count."""
    number_N = torch.arange(len(train.labels_N), device=train.labels_N.device)
    held_N = number_N % _HELD_OUT == _HELD_OUT - 1
    scores = {}
    if bool(held_N.any()):
        for penalty in PENALTIES:
            tried = fit(train.features_NF[~held_N], train.labels_N[~held_N], len(train.classes), penalty)
            scores[penalty] = share(tried.guesses(train.features_NF[held_N]) == train.labels_N[held_N])
    best = max(scores, key=lambda penalty: scores[penalty], default=PENALTIES[1])
    fitted = fit(train.features_NF, train.labels_N, len(train.classes), best)
    note = f"penalty {best:g} on the squared weights, chosen on a tenth of TRAIN"
    return _result(task, fitted.guesses(test.features_NF), train, test, {}, note)


def fit(features_NF: Tensor, labels_N: Tensor, classes: int, penalty: float) -> Classifier:
    """The least mean cross-entropy + penalty / 2 * |W|^2, by L-BFGS from zero: nothing is random."""
    mean_F = features_NF.mean(dim=0)
    scale_F = 1.0 / features_NF.std(dim=0, correction=0).clamp(min=1e-6)
    inputs_NF = (features_NF - mean_F) * scale_F
    weight_CF = torch.zeros((classes, features_NF.shape[1]), device=features_NF.device, requires_grad=True)
    bias_C = torch.zeros(classes, device=features_NF.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CF, bias_C], max_iter=_STEPS, tolerance_grad=1e-5, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(inputs_NF, weight_CF, bias_C), labels_N)
        loss = loss + 0.5 * penalty * weight_CF.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return Classifier(mean_F, scale_F, weight_CF.detach(), bias_C.detach())


def _result(task: str, guess_M: Tensor, train: Labelled, test: Labelled, more: dict[str, float], *notes: str) -> Result:
    hit_M, left_out, classes = guess_M == test.labels_N, train.left_out + test.left_out, len(train.classes)
    metrics = {"accuracy": share(hit_M), **more, "mean_per_class": mean_per_class(hit_M.cpu(), test.labels_N.cpu())}
    sizes = {"images": len(test.labels_N), "training_images": len(train.labels_N), "classes": classes}
    counts, notes = {**sizes, "left_out": len(left_out)}, (*notes, *left_out_note(left_out))
    return Result(task, metrics, "accuracy", 1.0 / classes, classes, counts=counts, notes=notes)
