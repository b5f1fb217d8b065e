"""Bytes that a step of the loss brings to a rank, on real gloo ranks, beside open_clip's, and by formula.

    python benchmarks/communication.py                       # 2, 4 and 8 processes
    python benchmarks/communication.py --ranks 2 --batch 32

Every collective of one step, forward and backward, is counted where torch.distributed is called.  What a rank receives:
(W - 1) s in a gather or a scatter of pieces of s bytes, 2 (W - 1) / W s in a sum of s bytes over a ring.  The gradients
of the towers, which both sides average alike, are left out: 2 (W - 1) / W times the size of the weights.
"""

# W: ranks   B: rows a rank   D: width

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import normalize

METHODS = ("openclip", "sogclr", "neuclip", "amorlip", "siglip")
OPEN_CLIP: Mapping[str, dict[str, bool]] = {
    "open_clip, whole loss on every rank": {},
    "open_clip, --local-loss --gather-with-grad": {"local_loss": True, "gather_with_grad": True},
}


class Counter:
    """Stands in for the collectives and adds up what they bring to this rank."""

    def __init__(self, world: int) -> None:
        self.world, self.received, self.calls = world, 0.0, 0
        ring = 2 * (world - 1) / world
        self._wrap("all_gather", lambda tensors, tensor: (world - 1) * tensor.nbytes)
        self._wrap("all_gather_into_tensor", lambda output, tensor: (world - 1) * tensor.nbytes)
        self._wrap("all_reduce", lambda tensor: ring * tensor.nbytes)
        self._wrap("reduce_scatter", lambda output, tensors: (world - 1) * output.nbytes)
        self._wrap("reduce_scatter_tensor", lambda output, tensor: (world - 1) * output.nbytes)
        # with gloo torch sends gradients of gathered rows back by scatters, one from each rank
        self._wrap("scatter", lambda tensor, tensors: tensor.nbytes * (world - 1) / world)

    def _wrap(self, name: str, received: Callable[..., float]) -> None:
        collective = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.received += received(*args[:2] if name != "all_reduce" else args[:1])
            return collective(*args, **options)

        setattr(dist, name, counted)


def predicted(method: str, world: int, batch: int, width: int) -> float:
    """Bytes to a rank.  Of each row elsewhere: both embeddings and s_ii, for either direction a sum and its gradient
    (the sigmoid has one direction), its id where the method keeps a value for each sample.  open_clip's rows are
    gathered, and their gradients sent back where it asks for them."""
    if method in OPEN_CLIP:
        return (world - 1) * batch * 4 * width * (4 if OPEN_CLIP[method] else 2)
    scalars, ids = 2 if method == "siglip" else 4, 8 if method == "sogclr" else 0
    return (world - 1) * batch * (4 * (2 * width + 1 + scalars) + ids)


def rows(batch: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(batch, width, generator=generator), dim=-1).requires_grad_()


def count(rank: int, world: int, port: int, batch: int, width: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from open_clip.loss import ClipLoss

    import fullbatch as fb

    counter = Counter(world)
    image, text = rows(batch, width, 2 * rank), rows(batch, width, 2 * rank + 1)
    ids = torch.arange(batch) + rank * batch
    steps: dict[str, Callable[[], Any]] = {}
    for name, options in OPEN_CLIP.items():
        loss = ClipLoss(rank=rank, world_size=world, **options)
        steps[name] = partial(loss, image, text, torch.tensor(14.0))
    for method in METHODS:
        objective = fb.make_objective(method, width=width, num_samples=world * batch)
        steps[method] = partial(objective, image, text, ids)
    for name, step in steps.items():
        for _ in range(9):  # the first ones look at what they are given, and ask the other ranks
            before = counter.received, counter.calls
            output = step()
            (output if isinstance(output, Tensor) else output.loss).backward()
        results[name, rank] = counter.received - before[0], counter.calls - before[1]
    dist.destroy_process_group()


def measured(world: int, batch: int, width: int) -> dict[str, tuple[float, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(count, (world, port, batch, width, results), nprocs=world)  # type: ignore[no-untyped-call]
        return {name: found for (name, rank), found in dict(results).items() if rank == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=64, help="rows a rank")
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    print(f"B {options.batch} a rank, D {options.width}, float32, torch {torch.__version__}; a step of the loss\n")
    print("| | ranks | received, kB | by the formula, kB | collectives |\n|---|---|---|---|---|")
    for world in options.ranks:
        for name, (received, calls) in measured(world, options.batch, options.width).items():
            formula = predicted(name, world, options.batch, options.width)
            print(f"| {name} | {world} | {received / 1e3:.1f} | {formula / 1e3:.1f} | {calls} |", flush=True)


if __name__ == "__main__":
    main()
