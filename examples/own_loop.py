"""fullbatch in your own training loop: an open_clip model, a plain PyTorch loop, three lines of ours.

    python examples/own_loop.py                                  # NeuCLIP at batch 32 on drawn shapes, about a minute
    python examples/own_loop.py --method openclip
    torchrun --nproc-per-node 2 examples/own_loop.py             # the same objective, spread over two ranks

The data are drawn here: coloured shapes with captions such as "a small red ring at the top left on grey".
"""

from __future__ import annotations

import argparse
import itertools
import os

import open_clip
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import fullbatch as fb

COLOURS = {
    "red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.1, 0.2, 0.9), "yellow": (0.9, 0.9, 0.1),
    "purple": (0.6, 0.1, 0.8), "white": (1.0, 1.0, 1.0),
}  # fmt: skip
SHAPES = ("disc", "ring", "square", "diamond", "cross")
SIZES = {"small": 0.28, "large": 0.5}
PLACES = {"top left": (-0.4, -0.4), "top right": (0.4, -0.4), "bottom left": (-0.4, 0.4), "bottom right": (0.4, 0.4)}
GROUNDS = {"black": (0.0, 0.0, 0.0), "grey": (0.4, 0.4, 0.4), "navy": (0.0, 0.0, 0.4), "brown": (0.4, 0.2, 0.0)}
KINDS = list(itertools.product(SIZES, COLOURS, SHAPES, PLACES, GROUNDS))  # 960 captions


def draw(size: str, colour: str, shape: str, place: str, ground: str, generator: torch.Generator) -> Tensor:
    """A 32 x 32 picture, jittered and noisy so that no two are alike."""
    axis = torch.linspace(-1.0, 1.0, 32)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    shift = 0.1 * torch.randn(2, generator=generator)
    x, y, r = x - PLACES[place][0] - shift[0], y - PLACES[place][1] - shift[1], SIZES[size]
    inside = {
        "disc": x**2 + y**2 < r**2,
        "ring": (x**2 + y**2 < r**2) & (x**2 + y**2 > (0.6 * r) ** 2),
        "square": torch.maximum(x.abs(), y.abs()) < 0.85 * r,
        "diamond": x.abs() + y.abs() < r,
        "cross": (torch.minimum(x.abs(), y.abs()) < 0.3 * r) & (torch.maximum(x.abs(), y.abs()) < r),
    }[shape]
    front, back = (torch.tensor(rgb)[:, None, None] for rgb in (COLOURS[colour], GROUNDS[ground]))
    picture = torch.where(inside, front, back)
    return picture + 0.1 * torch.randn(3, 32, 32, generator=generator)


def draw_many(count: int, seed: int) -> tuple[Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    kinds = [KINDS[int(k)] for k in torch.randint(len(KINDS), (count,), generator=generator)]
    captions = [f"a {size} {colour} {shape} at the {place} on {ground}" for size, colour, shape, place, ground in kinds]
    return torch.stack([draw(*kind, generator) for kind in kinds]), captions


def tiny_clip() -> open_clip.CLIP:
    """An open_clip model small enough for a CPU; any other open_clip model goes here just as well."""
    return open_clip.CLIP(
        embed_dim=64,
        vision_cfg=open_clip.CLIPVisionCfg(image_size=32, layers=3, width=96, patch_size=8, head_width=32),
        text_cfg=open_clip.CLIPTextCfg(context_length=16, vocab_size=49408, width=64, heads=2, layers=2),
    )


@torch.no_grad()
def accuracy(model: open_clip.CLIP, images: Tensor, captions: list[str], tokens: Tensor) -> float:
    """How often a picture's best caption among all distinct ones is its own."""
    model.eval()
    image = normalize(model.encode_image(images), dim=-1)
    first = {caption: index for index, caption in reversed(list(enumerate(captions)))}
    distinct = list(first)
    text = normalize(model.encode_text(tokens[[first[c] for c in distinct]]), dim=-1)
    best = (image @ text.T).argmax(1)
    model.train()
    return sum(distinct[int(b)] == own for b, own in zip(best, captions, strict=True)) / len(captions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="neuclip", choices=list(fb.METHODS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    torch.manual_seed(args.seed)
    images, captions = draw_many(args.samples, seed=1)
    tokens = open_clip.tokenize(captions, context_length=16)
    model = tiny_clip()
    model.logit_scale.requires_grad_(False)  # the temperature is the objective's

    # --- line 1: make it ---------------------------------------------------------------------------------------------
    objective = fb.make_objective(args.method, width=64, num_samples=args.samples, **small_scale(args.method))

    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1},
        {"params": list(objective.parameters()), "lr": 2e-4, "weight_decay": 0.0},  # tau: its own rate, no decay
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    trained = DistributedDataParallel(model) if ranks > 1 else model
    order = torch.Generator().manual_seed(args.seed)
    print_on_first = print if rank == 0 else lambda *_: None
    for step in range(args.steps):
        ids = torch.randperm(args.samples, generator=order)[: args.batch].chunk(ranks)[rank]
        image, text, _ = trained(images[ids], tokens[ids])  # open_clip returns unit rows

        # --- lines 2 and 3: use it -----------------------------------------------------------------------------------
        out = objective(image, text, ids)
        out.loss.backward()

        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == args.steps - 1:
            tau = f", tau {float(out.metrics['tau']):.4f}" if "tau" in out.metrics else ""
            print_on_first(f"step {step:4d}: global loss {float(out.metrics['global_loss']):.4f}{tau}")
    test_images, test_captions = draw_many(500, seed=2)
    found = accuracy(model, test_images, test_captions, open_clip.tokenize(test_captions, context_length=16))
    print_on_first(
        f"{args.method}, batch {args.batch}: {found:.1%} of 500 new pictures find their caption (chance 0.2%)"
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def small_scale(method: str) -> dict[str, object]:
    """2,000 samples allow a smaller KL budget than the papers' millions: rho below log(n - 1) = 7.6 by a margin."""
    return {"rho": 4.0} if "rho" in fb.settings_of(fb.METHODS[method]) and method != "amorlip" else {}


if __name__ == "__main__":
    main()
