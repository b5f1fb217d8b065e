"""A finished run's normalizers, checkpoint by checkpoint: NeuCLIP's estimation error (section B.6)."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullbatch import distributed
from fullbatch.assembly import build_objective, changed, make_embedder, pick_device
from fullbatch.audit import Options
from fullbatch.audit.errors import EPSILON, mean_errors, normalizer_audit
from fullbatch.config.axes import NoNormalizer
from fullbatch.config.data import Data
from fullbatch.config.run import RunConfig
from fullbatch.data.loader import LoadedBatch, SamplePool, open_pool
from fullbatch.data.sources import open_source
from fullbatch.evaluation.embed import Embedder, Tables
from fullbatch.models.build import rebuild_model
from fullbatch.objective.objective import Objective
from fullbatch.selection.ordered import losses_at
from fullbatch.selection.selector import loss_histograms
from fullbatch.selection.spectral import require_packages, spectral_order
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder, finite, replace_text

KEPT = 4 << 30  # bytes of a rank's decoded images that are kept for the next checkpoint; more are read again


@dataclass(frozen=True)
class Audit:
    folder: Path  # of the run
    results: Mapping[str, Any]  # as in audit.json


def audit_run(run: Path, options: Options = Options(), say: Callable[[str], None] = lambda text: None) -> Audit:
    """Measure the kept checkpoints of the run in folder ``run`` and write ``audit.json`` there.  The weights are those
    that trained, not their average: it is them the normalizers belong to."""
    for name, least in (("anchors", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(options, name)}.")
    if options.batch_losses:
        require_packages("--batch-losses")
    folder, chosen = _chosen(run, options.checkpoint)
    before = folder.read_config()
    config = changed(
        before,
        data=options.data or before.data.data,
        workers=before.data.workers if options.workers is None else options.workers,
        device=options.device,
        precision=options.precision or before.training.precision,
        table_storage="auto",  # the run's own tables are not to be touched
        graphs=False,  # nothing is trained
        compile=False,
    )
    device = pick_device(config)
    with distributed.ranks(device) as world:
        pool = distributed.together(lambda: _open(config.data, folder))
        model = rebuild_model(config.model, folder.model).to(device).eval()
        with warnings.catch_warnings():  # the run has said already what is unwise in its settings
            warnings.simplefilter("ignore")
            objective = build_objective(config, model, pool).to(device)
        embedder = make_embedder(config, model, model, device)
        fits = len(pool) * 3 * embedder.image_size**2 <= KEPT * world.size
        read = partial(embedder.uncropped, pool, torch.device("cpu"))
        images = cache(lambda: list(read())) if fits else read
        if options.anchors > len(pool):
            say(f"--anchors {options.anchors:,} is more than the {len(pool):,} samples: all of them are anchors")
        audits = []
        for path in chosen:
            saved = checkpoint.read(path, ("model", "objective", "position"), checked=True)
            with checkpoint.understood(path):
                _check_same_data(saved["position"]["data"], config.data, pool, folder)
                model.load_state_dict(saved["model"])
                objective.load_state_dict(saved["objective"])
                step = saved["position"]["step"]
            audited = _audit(objective, embedder, images, config, options, step)
            embedding, exact = audited["embedding_seconds"], audited["normalizer_seconds"]
            sizes = f"{audited['samples']:,} samples, {audited['anchors']:,} anchors"
            say(f"step {step}: embedding {embedding:.1f} s, exact normalizers {exact:.1f} s ({sizes})")
            audits.append(audited)
        results = {
            "method": config.objective.method,
            "has_normalizer": not isinstance(objective.method.normalizer, NoNormalizer),
            "batch_size": config.training.batch_size,
            "seed": options.seed,
            "anchors": audits[0]["anchors"],
            "samples": audits[0]["samples"],
            "epsilon": EPSILON,
            "checkpoints": audits,  # oldest first
            "mean": {"tau": sum(audited["tau"] for audited in audits) / len(audits), **mean_errors(audits)},
        }
        if world.rank == 0:
            replace_text(folder.path / "audit.json", json.dumps(finite(results), indent=1))
        distributed.host_barrier()
    return Audit(folder.path, results)


def _chosen(run: Path, wanted: str | None) -> tuple[Folder, list[Path]]:
    """The run's folder and its checkpoints to look at, oldest first; damaged ones are left out with a warning."""
    if wanted is None and (run / checkpoint.MANIFEST).is_file():
        run, wanted = run.parent.parent, str(run)
    folder = Folder(run)
    if not run.is_dir():
        raise ValueError(f"There is no run folder {run}.")
    folder.read_config()
    kept = checkpoint.checkpoints(folder.checkpoints)
    if not kept:
        raise ValueError(f"There is no checkpoint in {folder.checkpoints} yet; let the run save one (--save-every).")
    if wanted is not None:
        path = checkpoint.folder_of(folder.checkpoints, int(wanted)) if wanted.isdigit() else Path(wanted)
        named = [folder for folder in kept if folder.resolve() == path.resolve()]
        if not named:
            steps = ", ".join(str(checkpoint.step_of(folder)) for folder in kept)
            raise ValueError(f"--checkpoint {wanted}: {run} has no such checkpoint; it keeps those of steps {steps}.")
        kept = named
    good = [path for path in kept if checkpoint.is_good(path)]
    if not good:
        raise ValueError(f"No checkpoint to look at in {folder.checkpoints} is whole: {kept[-1]} is damaged.")
    return folder, good


