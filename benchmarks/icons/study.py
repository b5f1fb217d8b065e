"""The icon study: does a small batch with a better normalizer reach what a large one reaches?  One GPU, one small ViT.

    python benchmarks/icons/unpack.py icons.tar DATA --captions name
    python benchmarks/icons/study.py rates DATA OUT --jobs 12    # the learning rate of every arm at every batch size
    python benchmarks/icons/study.py rates DATA OUT --jobs 12 --new-captions   # again, on harder pairs
    python benchmarks/icons/study.py race DATA OUT --jobs 12     # with those rates, on the test pairs, three seeds
    python benchmarks/icons/study.py parts DATA OUT --jobs 12    # NeuCLIP with one thing changed, half as long
    python benchmarks/icons/unpack.py icons.tar BY-SET --captions name --by-set
    python benchmarks/icons/study.py windows BY-SET OUT --sizes 256   # blocks of neighbours, mixed in windows; the same
    python benchmarks/icons/study.py rates PICTURES OUT-2 --model benchmarks/icons/resnet.json --samples 600000 \\
        --arms openclip neuclip rolling --sizes 64 256           # elsewhere: another corpus, another tower; then race
    python benchmarks/icons/study.py gather OUT docs/studies/icons
    python benchmarks/icons/figures.py docs/studies/icons

and of the study of batches, in twelve epochs and an OUT of its own, ``rates`` and then ``race`` with

    --samples 1270800 --sizes 128 --arms openclip neuclip sogclr "openclip spectral" "neuclip spectral, none" \\
        "neuclip spectral, normalizers" "neuclip spectral, weights" "sogclr spectral, none" \\
        "sogclr spectral, normalizers" "sogclr spectral, weights"

A stage writes a plan for ``fullbatch compare`` and starts it; killed, it goes on where it was, and elsewhere after
``cp -r docs/studies/icons OUT``.  ``rates`` trains half as long as the
race, with a seed that is not reported, and is judged on a shard kept out of training; with ``--new-captions``, on those
of its pairs whose caption occurs in no other shard, as none of the test pairs' does.  Where the best rate lies at the
edge of its grid, the next one beyond is tried as well, until it does not.  The arms and batch sizes of earlier calls
stay in the plan; ``--arms`` and ``--sizes`` add to them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from comparing import compare, keep_runs
from icon_arms import ARMS, VARIANTS

from fullbatch.training.run_folder import replace_text
from fullbatch.trials.comparison_plan import folder_name

VIT = Path(__file__).with_name("vit.json")
SAMPLES = 2_500_000
TUNING_SEED = 100  # not one of those that are reported
SEEDS = (0, 1, 2)
LAST_SHARD = 19  # of training: the one that tuning is judged on

FIRST_ARMS = ("openclip", "neuclip", "queue", "rolling")
FIRST_SIZES = (64, 256, 1024)

Grids = dict[str, dict[int, list[float]]]  # arm -> batch size -> learning rates, rising
Scores = dict[tuple[str, int, float], float]
# Where the grids begin.
FIRST_RATES: Mapping[int, Sequence[float]] = {
    32: (1e-4, 2e-4, 4e-4),
    64: (2e-4, 4e-4, 8e-4),
    128: (2e-4, 4e-4, 8e-4),
    256: (4e-4, 8e-4, 1.6e-3),
    512: (4e-4, 8e-4, 1.6e-3),
    1024: (4e-4, 8e-4, 1.6e-3),
    2048: (8e-4, 1.6e-3, 3.2e-3),
}
WIDEST = 6  # rates a grid may have


@dataclass(frozen=True)
class Judge:
    """Of rates: the stage's name, and the shard without its ending."""

    stage: str
    shard: str


WHOLE_SHARD = Judge("rates", f"train-{LAST_SHARD:05d}")
NEW_CAPTIONS = Judge("rates-new", "tuning")


