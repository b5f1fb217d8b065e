"""What the operands of the loss's matrix products cost in its values and gradients, against float64.

    python benchmarks/kernel_error.py                     # each format imitated on the CPU
    python benchmarks/kernel_error.py --device cuda       # and the kernels as they run

Both directions of one batch, the positive left out, log g_i.  Rows are rounded to each format, and so is the gradient
to the similarities, which is the other operand of the last products; sums are float32.  "split" is a row as the sum of
two float16, in the similarities alone.  Printed are the largest error of a value, and the error of the gradient to the
images over its size, both as norms.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fullbatch.objective.chunked import tf32_products
from fullbatch.objective.kernel import log_mean_exp_of_batch, runs_fused
from fullbatch.objective.pairs import Table

# B: pairs   D: width

Round = Callable[[Tensor], Tensor]
TAUS = (0.07, 0.03, 0.01, 0.005)


class Pairs(NamedTuple):
    image_BD: Tensor
    text_BD: Tensor
    positive_B: Tensor


class Result(NamedTuple):
    value_2B: Tensor
    to_image_BD: Tensor


def with_bits(bits: int) -> Round:
    """So many bits of significand, the leading one counted, and any exponent."""

    def rounded(numbers: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(numbers)
        return torch.ldexp((mantissa * 2**bits).round(), exponent - bits)

    return rounded


def in_float16(numbers: Tensor) -> Tensor:
    return numbers.half().to(numbers.dtype)


def plain(see: Round) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda image_BD, text_BD: see(image_BD) @ see(text_BD).T


def split(image_BD: Tensor, text_BD: Tensor) -> Tensor:
    high, other = in_float16(image_BD), in_float16(text_BD)
    low, other_low = in_float16(image_BD - high), in_float16(text_BD - other)
    return high @ other.T + high @ other_low.T + low @ other.T


class Format(NamedTuple):
    """How similarities are computed, and what the last products see of their operands."""

    similarities: Callable[[Tensor, Tensor], Tensor]
    last: Round
    gradient: Round  # to the similarities; float16 is scaled, so that it is as good as any number of 11 bits


FORMATS = {
    "float32": Format(plain(torch.clone), torch.clone, torch.clone),
    "split": Format(split, in_float16, with_bits(11)),
    "float16": Format(plain(in_float16), in_float16, with_bits(11)),
    "tf32": Format(plain(with_bits(11)), with_bits(11), with_bits(11)),
    "bfloat16": Format(plain(with_bits(8)), with_bits(8), with_bits(8)),
}


def imitated(pairs: Pairs, tau: float, seen: Format) -> Result:
    sim_BB = seen.similarities(pairs.image_BD, pairs.text_BD)
    own_BB = torch.eye(len(sim_BB), dtype=torch.bool, device=sim_BB.device)
    log_count, values, to_sim_BB = math.log(len(sim_BB) - 1), [], torch.zeros_like(sim_BB)
    for dim in (1, 0):
        x_BB = ((sim_BB - pairs.positive_B.unsqueeze(dim)) / tau).masked_fill_(own_BB, -math.inf)
        values.append(torch.logsumexp(x_BB, dim) - log_count)
        to_sim_BB += torch.softmax(x_BB, dim) / (tau * len(sim_BB))
    return Result(torch.cat(values), seen.gradient(to_sim_BB) @ seen.last(pairs.text_BD))


def measured(pairs: Pairs, tau: float, operands: str) -> Result:
    """The kernel as it runs on this device."""
    image_BD, positive_B = pairs.image_BD.clone().requires_grad_(), pairs.positive_B
    tau_B = torch.full_like(positive_B, tau)
    row, column = (Table(t, t.detach(), positive_B, positive_B, tau_B, tau_B) for t in (image_BD, pairs.text_BD))
    found = log_mean_exp_of_batch(row, column, slice(0, len(image_BD)), operands=operands)
    value_2B = torch.cat([direction.log_mean_B for direction in found])
    return Result(value_2B.detach(), torch.autograd.grad(value_2B.sum() / len(image_BD), image_BD)[0])


def measured_in_tf32(pairs: Pairs, tau: float) -> Result:
    with tf32_products(pairs.image_BD):
        return measured(pairs, tau, "float32")


def make_pairs(count: int, width: int) -> Pairs:
    """Unit rows whose similarities are about those of a trained CLIP: 0.3 with their own, 0.1 with others."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(count, width, generator=generator, dtype=torch.float64) for _ in range(3)]
    common, shared = 0.33 * torch.randn(width, generator=generator, dtype=torch.float64), 0.5 * noise[0]
    image_BD, text_BD = (normalize(common + shared + own, dim=1) for own in noise[1:])
    return Pairs(image_BD, text_BD, (image_BD * text_BD).sum(1))


def report(name: str, results: list[Result], exact: list[Result]) -> None:
    errors = []
    for got, want in zip(results, exact, strict=True):
        value = (got.value_2B.cpu().double() - want.value_2B).abs().max()
        gradient = (got.to_image_BD.cpu().double() - want.to_image_BD).norm() / want.to_image_BD.norm()
        errors.append(f"{value:9.1e}{gradient:9.1e}")
    print(f"{name:20s}" + "  ".join(errors), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    exact_pairs = make_pairs(args.batch, args.width)
    exact = [imitated(exact_pairs, tau, FORMATS["float32"]) for tau in TAUS]
    pairs = Pairs(*(t.float().to(args.device) for t in exact_pairs))
    print(f"B {args.batch}, D {args.width}, {args.device}, torch {torch.__version__}; value, gradient at each tau")
    print(" " * 20 + "  ".join(f"{'tau ' + str(tau):>18s}" for tau in TAUS))
    for name, seen in FORMATS.items():
        report(name, [imitated(pairs, tau, seen) for tau in TAUS], exact)
    if runs_fused(pairs.image_BD, "float16"):
        for operands in ("float32", "split", "float16"):
            report(f"kernel, {operands}", [measured(pairs, tau, operands) for tau in TAUS], exact)
        report("kernel, tf32", [measured_in_tf32(pairs, tau) for tau in TAUS], exact)


if __name__ == "__main__":
    main()
