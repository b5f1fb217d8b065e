"""What it costs to plan an epoch's batches, part by part, and as a share of the epoch it is planned in; what training
waits for; and how far a correction takes a normalizer's bias away.

    python benchmarks/selection.py                              # 100,000 samples, batches of 32, blocks of 40 batches
    python benchmarks/selection.py --planners 1 --whole         # the whole epoch, in planners of their own
    python benchmarks/selection.py --device cuda
    python benchmarks/selection.py --samples 1_000_000 --stall --planners 8 --step-ms 2   # steps that only sleep
    python benchmarks/selection.py --bias

The embeddings are noisy copies of 100 directions: about as hard to cluster as those of a model that has learned a
little.  Each part runs on one thread, as a planner does.  "Hungarian" is scipy's matching on the same distances, which
``even_assignment`` replaces.  On a machine that does other things as well, look at the CPU time.
"""

# P: places of an epoch   D: width

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch.config.methods import METHODS
from fullbatch.config.training import Selection
from fullbatch.data.order import Order
from fullbatch.selection.correction import log_corrections
from fullbatch.selection.ordered import drawn_batches, hardest, losses_at
from fullbatch.selection.periods import Periods, Plans
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import Seen, Selector
from fullbatch.selection.spectral import (
    blocks,
    distances_to_centres,
    even_assignment,
    first_eigenvectors,
    laplacian,
    one_thread,
    order_of_block,
    pair_weights,
    thread_pools,
    unit_rows,
)


