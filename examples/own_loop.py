"""fullbatch in your own training loop: an open_clip model, a plain PyTorch loop, three lines of ours.

    python examples/own_loop.py                                  # NeuCLIP at batch 128 on drawn shapes, about a minute
    python examples/own_loop.py --method openclip
    python examples/own_loop.py --set prototype_lr=1.0 updates=3
    torchrun --nproc-per-node 2 examples/own_loop.py             # the same objective, spread over two ranks

The script draws its own data: two shapes in a picture, with captions such as "a red ring at the top left and a white
cross at the bottom right".
"""

from __future__ import annotations

import argparse
import ast
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
PLACES = {
    "top left": (-0.45, -0.45),
    "top right": (0.45, -0.45),
    "bottom left": (-0.45, 0.45),
    "bottom right": (0.45, 0.45),
}
OBJECTS = list(itertools.product(COLOURS, SHAPES, PLACES))
SCENES = [(a, b) for a, b in itertools.combinations(OBJECTS, 2) if a[2] != b[2]]  # 5,400 of them
CONTEXT = 24


def draw(scene: tuple[tuple[str, str, str], ...], generator: torch.Generator) -> Tensor:
    """A 32 x 32 picture of two things, jittered and noisy so that no two are alike."""
    axis = torch.linspace(-1.0, 1.0, 32)
    picture = 0.1 * torch.randn(3, 32, 32, generator=generator)
    for colour, shape, place in scene:
        shift = torch.tensor(PLACES[place]) + 0.08 * torch.randn(2, generator=generator)
        y, x = torch.meshgrid(axis - shift[1], axis - shift[0], indexing="ij")
        inside = {
            "disc": x**2 + y**2 < 0.4**2,
            "ring": (x**2 + y**2 < 0.4**2) & (x**2 + y**2 > 0.24**2),
            "square": torch.maximum(x.abs(), y.abs()) < 0.34,
            "diamond": x.abs() + y.abs() < 0.42,
            "cross": (torch.minimum(x.abs(), y.abs()) < 0.13) & (torch.maximum(x.abs(), y.abs()) < 0.4),
        }[shape]
        picture = picture + torch.tensor(COLOURS[colour])[:, None, None] * inside
    return picture


def draw_scenes(first: int, count: int) -> tuple[Tensor, list[str]]:
    """``count`` different scenes; those from another ``first`` are others."""
    order = torch.randperm(len(SCENES), generator=torch.Generator().manual_seed(0))[first : first + count]
    scenes, generator = [SCENES[int(k)] for k in order], torch.Generator().manual_seed(first)
    captions = [" and ".join(f"a {colour} {shape} at the {place}" for colour, shape, place in s) for s in scenes]
    return torch.stack([draw(scene, generator) for scene in scenes]), captions


def tiny_clip() -> open_clip.CLIP:
    """An open_clip model small enough for a CPU; any other open_clip model goes here just as well."""
    return open_clip.CLIP(
        embed_dim=64,
        vision_cfg=open_clip.CLIPVisionCfg(image_size=32, layers=3, width=96, patch_size=8, head_width=32),
        text_cfg=open_clip.CLIPTextCfg(context_length=CONTEXT, vocab_size=49408, width=64, heads=2, layers=2),
    )


@torch.no_grad()
def accuracy(model: open_clip.CLIP, images: Tensor, tokens: Tensor) -> float:
    """How often a picture's best caption is its own, and a caption's best picture."""
    model.eval()
    sim = normalize(model.encode_image(images), dim=-1) @ normalize(model.encode_text(tokens), dim=-1).T
    model.train()
    own = torch.arange(len(images))
    return float(((sim.argmax(1) == own).float().mean() + (sim.argmax(0) == own).float().mean()) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="neuclip", choices=list(fb.METHODS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the method")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    torch.manual_seed(args.seed)
    images, captions = draw_scenes(0, args.samples)
    tokens = open_clip.tokenize(captions, context_length=CONTEXT)
    model = tiny_clip()
    model.logit_scale.requires_grad_(False)  # the temperature is the objective's

    # --- line 1: make it ---------------------------------------------------------------------------------------------
    settings = {**small_scale(args.method), **dict(map(setting, args.set))}
    objective = fb.make_objective(args.method, width=64, num_samples=args.samples, **settings)

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
        if step % 50 == 0 or step == args.steps - 1:
            tau = f", tau {float(out.metrics['tau']):.4f}" if "tau" in out.metrics else ""
            print_on_first(f"step {step:4d}: global loss {float(out.metrics['global_loss']):.4f}{tau}")
    images, captions = draw_scenes(args.samples, 500)
    found = accuracy(model, images, open_clip.tokenize(captions, context_length=CONTEXT))
    print_on_first(f"{args.method}, batch {args.batch}: R@1 {found:.1%} among 500 scenes never seen (chance 0.2%)")
    if dist.is_initialized():
        dist.destroy_process_group()


def setting(text: str) -> tuple[str, object]:
    """NAME=VALUE as a setting: numbers, None, True and False as such, anything else as text."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def small_scale(method: str) -> dict[str, object]:
    """2,000 samples and 300 steps want other settings than the papers' millions: rho well below log(n - 1) = 7.6, fewer
    prototypes, and faster ones, because the encoders of so short a run move fast (docs/explanation/normalizers.md)."""
    known = fb.settings_of(fb.METHODS[method])
    smaller = {"rho": 4.0, "prototypes": 512, "prototype_lr": 0.0125}
    return {} if method == "amorlip" else {key: value for key, value in smaller.items() if key in known}


if __name__ == "__main__":
    main()