@dataclass(frozen=True)
class Setting:
    """data      the folder with the shards
    samples   of a run
    device    "cpu" for a rehearsal, without what only a GPU can do
    """

    data: Path
    samples: int
    device: str = "cuda"
    model: Path = VIT
    seeds: tuple[int, ...] = SEEDS


def base(setting: Setting, shards: str, judged_on: str) -> dict[str, Any]:
    """What every run shares."""
    gpu, data = setting.device == "cuda", setting.data
    return {
        "data": {"data": [f"{data}/train-{shards}.tar"], "workers": 0, "in_memory": True, "crop": [0.8, 1.0]},
        "model": {"model": os.path.relpath(setting.model)},
        "training": {
            "samples": setting.samples,
            "precision": "bf16" if gpu else "fp32",
            "graphs": gpu,
            "device": setting.device,
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.98, "eps": 1e-6},
        "schedule": {"warmup_share": 0.1},
        "evaluation": {"evaluate": [f"retrieval:{data}/{judged_on}.tar"], "eval_batch": 2048},
        "run": {"tensorboard": False, "keep": 1, "log_every": 200, "save_minutes": None, "quiet": True},
    }


# ---------------------------------------------------------------------------------------------------------------------
# learning rates


def rate_label(arm: str, rate: float) -> str:
    return f"{arm} lr={rate:g}"


def rates_plan(grids: Grids, setting: Setting, judge: Judge = WHOLE_SHARD) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for arm, sizes in grids.items():
        for size, rates in sizes.items():
            for rate in rates:
                label = rate_label(arm, rate)
                row = rows.setdefault(label, {"name": label, **ARMS[arm], "lr": rate, "batch_sizes": []})
                row["batch_sizes"].append(size)
    shared = base(setting, f"{{00000..{LAST_SHARD - 1:05d}}}", judge.shard)
    shared["evaluation"]["audit_every"] = 0
    return {
        "name": judge.stage,
        "base": shared,
        "methods": list(rows.values()),
        "batch_sizes": sorted({size for sizes in grids.values() for size in sizes}),
        "seeds": [TUNING_SEED],
        "baseline": next(iter(rows)),
        "metric": "mean_r1",
    }


def grids_in(plan: Mapping[str, Any]) -> Grids:
    """Those of a plan of rates that was begun."""
    grids: Grids = {}
    for row in plan["methods"]:
        arm, _, rate = row["name"].rpartition(" lr=")
        for size in row["batch_sizes"]:
            grids.setdefault(arm, {}).setdefault(size, []).append(float(rate))
    return {arm: {size: sorted(rates) for size, rates in sizes.items()} for arm, sizes in grids.items()}


def begun_grids(judge: Judge, out: Path) -> Grids:
    plan = out / judge.stage / "plan.yaml"
    return grids_in(yaml.safe_load(plan.read_text())) if plan.is_file() else {}


def joined(begun: Grids, first: Grids) -> Grids:
    """The grids that were begun, and the first rates of those that were not."""
    arms = dict.fromkeys([*begun, *first])
    return {arm: {**first.get(arm, {}), **begun.get(arm, {})} for arm in arms}


def first_rates(arms: Sequence[str], sizes: Sequence[int]) -> Grids:
    return {arm: {size: list(FIRST_RATES[size]) for size in sizes} for arm in arms}


def rates_below(chosen: Mapping[str, Mapping[int, float]], arms: Sequence[str], sizes: Sequence[int]) -> Grids:
    """For the harder judge: the rate that was chosen, its half and its quarter; half the first ones if none was."""

    def rates(arm: str, size: int) -> list[float]:
        if size in chosen.get(arm, {}):
            return [chosen[arm][size] / part for part in (4, 2, 1)]
        return [rate / 2 for rate in FIRST_RATES[size]]

    return {arm: {size: [_round(rate) for rate in rates(arm, size)] for size in sizes} for arm in arms}