class Stopwatch:
    """Seconds by the clock and of the CPU, summed by part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def over(self, part: str) -> Iterator[None]:
        start, worked = time.perf_counter(), time.process_time()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        clock, cpu = self.parts.get(part, (0.0, 0.0))
        self.parts[part] = clock + time.perf_counter() - start, cpu + time.process_time() - worked


def embeddings(count: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(100, width, generator=generator)[torch.randint(100, (count,), generator=generator)]
    shared = shared + 0.7 * torch.randn(count, width, generator=generator)
    image, text = (normalize(shared + 0.5 * torch.randn(count, width, generator=generator), dim=-1) for _ in range(2))
    return image, text


def by_parts(args: argparse.Namespace, device: torch.device) -> float:
    """Prints what each part of a block takes; seconds of a block, of the CPU or, with a GPU, by the clock."""
    watch, size = Stopwatch(device), args.block_batches * args.batch
    tables = [table.to(device) for table in embeddings((args.blocks + 1) * size, args.width)]
    with one_thread():
        for number in range(args.blocks + 1):
            image, text = (table[number * size : (number + 1) * size] for table in tables)
            with watch.over("weights"):
                matrix = laplacian(pair_weights(image, text, args.tau, args.batch))
            with watch.over("eigenvectors"):
                rows = unit_rows(first_eigenvectors(matrix, args.block_batches)).double().numpy(force=True)
            with watch.over("k-means"):
                cost = distances_to_centres(rows, args.block_batches, 0)
            with watch.over("assignment"):
                found = even_assignment(cost, args.batch)
            with watch.over("(Hungarian)"):
                _, matched = linear_sum_assignment(np.repeat(cost, args.batch, axis=1))
            everyone = np.arange(size)
            assert np.isclose(cost[everyone, found].sum(), cost[everyone, matched // args.batch].sum())
            if number == 0:
                watch.parts.clear()  # the first block also warms up
    print("| part of a block | clock, ms | CPU, ms |\n|---|---|---|")
    for part, (clock, cpu) in watch.parts.items():
        print(f"| {part} | {1e3 * clock / args.blocks:.0f} | {1e3 * cpu / args.blocks:.0f} |")
    kept = [seconds for part, seconds in watch.parts.items() if not part.startswith("(")]
    clock, cpu = (sum(each) / args.blocks for each in zip(*kept, strict=True))
    print(f"| a block | {1e3 * clock:.0f} | {1e3 * cpu:.0f} |\n", flush=True)
    return float(clock if device.type == "cuda" else cpu)


def as_a_share(block_seconds: float, args: argparse.Namespace) -> None:
    """Of the epoch during which it is planned: what a core beside the training does."""
    steps = args.samples // args.batch
    number = len(blocks(args.samples, args.batch, args.block_batches))
    epoch = number * block_seconds
    print(f"an epoch: {steps} steps, {number} blocks, {epoch:.1f} s for one planner\n")
    print("| a step, ms | share of an epoch |\n|---|---|")
    for step in args.step_ms:
        print(f"| {step:g} | {epoch / (steps * step / 1e3):.0%} |")
    print(flush=True)


def plan_block(image: Tensor, text: Tensor, args: argparse.Namespace, number: int) -> tuple[np.ndarray, float]:
    worked = time.process_time()
    return order_of_block(image, text, args.batch, args.tau, 0, number), time.process_time() - worked


def whole_epoch(args: argparse.Namespace) -> None:
    """In processes of their own, as training does it; and what the batches are worth."""
    image, text = embeddings(args.samples, args.width)
    parts = blocks(args.samples, args.batch, args.block_batches)
    with ProcessPoolExecutor(args.planners, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(plan_block, image[:64], text[:64], args, 0) for _ in range(args.planners)]:
            job.result()  # imports
        start = time.perf_counter()
        cut = [(image[part.start : part.stop].clone(), text[part.start : part.stop].clone()) for part in parts]
        jobs = [pool.submit(plan_block, *tables, args, number) for number, tables in enumerate(cut)]
        done = [job.result() for job in jobs]
    seconds = time.perf_counter() - start
    order = np.concatenate([part.start + found for part, (found, _) in zip(parts, done, strict=True)])
    assert (np.sort(order) == np.arange(order.size)).all()
    spent = sum(cpu for _, cpu in done)
    print(f"the whole epoch, {args.planners} planner(s): {seconds:.1f} s by the clock, {spent:.1f} s of the CPU")
    uniform = losses_at(image, text, np.arange(order.size).reshape(-1, args.batch), args.tau).mean()
    chosen = losses_at(image, text, order.reshape(-1, args.batch), args.tau).mean()
    print(f"mean loss of a batch: uniform {uniform:.3f}, spectral {chosen:.3f}\n", flush=True)


def stall(args: argparse.Namespace, device: torch.device) -> None:
    """Training that sleeps for a step's time and selects as training does: planned ahead, an epoch a plan, from a table
    on the device.  The first plan and one more; of each epoch what was waited for."""
    selection = Selection(batches="spectral", embeddings="forward", block_batches=args.block_batches)
    whole, step = args.samples // args.batch, args.step_ms[0] / 1e3
    rows = torch.stack(embeddings(args.samples, args.width), dim=1).to(device)
    seen = Seen(rows, torch.arange(1, args.samples + 1, device=device))
    print(f"{whole} steps an epoch, {1e3 * step:g} ms each, {args.planners} planner(s)\n")
    print("| epoch | seconds | waited, s | share |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder) / "batches", Periods(selection, whole), args.batch, METHODS["neuclip"])
        planners = Planners(args.planners, thread_pools)
        order = Order((args.samples,), (1.0,), 0)
        selector = Selector(plans, order, planners, lambda: seen, lambda rows: args.tau, lambda: None)
        waited, start = dict.fromkeys(range(3), 0.0), time.perf_counter()
        for numbers in selector.ranges(range(3 * whole)):
            epoch = numbers.start // whole
            waited[epoch] += selector.costs().get("selection_stall", 0.0)
            time.sleep(len(numbers) * step)
            if numbers.stop % whole == 0:
                seconds, start = time.perf_counter() - start, time.perf_counter()
                print(f"| {epoch} | {seconds:.1f} | {waited[epoch]:.2f} | {waited[epoch] / seconds:.1%} |", flush=True)
        selector.close()


def bias(args: argparse.Namespace) -> None:
    """log g of a batch less log g of ten blocks, the data set: the mean, and its size, over the anchors of one block;
    and the log of the mean ratio of the g themselves, which is what a moving average takes up.  The snapshot that
    batches and corrections are made from is the table with noise, so that its rows have this cosine with today's."""
    size = args.block_batches * args.batch
    tables = embeddings(10 * size, args.width)
    everyone = _log_g(*tables, args.tau)
    image, text = tables[0][:size], tables[1][:size]
    print("| a row's cosine with the snapshot's | batches | bias of log g | its size | of g |\n|---|---|---|---|---|")
    for noise in (0.0, 0.1, 0.2, 0.3, 0.5):
        generator = torch.Generator().manual_seed(1)
        spread = noise / args.width**0.5
        old_image, old_text = (
            normalize(rows + spread * torch.randn(rows.shape, generator=generator), dim=-1) for rows in (image, text)
        )
        cosine = float((old_image * image).sum(1).mean())
        chosen = order_of_block(old_image, old_text, args.batch, args.tau, 0, 0).reshape(-1, args.batch)
        uniform = np.arange(chosen.size).reshape(chosen.shape)
        log_c = log_corrections(old_image, old_text, chosen, args.tau, uniform.reshape(-1), METHODS["neuclip"])[..., 0]
        for name, batches, correction in (
            ("uniform", uniform, torch.zeros(())),
            ("spectral", chosen, torch.zeros(())),
            ("spectral, corrected", chosen, log_c),
        ):
            rows = torch.from_numpy(batches)
            found = torch.stack([_log_g(image[these], text[these], args.tau) for these in rows]) + correction
            off = found - everyone[rows]
            mean = float(off.flatten().logsumexp(0)) - math.log(off.numel())
            print(f"| {cosine:.3f} | {name} | {off.mean():+.2f} | {off.abs().mean():.2f} | {mean:+.2f} |", flush=True)


