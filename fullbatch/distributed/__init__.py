"""The ranks: who we are, how rows, scalars and small objects travel; towers.py spreads towers over them.  No other room
imports torch.distributed.  On one rank every function is the identity, so no caller has to ask how many ranks there
are."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


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


@contextmanager
def ranks(device: torch.device) -> Iterator[World]:
    """Join the ranks that torchrun started, and leave them at the end; without torchrun, one rank."""
    ours = "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if ours:
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(rendezvous("env://"))
        start = PrefixStore(_name_of_start(store, rank, size), store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=start, rank=rank, world_size=size)
    try:
        yield world()
    finally:
        if ours:
            dist.destroy_process_group()


def _name_of_start(store: Any, rank: int, size: int) -> str:
    """One that all ranks of this start know and no earlier start had: torchrun keeps its store when it starts ranks
    again, and there a rank could find where a dead one listened.  (Its count of restarts differs between machines.)
    The first rank answers whomever it reads of until all have found its answer, or the store's timeout has passed."""
    own, deadline = uuid.uuid4().hex, time.monotonic() + store.timeout.total_seconds()
    store.set(f"rank {rank}", own)

    def wait_for(keys: list[str]) -> None:
        """A moment; ``keys`` are set by the ranks 0, 1, ..."""
        if time.monotonic() > deadline:
            silent = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
            raise TimeoutError(
                f"Rank {rank} has not heard from rank {silent} for {store.timeout.total_seconds():g} seconds; "
                "see in its output why it ended, then start all ranks again."
            )
        time.sleep(0.05)

    if rank > 0:
        while not store.check([own]):
            wait_for([own])
        start: str = store.get(own).decode()
        store.set(f"{start} {rank}", "")
        return start
    found = [f"{own} {other}" for other in range(size)]
    store.set(found[0], "")
    while not store.check(found):
        for key in (f"rank {other}" for other in range(1, size)):
            if store.check([key]):
                store.set(store.get(key).decode(), own)
        wait_for(found)
    return own


def local_rank() -> int:
    """Which GPU of its node a rank takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def gather_rows(rows_BD: Tensor) -> Tensor:
    """All ranks' rows in rank order, without gradient.  Every rank must bring the same number of rows."""
    rows_BD = rows_BD.detach()
    if world().size == 1:
        return rows_BD
    rows_BD = rows_BD.contiguous()
    rows_ND = rows_BD.new_empty((world().size * rows_BD.shape[0], *rows_BD.shape[1:]))
    dist.all_gather_into_tensor(rows_ND, rows_BD)
    return rows_ND


def gather_together(*tables: Tensor) -> list[Tensor]:
    """The rows of several tables, or several scalars a row, in one collective; each keeps its shape."""
    if world().size == 1:
        return [table.detach() for table in tables]
    flat = [table.detach().reshape(table.shape[0], -1) for table in tables]
    parts = torch.split(gather_rows(torch.cat(flat, dim=1)), [part.shape[1] for part in flat], dim=1)
    return [part.reshape(-1, *table.shape[1:]).contiguous() for part, table in zip(parts, tables, strict=True)]


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


# -- nodes: ranks with the same host name share memory -----------------------------------------------------------------


class _Host:
    """What is known of the hosts of the current process group; asked once a group."""

    group: Any = None
    leader: int = 0
    barrier_group: Any = None
    thread_group: Any = None


def _host() -> type[_Host]:
    if _Host.group is not dist.group.WORLD:
        names: list[str | None] = [None] * world().size
        dist.all_gather_object(names, socket.gethostname())
        _Host.leader = names.index(names[world().rank])
        _Host.barrier_group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _Host.thread_group = None
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
    return text if world().size == 1 else gather_objects(text)[_host().leader]


def thread_line() -> Any:
    """For a thread that talks to the other ranks while training does, so that they never get each other's messages.
    Every rank must ask, and not in that thread."""
    if world().size == 1:
        return None
    if _host().thread_group is None:
        _Host.thread_group = dist.new_group(backend="gloo")
    return _Host.thread_group


def gather_objects(value: T, line: Any = None) -> list[T]:
    """Every rank's small object, in rank order."""
    if world().size == 1:
        return [value]
    everywhere: list[Any] = [None] * world().size
    dist.all_gather_object(everywhere, value, group=line or _host().barrier_group)
    return everywhere


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Each flag, true on all ranks if it is on one."""
    return tuple(any(votes) for votes in zip(*gather_objects(flags), strict=True))


def together(action: Callable[[], T], line: Any = None) -> T:
    """Do it on every rank; what fails on one fails on all, so that none waits for another that is gone."""
    result, error = None, None
    try:
        result = action()
    except (ValueError, OSError) as caught:
        error = caught
    messages = [message for message in gather_objects(error and str(error), line) if message is not None]
    if error is not None:
        raise error
    if messages:
        raise ValueError(messages[0])
    return cast(T, result)


def from_first_rank(value: Any) -> Any:
    """The first rank's ``value``, on every rank."""
    if world().size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_host().barrier_group)
    return box[0]


def gather_uneven(rows_BD: Tensor) -> Tensor:
    """All ranks' rows in rank order; each may bring another number of them, or none."""
    if world().size == 1:
        return rows_BD
    counts = gather_rows(torch.tensor([len(rows_BD)], device=rows_BD.device)).tolist()
    padded = rows_BD.new_zeros((max(counts), *rows_BD.shape[1:]))
    padded[: len(rows_BD)] = rows_BD
    parts = torch.split(gather_rows(padded), max(counts)) if max(counts) else [padded] * len(counts)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
