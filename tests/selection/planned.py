"""Small runs whose batches are planned, and what they leave behind."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fullbatch.config.run import RunConfig
from fullbatch.config.training import Selection
from fullbatch.selection.periods import numbered
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import Seen, Selector
from tests.training.small import small_config

COSTS = ("seconds", "samples_per_second", "waiting", "selection_stall", "selection_seconds")

SPECTRAL = Selection(batches="spectral", planners=0)
ORDERED = Selection(batches="ordered", drawn_batches=9, kept_batches=3, planners=0)
AVERAGED = replace(ORDERED, drawn_batches=5, reading="averaged")
SELECTIONS = {
    "spectral": SPECTRAL,
    "spectral, waiting": replace(SPECTRAL, plan_ahead=False),
    "spectral, forward": replace(SPECTRAL, embeddings="forward"),
    "spectral, two steps a plan, blocks of two": replace(SPECTRAL, period_steps=2, block_batches=2),
    "spectral, blocks of two": replace(SPECTRAL, block_batches=2),
    "spectral, blocks of two, waiting": replace(SPECTRAL, block_batches=2, plan_ahead=False),
    "spectral in the last epoch": replace(SPECTRAL, uniform_epochs=3),
    "ordered": ORDERED,
    "ordered, forward and waiting": replace(ORDERED, embeddings="forward", plan_ahead=False),
    "averaged": AVERAGED,
}


def config_for(folder: Path, selection: Selection, method: str = "sogclr", **training: object) -> RunConfig:
    """40 samples in batches of 8, 20 batches."""
    config = small_config(folder, method, **training)
    steps = 20 // selection.batches_a_step
    samples = 8 * steps * selection.batches_a_step
    saved = replace(config.run, save_every=10 if selection.batches_a_step == 1 else 3)
    return replace(config, selection=selection, training=replace(config.training, samples=samples), run=saved)


def seen(rows):
    return Seen(rows, torch.zeros(len(rows), dtype=torch.int64))


def lines(run):
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in COSTS} for line in found]


def plans_of(run):
    return {first: np.load(path)["place"] for first, path in numbered(run / "batches", "plan").items()}


def check_plans(ours, theirs, since=10):
    """The same plans.  When earlier ones go depends on when a checkpoint's writer, a thread, ends."""
    ours, theirs = ({first: plan for first, plan in plans_of(run).items() if first >= since} for run in (ours, theirs))
    assert ours and ours.keys() == theirs.keys() and all(np.array_equal(ours[one], theirs[one]) for one in ours)


def loss_lines(run):
    return [json.loads(text) for text in (run / "batches" / "losses.jsonl").read_text().splitlines()]


def simulated(plans, order, batches, table, stop):
    """The places of these batches, each of which leaves rows in the table as a training step would; up to ``stop``."""
    selector = Selector(plans, order, Planners(0), lambda: seen(table), lambda rows: 0.2, lambda: None)
    shown = {}
    with closing(selector):
        for numbers in selector.ranges(batches):
            for number in numbers:
                if number == stop:
                    return shown, table
                plan = plans.of(number)
                epoch, places = shown[number] = plan.epoch, plan.places(number)
                drawn = torch.Generator().manual_seed(number)
                rows = torch.randn(len(places), 2, 4, generator=drawn)
                table[torch.from_numpy(order.ids(epoch, places))] = torch.nn.functional.normalize(rows, dim=-1)
    return shown, table
