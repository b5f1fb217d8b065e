"""What an audit costs: of 100,000 embeddings at once, and during training as a share of its time.

    python benchmarks/audit.py                                   # 100,000 samples, D 256 and 512, 10,000 anchors
    python benchmarks/audit.py --device cuda
    python benchmarks/audit.py --train --threads 2               # the audits of `fullbatch train`

The embeddings are random unit rows, the objective is NeuCLIP after one batch: neither changes what there is to compute.
"exact" is ``exact_log_normalizers``; "audit" the whole of ``normalizer_audit``, which adds what the method believes and
the batches' own estimates.  Embedding the data set comes before both and costs what a forward pass costs.  On a machine
that does other things as well, look at the CPU time.
"""

# n: samples   D: width

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import normalize

import fullbatch as fb
from fullbatch.audit.errors import normalizer_audit
from fullbatch.cli.train import train_config


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> str:
    """By the clock and of the CPU, the best of a few rounds; the first also warms up."""
    taken = []
    for _ in range(rounds):
        start, worked = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start, time.process_time() - worked))
    return " | ".join(f"{best:.2f}" for best in map(min, zip(*taken, strict=True)))


def measure(width: int, args: argparse.Namespace, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    image_nD, text_nD = (
        normalize(torch.randn(args.samples, width, generator=generator), dim=-1).to(device) for _ in range(2)
    )
    ids, anchors = torch.arange(args.samples, device=device), torch.arange(args.anchors, device=device)
    objective = fb.make_objective("neuclip", width=width, num_samples=args.samples).to(device)
    with torch.no_grad():
        objective(image_nD[: args.batch], text_nD[: args.batch])

    def audit() -> object:
        draws = torch.Generator().manual_seed(0)
        return normalizer_audit(objective, image_nD, text_nD, ids, args.anchors, args.batch, draws)

    exact = seconds(lambda: fb.exact_log_normalizers(image_nD, text_nD, 0.07, anchors=anchors), device, args.rounds)
    print(f"| {width} | {exact} | {seconds(audit, device, args.rounds)} |", flush=True)


def train_with_audits(arguments: list[str]) -> None:
    """Train as `fullbatch train` does and add up what its audits took."""
    with tempfile.TemporaryDirectory() as folder:
        config, _ = train_config(["--runs", folder, "--name", "run", *arguments])
        fb.train(config)
        lines = [json.loads(text) for text in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    audits = [line for line in lines if line.get("kind") == "audit"]
    trained = [line["seconds"] for line in lines if "kind" not in line][-1]
    spent = sum(line["seconds"] for line in audits)
    for line in audits:
        known, batch = line["normalizer_error"], line["batch_error"]
        print(f"step {line['step']:5d}  normalizer {known:.4f}  one batch {batch:.4f}  {line['seconds']:.2f} s")
    print(
        f"{len(audits)} audits of {audits[0]['anchors']} anchors against {audits[0]['samples']} samples: "
        f"{spent:.1f} s, training {trained:.1f} s: {spent / (spent + trained):.1%} of the run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--anchors", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", action="store_true", help="measure the audits of `fullbatch train` instead")
    args, rest = parser.parse_known_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{datetime.date.today()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}")
    if args.train:
        train_with_audits(rest)
        return
    print(f"{args.samples:,} samples, {args.anchors:,} anchors, both directions, batches of {args.batch}\n")
    print("| width | exact (s) | CPU time | audit (s) | CPU time |\n|---|---|---|---|---|")
    for width in args.width:
        measure(width, args, device)


if __name__ == "__main__":
    main()
