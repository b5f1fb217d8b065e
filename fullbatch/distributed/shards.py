"""Sharded tensors on disk, as torch's distributed checkpoints (DCP) have them: each rank writes what it holds and reads
what it needs, also where the writers were more, or fewer, or a single process wants the whole."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_saver import save

from fullbatch.distributed import world


def mapped(tree: Any, act: Callable[[str, Tensor], Any], place: str = "") -> Any:
    """The tree with ``act(place, tensor)`` for each tensor; a place is the keys on the way to it, joined by dots."""
    if isinstance(tree, Tensor):
        return act(place, tree)
    if isinstance(tree, dict):
        return {key: mapped(inner, act, f"{place}.{key}" if place else str(key)) for key, inner in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(inner, act, f"{place}.{number}") for number, inner in enumerate(tree))
    return tree


def empty_whole(tensor: Tensor) -> Tensor:
    """Room for all of it, in host memory."""
    return torch.empty_like(tensor, device="cpu")


def write_shards(folder: Path, shards: dict[str, Tensor], line: Any) -> list[Path]:
    """Write this rank's part of each tensor; the files that are its own.  What fails on one rank fails on all.  Every
    rank must call, and ``line`` is for this alone (see ``thread_line``)."""
    try:
        # they are on the host already: nothing to copy ahead, by a stream of the first GPU
        save(shards, storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0), process_group=line)
    except CheckpointException as error:
        (reason, _), *_ = error.failures.values()
        raise reason from None
    own = world().rank
    return [*folder.glob(f"__{own}_*.distcp"), *(folder.glob(".metadata") if own == 0 else ())]


def read_shards(folder: Path, spaces: dict[str, Tensor]) -> None:
    """Fill each tensor, whole or this rank's shard of it, from the files.  No rank has to wait for another."""
    reader, planner = _Reader(folder), _Planner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(spaces), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")


class _Reader(FileSystemReader):
    """DCP's, but what it unpickles can only be a description of tensors."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Descriptions(file).load()
        assert isinstance(metadata, Metadata)
        return metadata


_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local")  # beside DCP's own


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES or module.startswith("torch.distributed.checkpoint."):
            described = super().find_class(module, name)
            if described in (torch.Size, torch.serialization._get_layout) or isinstance(described, torch.dtype):
                return described
            if isinstance(described, type) and (is_dataclass(described) or issubclass(described, (Enum, PurePath))):
                return described
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a description of tensors")
