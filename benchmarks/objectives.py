"""Time and memory of every method's loss beside open_clip's, in one run.

    python benchmarks/objectives.py                              # CPU, B = 1024, D = 512
    python benchmarks/objectives.py --device cuda --batch 4096
    python benchmarks/objectives.py --csv results.csv            # one row a measurement

A measurement is forward and backward to both embedding tables.  Rounds are interleaved with open_clip's, so the ratio
(the median over rounds of ours / theirs in the same round) does not depend on what else the machine is doing.  Memory
is the peak of live tensors beyond the inputs and the objective's state: on the CPU counted tensor by tensor, on CUDA
read from the allocator.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from rows import append_rows, machine_name
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import fullbatch as fb

Step = Callable[[], None]
COLUMNS = ("method", "chunk", "batch", "width", "ms", "peer_ms", "ratio", "peak_mib")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak bytes of storages that came to life inside the block; a storage is counted once, while it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_memory(step: Step, inputs: list[Tensor], device: str) -> float:
    """MiB beyond what was there; the gradients of the inputs, which every loss leaves behind, are part of it."""
    step()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    counter = LiveBytes()
    counter.known = {tensor.untyped_storage()._cdata for tensor in inputs}
    with counter:
        step()
    return counter.peak / 2**20


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def our_step(objective: fb.Objective, image: Tensor, text: Tensor, ids: Tensor) -> Step:
    def step() -> None:
        loss = objective(image, text, ids).loss
        torch.autograd.grad(loss, (image, text, *objective.parameters()), allow_unused=True)

    return step


def their_step(loss: torch.nn.Module, image: Tensor, text: Tensor, *own: Tensor) -> Step:
    def step() -> None:
        scale = own[0].exp()
        torch.autograd.grad(loss(image, text, scale, *own[1:]), (image, text, *own))

    return step


def compare(name: str, step: Step, peer: Step, rounds: int, device: str) -> tuple[float, float, float]:
    """Median seconds of ours and theirs, and the median ratio of neighbouring rounds."""
    for _ in range(2 if device == "cpu" else 16):  # on a GPU the first calls check their inputs, one is recorded
        step()
    for _ in range(2):
        peer()
    pairs = [(seconds(step, device), seconds(peer, device)) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return ours, theirs, statistics.median(a / b for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--methods", nargs="*", default=list(fb.METHODS))
    parser.add_argument("--chunks", nargs="*", type=int, default=[0, 256, 64], help="rows at a time; 0: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recorded", action="store_true", help="our steps replayed, as the trainer does on a GPU")
    parser.add_argument("--csv", help="append one row a measurement to this file")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        table = normalize(torch.randn(args.batch, args.width, generator=generator), dim=-1)
        return table.to(args.device).requires_grad_()

    image, text, ids = rows(), rows(), torch.randperm(args.samples, generator=generator)[: args.batch].to(args.device)
    log_scale = torch.tensor(2.659, device=args.device, requires_grad=True)
    bias = torch.tensor(-10.0, device=args.device, requires_grad=True)
    clip = their_step(ClipLoss(), image, text, log_scale)
    siglip = their_step(SigLipLoss(), image, text, log_scale, bias)
    where = machine_name(args.device)
    print(f"B {args.batch}, D {args.width}, {where}, torch {torch.__version__}; ratio to open_clip's ClipLoss")
    print(f"{'':16s}{'chunk':>6s}{'ms':>9s}{'ClipLoss ms':>13s}{'ratio':>8s}{'peak MiB':>10s}")
    base_memory = peak_memory(clip, [image, text], args.device)
    print(f"{'ClipLoss':16s}{'':6s}{1e3 * seconds(clip, args.device):9.2f}{'':13s}{1.0:8.2f}{base_memory:10.1f}")
    ours, theirs, ratio = compare("SigLipLoss", siglip, clip, args.rounds, args.device)
    memory = peak_memory(siglip, [image, text], args.device)
    print(f"{'SigLipLoss':16s}{'':6s}{1e3 * ours:9.2f}{1e3 * theirs:13.2f}{ratio:8.2f}{memory:10.1f}")
    records = []
    for name in args.methods:
        for chunk in args.chunks:
            newest = {"prototypes": max(2 * args.batch, 4096)}
            settings = {"rolling": newest, "queue": newest, "xbm": {"starts_after": 0}}.get(name, {})
            objective = fb.make_objective(
                name, width=args.width, num_samples=args.samples, chunk=chunk or None, **settings
            )
            objective.to(args.device)
            if args.recorded:
                objective.record()
            step = our_step(objective, image, text, ids)
            rounds = args.rounds if "neuclip" not in name else max(args.rounds // 3, 3)
            ours, theirs, ratio = compare(name, step, clip, rounds, args.device)
            memory = peak_memory(step, [image, text, *objective.state_dict().values()], args.device)
            print(
                f"{name:16s}{chunk or 'all':>6}{1e3 * ours:9.2f}{1e3 * theirs:13.2f}{ratio:8.2f}{memory:10.1f}",
                flush=True,
            )
            records.append([name, chunk, args.batch, args.width, 1e3 * ours, 1e3 * theirs, ratio, memory])
    if args.csv:
        append_rows(args.csv, COLUMNS, records, args.device)


if __name__ == "__main__":
    main()
