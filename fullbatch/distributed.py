"""The ranks: who we are, how rows and scalars travel.  The only file that imports torch.distributed.

On one rank every function is the identity, so no caller has to ask how many ranks there are.
"""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    def rows(self, count: int) -> slice:
        """Where this rank's ``count`` rows lie among the gathered ones."""
        return slice(self.rank * count, (self.rank + 1) * count)


def world() -> World:
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


def gather_rows(rows_BD: Tensor) -> Tensor:
    """All ranks' rows in rank order, without gradient.  Every rank must bring the same number of rows."""
    rows_BD = rows_BD.detach()
    if world().size == 1:
        return rows_BD
    rows_BD = rows_BD.contiguous()
    rows_ND = rows_BD.new_empty((world().size * rows_BD.shape[0], *rows_BD.shape[1:]))
    dist.all_gather_into_tensor(rows_ND, rows_BD)
    return rows_ND


def check_equal_rows(count: int, device: torch.device) -> None:
    """Gathering needs the same number of rows everywhere; say so on every rank rather than hang."""
    if world().size == 1:
        return
    counts = gather_rows(torch.tensor([count], device=device)).tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            f"Every rank must bring the same number of pairs, but they brought {counts}; "
            "use drop_last=True in the data loader, or pad the last batch."
        )


def mean_over_ranks(value: Tensor) -> Tensor:
    if world().size == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value.div_(world().size)


class _AverageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return mean_over_ranks(grad)


def average_gradient(parameter: Tensor) -> Tensor:
    """The parameter itself; its gradient is averaged over ranks, so that replicas stay equal without DDP."""
    return _AverageGradient.apply(parameter) if world().size > 1 else parameter


# ---------------------------------------------------------------------------------------------------------------------
# one node


def _local_size() -> int:
    """Ranks on this node: torchrun says so; without it all ranks are taken to share one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world().size)) if world().size > 1 else 1


def is_node_leader() -> bool:
    return world().rank % _local_size() == 0


def node_size() -> int:
    return _local_size()


_host_group: Any = None


def node_barrier() -> None:
    """Wait on the host for all ranks (a gloo group: nccl's barrier would not order writes to host memory)."""
    global _host_group
    if world().size == 1:
        return
    if dist.get_backend() == "gloo":
        dist.barrier()
        return
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo")
    dist.barrier(group=_host_group)


def share_text(text: str) -> str:
    """The first rank of this node's ``text``, on every rank of the node."""
    if world().size == 1:
        return text
    texts: list[str | None] = [None] * world().size
    dist.all_gather_object(texts, text)
    leader = world().rank - world().rank % _local_size()
    chosen = texts[leader]
    assert chosen is not None
    return chosen
