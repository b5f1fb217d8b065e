"""A part of a data set, embedded by a run's model: its samples, which are near which, and their pictures."""

# N: samples at hand   D: width   P: numbers of a tiny picture   C: rows of a block   K: pairs kept

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image, features
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fullbatch.config.messages import plain
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.data.images import EvalTransform, decode
from fullbatch.data.loader import EvaluationBatches, SamplePool, load, open_pool
from fullbatch.data.sample import BadSample, RawSample
from fullbatch.data.sources import Share
from fullbatch.finetuning.record import BASE, TUNED
from fullbatch.loading import load_trained
from fullbatch.models.build import build_model
from fullbatch.models.two_towers import TwoTowers, in_precision
from fullbatch.report.blocks import Child, Html, node, quoted
from fullbatch.report.collect import RunData
from fullbatch.training.run_folder import Folder

CAPTION = 160  # characters shown of a caption
_LARGEST = 128  # pixels a side of a picture on the page
TINY = 16  # pixels a side of the pictures that near-identical ones are found by
_MANY = 2000  # samples that are worth starting workers for
UNUSABLE = (ValueError, OSError, RuntimeError, ImportError)  # what a model that cannot be loaded or used raises
Pair = tuple[int, int, float]  # two rows, the first before the second, and a score
PairT = TypeVar("PairT", bound=tuple[Any, ...])  # two rows, and whatever is told of them


@dataclass(frozen=True)
class Embedded:
    pool: SamplePool
    ids: list[int]  # places in the pool
    image_ND: Tensor
    text_ND: Tensor
    tiny_NP: Tensor  # the pictures at 16 x 16 pixels, in [0, 1]
    captions: list[str]

    def part(self, rows: list[int]) -> Embedded:
        ids, captions = [self.ids[row] for row in rows], [self.captions[row] for row in rows]
        return Embedded(self.pool, ids, self.image_ND[rows], self.text_ND[rows], self.tiny_NP[rows], captions)

    @cached_property
    def groups_N(self) -> Tensor:
        return groups_of(self.captions)

    def read(self, row: int) -> RawSample | None:
        try:
            return self.pool.read(self.ids[row])
        except BadSample:
            return None

    @cached_property
    def origins(self) -> list[tuple[str, bytes]]:
        """Each sample's name and a digest of its picture's bytes."""
        origins = []
        for row in range(len(self.ids)):
            raw = self.read(row)
            name, image = (raw.name, raw.image) if raw is not None else (f"sample {self.ids[row]}", b"")
            origins.append((name, hashlib.blake2b(image, digest_size=16).digest()))
        return origins


