"""A model and a source in, tables of embeddings out; the ranks share the work, and a cache folder may keep them."""

# N, n: samples   T: captions   B: rows of a batch   D: width

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config.data import Source
from fullbatch.config.training import Precision
from fullbatch.data.cache_folder import cache_folder, keep_in_cache
from fullbatch.data.images import EvalTransform, ViewMaker, no_tokens
from fullbatch.data.loader import EvaluationBatches, LoadedBatch, SamplePool, TextSize, known_size, load, tokenized
from fullbatch.data.sample import Samples, fingerprint_of
from fullbatch.data.sources import fingerprint_of_samples, open_source
from fullbatch.models.design import to_json
from fullbatch.models.two_towers import TwoTowers, in_precision

log = logging.getLogger("fullbatch")
_VERSION = 1  # part of the names of kept embeddings; raise it when images are read or embedded otherwise


@dataclass(frozen=True)
class SourceRows:
    """What a pass over a source gave for each of its images, in its order; on the host, the same on every rank."""

    ids: Tensor
    tables: tuple[Tensor, ...]  # what was made of each image: its embedding, or whatever the pass was for
    captions: list[tuple[str, ...]]  # every caption of each image
    left_out: tuple[str, ...] = ()  # the samples that could not be read, and why

    @property
    def image_ND(self) -> Tensor:
        return self.tables[0]


Kept = tuple[dict[str, Tensor], list[list[str]]]  # tensors and texts


@dataclass(frozen=True)
class Tables:
    """Embeddings of the samples that could be read, by their ids; on the device, the same on every rank."""

    ids_n: Tensor
    image_nD: Tensor
    text_nD: Tensor


