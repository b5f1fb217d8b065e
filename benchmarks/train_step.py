"""Samples a second of a training step beside open_clip's own, in one run.

    python benchmarks/train_step.py                              # one GPU: ViT-B-32 at B 1024
    python benchmarks/train_step.py --model ViT-B-16 --batch 512 --captions full
    python benchmarks/train_step.py --model RN50 --channels-last
    python benchmarks/train_step.py --model benchmarks/icons/vit.json --batch 128 --graphs
    python benchmarks/train_step.py --device cpu --model tiny --batch 8 --steps 2 --rounds 1

Ours is ``Trainer.train_step`` on a batch of the loader (uint8 images).  Theirs is ``open_clip_train.train``'s
``train_one_epoch`` with the model, loss, AdamW groups and scheduler that its ``main`` makes, on float images normalised
beforehand, as its loader gives them, with the TF32 and cuDNN settings it makes.  Both towers are compiled and run in
bf16; the batches lie on the device already.  With ``--graphs`` nothing is compiled: our step is replayed as a CUDA
graph, theirs runs as it does by default.  A round is ``--steps`` steps of each side, one after the other; the ratio
is the median over rounds of our speed over theirs in the same round.  Memory is the peak of a step beyond weights,
moments and the objective's state: activations, gradients and whatever the loss needs.

Captions have the lengths of Conceptual 12M: 20.2 +- 16.3 tokens (Changpinyo et al. 2021, table 1), drawn from a gamma
distribution of that mean and deviation, with a start and an end token and cut at the context length.  With
``--captions full`` all fill it.
"""

# B: pairs   C: channels   H, W: pixels   L: tokens

from __future__ import annotations

import argparse
import datetime
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import torch
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch
from rows import append_rows, machine_name
from torch import Tensor

from fullbatch.assembly import make_state
from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.training import RunFolder, Training
from fullbatch.data.images import TrainTransform
from fullbatch.data.loader import LoadedBatch, SamplePool, TrainingBatches
from fullbatch.data.order import Order
from fullbatch.data.sample import Samples
from fullbatch.models.build import build_model
from fullbatch.models.open_clip_towers import TINY
from fullbatch.models.tokenizers import Tokenizer
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training.display import Display
from fullbatch.training.run_folder import Folder, Metrics
from fullbatch.training.stages import Stages
from fullbatch.training.trainer import Trainer

SAMPLES = 1_000_000  # of the data set that the random batches pretend to come from
BATCHES = 4  # that take turns
WORDS = (20.2, 16.3)  # of a caption: mean and deviation
COLUMNS = ("model", "batch", "captions", "compiled", "graphs", "method", "samples_per_s", "ratio", "peak_gib")
WARM_UP = 16  # steps on a GPU: compilation, prototypes filled, the first calls' checks over, the objective recorded
WARM_UP_GRAPHS = 48  # the same where batches are small, and a step is recorded after that
Steps = Callable[[int], None]


class Nothing(Samples):
    """A source that is as long as it says and is never read: the batches are random."""

    name, fingerprint, count = "random", "random", SAMPLES


def random_batches(model: TwoTowers, size: int, full: bool, device: torch.device) -> list[LoadedBatch]:
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randint, generator=generator, device=device)
    lengths_draw = np.random.default_rng(0)
    side = model.image_size
    batches = []
    for _ in range(BATCHES):
        lengths = caption_lengths(size, model.context_length, full, lengths_draw)
        batches.append(
            LoadedBatch(
                ids=draw(SAMPLES, (size,)),
                images=draw(256, (size, 3, side, side), dtype=torch.uint8),
                tokens=random_tokens(model, lengths, draw),
                lengths=tuple(lengths),
            )
        )
    return batches


def caption_lengths(size: int, most: int, full: bool, generator: np.random.Generator) -> list[int]:
    """Start and end tokens counted."""
    mean, deviation = WORDS
    words = generator.gamma((mean / deviation) ** 2, deviation**2 / mean, size)
    lengths: list[int] = np.clip(np.rint(words) + 2, 3, most).astype(int).tolist()
    return [most] * size if full else lengths


def random_tokens(model: TwoTowers, lengths: list[int], draw: Callable[..., Tensor]) -> Tensor:
    """Any words, then the end token, whose id is the largest, then padding."""
    assert isinstance(model.tokenize, Tokenizer)  # two towers
    end = model.tokenize.vocabulary - 1
    tokens_BL = draw(1, end, (len(lengths), model.context_length))
    place_L = torch.arange(model.context_length, device=tokens_BL.device)
    length_B1 = torch.tensor(lengths, device=tokens_BL.device).unsqueeze(1)
    tokens_BL = torch.where(place_L == length_B1 - 1, end, tokens_BL)
    return torch.where(place_L < length_B1, tokens_BL, model.tokenize.padding)


# ---------------------------------------------------------------------------------------------------------------------
# the two sides