def groups_of(keys: Iterable[Hashable]) -> Tensor:
    """A number a key, equal for equal ones."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


@dataclass(frozen=True)
class RunModel:
    """A run's model, ready to embed pictures and captions."""

    model: TwoTowers
    config: RunConfig
    temperature: float
    device: torch.device

    @classmethod
    def load(cls, run: Path, name: str | None = None) -> RunModel:
        """The model that a fine-tuning exported to the folder of this name; else that of the last good checkpoint."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if name is None:
            loaded = load_trained(run)
            return cls(loaded.model.to(device), loaded.config, loaded.temperature, device)
        model = build_model(Model(pretrained=str(run / name))).eval().to(device)
        return cls(model, Folder(run).read_config(), model.initial_temperature or 0.07, device)

    def training(self, most: int) -> Embedded:
        return self.embed(open_pool(self.config.data)[0], most)

    @torch.no_grad()
    def embed(self, pool: SamplePool, most: int) -> Embedded:
        """Embed the pool, or ``most`` samples drawn from it, always the same ones; bad samples are left out."""
        ids: Sequence[int] = range(len(pool))
        if len(pool) > most:
            ids = sorted(random.Random(0).sample(ids, most))
        transform = EvalTransform(self.model.image_size, self.config.data.max_pixels)
        part = SamplePool([Share(pool, ids)])
        batches = EvaluationBatches(part, self.config.evaluation.eval_batch, transform, self.model.tokenize)
        workers = self.config.data.workers if len(ids) > _MANY else 0
        precision = self.config.training.precision
        if precision == "fp16" and self.device.type == "cpu":
            precision = "fp32"  # a CPU has no float16
        places, captions, tables = list[int](), list[str](), list[tuple[Tensor, ...]]()
        for batch in load(batches, range(len(batches)), workers, self.device):
            if not len(batch.ids):
                continue
            with in_precision(precision, self.device):
                image_BD, text_BD = self.model(*batch.inputs)
            places += batch.ids.tolist()
            captions += [of_image[0] for of_image in batch.captions]
            tiny_BP = adaptive_avg_pool2d(batch.images.float() / 255.0, TINY).flatten(1)
            tables.append((image_BD.float(), text_BD.float(), tiny_BP))
        if not captions:
            raise ValueError("none of its samples can be read")
        image_ND, text_ND, tiny_NP = (torch.cat(parts) for parts in zip(*tables, strict=True))
        if not bool(image_ND.isfinite().all() and text_ND.isfinite().all()):
            raise ValueError("the model's embeddings are not finite")
        return Embedded(pool, [ids[place] for place in places], image_ND, text_ND, tiny_NP, captions)


def shown_model(run: RunData) -> str | None:
    """Which of its two models a fine-tuning says to use; None for other runs, and before there is a result."""
    name = run.finetune.get("result")
    return str(name) if name in (BASE, TUNED) and (run.path / str(name)).is_dir() else None


# ---------------------------------------------------------------------------------------------------------------------
# which samples are near which, a block of rows at a time: no matrix larger than chunk x N exists


def fits_the_other(image_ND: Tensor, text_ND: Tensor, groups_N: Tensor, most: int, chunk: int = 1024) -> list[Pair]:
    """Pairs by min(s_ij, s_ji) - max(s_ii, s_jj), greatest first.

    At 0 and above, each picture fits the other's caption no worse than either fits its own.  Rows of one group (equal
    captions) make no pair.
    """
    own_N = (image_ND * text_ND).sum(dim=1)

    def scores(rows: slice) -> Tensor:
        cross_CN = torch.minimum(image_ND[rows] @ text_ND.T, text_ND[rows] @ image_ND.T)
        cross_CN -= torch.maximum(own_N[rows, None], own_N[None, :])
        return cross_CN.masked_fill_(groups_N[rows, None].to(own_N.device) == groups_N.to(own_N.device), -torch.inf)

    return _best_pairs(len(own_N), scores, most, chunk)


def looks_alike(tiny_NP: Tensor, most: int, within: float, chunk: int = 1024) -> list[Pair]:
    """Pairs of pictures by the negative root mean squared difference of their tiny pixels, if at most ``within``."""

    def scores(rows: slice) -> Tensor:
        away_CN = torch.cdist(tiny_NP[rows], tiny_NP)
        return -away_CN.square().div(tiny_NP.shape[1]).sqrt()

    return [pair for pair in _best_pairs(len(tiny_NP), scores, most, chunk) if pair[2] >= -within]


def _best_pairs(count: int, scores: Callable[[slice], Tensor], most: int, chunk: int) -> list[Pair]:
    """The ``most`` pairs of rows with the greatest scores; each pair once."""
    best_K = torch.empty(0)
    pairs_K2 = torch.empty((0, 2), dtype=torch.int64)
    for start in range(0, count, chunk):
        score_CN = scores(slice(start, start + chunk))
        later_CN = torch.ones_like(score_CN, dtype=torch.bool).triu_(start + 1)
        flat = score_CN.masked_fill_(~later_CN, -torch.inf).flatten()
        top = flat.topk(min(most, len(flat)))
        rows_K2 = torch.stack((top.indices // count + start, top.indices % count), dim=1)
        best_K, pairs_K2 = torch.cat((best_K, top.values.cpu())), torch.cat((pairs_K2, rows_K2.cpu()))
        kept = best_K.topk(min(most, len(best_K))).indices
        best_K, pairs_K2 = best_K[kept], pairs_K2[kept]
    rows = zip(pairs_K2.tolist(), best_K.tolist(), strict=True)
    return [(first, second, score) for (first, second), score in rows if score > -torch.inf]


def nearest_other(
    image_ND: Tensor, text_ND: Tensor, groups_N: Tensor, rows: list[int]
) -> list[tuple[int | None, float]]:
    """For each of these rows, the other sample whose caption is nearest to the picture, if there is one."""
    sim_KN = (image_ND[rows] @ text_ND.T).cpu().masked_fill_(groups_N[rows, None] == groups_N, -torch.inf)
    best = sim_KN.max(dim=1)
    nearest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(other if score > -torch.inf else None, score) for other, score in nearest]


def without_repeats(pairs: Sequence[PairT], most: int, often: int = 2) -> list[PairT]:
    """The first pairs, no sample in more than a few: one strange sample would fill the list."""
    seen: Counter[int] = Counter()
    kept: list[PairT] = []
    for pair in pairs:
        if len(kept) < most and max(seen[pair[0]], seen[pair[1]]) < often:
            seen.update(pair[:2])
            kept.append(pair)
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# pictures


class Pictures:
    """Add encoded images, get numbers; later all of them as data URIs in whatever size the page can afford."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self._numbers: dict[bytes, int] = {}
        self._kept: list[Image.Image] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, raw: bytes, name: str) -> int | None:
        """Its number; None if it cannot be decoded."""
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        if digest not in self._numbers:
            try:
                image = decode(raw, name, self.max_pixels)
            except BadSample:
                return None
            image.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
            self._numbers[digest] = len(self._kept)
            self._kept.append(image)
        return self._numbers[digest]

    def encoded(self, side: int, quality: int) -> list[str]:
        """A data URI a picture, in the order of the numbers."""
        kind, mime = ("WEBP", "webp") if features.check("webp") else ("JPEG", "jpeg")
        uris = []
        for kept in self._kept:
            image = kept.copy()
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, kind, quality=quality)
            uris.append(f"data:image/{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}")
        return uris

    def shown(self, embedded: Embedded, row: int) -> Html:
        """A sample's picture, read from its pool."""
        raw = embedded.read(row)
        number = self.add(raw.image, raw.name) if raw is not None else None
        if number is None:
            return node("span", "no picture", class_="missing")
        return node("img", data_picture=number, alt=plain(embedded.captions[row], CAPTION))

    def card(self, embedded: Embedded, first: int, other: int | None, reason: Child) -> Html:
        """One sample, or two side by side, with their captions and ids."""
        sides = []
        for row in (first,) if other is None else (first, other):
            caption, number = quoted(embedded.captions[row], CAPTION), node("p", f"id {embedded.ids[row]}", class_="id")
            sides.append(node("div", self.shown(embedded, row), node("p", caption), number, class_="side"))
        return node("div", node("div", sides, class_="sides"), node("p", reason, class_="reason"), class_="card pair")