@dataclass(frozen=True)
class Embedder:
    """How to embed: the model (as wrapped for training), its input, the device."""

    model: nn.Module
    tokenize: Callable[[list[str]], Tensor]
    image_size: int
    device: torch.device
    precision: Precision = "fp32"
    batch_size: int = 256
    workers: int = 0
    max_pixels: int = 50_000_000
    cache: EmbeddingCache | None = None  # of what ``images`` and ``captions`` return, for a model that does not change
    views: ViewMaker | None = None  # what stands in for captions, where one encoder sees two views of each image
    watch: Callable[[str, int, int], None] = lambda source, done, total: None  # is told the batches done, of how many

    @torch.no_grad()
    def tables(self, batches: Iterable[LoadedBatch]) -> Tables:
        """Every rank brings equally many batches, some of which may be empty."""
        columns: tuple[list[Tensor], ...] = ([], [], [])
        with _evaluating(self.model):
            for batch in batches:
                here = batch.to(self.device)
                there = self._present(here, self.tokenize)
                for table, part in zip(columns, (here.ids, *self._embed(*there.inputs)), strict=True):
                    table.append(part[: len(here.ids)])
        ids_n, image_nD, text_nD = (distributed.gather_uneven(torch.cat(parts)) for parts in columns)
        order = ids_n.argsort()
        return Tables(ids_n[order], image_nD[order], text_nD[order])

    def uncropped(self, pool: SamplePool, place: torch.device, rows: int | None = None) -> Iterable[LoadedBatch]:
        """A pool's samples with their first captions, for ``tables``; this rank's share, read to ``place``."""
        transform, rows = EvalTransform(self.image_size, self.max_pixels), rows or self.batch_size
        batches = EvaluationBatches(pool, rows, transform, self.tokenize, distributed.world(), self.views)
        return load(batches, range(len(batches)), self.workers, place)

    def images(self, source: Source | Samples) -> SourceRows:
        """Every image of a source with all its captions, which are not embedded; on every rank the same."""
        named = source if isinstance(source, Source) else None
        samples = _samples_of(source)

        def embedded() -> Kept:
            rows = self.walk(samples, lambda batch: (self.image_rows(batch.images),))
            return {"ids": rows.ids, "image": rows.image_ND}, [list(rows.left_out), *map(list, rows.captions)]

        parts = () if self.cache is None else (self.max_pixels, fingerprint_of_samples(samples, named))
        tensors, (left_out, *captions) = self._kept(embedded, "images", *parts)
        return SourceRows(tensors["ids"], (tensors["image"],), [tuple(of) for of in captions], tuple(left_out))

    def _kept(self, make: Callable[[], Kept], *parts: object) -> Kept:
        return make() if self.cache is None else self.cache.kept(make, *parts)

    @torch.no_grad()
    def captions(self, captions: list[str]) -> Tensor:
        """Text embeddings, on every rank the same; captions that are equal are embedded once."""
        distinct = list(dict.fromkeys(captions))
        number = {caption: place for place, caption in enumerate(distinct)}

        def embedded() -> Kept:
            world, rows = distributed.world(), self.batch_size
            turns_here = []
            with _evaluating(self.model):
                for start in range(0, len(distinct), rows * world.size):  # every rank joins in every turn
                    mine = distinct[start + world.rank * rows : start + (world.rank + 1) * rows]
                    turns_here.append(self.text_rows(mine or [""])[: len(mine)])
            text_TD = torch.cat([distributed.gather_uneven(text_BD).cpu() for text_BD in turns_here])  # in order
            check_finite(text_TD, distinct, "captions")
            return {"text": text_TD}, []

        tensors, _ = self._kept(embedded, "captions", *distinct)
        return tensors["text"][torch.tensor([number[caption] for caption in captions])]

    @torch.no_grad()
    def walk(self, source: Source | Samples, rows: Callable[[LoadedBatch], tuple[Tensor, ...]]) -> SourceRows:
        """Whatever ``rows`` makes of a batch, one row per sample, over all samples; the model is in evaluation mode.
        Every rank calls ``rows`` equally often: with a batch of one black image where its share is used up."""
        samples, name = _samples_of(source), str(source) if isinstance(source, Source) else source.name
        transform = EvalTransform(self.image_size, self.max_pixels)
        batches = EvaluationBatches(SamplePool([samples]), self.batch_size, transform, no_tokens, distributed.world())
        ids: list[Tensor] = []
        parts: list[tuple[Tensor, ...]] = []
        captions: dict[int, tuple[str, ...]] = {}
        bad: list[str] = []
        self.watch(name, 0, len(batches))
        with _evaluating(self.model):
            for number, batch in enumerate(load(batches, range(len(batches)), self.workers, self.device), start=1):
                ids.append(batch.ids)
                parts.append(tuple(part[: len(batch.ids)] for part in rows(self._present(batch, no_tokens))))
                captions.update(zip(batch.ids.tolist(), batch.captions, strict=True))
                bad += [str(error) for error in batch.bad]
                self.watch(name, number, len(batches))
        captions_of_id: dict[int, tuple[str, ...]] = {}
        left_out: list[str] = []
        for captions_there, bad_there in distributed.gather_objects((captions, bad)):
            captions_of_id.update(captions_there)
            left_out += bad_there
        for error in left_out:
            log.info("left a bad sample out of the evaluation: %s", error)
        if not captions_of_id:
            raise ValueError(f"No sample of {name} can be evaluated ({left_out[0] if left_out else 'it is empty'}).")
        tables_of_parts: list[tuple[Tensor, ...]] = [tuple(ids), *zip(*parts, strict=True)]
        gathered = [distributed.gather_uneven(torch.cat(table)).cpu() for table in tables_of_parts]
        order = gathered[0].argsort()
        ids_N, *tables = (rows_N[order] for rows_N in gathered)
        names = [captions_of_id[sample] for sample in ids_N.tolist()]
        for rows_ND in tables:
            check_finite(rows_ND, [repr(of[0]) for of in names], f"images of {name}")
        return SourceRows(ids_N, tuple(tables), names, tuple(left_out))

    def image_rows(self, images_BCSS: Tensor) -> Tensor:
        """The embeddings of these images, (B, D)."""
        return self._embed(images_BCSS, None)[0]

    def text_rows(self, captions: list[str]) -> Tensor:
        """The embeddings of these captions, (B, D)."""
        tokens_BL, lengths = tokenized(self.tokenize, captions)
        tokens_BL = tokens_BL.to(self.device)
        return self._embed(None, tokens_BL, *known_size(tokens_BL, lengths))[1]

    def feature_rows(self, images_BCSS: Tensor) -> Tensor:
        """What the image tower knows before the projection that training needs; where it has no such, embeddings."""
        bare: Any = getattr(self.model, "module", self.model)  # features have no gradient that ranks would share
        if not hasattr(bare, "features"):
            return self.image_rows(images_BCSS)
        with in_precision(self.precision, self.device):
            features_BF: Tensor = bare.features(images_BCSS)
        return features_BF

    def _present(self, batch: LoadedBatch, tokenize: Callable[[list[str]], Tensor]) -> LoadedBatch:
        """Sharded towers need every rank's presence at every batch, also when its share is used up."""
        if len(batch.ids):
            return batch
        images = torch.zeros((1, 3, self.image_size, self.image_size), dtype=torch.uint8)
        second = images if batch.tokens.ndim == images.ndim else tokenize([""])
        return LoadedBatch(torch.zeros(1, dtype=torch.int64), images, second).to(self.device)

    def _embed(self, *inputs: Tensor | TextSize | None) -> tuple[Tensor, Tensor]:
        with in_precision(self.precision, self.device):
            embedded: tuple[Tensor, Tensor] = self.model(*inputs)
        return embedded


