"""The measurements: embedded images and what is right for them in, a result out."""

# N: images, or training images   M: test images   T: captions   C: classes   P: prompts a class   G: groups of images
# D: width   F: features   k: neighbours

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fullbatch import distributed
from fullbatch.config.data import Source
from fullbatch.evaluation.benchmark_folders import Classified, open_benchmark
from fullbatch.evaluation.datacomp import MainMetric
from fullbatch.evaluation.embed import Embedder, SourceRows
from fullbatch.evaluation.result import Result
from fullbatch.evaluation.retrieval import Answers, Gallery, chance_of_first, own_captions, recalls

Name = TypeVar("Name", str, int)

FEWEST_FOR_TOP5 = 5  # classes
EXAMPLES = 8
_OTHER_REGION = 5  # FMoW's last: what lies in none of the five; WILDS leaves it out, DataComp does not
_ENTRIES = 1 << 24  # similarities held at a time
PLAIN_TEMPLATES = ("{}", "a picture of {}", "an image about {}")


def written_out(templates: tuple[str, ...]) -> tuple[str, ...]:
    """With the names of sets replaced by their prompts: "openai" is open_clip's 80, "simple" its 7."""
    import open_clip

    sets = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
    return tuple(prompt for text in templates for prompt in ([f("{}") for f in sets[text]] if text in sets else [text]))


def prompted(template: str, name: str) -> str:
    """CLIP_benchmark's files write {c} where open_clip writes {}."""
    return template.replace("{c}", name).replace("{}", name)


@functools.cache
def imagenet_names() -> tuple[str, ...]:
    """open_clip's names of the 1,000 classes, by number."""
    import open_clip

    return tuple(open_clip.IMAGENET_CLASSNAMES)


@functools.cache
def imagenet_numbers() -> dict[str, int]:
    """From what a class's folder may be called to the class's number: "n01440764", "0", "000"."""
    from timm.data import ImageNetInfo

    ids = ImageNetInfo("imagenet-1k").label_names()
    numbers = {f"{number:0{width}d}": number for number in range(len(ids)) for width in (1, 3, 4)}
    return numbers | {name: number for number, name in enumerate(ids)}


# from predictions to numbers: each metric of DataComp's tasks is one function


def share(hit_N: Tensor) -> float:
    return int(hit_N.sum()) / len(hit_N)


def mean_per_class(hit_N: Tensor, labels_N: Tensor) -> float:
    """The mean over the classes that occur of the share of their images that are right (balanced accuracy)."""
    return float(np.mean(_share_of_groups(hit_N, labels_N)))


def worst_group(hit_N: Tensor, groups_N: Tensor) -> float:
    """The least share of right images among the groups that occur, however small."""
    return float(_share_of_groups(hit_N, groups_N).min())


def _share_of_groups(hit_N: Tensor, groups_N: Tensor) -> npt.NDArray[np.float64]:
    _, group_N, count_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    shares_G: npt.NDArray[np.float64] = group_N[hit_N].bincount(minlength=len(count_G)).numpy() / count_G.numpy()
    return shares_G


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