def write_tuning_pairs(data: Path) -> None:
    """DATA/tuning.tar: the pairs of the last shard whose caption occurs in no other."""
    target = data / f"{NEW_CAPTIONS.shard}.tar"
    if target.is_file():
        return
    known = {caption for shard in range(LAST_SHARD) for caption in captions(data / f"train-{shard:05d}.tar").values()}
    own = captions(data / f"{WHOLE_SHARD.shard}.tar")
    unfinished = target.with_suffix(f".unfinished-{os.getpid()}")
    with tarfile.open(data / f"{WHOLE_SHARD.shard}.tar") as shard, tarfile.open(unfinished, "w") as pairs:
        for member in shard:
            if own[member.name.split(".")[0]] not in known:
                pairs.addfile(member, shard.extractfile(member))
    os.replace(unfinished, target)


def captions(shard: Path) -> dict[str, str]:
    """Of every key."""
    with tarfile.open(shard) as archive:
        records = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".json")}
        return {
            name.removesuffix(".json"): json.loads(file.read())["caption"].lower()
            for name, file in records.items()
            if file is not None
        }


def scores_of(comparison: Mapping[str, Any], grids: Grids) -> Scores:
    """R@1 of every cell; a run that failed, or whose loss is no number, is worth nothing."""
    found = {(run["method"], run["batch_size"]): run for run in comparison["runs"]}
    scores = {}
    for arm, sizes in grids.items():
        for size, rates in sizes.items():
            for rate in rates:
                run = found[rate_label(arm, rate), size]
                scores[arm, size, rate] = score_of(run) if run["status"] == "done" else 0.0
    return scores


def score_of(run: Mapping[str, Any]) -> float:
    return float(next(value for name, value in run["results"].items() if name.endswith("mean_r1")))


def widened(grids: Grids, scores: Scores, factor: float = 2.0) -> Grids:
    """Each grid with the next rate beyond the edge its best lies on; a grid whose best lies inside stays."""
    wider: Grids = {}
    for arm, sizes in grids.items():
        wider[arm] = {}
        for size, rates in sizes.items():
            best = max(rates, key=lambda rate: scores[arm, size, rate])
            below = [_round(rates[0] / factor)] if best == rates[0] else []
            above = [_round(rates[-1] * factor)] if best == rates[-1] else []
            wider[arm][size] = rates if len(rates) >= WIDEST else [*below, *rates, *above]
    return wider


def _round(rate: float) -> float:
    """Without the dust of halving: 1e-4, not 0.00010000000000000002."""
    return float(f"{rate:.3g}")


def best_rates(grids: Grids, scores: Scores) -> dict[str, dict[int, float]]:
    return {
        arm: {size: max(rates, key=lambda rate: scores[arm, size, rate]) for size, rates in sizes.items()}
        for arm, sizes in grids.items()
    }


def tune(first: Grids, judge: Judge, setting: Setting, out: Path, more: list[str]) -> None:
    """Until every grid has its best inside; what earlier calls found counts."""
    grids = joined(begun_grids(judge, out), first)
    while True:
        scores = scores_of(compare(rates_plan(grids, setting, judge), out, more), grids)
        choose(best_rates(grids, scores), judge, out)
        wider = widened(grids, scores)
        if wider == grids:
            break
        grids = wider
    for (arm, size, rate), score in scores.items():
        print(f"{arm:15} B {size:5} lr {rate:<8g} {100 * score:6.2f}")


