"""A part of a data set, embedded by a run's model: what the grids and the suspects are made from."""

# N: samples at hand   D: width   P: numbers of a tiny picture

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Precision
from fullbatch.data.images import EvalTransform
from fullbatch.data.loader import EvaluationBatches, Part, Pool, load
from fullbatch.data.sample import BadSample, RawSample
from fullbatch.loading import load_trained
from fullbatch.models.build import build_model
from fullbatch.models.execution import in_precision
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training.run_folder import Folder

TINY = 16  # pixels a side of the pictures that near-identical ones are found by
_MANY = 2000  # samples that are worth starting workers for
SAMPLES_ON_CPU, SAMPLES_ON_GPU = 4_000, 20_000


@dataclass(frozen=True)
class Embedded:
    """ids       places in the pool
    tiny_NP   the pictures at 16 x 16 pixels, in [0, 1]
    of        how many samples the pool has
    """

    pool: Pool
    ids: list[int]
    image_ND: Tensor
    text_ND: Tensor
    tiny_NP: Tensor
    captions: list[str]

    @property
    def of(self) -> int:
        return len(self.pool)

    @cached_property
    def groups_N(self) -> Tensor:
        """Equal for equal captions."""
        numbers = {caption: number for number, caption in enumerate(dict.fromkeys(self.captions))}
        return torch.tensor([numbers[caption] for caption in self.captions])

    def read(self, row: int) -> RawSample | None:
        try:
            return self.pool.read(self.ids[row])
        except BadSample:
            return None

    @cached_property
    def origins(self) -> list[tuple[str, bytes]]:
        """Each sample's name and a digest of its picture's bytes."""
        found = []
        for row in range(len(self.ids)):
            raw = self.read(row)
            name, image = (raw.name, raw.image) if raw is not None else (f"sample {self.ids[row]}", b"")
            found.append((name, hashlib.blake2b(image, digest_size=16).digest()))
        return found


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Eye:
    """A run's model, ready to look at pictures and captions."""

    model: TwoTowers
    config: RunConfig
    step: int
    temperature: float
    device: torch.device

    @classmethod
    def of_run(cls, run: Path) -> Eye:
        """The model of the run's last good checkpoint."""
        loaded = load_trained(run)
        return cls(loaded.model.to(_device()), loaded.config, loaded.step, loaded.temperature, _device())

    @classmethod
    def of_export(cls, run: Path, name: str, step: int) -> Eye:
        """The model that a fine-tuning exported to this folder of its own, as it was at ``step``."""
        model = build_model(Model(pretrained=str(run / name))).eval().to(_device())
        return cls(model, Folder(run).read_config(), step, model.initial_temperature or 0.07, _device())

    @property
    def most_samples(self) -> int:
        """What is looked at unless the user says otherwise: some seconds of a small model's time."""
        return SAMPLES_ON_GPU if self.device.type == "cuda" else SAMPLES_ON_CPU

    @torch.no_grad()
    def look(self, pool: Pool, most: int) -> Embedded:
        """Embed the pool, or ``most`` samples drawn from it, always the same ones; bad samples are left out."""
        ids: Sequence[int] = range(len(pool))
        if len(pool) > most:
            ids = sorted(random.Random(0).sample(ids, most))
        transform = EvalTransform(self.model.image_size, self.config.data.max_pixels)
        part = Pool([Part(pool, ids)])
        batches = EvaluationBatches(part, self.config.evaluation.eval_batch, transform, self.model.tokenize)
        workers = self.config.data.workers if len(ids) > _MANY else 0
        places, images, texts, tiny, captions = [], [], [], [], []
        for batch in load(batches, range(len(batches)), workers, self.device):
            if not len(batch.ids):
                continue
            with in_precision(self._precision, self.device):
                image_BD, text_BD = self.model(batch.images, batch.tokens)
            places += batch.ids.tolist()
            captions += list(batch.captions)
            images.append(image_BD.float())
            texts.append(text_BD.float())
            tiny.append(adaptive_avg_pool2d(batch.images.float() / 255.0, TINY).flatten(1))
        if not captions:
            raise ValueError("none of its samples can be read")
        image_ND, text_ND, tiny_NP = (torch.cat(rows) for rows in (images, texts, tiny))
        if not bool(image_ND.isfinite().all() and text_ND.isfinite().all()):
            raise ValueError("the model's embeddings are not finite")
        return Embedded(pool, [ids[place] for place in places], image_ND, text_ND, tiny_NP, captions)

    @property
    def _precision(self) -> Precision:
        """As in training, but a CPU has no float16."""
        wanted = self.config.training.precision
        return "fp32" if wanted == "fp16" and self.device.type == "cpu" else wanted
