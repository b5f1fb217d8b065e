"""From a config to the parts of a run: device, batches, objective, state; what embeds and what selects."""

# n: samples   m: those that can be read   D: width

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullbatch import distributed
from fullbatch.config.axes import BatchAndQueue, Constant, LearnedScale, RobustGlobal
from fullbatch.config.methods import settings_of
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, merged, to_dict
from fullbatch.data.images import EvalTransform, TrainTransform, ViewMaker, no_tokens
from fullbatch.data.in_memory import InMemoryBatches, decode_all, decoded_key, resident
from fullbatch.data.loader import LoadedBatch, SamplePool, TrainingBatches, open_pool
from fullbatch.data.order import Order
from fullbatch.distributed import towers
from fullbatch.evaluation.embed import Embedder
from fullbatch.models.build import build_model, rebuild_model
from fullbatch.models.timm_towers import TwoViews
from fullbatch.models.two_towers import TwoTowers, batch_norm_names, is_convolutional
from fullbatch.objective.objective import Objective
from fullbatch.objective.parts import Context
from fullbatch.selection.periods import Periods, Plans
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import EmbeddingTable, Seen, Selector, mean_temperature, text_keys
from fullbatch.selection.spectral import require_packages, thread_pools
from fullbatch.training import checkpoint
from fullbatch.training.optimizer import WeightAverage, make_optimizer, make_temperature_optimizer, phases
from fullbatch.training.run_folder import Folder
from fullbatch.training.stages import Stages
from fullbatch.training.state import Position, TrainingState

log = logging.getLogger("fullbatch")

Batches = TrainingBatches | InMemoryBatches


@dataclass(frozen=True)
class Parts:
    device: torch.device
    model: TwoTowers  # the bare towers
    wrapped: nn.Module  # the towers as the ranks call them
    batches: Batches
    stages: Stages
    state: TrainingState


def assemble(config: RunConfig, device: torch.device, design: Path | None = None) -> Parts:
    """Everything a run needs; what does not fit together is refused here, before anything is written.  ``design`` is
    where a run that goes on wrote its model's design."""
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.training.seed)
    model = rebuild_model(config.model, design) if design else build_model(config.model, config.data.image_size)
    batches = make_batches(config, model, device)
    stages = Stages.of(config, periods_of(config, batches).trained_batches)
    phases(config.schedule, stages.training, stages.steps_per_epoch)  # is the run long enough for its warm-up?
    state, wrapped = make_state(config, model, batches.pool, device)
    split = config.training.micro_batch is not None or distributed.world().size > 1
    if split and (names := batch_norm_names(model)):
        log.warning(
            "%d BatchNorm layers (%s, ...) see a micro-batch or a rank's share at a time, so the gradient is not that "
            "of the whole batch; use a model without BatchNorm for that",
            len(names),
            names[0],
        )
    normalizer = state.objective.method.normalizer
    batches_seen = stages.training * stages.apart
    if config.recovery.carry in ("all", "memory"):
        batches_seen += stages.recovery
    if isinstance(normalizer, BatchAndQueue) and batches_seen <= normalizer.starts_after:
        log.warning(
            "the queue's embeddings count after %d batches and the objective sees %d, so none ever counts; give a "
            "smaller --settings.starts-after, or train for longer",
            normalizer.starts_after,
            batches_seen,
        )
    return Parts(device, model, wrapped, batches, stages, state)


def changed(config: RunConfig, **settings: Any) -> RunConfig:
    """``config`` with these settings instead of its own, named as flags without their dashes."""
    return from_dict(RunConfig, merged(to_dict(config), RunConfig.grouped(settings)))


def periods_of(config: RunConfig, batches: Batches) -> Periods:
    """In which batches are planned together."""
    selection, whole = config.selection, batches.steps_per_epoch
    if selection.averages and selection.kept_batches > whole:
        raise ValueError(
            f"--kept-batches {selection.kept_batches} is more than the {whole} batches of an epoch; keep fewer."
        )
    return Periods(selection, whole)


def check_packages(config: RunConfig) -> None:
    """Is there what the run's batches are chosen with?  Asked before data are read or a model is built."""
    if config.selection.batches == "spectral":
        require_packages("--batches spectral")