def our_steps(method: str, model: TwoTowers, batches: list[LoadedBatch], training: Training, folder: Path) -> Steps:
    """The trainer of a run, without its loader, log and checkpoints."""
    size, device = len(batches[0].ids), batches[0].ids.device
    config = RunConfig(objective=ObjectiveConfig(method), training=training, run=RunFolder(log_every=10**9))
    source = TrainingBatches(
        SamplePool([Nothing()]), Order((SAMPLES,), (1.0,), 0), size, TrainTransform(model.image_size), model.tokenize
    )
    state, wrapped = make_state(config, model, source.pool, device)
    trainer = Trainer(
        config=config,
        folder=Folder(folder),
        batches=source,
        stages=Stages(per_epoch=SAMPLES // size, training=10**6),
        device=device,
        model=wrapped,
        state=state,
        metrics=Metrics(Folder(folder), config, first=False, step=0),
        display=Display(first=False, quiet=True),
    )
    turns = cycle(batches)

    def steps(count: int) -> None:
        for batch in islice(turns, count):
            trainer.train_step(batch)

    return steps


def their_steps(name: str, images: list[Tensor], tokens: list[Tensor], compiled: bool) -> Steps:
    """open_clip's training loop over a loader that gives these batches."""
    device = images[0].device
    if name == "tiny" or name.endswith(".json"):
        open_clip.add_model_config(TINY if name == "tiny" else Path(name))
        name = Path(name).stem
    model = open_clip.create_model(name, precision="amp_bf16", device=device, output_dict=True)

    def undecayed(key: str, parameter: Tensor) -> bool:  # as in open_clip_train.main
        return parameter.ndim < 2 or any(part in key for part in ("bn", "ln", "bias", "logit_scale"))

    named = list(model.named_parameters())
    groups = [
        {"params": [p for key, p in named if undecayed(key, p)], "weight_decay": 0.0},
        {"params": [p for key, p in named if not undecayed(key, p)], "weight_decay": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    scheduler = cosine_lr(optimizer, 5e-4, 10_000, 10**6)
    loss = open_clip.ClipLoss(cache_labels=True)
    callable_model = torch.compile(model) if compiled else model
    args = SimpleNamespace(
        **{"device": str(device), "precision": "amp_bf16", "batch_size": len(images[0]), "accum_freq": 1},
        **{"distill": False, "skip_scheduler": False, "grad_clip_norm": None, "horovod": False, "wandb": False},
        **{"rank": 1, "world_size": 1, "log_local": False},  # only rank 0 logs, and ours does not either
    )
    turns = cycle(zip(images, tokens, strict=True))

    class Loader:
        num_batches = num_samples = 10**6

        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return islice(turns, self.count)

    def steps(count: int) -> None:
        data = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=Loader(count))}
        with their_settings():
            train_one_epoch(callable_model, data, loss, 0, optimizer, None, scheduler, None, args)
        optimizer.zero_grad()  # it does so before a step; ours after, and memory is compared between steps

    return steps


@contextmanager
def their_settings() -> Iterator[None]:
    """What open_clip_train.main sets for the whole process; ours runs with torch's defaults."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.benchmark
    products.allow_tf32, convolutions.benchmark = True, True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.benchmark = before


# ---------------------------------------------------------------------------------------------------------------------
# measuring


def seconds(steps: Steps, count: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    steps(count)
    _wait(device)
    return time.perf_counter() - start


def peak_memory(steps: Steps, device: torch.device) -> float:
    """GiB beyond what is there between steps; nan on a CPU, which does not count."""
    if device.type != "cuda":
        return float("nan")
    _wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps(1)
    _wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="an open_clip config, tiny, or a file of one")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--methods", nargs="*", default=["openclip", "sogclr", "fastclip_v3", "neuclip"])
    parser.add_argument("--steps", type=int, default=20, help="of each side in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--captions", choices=["cc12m", "full"], default="cc12m", help="their lengths")
    parser.add_argument("--graphs", action="store_true", help="our step as a CUDA graph, theirs plain")
    parser.add_argument("--channels-last", action="store_true", help="the layout of images in our step")
    parser.add_argument("--csv", help="append one row a measurement to this file")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    device, compiled = torch.device(args.device), args.device != "cpu" and not args.graphs

    torch.manual_seed(0)
    model = build_model(Model(args.model)).to(device)
    batches = random_batches(model, args.batch, args.captions == "full", device)
    options = {"compile": compiled, "graphs": args.graphs, "channels_last": args.channels_last}
    training = Training(batch_size=args.batch, precision="bf16", **options)
    normalised = [(batch.images.float() - model.mean_C11) / model.std_C11 for batch in batches]
    with tempfile.TemporaryDirectory() as folder:
        sides = {"open_clip": their_steps(args.model, normalised, [batch.tokens for batch in batches], compiled)}
        for method in args.methods:  # the methods share the towers, so that these are compiled once
            sides[method] = our_steps(method, model, batches, training, Path(folder))
        memory = {}
        for name, steps in sides.items():
            steps(WARM_UP_GRAPHS if args.graphs else WARM_UP if compiled else 1)
            memory[name] = peak_memory(steps, device)
        rounds = [
            {name: args.steps * args.batch / seconds(steps, args.steps, device) for name, steps in sides.items()}
            for _ in range(args.rounds)
        ]

    versions = f"torch {torch.__version__}, open_clip_torch {version('open_clip_torch')}"
    captions = sum(sum(batch.lengths) for batch in batches) / (BATCHES * args.batch)
    print(
        f"{datetime.date.today()}, {machine_name(args.device)}, {versions}; {Path(args.model).stem}, B {args.batch}, "
        f"bf16, captions of {captions:.1f} tokens, compiled: {compiled}, graphs: {args.graphs}\n"
    )
    print("| | samples/s | ratio to open_clip's | peak GiB |")
    print("|---|---|---|---|")
    setting = (Path(args.model).stem, args.batch, args.captions, compiled, args.graphs)
    records: list[tuple[object, ...]] = []
    for name in sides:
        speed = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["open_clip"] for each in rounds)
        label = "open_clip's own step" if name == "open_clip" else f"`{name}`"
        print(f"| {label} | {speed:.0f} | {ratio:.3f} | {memory[name]:.2f} |")
        records.append((*setting, name, speed, ratio, memory[name]))
    if args.csv:
        append_rows(args.csv, COLUMNS, records, args.device)


if __name__ == "__main__":
    main()