def choose(best: Mapping[str, Mapping[int, float]], judge: Judge, out: Path) -> None:
    """chosen.json with these cells; what another judge chose elsewhere stays, and what new captions decided."""
    decided, chosen = begun_grids(NEW_CAPTIONS, out) if judge == WHOLE_SHARD else {}, chosen_rates(out)
    for arm, rates in best.items():
        new = {size: rate for size, rate in rates.items() if size not in decided.get(arm, {})}
        chosen[arm] = dict(sorted({**chosen.get(arm, {}), **new}.items()))
    (out / "chosen.json").write_text(json.dumps(chosen, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# the race


def chosen_rates(out: Path) -> dict[str, dict[int, float]]:
    path = out / "chosen.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {arm: {int(size): rate for size, rate in rates.items()} for arm, rates in found.items()}


def race_plan(
    chosen: Mapping[str, Mapping[int, float]], blocks: Sequence[Mapping[str, Any]], setting: Setting
) -> dict[str, Any]:
    """``blocks`` name arms x batch sizes x seeds, in the order in which they are run."""
    rows = [
        {"name": arm, **ARMS[arm], "batch_sizes": [], "at": {size: {"lr": rate} for size, rate in rates.items()}}
        for arm, rates in chosen.items()
    ]
    shared = base(setting, f"{{00000..{LAST_SHARD:05d}}}", "test-00000")
    shared["evaluation"] |= {"audits": 2, "audit_anchors": 5_000, "audit_samples": 1_000_000}  # all there are
    return {
        "name": "race",
        "base": shared,
        "methods": rows,
        "batch_sizes": [],
        "seeds": list(setting.seeds),
        "baseline": "openclip",
        "metric": "mean_r1",
        "runs": [dict(block) for block in blocks],
    }


def forget_other_rates(chosen: Mapping[str, Mapping[int, float]], out: Path) -> None:
    """Runs of a cell that has got another rate since are trained anew; what earlier calls asked for stays in the plan,
    also where this call is stopped here."""
    path = out / "race" / "plan.yaml"
    plan, changed = yaml.safe_load(path.read_text()), False
    for row in plan["methods"]:
        for size, at in row["at"].items():
            rate = chosen.get(row["name"], {}).get(size, at["lr"])
            if rate == at["lr"]:
                continue
            for run in (out / "race" / "runs").glob(f"{folder_name(row['name'])}-b{size}-seed*"):
                print(f"{run}: trained anew, at {rate:g}", flush=True)
                shutil.rmtree(run)
            at["lr"], changed = rate, True
    if changed:  # else the comparison would be held to the former rates
        replace_text(path, yaml.safe_dump(plan, sort_keys=False))


def race(arms: Sequence[str], sizes: Sequence[int], setting: Setting, out: Path, more: list[str]) -> None:
    """The arms at those of the sizes that they have a rate for, after what earlier calls asked for."""
    chosen = chosen_rates(out)
    begun, blocks = out / "race" / "plan.yaml", list[dict[str, Any]]()
    if begun.is_file():
        blocks = yaml.safe_load(begun.read_text())["runs"]
        forget_other_rates(chosen, out)
    for size in sizes:
        block = {"methods": [arm for arm in arms if size in chosen.get(arm, {})], "batch_sizes": [size]}
        if block["methods"] and block not in blocks:
            blocks.append(block)
    compare(race_plan(chosen, blocks, setting), out, more)


# ---------------------------------------------------------------------------------------------------------------------
# neuclip with one thing changed


def variants_plan(
    stage: str,
    chosen: Mapping[str, Mapping[int, float]],
    sizes: Sequence[int],
    setting: Setting,
    arms: Sequence[str] = FIRST_ARMS,
) -> dict[str, Any]:
    """Of these arms, at ``neuclip``'s rates, but for rows of other arms, which have their own."""
    rows = []
    for name, changes in VARIANTS[stage].items():
        arm = changes.get("method", "neuclip")
        if arm not in arms:
            continue
        if missing := [size for size in sizes if size not in chosen.get(arm, {})]:
            raise SystemExit(f"There is no rate yet of {arm} at B {missing[0]}; run the stage rates first.")
        at = {size: {"lr": chosen[arm][size]} for size in sizes}
        rows.append({"name": name, **({} if "method" in changes else ARMS["neuclip"]), **changes, "at": at})
    plan = race_plan({}, (), setting)
    plan |= {"name": stage, "methods": rows, "batch_sizes": list(sizes), "seeds": [setting.seeds[0]]}
    return plan if stage == "parts" else {**plan, "baseline": "neuclip, full"}


# ---------------------------------------------------------------------------------------------------------------------
# which pairs were found


def write_hits(data: Path, out: Path, device: str) -> None:
    """Beside each run of the race which test pairs it finds first, a bit a pair and direction, for a bootstrap."""
    import numpy as np

    from fullbatch.config.data import Source
    from fullbatch.config.training import Precision
    from fullbatch.evaluation.embed import Embedder
    from fullbatch.evaluation.retrieval import own_captions, ranks
    from fullbatch.loading import load_trained

    for run in sorted((out / "race" / "runs").glob("*/results.json")):
        target = run.with_name("hits.json")
        if target.is_file() or not run.with_name("checkpoints").is_dir():
            continue
        model = load_trained(run.parent).model.to(device)
        precision: Precision = "bf16" if device == "cuda" else "fp32"
        embedder = Embedder(model, model.tokenize, model.image_size, model.mean_C11.device, precision, 2048, 0)
        images = embedder.images(Source(f"{data}/test-00000.tar"))
        answers = own_captions([len(captions) for captions in images.captions])
        image_ND = images.image_ND.to(device)
        text_TD = embedder.captions([captions[0] for captions in images.captions]).to(device)
        hits = {
            "image_to_text": ranks(image_ND, text_TD, answers.of_images).hits(1),
            "text_to_image": ranks(text_TD, image_ND, answers.of_captions).hits(1),
        }
        packed = {name: np.packbits((hit > 0.5).numpy()).tobytes().hex() for name, hit in hits.items()}
        target.write_text(json.dumps({"pairs": len(image_ND), **packed}))


# ---------------------------------------------------------------------------------------------------------------------


def gather(out: Path, target: Path) -> None:
    keep_runs(out, target, ("rates", "rates-new", "race", *VARIANTS))
    if (out / "chosen.json").is_file():
        shutil.copy(out / "chosen.json", target / "chosen.json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the icon study.")
    parser.add_argument("stage", choices=("rates", "race", *VARIANTS, "hits", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the shards; for gather, OUT")
    parser.add_argument("out", type=Path, help="the folder of the comparisons; for gather, where to put what is kept")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(FIRST_ARMS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=list(FIRST_RATES), default=list(FIRST_SIZES))
    parser.add_argument("--new-captions", action="store_true", help="rates: judged on pairs with new captions")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side on the GPU")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="minutes after which no run is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="a run; half of it in rates, parts and windows")
    parser.add_argument("--model", type=Path, default=VIT, help="an open_clip config")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="of the race")
    options = parser.parse_args()
    more = ["--jobs", str(options.jobs)]
    if options.stop_after < math.inf:
        more += ["--stop-after", str(options.stop_after)]
    samples = options.samples if options.stage == "race" else options.samples // 2
    setting = Setting(options.source, samples, options.device, options.model, tuple(options.seeds))
    match options.stage:
        case "rates" if options.new_captions:
            write_tuning_pairs(options.source)
            below = rates_below(chosen_rates(options.out), options.arms, options.sizes)
            tune(below, NEW_CAPTIONS, setting, options.out, more)
        case "rates":
            tune(first_rates(options.arms, options.sizes), WHOLE_SHARD, setting, options.out, more)
        case "race":
            try:
                race(options.arms, options.sizes, setting, options.out, more)
            except SystemExit as stopped:
                if isinstance(stopped.code, str):  # not all have ended; of those that have, the checkpoints are here
                    write_hits(options.source, options.out, options.device)
                raise
            write_hits(options.source, options.out, options.device)
        case "parts" | "windows":
            chosen = chosen_rates(options.out)
            compare(variants_plan(options.stage, chosen, options.sizes, setting, options.arms), options.out, more)
        case "hits":
            write_hits(options.source, options.out, options.device)
        case "gather":
            gather(options.source, options.out)


if __name__ == "__main__":
    main()
