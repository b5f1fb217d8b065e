"""How wrong is a normalizer, and do the prototype updates help?  On clustered synthetic embeddings, held-out anchors.

    python benchmarks/normalizer_error.py             # the table in docs/explanation/normalizers.md, a few CPU minutes
    python benchmarks/normalizer_error.py --width 512 --prototypes 4096 --samples 51200 --device cuda

Each row is one setting of NeuCLIP's prototypes; each number a mean squared error of log-normalizers over anchors that
were never in a batch (both directions).  "drift" lets the embeddings move as an encoder in training would.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fullbatch as fb

HELD_OUT = 1000


class Clusters:
    """Pairs around cluster centres with Zipf sizes; image and text share the centre and a part of the noise."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        count, width = args.samples + HELD_OUT, args.width

        def noise(rows: int) -> Tensor:
            return torch.randn(rows, width, generator=generator).to(args.device) / math.sqrt(width)

        centers = noise(args.clusters)
        sizes = 1.0 / torch.arange(1, args.clusters + 1) ** args.zipf
        label = torch.multinomial(sizes, count, replacement=True, generator=generator).to(args.device)
        shared = centers[label] + args.spread * noise(count)
        self.image, self.text = shared + args.gap * noise(count), shared + args.gap * noise(count)
        drift_centers = noise(args.clusters)
        self.motion, self.drift = drift_centers[label] + noise(count), args.drift
        self.samples = args.samples

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The embeddings after ``step`` steps of drift."""
        shift = self.drift * step * self.motion
        return normalize(self.image + shift, dim=-1), normalize(self.text + shift, dim=-1)


def error(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> float:
    return float(torch.stack([(a - b).square().mean() for a, b in zip(found, exact, strict=True)]).mean())


def batch_estimate(data: Clusters, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """What a batch that contains the anchor says: the mean over its B - 1 negatives, the same epsilon."""
    image, text = data.at(step)
    others = torch.randperm(args.samples, generator=torch.Generator().manual_seed(step))[: args.batch - 1]
    held = slice(args.samples, None)
    positive = (image[held] * text[held]).sum(1, keepdim=True)
    logs = [(a[held] @ b[others].T - positive) / args.temperature for a, b in ((image, text), (text, image))]
    found = [torch.logsumexp(x, 1) - math.log(args.batch - 1) for x in logs]
    return tuple(torch.logaddexp(x, torch.full_like(x, math.log(1e-14))) for x in found)  # type: ignore[return-value]


def batches(data: Clusters, args: argparse.Namespace) -> list[Tensor]:
    order: list[Tensor] = []
    generator = torch.Generator().manual_seed(args.seed + 1)
    while len(order) < args.steps:
        shuffled = torch.randperm(args.samples, generator=generator)
        order += torch.split(shuffled[: args.samples // args.batch * args.batch], args.batch)
    return order[: args.steps]


def run(data: Clusters, args: argparse.Namespace, report: list[int], **settings: object) -> list[float]:
    objective = fb.make_objective(
        "neuclip",
        width=args.width,
        temperature=fb.Constant(args.temperature),
        prototypes=args.prototypes,
        restart_every=args.restart_every,
        **settings,
    ).to(args.device)
    held, errors = torch.arange(args.samples, args.samples + HELD_OUT, device=args.device), []
    for step, rows in enumerate(batches(data, args)):
        image, text = data.at(step)
        with torch.no_grad():
            objective(image[rows], text[rows])
        if step in report:
            exact = fb.exact_log_normalizers(image, text, args.temperature, anchors=held)
            errors.append(error(objective.log_normalizers(image[held], text[held]), exact))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=12800)
    parser.add_argument("--clusters", type=int, default=256)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--gap", type=float, default=0.5)
    parser.add_argument("--drift", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--prototypes", type=int, default=1024)
    parser.add_argument("--restart-every", type=int, default=200)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sweep", type=float, nargs="*", default=[], help="more learning rates to try")
    args = parser.parse_args()
    data, every = Clusters(args), args.restart_every
    last = (args.steps - 1) // every * every
    report = sorted({s for s in (0, 10, every - 1, last, last + 1, last + 10, args.steps - 1) if s < args.steps})
    image, text = data.at(0)
    held = torch.arange(args.samples, args.samples + HELD_OUT, device=args.device)
    exact = fb.exact_log_normalizers(image, text, args.temperature, anchors=held)
    print(f"n/B = {args.samples / args.batch:.0f}, batch estimate: {error(batch_estimate(data, 0, args), exact):.4f}")
    print(f"{'prototypes, after step':34s}" + "".join(f"{step:>9d}" for step in report))
    rows: list[tuple[str, dict[str, object]]] = [
        ("restarts only (updates=0)", {"updates": 0}),
        ("default", {}),
        ("default, accumulator kept", {"reset_accumulator": False}),
        ("default, accumulator reset", {"reset_accumulator": True}),
        ("paper (lr 1.0, reset)", {"prototype_lr": 1.0, "reset_accumulator": True}),
    ]
    for lr in args.sweep:
        rows.append((f"lr {lr}", {"prototype_lr": lr}))
    for label, settings in rows:
        errors = run(data, args, report, **settings)
        print(f"{label:34s}" + "".join(f"{value:9.4f}" for value in errors), flush=True)


if __name__ == "__main__":
    main()