def _samples_of(source: Source | Samples) -> Samples:
    return distributed.together(lambda: open_source(source)) if isinstance(source, Source) else source


def check_finite(table_ND: Tensor, names: list[str], what: str) -> None:
    """Numbers from a broken model would look like bad numbers of a good one."""
    broken_N = ~torch.isfinite(table_ND).all(dim=1)
    if bool(broken_N.any()):
        first = names[int(broken_N.nonzero()[0])][:80]
        raise ValueError(
            f"The model's embeddings are not finite for {int(broken_N.sum()):,} of {len(names):,} {what} "
            f"(first: {first}); are its weights? Try --precision fp32."
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def fingerprint_of_model(model: TwoTowers) -> str:
    """Of the weights, buffers, design and tokenizer: what an embedding depends on but for the sample."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(to_json(model.design).encode())
    tokenizer = model.tokenize
    digest.update(repr((tokenizer.name, tokenizer.context_length, tokenizer.given, model.image_size)).encode())
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class EmbeddingCache:
    folder: Path  # where the files lie
    model: str  # fingerprint_of_model, with what else all its embeddings depend on

    @classmethod
    def of(cls, where: str, model: TwoTowers, *settings: object) -> EmbeddingCache | None:
        """``where``: "auto" is a folder in the cache folder, "none" is no cache."""
        if where == "none":
            return None
        home = cache_folder() if where == "auto" else Path(where).expanduser()
        if home is None:
            return None
        folder = home / "embeddings" if where == "auto" else home
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--cache {where}: the folder cannot be made ({error.strerror}).") from None
        return cls(folder, fingerprint_of(_VERSION, fingerprint_of_model(model), *settings))

    def kept(self, make: Callable[[], Kept], *parts: object) -> Kept:
        """What ``make`` gives, or gave before, under a name made of ``parts``.  A file appears there when it is
        complete, and counts when every rank has it whole."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save

        path = self.folder / f"{fingerprint_of(self.model, *parts)}.safetensors"
        before: Kept | None = None
        with suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as opened:
            texts: list[list[str]] = json.loads((opened.metadata() or {})["texts"])
            before = {name: opened.get_tensor(name) for name in opened.keys()}, texts  # noqa: SIM118
        (lacking,) = distributed.any_rank(before is None)
        if before is not None and not lacking:
            return before
        tensors, texts = make()
        if distributed.is_node_leader():
            raw = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"texts": json.dumps(texts)})
            keep_in_cache(path, lambda file: file.write(raw), "Embeddings")
        distributed.host_barrier()
        return tensors, texts
