"""Embeddings of real pairs in a second: the built-in emoji of one style through the best linear model there is.

Pixels and words, each whitened with a ridge, then the singular vectors between them (canonical correlations): what a
two-tower model with linear towers would learn, in closed form.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import fullbatch

WIDTH, WORDS = 16, 256


@cache
def emoji_embeddings() -> tuple[Tensor, Tensor]:
    """Unit rows of 1,424 images and of their captions, float64, in a fixed random order."""
    pixels, words = {}, {}
    with tarfile.open(Path(fullbatch.__file__).parent / "data" / "emoji" / "new_style.tar.xz") as archive:
        for member in archive:
            key, ending = member.name.split(".")
            content = archive.extractfile(member).read()
            if ending == "json":
                words[key] = np.zeros(WORDS)
                for word in re.findall(r"\w+", json.loads(content)["caption"]):
                    words[key][zlib.crc32(word.encode()) % WORDS] += 1
            else:
                picture = Image.open(io.BytesIO(content)).convert("RGB").resize((8, 8))
                pixels[key] = np.asarray(picture, np.float64).reshape(-1)
    keys = np.random.default_rng(0).permutation(sorted(pixels))
    image, text = (_whitened(np.stack([table[key] for key in keys])) for table in (pixels, words))
    left, _, right = np.linalg.svd(image.T @ text)
    return (
        normalize(torch.from_numpy(image @ left[:, :WIDTH]), dim=-1),
        normalize(torch.from_numpy(text @ right.T[:, :WIDTH]), dim=-1),
    )


def _whitened(rows: np.ndarray) -> np.ndarray:
    left, scale, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return left * scale / np.hypot(scale, 0.1 * scale[0])
