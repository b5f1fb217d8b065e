"""The ranks: who we are, how rows and scalars travel.  The only file that imports torch.distributed.

On one rank every function is the identity, so no caller has to ask how many ranks there are.
"""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import socket
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
# nodes: ranks with the same host name share memory


class _Host:
    """What is known of the hosts of the current process group; asked once a group."""

    group: Any = None
    leader: int = 0
    barrier_group: Any = None


def _host() -> type[_Host]:
    if _Host.group is not dist.group.WORLD:
        names: list[str | None] = [None] * world().size
        dist.all_gather_object(names, socket.gethostname())
        _Host.leader = names.index(names[world().rank])
        _Host.barrier_group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _Host.group = dist.group.WORLD
    return _Host


def is_node_leader() -> bool:
    return world().size == 1 or _host().leader == world().rank


def host_barrier() -> None:
    """All ranks wait on their hosts (by gloo: nccl's barrier would not order writes to host memory)."""
    if world().size > 1:
        dist.barrier(group=_host().barrier_group)


def share_from_leader(text: str) -> str:
    """The node leader's ``text``, on every rank of the node."""
    if world().size == 1:
        return text
    texts: list[str | None] = [None] * world().size
    dist.all_gather_object(texts, text)
    chosen = texts[_host().leader]
    assert chosen is not None
    return chosen
