"""How the nearest negatives lie under GCL and HGCL, as in TuneCLIP's Figures 3 and 11.

    python benchmarks/finetune/false_negatives.py DATA OUT     # after `tuning_study.py race`; OUT/similarities.json

On the pairs of tune-once.tar, one picture a name: pictures that share a name would be each other's nearest negatives at
exactly the similarity of the true pair, and hide the ones that are only near in meaning.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fullbatch.config.data import Source
from fullbatch.config.model import Model
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.similarities import Distribution, merged_bins, similarity_distributions
from fullbatch.loading import open_model

COMPARED = {
    "base": "base",
    "openclip": "race/runs/openclip-b256-seed0",
    "GCL + OSR": "race/runs/GCL_+_OSR-b256-seed0",
    "tuneclip": "race/runs/tuneclip-b256-seed0",
}
KINDS = ("positives", "nearest", "far", "lower")


def measured(model: Path, data: Path, device: torch.device, workers: int) -> dict[str, Distribution]:
    """Each picture looks for captions."""
    towers = open_model(Model(str(model))).model.to(device)
    embedder = Embedder(towers, towers.tokenize, towers.image_size, device, batch_size=1024, workers=workers)
    images = embedder.images(Source(f"{data}/tune-once.tar"))
    text_ND = embedder.captions([of_image[0] for of_image in images.captions])
    found = similarity_distributions(images.image_ND.to(device), text_ND.to(device))
    return {kind: each for kind in KINDS if (each := found.get(kind)) is not None}


def as_json(found: dict[str, Distribution]) -> dict[str, Any]:
    middles, shares = merged_bins(list(found.values()))
    numbers = {kind: {k: v for k, v in asdict(each).items() if k != "bins_K"} for kind, each in found.items()}
    return {"middles": middles, "shares": dict(zip(found, shares, strict=True)), **numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Similarities of true pairs and of near and far negatives.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="the folder of the study")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    device = torch.device(options.device)
    there = {name: options.out / path for name, path in COMPARED.items() if (options.out / path).is_dir()}
    found = {name: as_json(measured(path, options.data, device, options.workers)) for name, path in there.items()}
    (options.out / "similarities.json").write_text(json.dumps(found))
    for name, numbers in found.items():
        spread = (f"{kind} {numbers[kind]['mean']:.3f} ± {numbers[kind]['deviation']:.3f}" for kind in KINDS)
        print(f"{name}: " + ", ".join(spread))


if __name__ == "__main__":
    main()