def pick_device(config: RunConfig) -> torch.device:
    wanted, there = config.training.device, torch.cuda.is_available()
    if config.training.compile and config.training.graphs:
        raise ValueError(
            "--compile and --graphs cannot be used together yet: recorded steps of compiled towers have computed wrong "
            "gradients. Leave one of them out."
        )
    if wanted == "cuda" and not there:
        raise ValueError(
            "--device cuda: PyTorch sees no GPU here; check the driver with nvidia-smi, or use --device cpu."
        )
    if wanted == "cpu" or not there:
        if config.training.precision == "fp16":
            raise ValueError("--precision fp16 needs a GPU; on a CPU use fp32 or bf16.")
        return torch.device("cpu")
    index = distributed.local_rank()
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"Local rank {index} has no GPU: there are {torch.cuda.device_count()}; "
            "give torchrun --nproc-per-node at most that number."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_batches(config: RunConfig, model: TwoTowers, device: torch.device) -> Batches:
    batch_size, world = config.training.batch_size, distributed.world()
    if batch_size % world.size:
        raise ValueError(f"--batch-size {batch_size} cannot be shared evenly by {world.size} ranks.")
    leader = distributed.is_node_leader()  # it makes the indexes of the shards, the others then read them
    made = distributed.together(lambda: open_pool(config.data) if leader else None)
    pool, order = distributed.together(lambda: made or open_pool(config.data))
    found = distributed.gather_objects((pool.fingerprint, order))
    if len(set(found)) > 1:
        raise ValueError(
            "The ranks found different data, so that one id would name different samples; samples an epoch: "
            f"{', '.join(f'{order.epoch_size:,}' for _, order in found)}. Start all again when the files stay as they "
            "are, and write shards out, as in {00000..00331}.tar, instead of a *."
        )
    if order.epoch_size < batch_size:
        share, whole = config.data.data_share, config.data.data_share == 1.0
        if order.epoch_size < 2:
            more = "name more --data" if whole else f"take more than --data-share {share:g}"
            raise ValueError(f"An epoch has one sample, and a batch needs two at least; {more}.")
        raise ValueError(
            f"--batch-size {batch_size} is more than the {order.epoch_size} samples of an epoch; use at most "
            f"{order.epoch_size}, or {'more data' if whole else f'more than --data-share {share:g}'}."
        )
    order = replace(order, seed=config.training.seed)
    if config.data.in_memory:
        return _in_memory(config, model, pool, order, device)
    data = config.data
    views = view_maker(config, model)
    transform: TrainTransform | EvalTransform = EvalTransform(model.image_size, data.max_pixels)
    if views is None:
        transform = TrainTransform(model.image_size, data.crop, data.flip, data.max_pixels)
    return TrainingBatches(pool, order, batch_size, transform, model.tokenize, world, views=views)


def view_maker(config: RunConfig, model: TwoTowers) -> ViewMaker | None:
    """What stands in for captions where one encoder sees two views of each image."""
    return ViewMaker(config.views, config.training.seed) if isinstance(model, TwoViews) else None


def _in_memory(
    config: RunConfig, model: TwoTowers, pool: SamplePool, order: Order, device: torch.device
) -> InMemoryBatches:
    data = config.data
    transform = EvalTransform(model.image_size, data.max_pixels)
    key = distributed.together(lambda: decoded_key(pool, data.sources, transform))
    leader = distributed.is_node_leader()  # it decodes, the others then read what it kept
    made = distributed.together(lambda: decode_all(pool, key, transform, data.workers) if leader else None)
    decoded = distributed.together(lambda: made or decode_all(pool, key, transform, data.workers))
    for name in decoded.bad:
        log.info("left a bad sample out: %s", name)
    if len(decoded.bad) == len(pool):
        raise ValueError(f"None of the {len(pool)} samples can be read; the first is {decoded.bad[0]}.")
    if len(decoded.bad) > data.max_bad * len(pool):
        raise ValueError(
            f"{len(decoded.bad)} of {len(pool)} samples could not be read, more than --max-bad {data.max_bad:g} of "
            f"them; the first is {decoded.bad[0]}. Repair the data, or allow more."
        )
    views, world = view_maker(config, model), distributed.world()
    kept = resident(key, decoded, model.tokenize if views is None else no_tokens, device)
    return InMemoryBatches(pool, order, config.training.batch_size, kept, data.crop, data.flip, world, views=views)


def build_objective(config: RunConfig, model: TwoTowers, pool: SamplePool) -> Objective:
    """With pretrained weights the temperature starts, or stays, where theirs ended, unless the user sets it."""
    described = config.objective
    method, settings = described.build(), dict(described.settings)
    if isinstance(method.temperature, (Constant, LearnedScale, RobustGlobal)):
        start = {"temperature": model.initial_temperature, "bias": model.initial_bias}
        for name, value in start.items():
            if value is not None and name not in settings and name in settings_of(method):
                settings[name] = value
                log.info("the %s starts at %.6g, as the pretrained weights have it", name, value)
    automatic = "split" if config.training.precision == "fp32" else "float16"
    context = Context(
        width=model.width,
        num_samples=len(pool),
        chunk=described.loss_chunk,
        operands=automatic if described.loss_operands == "auto" else described.loss_operands,
        seed=config.training.seed,
        table_dtype=getattr(torch, described.table_dtype),
        table_storage=described.table_storage,
        dataset=pool.fingerprint,
        correct_weights=config.selection.correction == "weights",
    )
    return Objective(replace(described, settings=settings).build(), context)


