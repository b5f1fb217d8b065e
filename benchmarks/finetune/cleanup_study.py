"""The clean-up study: a small CLIP that has learnt what noisy captions can teach is tuned on clean pairs of their kind.

    python benchmarks/finetune/icon_parts.py icons.tar DATA --cut clean-up
    python benchmarks/finetune/cleanup_study.py decode DATA OUT --jobs 14
    python benchmarks/finetune/cleanup_study.py base DATA OUT --jobs 9     # the base: longer until it does not help
    python benchmarks/finetune/cleanup_study.py rates DATA OUT --jobs 12   # the learning rate of every arm
    python benchmarks/finetune/cleanup_study.py race DATA OUT --jobs 12    # with those rates, three seeds
    python benchmarks/finetune/cleanup_study.py gather OUT docs/studies/finetune/cleanup
    python benchmarks/finetune/cleanup_figures.py docs/studies/finetune/cleanup

The base is `openclip`'s; where its temperature stays above 0.015 it goes on for half as many samples again with the
temperature held there.  The base as it was before, with the temperature it chose, is kept for the margins: one tau
alone cannot tell m ~ tau from m ~ sqrt(tau).  Rates of all arms, of the base too, are judged on DATA/check.tar, by a
seed that is not reported; where the best lies at the edge of its grid, the next one beyond is tried as well.  A stage
writes plans for ``fullbatch compare`` and starts them; killed, it goes on where it was with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))
from comparing import compare, keep_runs
from study import Grids, Judge, Scores, begun_grids, best_rates, joined, rate_label, scores_of, widened
from tuning_study import (
    BASE_BATCH,
    BATCH,
    MODEL,
    TUNING_SEED,
    Row,
    base_plan,
    decode,
    export_best,
    tuning_base,
)

LENGTHS = (1_500_000, 3_000_000, 6_000_000)  # samples of the base; doubled until that gains less than FLAT
LONGEST, FLAT = 12_000_000, 0.005
BASE_RATES = (5e-4, 1e-3, 2e-3)
HELD = 0.015  # the temperature of the base's last third
EPOCHS = 4  # of recovery, of tuning, and of gamma's fall: recovered runs begin with gamma at its end
FIRST_RATES, FACTOR = (3e-5, 9e-5, 2.7e-4), 3.0
SEEDS = (0, 1, 2)
A_PART = 8  # evaluations an epoch
SLOPES = (5, 10, 20, 40)  # m / tau; TuneCLIP has 10


@dataclass(frozen=True)
class Base:
    """A model to be tuned, and its temperature."""

    pretrained: str
    tau: float


@dataclass(frozen=True)
class Setting:
    """samples  of the shortest base; 0: as LENGTHS has them
    device   "cpu" for a rehearsal, without what only a GPU can do
    """

    data: Path
    device: str = "cuda"
    epochs: int = EPOCHS
    samples: int = 0
    model: str = MODEL

    @property
    def check(self) -> str:
        return f"retrieval:{self.data}/check.tar"

    @property
    def test(self) -> str:
        return f"retrieval:{self.data}/test.tar"


# ---------------------------------------------------------------------------------------------------------------------
# what is compared


def margins(tau: float) -> dict[str, float]:
    """By name: multiples of tau (the exponent's slope at no gap is 2 m / tau), and with its value there, m^2 / tau, as
    TuneCLIP has it, which makes m the root of tau."""
    found = {f"m = {slope} tau": slope * tau for slope in SLOPES} | {"m = sqrt tau": math.sqrt(tau)}
    return {name: margin for name, margin in found.items() if margin <= 2.0}


def arms(base: Base, warmer: Base | None, epochs: int) -> dict[str, Row]:
    """Rows of a plan, in the order of what is asked first: each loss cold and recovered; whether recovered u helps by
    its pattern or by smaller steps; what of the recovery is worth carrying over; margins, on the base and on the warmer
    one that it was."""
    recovered: Row = {"recovery_epochs": float(epochs)}
    hinge = {"margin": 10 * base.tau}
    losses: dict[str, Row] = {
        "openclip": {"method": "openclip"},
        "GCL": {"method": "tuneclip", "pairwise": "identity", "settings": {}},
        "HGCL": {"method": "tuneclip", "settings": hinge},
    }
    found: dict[str, Row] = {}
    for loss, row in losses.items():
        found[f"{loss}, cold"] = row
        found[f"{loss}, recovery"] = {**row, **recovered}
    del losses["openclip"]  # it has no u
    for start, changes in (("cold", {}), ("recovery", recovered)):
        for loss, row in losses.items():
            settings = {**row["settings"], "unit_mean": True}
            found[f"{loss}, {start}, mean weight 1"] = {**row, **changes, "settings": settings}
    for carried in ("none", "moments", "memory"):
        for loss, row in losses.items():
            found[f"{loss}, carry {carried}"] = {**row, **recovered, "carry": carried}
    for where, tuned in [("", base)] + ([(", warmer base", warmer)] if warmer is not None else []):
        for name, margin in margins(tuned.tau).items():
            if tuned is not base or not math.isclose(margin, hinge["margin"]):  # that one is above
                changes = {"pretrained": tuned.pretrained, "settings": {"margin": margin}}
                found[name + where] = {**losses["HGCL"], **recovered, **changes}
    return found


def rates_plan(name: str, shared: Mapping[str, Any], rows: Mapping[str, Row], grids: Grids) -> dict[str, Any]:
    methods = [
        {"name": rate_label(arm, rate), **rows[arm], "lr": rate, "batch_sizes": [size]}
        for arm, sizes in grids.items()
        for size, rates in sizes.items()
        for rate in rates
    ]
    return {
        "name": name,
        "base": dict(shared),
        "methods": methods,
        "batch_sizes": sorted({size for sizes in grids.values() for size in sizes}),
        "seeds": [TUNING_SEED],
        "baseline": methods[0]["name"],
        "metric": "mean_r1",
    }


def race_plan(shared: Mapping[str, Any], rows: Mapping[str, Row], best: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": "race",
        "base": dict(shared),
        "methods": [{"name": arm, **row, "lr": best[arm]} for arm, row in rows.items()],
        "batch_sizes": [BATCH],
        "seeds": list(SEEDS),
        "order": "seeds",
        "baseline": "openclip, cold",
        "metric": f"{shared['evaluation']['evaluate'][0]} mean_r1",
    }


# ---------------------------------------------------------------------------------------------------------------------
# the stages


def bracketed(
    name: str, shared: Mapping[str, Any], rows: Mapping[str, Row], first: Grids, out: Path, more: Sequence[str]
) -> tuple[Grids, Scores, dict[str, Any]]:
    """Until every grid has its best inside; with the comparison of all runs.  What was begun counts."""
    grids = joined(begun_grids(Judge(name, "check"), out), first)
    while True:
        comparison = compare(rates_plan(name, shared, rows, grids), out, more)
        scores = scores_of(comparison, grids)
        wider = widened(grids, scores, FACTOR if name == "rates" else 2.0)
        if wider == grids:
            return grids, scores, comparison
        grids = wider


def lengths_of(scores: Scores) -> dict[int, float]:
    """The best score of the base by its samples."""
    found: dict[int, float] = {}
    for (arm, _, _), score in scores.items():
        samples = int(arm.removeprefix("samples "))
        found[samples] = max(score, found.get(samples, 0.0))
    return dict(sorted(found.items()))


def train_base(setting: Setting, out: Path, more: Sequence[str]) -> None:
    """OUT/bases.json: which models are tuned, and what is known of them."""
    shared = base_plan(setting.data, 0, setting.device, setting.model)["base"]
    shared["evaluation"]["evaluate"] = [setting.check]
    del shared["training"]["samples"]
    begun = {int(arm.removeprefix("samples ")) for arm in begun_grids(Judge("pretraining", "check"), out)}
    lengths = sorted({*((setting.samples, 2 * setting.samples) if setting.samples else LENGTHS), *begun})
    while True:
        rows = {f"samples {samples}": {"method": "openclip", "samples": samples} for samples in lengths}
        first: Grids = {arm: {BASE_BATCH: list(BASE_RATES)} for arm in rows}
        _, scores, comparison = bracketed("pretraining", shared, rows, first, out, more)
        *_, shorter, longest = lengths_of(scores).values()
        gain = longest - shorter
        if gain < FLAT or 2 * lengths[-1] > LONGEST or setting.samples:
            break
        lengths.append(2 * lengths[-1])
    best = export_best(comparison, out, "pretraining", "learned")
    bases = {"base": {"pretrained": str(out / "learned"), "tau": best["tau"]}}
    if best["tau"] > HELD:
        samples = int(best["method"].split()[1]) // 2
        held = {"method": "openclip", "temperature_rule": "constant", "settings": {"temperature": HELD}}
        going_on = {**shared, "model": {"pretrained": str(out / "learned")}}
        grid: Grids = {"held": {BASE_BATCH: [rate / 2 for rate in BASE_RATES]}}
        _, _, comparison = bracketed("holding", going_on, {"held": {**held, "samples": samples}}, grid, out, more)
        export_best(comparison, out, "holding", "held")
        bases = {"base": {"pretrained": str(out / "held"), "tau": HELD}, "warmer": bases["base"]}
    (out / "bases.json").write_text(json.dumps({**bases, "gain_of_doubling": gain}, indent=1) + "\n")


def begun_arms(setting: Setting, out: Path) -> tuple[dict[str, Any], dict[str, Row]]:
    """What all runs share, and the rows, once the base is there."""
    if not (out / "bases.json").is_file():
        raise SystemExit(f"error: no base in {out} yet; run the stage base first")
    bases = json.loads((out / "bases.json").read_text())
    base = Base(**bases["base"])
    warmer = Base(**bases["warmer"]) if "warmer" in bases else None
    shared = tuning_base(setting.data, Path(base.pretrained), setting.epochs, setting.device)
    shared["run"]["log_every"] = 20
    return shared, arms(base, warmer, setting.epochs)


def choose_rates(setting: Setting, out: Path, more: Sequence[str]) -> None:
    shared, rows = begun_arms(setting, out)
    shared["evaluation"]["evaluate"] = [setting.check]
    first: Grids = {arm: {BATCH: list(FIRST_RATES)} for arm in rows}
    grids, scores, _ = bracketed("rates", shared, rows, first, out, more)
    best = {arm: rates[BATCH] for arm, rates in best_rates(grids, scores).items()}
    (out / "chosen.json").write_text(json.dumps(best, indent=1) + "\n")
    about = {"data": str(setting.data), "epochs": setting.epochs}
    (out / "study.json").write_text(json.dumps(about, indent=1) + "\n")
    for (arm, _, rate), score in scores.items():
        print(f"{arm:32} lr {rate:<8g} {100 * score:6.2f}{' *' if best[arm] == rate else ''}")


def race(setting: Setting, out: Path, more: Sequence[str]) -> None:
    shared, rows = begun_arms(setting, out)
    shared["evaluation"] |= {
        "evaluate": [setting.test, setting.check],
        "evaluations": A_PART * setting.epochs,
        "evaluate_start": True,
    }
    compare(race_plan(shared, rows, json.loads((out / "chosen.json").read_text())), out, more)


def gather(out: Path, target: Path) -> None:
    """With all lines of training steps: the figures ask them where the recovery ended, and for the weights since."""
    keep_runs(out, target, ("pretraining", "holding", "rates", "race"), most=10_000)
    for name in ("bases.json", "learned.json", "held.json", "chosen.json", "study.json"):
        if (out / name).is_file():
            shutil.copy(out / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the clean-up study.")
    parser.add_argument("stage", choices=("decode", "base", "rates", "race", "gather"))
    parser.add_argument("source", type=Path, help="the folder with the parts; for gather, OUT")
    parser.add_argument("out", type=Path, help="the folder of the comparisons; for gather, where to put what is kept")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side on the GPU; for decode, processes")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="minutes after which no run is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a rehearsal")
    parser.add_argument("--samples", type=int, default=0, help="for a rehearsal: a short base, and one twice as long")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="for a rehearsal: fewer epochs of each stage")
    parser.add_argument("--model", default=MODEL, help="for a rehearsal: a smaller one of the same input size")
    options = parser.parse_args()
    setting = Setting(options.source, options.device, options.epochs, options.samples, options.model)
    more = ["--jobs", str(options.jobs)]
    if options.stop_after < math.inf:
        more += ["--stop-after", str(options.stop_after)]
    match options.stage:
        case "decode":
            decode(options.source, options.jobs, ("base", "tune"))
        case "base":
            train_base(setting, options.out, more)
        case "rates":
            choose_rates(setting, options.out, more)
        case "race":
            race(setting, options.out, more)
        case "gather":
            gather(options.source, options.out)


if __name__ == "__main__":
    main()
