"""The ceiling of the icon study: how much could any normalizer win?

    python benchmarks/icons/oracle.py DATA OUT --batch 64 --fresh 1024 --lr 4e-4

In every step ``--fresh`` further samples, drawn uniformly, are embedded with the current weights, without gradient and
for the normalizers alone: alpha_i is the log of the mean over the batch's others and these, all of them current and
cropped as training crops them (uncropped ones a model learns to tell from the batch's, and to keep away from).  The
loss, its gradient and the rest are those of ``queue``.  Judged as in the stage ``rates`` of study.py; OUT/NAME is an
ordinary run folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from icon_arms import ARMS
from study import LAST_SHARD, SAMPLES, TUNING_SEED, Setting, base
from torch import nn

import fullbatch.training_run
from fullbatch.assembly import Parts, assemble
from fullbatch.config.run import RunConfig, layered
from fullbatch.config.tree import from_dict
from fullbatch.data.images import cropped, random_boxes
from fullbatch.data.in_memory import InMemoryBatches
from fullbatch.objective.normalizers import RollingNormalizer

BOXES = 1 << 16  # crops to choose from


def with_fresh_samples(parts: Parts, fresh: int) -> Parts:
    """Before each training step the queue holds the embeddings of ``fresh`` samples; the step itself adds its batch."""
    assert isinstance(parts.batches, InMemoryBatches)
    data, model = parts.batches.resident, parts.model
    firsts_n = torch.from_numpy(data.firsts_n).to(parts.device)
    draws = np.random.default_rng(0)
    boxes = random_boxes(data.images_nCSS.shape[-1], parts.batches.crop, lambda tries, what: draws.random(BOXES))
    boxes_K4 = torch.from_numpy(boxes).float().to(parts.device)
    mirrored = torch.zeros(fresh, dtype=torch.bool, device=parts.device)
    queues = {name: parts.state.objective.normalizers[name] for name in ("image", "text")}
    for queue in queues.values():
        assert isinstance(queue, RollingNormalizer)
        queue.active = queue.config.prototypes

    @torch.no_grad()
    def embed_more(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not module.training or any(each is None for each in inputs):
            return
        # What autocast casts here has no gradient, and the step itself must not find it in autocast's cache.
        with torch.autocast(parts.device.type, torch.bfloat16, torch.is_autocast_enabled(), cache_enabled=False):
            embed_some()

    def embed_some() -> None:
        ids, crops = (torch.randint(count, (fresh,), device=parts.device) for count in (len(firsts_n), BOXES))
        images = cropped(data.images_nCSS[ids], boxes_K4[crops], mirrored)
        embedded = {
            "text": model.encode_image(images),  # what texts as anchors look at
            "image": model.encode_text(data.tokens_mL[firsts_n[ids]]),
        }
        for name, rows in embedded.items():
            queue = queues[name]
            assert isinstance(queue, RollingNormalizer)
            queue.prototypes_MD[:fresh] = rows.float()

    model.register_forward_pre_hook(embed_more)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with the shards")
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--fresh", type=int, required=True, help="further samples a step")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--samples", type=int, default=SAMPLES // 2)
    options = parser.parse_args()
    setting = Setting(options.data, options.samples, options.device)
    shared = base(setting, f"{{00000..{LAST_SHARD - 1:05d}}}", f"train-{LAST_SHARD:05d}")
    arm = {name: value for name, value in ARMS["queue"].items() if name != "settings"}
    settings = {**ARMS["queue"]["settings"], "prototypes": options.fresh + options.batch}
    name = f"oracle-{options.fresh}_lr={options.lr:g}-b{options.batch}-seed{TUNING_SEED}"
    own = RunConfig.grouped(
        {
            **arm,
            **{"settings": settings, "lr": options.lr, "batch_size": options.batch, "seed": TUNING_SEED},
            **{"audit_every": 0, "runs": str(options.out), "name": name},
        }
    )
    setattr(fullbatch.training_run, "assemble", lambda *given: with_fresh_samples(assemble(*given), options.fresh))  # noqa: B010
    fullbatch.training_run.train(from_dict(RunConfig, layered(shared, own)))


if __name__ == "__main__":
    main()