def _open(data: Data, folder: Folder) -> SamplePool:
    for source in data.sources:
        try:
            open_source(source)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"The audit of {folder.path} embeds the data it was trained on, and the source {str(source)!r} cannot "
                f"be opened: {error} If the data was moved, say where it lies now with --data."
            ) from None
    return open_pool(data)[0]


def _check_same_data(trained_on: str, data: Data, pool: SamplePool, folder: Folder) -> None:
    """The memory per sample, and the exact normalizers, are those of the very samples of the training."""
    if pool.fingerprint == trained_on:
        return
    before, now = trained_on.split(" "), pool.fingerprint.split(" ")
    if len(before) != len(now):
        what = f"it had {len(before)} source(s), and now there are {len(now)}"
    else:
        other = [str(s) for s, old, new in zip(data.sources, before, now, strict=True) if old != new]
        what = "names, sizes or samples of files differ in " + ", ".join(map(repr, other))
    raise ValueError(
        f"The data is not what {folder.path} was trained on ({what}), so its normalizers mean nothing here."
    )


def _audit(
    objective: Objective,
    embedder: Embedder,
    images: Callable[[], Iterable[LoadedBatch]],
    config: RunConfig,
    options: Options,
    step: int,
) -> dict[str, Any]:
    """One checkpoint's numbers and what they cost."""
    batch_size, seed, start = config.training.batch_size, options.seed, time.monotonic()
    tables = embedder.tables(images())
    if len(tables.ids_n) < 2:
        raise ValueError(f"Of {objective.context.num_samples:,} samples only {len(tables.ids_n)} can be read.")
    if embedder.device.type == "cuda":
        torch.cuda.synchronize(embedder.device)
    embedded = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    numbers = normalizer_audit(
        objective, tables.image_nD, tables.text_nD, tables.ids_n, options.anchors, batch_size, generator
    )
    ended = time.monotonic()
    cost = {"embedding_seconds": embedded - start, "normalizer_seconds": ended - embedded, "seconds": ended - start}
    audited = {"step": step, "samples_seen": step * batch_size, **numbers, **cost}
    if options.batch_losses:
        blocks = config.selection.block_batches
        audited["batch_losses"] = _batch_losses(tables, batch_size, blocks, numbers["tau"], seed)
    return audited


def _batch_losses(tables: Tables, batch_size: int, block_batches: int, tau: float, seed: int) -> dict[str, Any]:
    """The losses of an epoch's uniform batches, and of the spectral ones of the same samples: figures 3 and 5 of
    "Mini-Batch Optimization of Contrastive Loss", for a model trained on whatever batches."""
    order_n = torch.from_numpy(np.random.default_rng(seed).permutation(len(tables.ids_n)))
    image_nD, text_nD = (rows_nD.float().cpu()[order_n] for rows_nD in (tables.image_nD, tables.text_nD))
    chosen_n = spectral_order(image_nD, text_nD, batch_size, block_batches, tau, seed)
    if not len(chosen_n):
        raise ValueError(f"--batch-losses needs a whole batch, {batch_size:,} samples; there are {len(order_n):,}.")
    own, uniform = (
        losses_at(image_nD, text_nD, places_n.reshape(-1, batch_size), tau).double().numpy()
        for places_n in (chosen_n, np.arange(len(chosen_n)))
    )
    return loss_histograms(own, uniform)
