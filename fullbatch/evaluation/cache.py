"""Embeddings kept on disk, under a name made of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fullbatch import distributed
from fullbatch.data.sample import fingerprint_of
from fullbatch.data.tar_index import cache_folder, write_atomically
from fullbatch.models.design import to_json
from fullbatch.models.towers import TwoTowers

log = logging.getLogger("fullbatch")

_VERSION = 1  # part of every name; raise it when images are read or embedded otherwise


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
    """folder   where the files lie
    model    fingerprint_of_model, with what else all its embeddings depend on
    """

    folder: Path
    model: str

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

    def path(self, *parts: object) -> Path:
        return self.folder / f"{fingerprint_of(self.model, *parts)}.safetensors"

    def load(self, path: Path) -> tuple[dict[str, Tensor], list[list[str]]] | None:
        """The tensors and texts under a name; None unless every rank has them whole."""
        found = _read(path)
        (lacking,) = distributed.any_rank(found is None)
        return None if lacking else found

    def save(self, path: Path, tensors: dict[str, Tensor], texts: list[list[str]]) -> None:
        """All or nothing: a file appears under its name when it is complete."""
        from safetensors.torch import save

        if distributed.is_node_leader():
            raw = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"texts": json.dumps(texts)})

            def write(file: IO[bytes]) -> None:
                file.write(raw)

            try:
                write_atomically(path, write)
            except OSError as error:
                log.warning("Cannot keep embeddings in %s (%s).", path.parent, error.strerror)
        distributed.host_barrier()


def _read(path: Path) -> tuple[dict[str, Tensor], list[list[str]]] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            texts: list[list[str]] = json.loads((opened.metadata() or {})["texts"])
            return {name: opened.get_tensor(name) for name in opened.keys()}, texts  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
