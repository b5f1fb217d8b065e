"""The study of the search: three losses, nine optimizers, on the icon corpus, with `fullbatch search`.

    python benchmarks/icons/unpack.py icons.tar ICONS --captions name
    python benchmarks/search/search_study.py split ICONS        # held-out concepts: half to choose by, half for the end
    python benchmarks/search/search_study.py search ICONS OUT --jobs 12
    python benchmarks/search/search_study.py gather OUT docs/studies/search/runs

``search`` writes a plan and starts `fullbatch search`; killed, it goes on where it was.  A trial sees at most 100,000
samples in batches of 512.  Phases 1 to 3 are scored on one half of the 3,000 held-out concepts, the finals on the other
half, which nothing was chosen by.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import yaml

from fullbatch.cli import main as fullbatch

MODEL = os.path.relpath(Path(__file__).parent.parent / "icons" / "vit.json")
NAME, BATCH, SAMPLES = "icons", 512, 100_000
LOSSES = ["sogclr", "isogclr_new", "isogclr_new_v2"]  # the report's three
OPTIMIZERS = ["adam", "adamw", "radam", "novograd", "nvnovograd", "rmsprop", "sgd", "lamb", "lion"]
CHOSEN_BY, FINAL = "choose.tar", "final.tar"


def tasks(data: Path, part: str) -> list[str]:
    """Names are captions and, taken as classes, what a picture can be."""
    return [f"retrieval:{data}/{part}", f"zero_shot:{data}/{part}"]


def plan(data: Path, device: str, samples: int, choices: int, fine: int) -> dict[str, Any]:
    rates = {"log": True, "low": 1e-4, "high": 1e-2}
    gpu = device == "cuda"
    return {
        "name": NAME,
        "base": {
            "data": {
                "data": [f"{data}/train-{{00000..00019}}.tar"],
                "workers": 0,
                "in_memory": True,
                "crop": [0.8, 1.0],
            },
            "model": {"model": MODEL},
            "training": {
                "batch_size": BATCH,
                "samples": samples,
                "precision": "bf16" if gpu else "fp32",
                "device": device,
            },
            # Table 1 has one rate for all optimizers; the moments are open_clip's.
            "optimizer": {"lr": 1e-3, "weight_decay": 1e-4, "beta2": 0.98, "eps": 1e-6},
            "schedule": {"warmup_share": 0.1},
            "evaluation": {
                "evaluate": tasks(data, CHOSEN_BY),
                "templates": ["{}"],
                "eval_batch": 2048,
                "evaluations": 4,
                "audit_every": 0,
            },
            "run": {"tensorboard": False, "keep": 1, "log_every": 20, "save_minutes": None, "quiet": True},
        },
        "metrics": ["mean(text_to_image_r1, image_to_text_r1, accuracy)"],
        "methods": LOSSES,
        "optimizers": OPTIMIZERS,
        "space": {
            "lr": rates,
            "sgd.lr": {**rates, "low": 1e-2, "high": 1.0},
            "lion.lr": {**rates, "low": 1e-5, "high": 1e-3},
            "weight_decay": {**rates, "low": 1e-6, "high": 0.3},
            "gamma": {"low": 0.5, "high": 1.0},
            "temperature": {"low": 0.01, "high": 0.1, "log": True},
            "rho_image": {"low": 1.0, "high": 10.0},
            "rho_text": {"low": 1.0, "high": 10.0},
            "schedule": {"choices": ["cosine", "tanh"]},
            "warmup_share": {"low": 0.0, "high": 0.3},
        },
        # measured once, so that none is pruned: what an optimizer is worth is asked of all of them
        "choices": {"trials": choices, "changes": {"samples": samples // 2, "evaluations": 1}},
        "grid": {"methods": 3, "optimizers": 3},
        "fine": {"trials": fine},
        "finals": {
            "best": 2,
            "seeds": [0, 1, 2],
            "baselines": ["openclip", "sogclr"],
            "changes": {"evaluate": tasks(data, FINAL), "evaluations": 1},
        },
        "pruner": "asha",
        "pruner_factor": 2,
        "take": "last",
    }


def split(data: Path) -> None:
    """Every other test pair; a pair is two files of one key."""
    with tarfile.open(data / "test-00000.tar") as whole:
        members = {member.name: member for member in whole}
        keys = sorted({name.rpartition(".")[0] for name in members})
        for part, first in ((CHOSEN_BY, 0), (FINAL, 1)):
            mine = set(keys[first::2])
            with tarfile.open(data / part, "w", format=tarfile.USTAR_FORMAT) as out:
                for name, member in members.items():
                    if name.rpartition(".")[0] in mine:
                        out.addfile(member, whole.extractfile(member))
            print(f"{data / part}: {len(mine)} pairs")


def gather(out: Path, target: Path) -> None:
    """The plan, the summary and the page; a trial's own lines are in the summary."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("search.yaml", "search.json", "search.csv", "best.yaml", "report.html"):
        if (out / NAME / name).is_file():
            shutil.copy(out / NAME / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the study of the search.")
    parser.add_argument("stage", choices=("split", "search", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the icons; for gather, OUT")
    parser.add_argument("out", type=Path, nargs="?", help="the folder of searches; for gather, the kept files'")
    parser.add_argument("--jobs", type=int, default=12, help="trials side by side on the GPU")
    parser.add_argument("--trials", type=int, default=27, help="of phase 1; there are 27 pairs")
    parser.add_argument("--fine", type=int, default=24, help="trials of phase 3")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="that a trial sees; phase 1: half of them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    options = parser.parse_args()
    if options.stage == "split":
        split(options.source)
        return
    if options.out is None:
        raise SystemExit(f"error: {options.stage} needs a folder to write to")
    if options.stage == "gather":
        gather(options.source, options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{NAME}.yaml"
    values = plan(options.source, options.device, options.samples, options.trials, options.fine)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    more = ["--jobs", str(options.jobs), "--searches", str(options.out), "--quiet"]
    raise SystemExit(fullbatch(["search", "--plan", str(path), *more]))


if __name__ == "__main__":
    main()
