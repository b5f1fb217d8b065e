"""Real architectures through ``fullbatch finetune``: ViT-B-32 and ViT-B-16-SigLIP of open_clip, at 224 pixels.

    python benchmarks/finetune/architectures.py DATA OUT            # DATA of icon_parts.py; one GPU, a minute each

No published weights are needed: both start from random ones, so the scores mean nothing.  What is looked at is whether
the command gets through both stages, leaves the base as it was, and hands on the temperature (and SigLIP's bias) that
came with the weights.  SigLIP's own tokenizer cannot be had without a download; one of our own, of the same kind, takes
its place through --tokenizer, as a user without a connection would give the real one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch

from fullbatch.cli import main as fullbatch
from fullbatch.config.model import Model
from fullbatch.loading import Opened, open_model

TEMPERATURE = 0.0123  # no architecture's own, so that it can only come from the weights
BIAS = -9.5
BATCH, FROZEN, TUNED = 128, 10, 20


@dataclass(frozen=True)
class Case:
    model: str
    recipe: str
    has_bias: bool


CASES = (Case("ViT-B-32", "tuneclip", False), Case("ViT-B-16-SigLIP", "tuneclip-siglip", True))


def write_weights(case: Case, path: Path) -> None:
    """As a user has them: a file of open_clip's own names."""
    torch.manual_seed(0)
    weights = open_clip.create_model(case.model).state_dict()
    weights["logit_scale"] = torch.tensor(math.log(1.0 / TEMPERATURE))
    if case.has_bias:
        weights["logit_bias"] = torch.tensor(BIAS)
    torch.save(weights, path)


def write_tokenizer(out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "tests.models.siglip", str(out / "siglip")], check=True)
    return out / "siglip" / "tokenizer"


def finetune(case: Case, data: Path, out: Path, device: str, batch: int, frozen: int, tuned: int) -> Path:
    weights, run = out / f"{case.model}.pt", out / case.model
    shutil.rmtree(run, ignore_errors=True)
    write_weights(case, weights)
    tokenizer = ["--tokenizer", str(write_tokenizer(out))] if case.has_bias else []
    steps = out / "steps.yaml"  # in place of the recipe's epochs
    steps.write_text(f"training: {{samples: {tuned * batch}}}\nrecovery: {{recovery_steps: {frozen}}}\n")
    arguments = [
        "--recipe", case.recipe, "--config", str(steps),
        "--model", case.model, "--pretrained", str(weights), *tokenizer,
        "--data", f"{data}/tune.tar", "--evaluate", f"retrieval:{data}/tune-test.tar",
        "--batch-size", str(batch), "--precision", "bf16" if device == "cuda" else "fp32", "--device", device,
        "--workers", "6" if device == "cuda" else "0", "--log-every", "5", "--keep", "1", "--no-tensorboard",
        "--runs", str(out), "--name", case.model, "--quiet",
    ]  # fmt: skip
    if fullbatch(["finetune", *arguments]):
        raise SystemExit(f"error: {case.model} did not get through")
    return run


def same_temperature(opened: Opened, case: Case) -> bool:
    kept = math.isclose(opened.temperature, TEMPERATURE, rel_tol=1e-5)
    return kept and (not case.has_bias or (opened.bias is not None and math.isclose(opened.bias, BIAS, rel_tol=1e-5)))


def check(case: Case, out: Path, run: Path) -> dict[str, bool]:
    """What must hold whatever the numbers are."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "kind" not in line]
    base, tuned = (open_model(Model(str(run / name))) for name in ("base", "tuned"))
    ours = open_model(Model(case.model, pretrained=str(out / f"{case.model}.pt"), tokenizer=base_tokenizer(case, out)))
    pairs = list(zip(ours.model.parameters(), base.model.parameters(), tuned.model.parameters(), strict=True))
    return {
        "both stages": {line.get("stage") for line in steps} == {"recovery", "tuning"},
        "temperature in every step": all(math.isclose(line["tau"], TEMPERATURE, rel_tol=1e-4) for line in steps),
        "temperature of base and tuned": same_temperature(base, case) and same_temperature(tuned, case),
        "base as it was": all(torch.equal(before, kept) for before, kept, _ in pairs),
        "tuned moved": any(not torch.equal(kept, after) for _, kept, after in pairs),
    }


def base_tokenizer(case: Case, out: Path) -> str | None:
    return str(out / "siglip" / "tokenizer") if case.has_bias else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Real architectures through fullbatch finetune.")
    parser.add_argument("data", type=Path, help="the folder that icon_parts.py wrote")
    parser.add_argument("out", type=Path, help="for weights and run folders")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--frozen", type=int, default=FROZEN, help="steps of recovery")
    parser.add_argument("--tuned", type=int, default=TUNED, help="steps of tuning")
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for case in CASES:
        if case.model in options.models:
            began = time.monotonic()
            run = finetune(
                case, options.data, options.out, options.device, options.batch, options.frozen, options.tuned
            )
            found[case.model] = {**check(case, options.out, run), "seconds": round(time.monotonic() - began, 1)}
    (options.out / "architectures.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if not all(value for answers in found.values() for value in answers.values()):
        raise SystemExit("error: something does not hold, see above")


if __name__ == "__main__":
    main()
