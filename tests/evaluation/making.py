"""Benchmark folders of a few small images, and a model of one layer to measure on them."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullbatch.config.model import Model
from fullbatch.evaluation.embed import Embedder
from fullbatch.models.build import build_model
from fullbatch.models.two_towers import TwoTowers
from tests.data.making import png, write_members
from tests.training.small import TOWERS

CLASSES = ("cat", "dog", "red bus", "house", "tree", "sea")
TEMPLATES = ("a photo of a {c}.", "{c}")


@functools.cache
def small_model() -> TwoTowers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "towers.json"
        path.write_text(json.dumps(TOWERS))
        torch.manual_seed(3)
        return build_model(Model(model=str(path))).eval()


def small_embedder(**settings: Any) -> Embedder:
    model = small_model()
    return Embedder(model, model.tokenize, model.image_size, torch.device("cpu"), batch_size=4, **settings)


def number_array(values: Sequence[object]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values))
    return buffer.getvalue()


def write_benchmark(
    folder: Path,
    labels: Sequence[int],
    groups: Sequence[int] | None = None,
    classes: Sequence[str] = CLASSES,
    templates: Sequence[str] = TEMPLATES,
    shards: int = 2,
) -> Path:
    """CLIP_benchmark's layout: image number i has the label labels[i], in one of the shards, one after the other."""
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("\n".join(classes) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")
    members: list[tuple[str, bytes]] = []
    for number, label in enumerate(labels):
        members += [(f"s{number:04d}.cls", str(label).encode()), (f"s{number:04d}.png", png((20, 16), number))]
        if groups is not None:
            members.append((f"s{number:04d}.npy", number_array([groups[number], 7])))
    return _write_shards(folder, members, shards, 2 if groups is None else 3)


def write_captioned(folder: Path, captions: Sequence[Sequence[str]], shards: int = 2, said: bool = True) -> Path:
    """The layout of its retrieval sets."""
    (folder / "test").mkdir(parents=True)
    if said:
        (folder / "dataset_type.txt").write_text("retrieval\n")
    members: list[tuple[str, bytes]] = []
    for number, lines in enumerate(captions):
        members += [(f"s{number:04d}.png", png((20, 16), number)), (f"s{number:04d}.txt", "\n".join(lines).encode())]
    return _write_shards(folder, members, shards, 2)


def _write_shards(folder: Path, members: list[tuple[str, bytes]], shards: int, each: int) -> Path:
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    samples = len(members) // each
    for shard in range(shards):
        first, last = samples * shard // shards * each, samples * (shard + 1) // shards * each
        write_members(folder / "test" / f"{shard}.tar", members[first:last])
    return folder


def several_captions(images: int) -> list[list[str]]:
    """Image i has i % 3 + 1 captions, all different."""
    return [[f"thing {image} seen {time}" for time in range(image % 3 + 1)] for image in range(images)]