def _log_g(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Of images as anchors among these pairs, but for the positive's part, which is the same in every batch."""
    sims: Tensor = (image @ text.T / tau).fill_diagonal_(-torch.inf)
    return sims.logsumexp(1) - math.log(len(image) - 1)


def ordered(args: argparse.Namespace, device: torch.device) -> None:
    image, text = (table.to(device) for table in embeddings(args.samples, args.width))
    watch = Stopwatch(device)
    for _ in range(3):
        watch.parts.clear()
        with watch.over("all"):
            found = hardest(image, text, drawn_batches(args.samples, args.batch, 1500, 0), 150, args.tau)
    clock, cpu = watch.parts["all"]
    looked_at = losses_at(image, text, drawn_batches(args.samples, args.batch, 1500, 0), args.tau).mean()
    kept = losses_at(image, text, found, args.tau).mean()
    print(f"ordered, 150 of 1500 batches: {clock:.2f} s by the clock, {cpu:.2f} s of the CPU", end="; ")
    print(f"mean loss of a batch: drawn {looked_at:.3f}, kept {kept:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--block-batches", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tau", type=float, default=0.1)
    parser.add_argument("--blocks", type=int, default=6, help="blocks that are timed")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5, 10, 25, 50])
    parser.add_argument("--planners", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="plan the whole epoch too")
    parser.add_argument("--stall", action="store_true", help="what training waits for, and nothing else")
    parser.add_argument("--bias", action="store_true", help="of normalizers, and nothing else")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}; ", end="")
    print(f"{args.samples} samples, B {args.batch}, {args.block_batches} batches a block, D {args.width}\n")
    if args.stall or args.bias:
        stall(args, device) if args.stall else bias(args)
        return
    as_a_share(by_parts(args, device), args)
    if args.whole:
        whole_epoch(args)
    ordered(args, device)


if __name__ == "__main__":
    main()