def make_state(
    config: RunConfig, model: TwoTowers, pool: SamplePool, device: torch.device
) -> tuple[TrainingState, torch.nn.Module]:
    """What the run remembers, and the model as the ranks call it."""
    training = config.training
    model.to(device)
    in_16_bits = device.type == "cuda" and training.precision != "fp32"
    shards = training.parallel == "fsdp" and distributed.world().size > 1
    if shards and training.channels_last:
        raise ValueError("--channels-last does not go with --parallel fsdp, which shards rows; leave one of them out.")
    if training.channels_last or (in_16_bits and is_convolutional(model) and not shards):
        model.to(memory_format=torch.channels_last)
    if training.compile:
        model.compile()
    wrap = towers.copied if training.parallel == "ddp" else towers.sharded
    wrapped = wrap(model, device)
    if training.graphs and (device.type != "cuda" or distributed.world().size > 1):
        raise ValueError("--graphs works on one GPU, in one process; leave it out.")
    objective = build_objective(config, model, pool).to(device)
    # A recorded step has the objective's kernels in it already; and where losses are averaged, a replayed one rounds
    # its gradient before it is scaled, so that a resumed run, which rehearses plainly, would not be the same run.
    if device.type == "cuda" and not training.graphs and config.selection.batches_a_step == 1:
        objective.record()
    dtype = getattr(torch, config.objective.table_dtype)
    state = TrainingState(
        model=model,
        average=None if training.ema is None else WeightAverage(model, training.ema),
        optimizer=make_optimizer(model, config.optimizer, device),
        temperature_optimizer=make_temperature_optimizer(objective, config.optimizer),
        objective=objective,
        scaler=torch.amp.GradScaler(device.type, enabled=training.precision == "fp16"),
        position=Position(data=pool.fingerprint),
        table=EmbeddingTable(len(pool), model.width, device, dtype) if config.selection.keeps_table else None,
    )
    return state, wrapped


def make_embedder(
    config: RunConfig,
    model: TwoTowers,
    wrapped: nn.Module,
    device: torch.device,
    watch: Callable[[str, int, int], None] = lambda source, done, total: None,
) -> Embedder:
    views, rows, data = view_maker(config, model), config.evaluation.eval_batch, config.data
    settings = (config.training.precision, rows, data.workers, data.max_pixels)
    return Embedder(wrapped, model.tokenize, model.image_size, device, *settings, views=views, watch=watch)


def make_selector(config: RunConfig, parts: Parts, folder: Folder, embedder: Embedder) -> Selector | None:
    """None where batches are uniform."""
    selection = config.selection
    if selection.batches == "uniform":
        return None
    batches, stages, table = parts.batches, parts.stages, parts.state.table

    def oldest() -> int | None:
        kept = checkpoint.checkpoints(folder.checkpoints)
        return stages.place(checkpoint.step_of(kept[0])) if kept else None

    method = parts.state.objective.method
    corrects_for = method if selection.correction != "none" and method.remembers else None
    periods = replace(periods_of(config, batches), joined=stages.joined_batches)
    uniform, read = periods[periods.first_planned].batches.start, stages.place(stages.total)
    if uniform >= read:
        sooner = "give fewer --uniform-epochs" if selection.uniform_epochs else "try --embeddings forward"
        log.warning(
            "the first %d batches are uniform and the run reads %d, so none is selected; %s, or train for longer",
            uniform,
            read,
            sooner,
        )
    return Selector(
        plans=Plans(folder.batches, periods, batches.batch_size, corrects_for),
        order=batches.order,
        planners=Planners(selection.planners, thread_pools if selection.batches == "spectral" else int),
        seen=partial(seen_now, embedder, batches) if table is None else lambda: table.seen,
        temperature=partial(mean_temperature, parts.state.objective),
        oldest=oldest,
    )


def seen_now(embedder: Embedder, batches: Batches) -> Seen:
    """The whole training set embedded by the model as it is now; NaN where a sample cannot be read.  The towers are in
    evaluation mode, and the random generators are as they were.  Every rank must call."""
    device, pool = embedder.device, batches.pool
    texts_n = torch.zeros(len(pool), dtype=torch.int64, device=device)

    def noted(read: Iterable[LoadedBatch]) -> Iterator[LoadedBatch]:
        for batch in read:
            texts_n[batch.ids.to(device)] = text_keys(batch.tokens).to(device)
            yield batch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if isinstance(batches, InMemoryBatches):
            tables = embedder.tables(noted(batches.chosen(range(len(pool)), embedder.batch_size)))
        else:
            tables = embedder.tables(noted(embedder.uncropped(pool, device)))
    both_m2D = torch.stack([tables.image_nD, tables.text_nD], dim=1).float()
    rows_n2D = torch.full((len(pool), *both_m2D.shape[1:]), torch.nan, device=device)
    texts_n = distributed.gather_rows(texts_n[None]).sum(0)  # each rank has read its own
    return Seen(rows_n2D.index_copy_(0, tables.ids_n, both_m2D), texts_n)