def class_embeddings(embedder: Embedder, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """The mean of each class's unit prompt embeddings, made unit again (Radford et al. 2021)."""
    prompts = [prompted(template, name) for name in classes for template in templates]
    prompts_CPD = embedder.captions(prompts).view(len(classes), len(templates), -1)
    return F.normalize(prompts_CPD.mean(dim=1), dim=-1)


@dataclass(frozen=True)
class Guesses:
    guess_N: Tensor  # the nearest class; of classes that are equally near the first
    place_N: Tensor  # how many classes come before the right one, by the same rule

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


def retrieved(task: str, images: SourceRows, answers: Answers, embedder: Embedder) -> Result:
    chance = chance_of_first(answers)
    if chance == 1.0:
        what = "one image" if len(images.ids) == 1 else "the same caption for every image"
        raise ValueError(f"The task {task!r} has {what}: any model would be right.")
    captions = [caption for of_image in images.captions for caption in of_image]
    text_TD = embedder.captions(captions)
    metrics = recalls(images.image_ND.to(embedder.device), text_TD.to(embedder.device), answers)
    counts = {"images": len(images.ids), "captions": len(captions), "left_out": len(images.left_out)}
    shown = _examples(images, text_TD, captions)
    return Result(task, metrics, "mean_r1", chance, len(captions), shown, counts, left_out_note(images.left_out))


def _examples(images: SourceRows, text_TD: Tensor, captions: list[str]) -> tuple[dict[str, Any], ...]:
    """For a few images, evenly spread: its caption, the rank of the best of its own, and the three nearest captions."""
    count = len(images.ids)
    ends = torch.tensor([len(of_image) for of_image in images.captions]).cumsum(0).tolist()
    shown = []
    for image in range(0, count, max(1, count // EXAMPLES))[:EXAMPLES]:
        sim_T = text_TD @ images.image_ND[image]
        best = sim_T[ends[image] - len(images.captions[image]) : ends[image]].max()
        nearest = sim_T.topk(min(3, len(captions))).indices.tolist()
        rank = int((sim_T > best).sum()) + 1
        nearest_captions = [captions[text] for text in nearest]
        shown.append({"caption": images.captions[image][0], "rank": rank, "nearest": nearest_captions})
    return tuple(shown)


def classified(
    task: str,
    images: SourceRows,
    labels_N: Tensor,
    classes: Sequence[str],
    templates: Sequence[str],
    embedder: Embedder,
    groups_N: Tensor | None = None,
    main: MainMetric = "accuracy",
) -> Result:
    """``groups_N`` are those over which worst_group is taken."""
    if len(classes) < 2:
        raise ValueError(f"The task {task!r} has one class ({classes[0]!r}): any model would be right.")
    classes_CD = class_embeddings(embedder, classes, written_out(tuple(templates)))
    guessed = guesses(images.image_ND, classes_CD, labels_N)
    metrics = accuracies(guessed, labels_N, len(classes))
    metrics["f1_macro"] = macro_f1(guessed.guess_N, labels_N)
    if groups_N is None and main in ("worst_group", "worst_group_top5"):
        raise ValueError(f"The samples of {task!r} have no .npy members, which say over which groups {main} is taken.")
    if groups_N is not None:
        metrics["worst_group"] = worst_group(guessed.hit_N, groups_N)
        metrics["worst_group_top5"] = worst_group(guessed.place_N < 5, groups_N)
        inside_N = groups_N != _OTHER_REGION
        if task == "datacomp:wilds/fmow" and bool(inside_N.any()):
            metrics["worst_group_without_other"] = worst_group(guessed.hit_N[inside_N], groups_N[inside_N])
    counts = {"images": len(images.ids), "classes": len(classes), "left_out": len(images.left_out)}
    # in each group alike, so that the worst of several small ones is below it
    chance = min(1.0, 5.0 / len(classes)) if main == "worst_group_top5" else 1.0 / len(classes)
    chance = macro_f1_of_guessing(labels_N, len(classes)) if main == "f1_macro" else chance
    return Result(task, metrics, main, chance, len(classes), counts=counts, notes=left_out_note(images.left_out))


def numbered(names: Sequence[Name]) -> tuple[list[Name], Tensor]:
    """The classes, sorted, and the place of each name among them."""
    classes = sorted(set(names))
    place = {name: row for row, name in enumerate(classes)}
    return classes, torch.tensor([place[name] for name in names])


def require_imagenet(path: Path, folders: Iterable[str]) -> None:
    unknown = sorted(set(folders) - set(imagenet_numbers()))
    if unknown:
        raise ValueError(
            f"{str(path)!r} has a folder {unknown[0]!r}, which is neither a WordNet id of ImageNet's 1,000 classes "
            "(n01440764) nor a class number; for folders named by class use zero_shot:FOLDER?captions=folder."
        )


def imagenet(task: str, source: Source, templates: tuple[str, ...], embedder: Embedder) -> Result:
    images = embedder.images(source)
    folders = [of_image[0] for of_image in images.captions]
    require_imagenet(Path(source.path), folders)
    there, labels_N = numbered([imagenet_numbers()[folder] for folder in folders])
    result = classified(task, images, labels_N, [imagenet_names()[n] for n in there], templates, embedder)
    if len(there) == len(imagenet_names()):
        return result
    note = f"{len(there):,} of the {len(imagenet_names()):,} classes have a folder; the others are no candidates"
    return replace(result, notes=(*result.notes, note))


def benchmark(
    task: str, path: Path, templates: tuple[str, ...] | None, embedder: Embedder, main: MainMetric | None = None
) -> Result:
    """``main`` says what is measured; None: the folder does, and of classes accuracy is what counts."""
    kind = "" if main is None else "retrieval" if main == "mean_r1" else "classification"
    opened = distributed.together(lambda: open_benchmark(path, kind))
    images = embedder.images(opened.samples if isinstance(opened, Classified) else opened)
    if not isinstance(opened, Classified):
        return retrieved(task, images, own_captions([len(of) for of in images.captions]), embedder)
    groups_N = None if opened.groups_NM is None else opened.groups_NM[images.ids, 0]
    prompts, labels_N = templates or opened.templates or PLAIN_TEMPLATES, opened.labels_N[images.ids]
    return classified(task, images, labels_N, opened.classes, prompts, embedder, groups_N, main or "accuracy")


def left_out_note(left_out: Sequence[str]) -> tuple[str, ...]:
    if not left_out:
        return ()
    return (f"{len(left_out):,} samples could not be read and are left out (first: {left_out[0]})",)


# ---------------------------------------------------------------------------------------------------------------------
# what frozen features say of an image's class: its nearest neighbours, and a linear classifier on top


NEIGHBOURS, TEMPERATURE = 200, 0.07  # Wu et al. 2018
FEW = 20
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
_HELD_OUT = 10  # every tenth training image judges the penalty
_STEPS = 200  # of L-BFGS at most
_VOTES = 1 << 26  # similarities and votes held at a time


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
    return _probed(task, guess_M, train, test, {"accuracy_20": share(guess_20_M == test.labels_N)})


def neighbour_votes(train: Labelled, features_MF: Tensor) -> tuple[Tensor, Tensor]:
    """The classes that the weighted 200 and the plain 20 nearest vote for; of equal votes the first class."""
    gallery_NF, classes = F.normalize(train.features_NF, dim=1), len(train.classes)
    many, few = min(NEIGHBOURS, len(gallery_NF)), min(FEW, len(gallery_NF))
    rows = max(1, _VOTES // max(len(gallery_NF), many * classes))
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
    return _probed(task, fitted.guesses(test.features_NF), train, test, {}, note)


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


def _probed(task: str, guess_M: Tensor, train: Labelled, test: Labelled, more: dict[str, float], *notes: str) -> Result:
    hit_M, left_out, classes = guess_M == test.labels_N, train.left_out + test.left_out, len(train.classes)
    metrics = {"accuracy": share(hit_M), **more, "mean_per_class": mean_per_class(hit_M.cpu(), test.labels_N.cpu())}
    sizes = {"images": len(test.labels_N), "training_images": len(train.labels_N), "classes": classes}
    counts, notes = {**sizes, "left_out": len(left_out)}, (*notes, *left_out_note(left_out))
    return Result(task, metrics, "accuracy", 1.0 / classes, classes, counts=counts, notes=notes)
