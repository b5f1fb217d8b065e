"""The measurements: embedded images and what is right for them in, a result out."""

# N: images   T: captions   C: classes   D: width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch import distributed
from fullbatch.config.data import Source
from fullbatch.evaluation.benchmark_folders import Captioned, Classified, open_benchmark
from fullbatch.evaluation.datacomp import MainMetric
from fullbatch.evaluation.embed import Embedder, Images
from fullbatch.evaluation.metrics import macro_f1, macro_f1_of_guessing, worst_group
from fullbatch.evaluation.prompts import PLAIN_TEMPLATES, imagenet_names, imagenet_numbers, written_out
from fullbatch.evaluation.result import Result
from fullbatch.evaluation.retrieval import Answers, chance_of_first, own_captions, recalls
from fullbatch.evaluation.zero_shot import accuracies, class_embeddings, guesses

EXAMPLES = 8
_OTHER_REGION = 5  # FMoW's last: what lies in none of the five; WILDS leaves it out, DataComp does not


def retrieved(task: str, images: Images, answers: Answers, embedder: Embedder) -> Result:
    chance = chance_of_first(answers)
    if chance == 1.0:
        what = "one image" if len(images.ids) == 1 else "the same caption for every image"
        raise ValueError(f"The task {task!r} has {what}: any model would be right.")
    captions = [caption for of_image in images.captions for caption in of_image]
    text_TD = embedder.captions(captions)
    found = recalls(images.image_ND.to(embedder.device), text_TD.to(embedder.device), answers)
    counts = {"images": len(images.ids), "captions": len(captions), "left_out": len(images.left_out)}
    shown = _examples(images, text_TD, captions)
    return Result(task, found, "mean_r1", chance, len(captions), shown, counts, _left_out(images))


def _examples(images: Images, text_TD: Tensor, captions: list[str]) -> tuple[dict[str, Any], ...]:
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
    images: Images,
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
    chance = _chance(main, labels_N, len(classes))
    return Result(task, metrics, main, chance, len(classes), counts=counts, notes=_left_out(images))


def _chance(main: MainMetric, labels_N: Tensor, classes: int) -> float:
    """What guessing evenly gives; in each group alike, so that the worst of several small ones is below it."""
    match main:
        case "f1_macro":
            return macro_f1_of_guessing(labels_N, classes)
        case "worst_group_top5":
            return min(1.0, 5.0 / classes)
        case _:
            return 1.0 / classes


def class_folders(path: Path) -> Source:
    return Source(str(path), kind="folder", captions=("folder",))


def require_imagenet(path: Path, folders: Iterable[str]) -> None:
    unknown = sorted(set(folders) - set(imagenet_numbers()))
    if unknown:
        raise ValueError(
            f"{str(path)!r} has a folder {unknown[0]!r}, which is neither a WordNet id of ImageNet's 1,000 classes "
            "(n01440764) nor a class number; for folders named by class use zero_shot:FOLDER?captions=folder."
        )


def imagenet(task: str, path: Path, templates: tuple[str, ...], embedder: Embedder) -> Result:
    images = embedder.images(class_folders(path))
    numbers, folders = imagenet_numbers(), [of_image[0] for of_image in images.captions]
    require_imagenet(path, folders)
    there = sorted({numbers[folder] for folder in folders})
    place = {number: row for row, number in enumerate(there)}
    labels_N = torch.tensor([place[numbers[folder]] for folder in folders])
    result = classified(task, images, labels_N, [imagenet_names()[n] for n in there], templates, embedder)
    if len(there) == len(imagenet_names()):
        return result
    note = f"{len(there):,} of the {len(imagenet_names()):,} classes have a folder; the others are no candidates"
    return replace(result, notes=(*result.notes, note))


def benchmark(
    task: str,
    path: Path,
    templates: tuple[str, ...] | None,
    embedder: Embedder,
    kind: str = "",
    main: MainMetric = "accuracy",
) -> Result:
    found = distributed.together(lambda: open_benchmark(path, kind))
    images = embedder.images(found.samples)
    match found:
        case Captioned():
            return retrieved(task, images, own_captions([len(of) for of in images.captions]), embedder)
        case Classified():
            groups_N = None if found.groups_NM is None else found.groups_NM[images.ids, 0]
            prompts, labels_N = templates or found.templates or PLAIN_TEMPLATES, found.labels_N[images.ids]
            return classified(task, images, labels_N, found.classes, prompts, embedder, groups_N, main)
        case _:
            assert_never(found)


def _left_out(images: Images) -> tuple[str, ...]:
    if not images.left_out:
        return ()
    return (f"{len(images.left_out):,} samples could not be read and are left out (first: {images.left_out[0]})",)
