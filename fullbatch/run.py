"""From a config to a trained model in a run folder: every room's part is made here and handed to the trainer."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullbatch import distributed
from fullbatch.config.methods import settings_of
from fullbatch.config.run import RunConfig
from fullbatch.data.loader import TrainingBatches, open_pool
from fullbatch.data.transforms import TrainTransform
from fullbatch.distributed import towers
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.tasks import check_tasks, run_task, tasks_of
from fullbatch.models.build import build_model
from fullbatch.models.export import Format, export
from fullbatch.models.towers import TwoTowers, batch_norm_names
from fullbatch.objective.objective import Objective
from fullbatch.objective.parts import Context
from fullbatch.training import checkpoint
from fullbatch.training.average import WeightAverage
from fullbatch.training.display import Display
from fullbatch.training.optimizer import make_optimizer, make_temperature_optimizer
from fullbatch.training.run_folder import Folder, Metrics, replace_text
from fullbatch.training.schedule import phases
from fullbatch.training.state import Position, TrainingState
from fullbatch.training.trainer import Trainer

log = logging.getLogger("fullbatch")


@dataclass(frozen=True)
class Trained:
    """folder    the run's folder
    results   task -> its numbers, as in results.json
    """

    folder: Path
    results: Mapping[str, Any]


def train(config: RunConfig, resume: str | Path | None = None) -> Trained:
    """Train as ``config`` says; with ``resume``, go on with the run in that folder from its last good checkpoint.

    >>> trained = train(RunConfig(data=Data(("cc3m/{00000..00331}.tar",))))  # doctest: +SKIP
    """
    device = pick_device(config)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with distributed.ranks(device) as world:
        folder = Folder(Path(resume)) if resume is not None else Folder.of(config)
        folder = Folder(Path(distributed.from_first_rank(str(folder.path))))
        if world.rank == 0 and resume is None:
            folder.create(config)
        distributed.host_barrier()
        with _logging_to(folder.log if world.rank == 0 else None):
            return _train(config, folder, device, resume is not None)


def _train(config: RunConfig, folder: Folder, device: torch.device, resumed: bool) -> Trained:
    world = distributed.world()
    display = Display(world.rank == 0, config.run.quiet)
    tasks = tasks_of(config)
    check_tasks(tasks)
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, config.data.image_size)
    batches = make_batches(config, model)
    total_steps = steps_of(config, batches)
    phases(config.schedule, total_steps, batches.steps_per_epoch)  # refuse a warm-up that does not fit, now
    state, wrapped = make_state(config, model, batches, device)

    found = checkpoint.last_good(folder.checkpoints) if resumed else None
    if resumed and found is None and checkpoint.checkpoints(folder.checkpoints):
        raise ValueError(f"Every checkpoint in {folder.checkpoints} is damaged; start a new run.")
    distributed.host_barrier()
    if world.rank == 0:
        checkpoint.clean(folder.checkpoints, found)
        folder.write_config(config)
    if found is not None:
        state.restore(checkpoint.read(found))
        display.say(f"going on with {found}")
    elif resumed:
        display.say(f"there is no checkpoint in {folder.path} yet: starting at step 0")
    announce(config, model, batches, total_steps, display)

    embedder = Embedder(
        wrapped,
        model.tokenize,
        model.image_size,
        device,
        config.training.precision,
        config.evaluation.eval_batch,
        config.data.workers,
    )

    def evaluate() -> dict[str, Any]:
        with state.average.in_use() if state.average is not None else nullcontext():
            results = [run_task(task, embedder, config.evaluation.templates).as_dict() for task in tasks]
        if world.rank == 0:
            line = {"step": state.position.step, "results": results}
            replace_text(folder.results, json.dumps(line, indent=1))
        return {f"{result['task']} {result['main']}": result[result["main"]] for result in results}

    metrics = Metrics(folder, config, world.rank == 0, state.position.step)
    trainer = Trainer(
        config, folder, batches, total_steps, device, wrapped, state, metrics, display, evaluate if tasks else None
    )
    try:
        trainer.run()
    finally:
        metrics.close()
    distributed.host_barrier()
    return Trained(folder.path, json.loads(folder.results.read_text()) if folder.results.is_file() else {})


# ---------------------------------------------------------------------------------------------------------------------
# the parts


def pick_device(config: RunConfig) -> torch.device:
    wanted, there = config.training.device, torch.cuda.is_available()
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


def make_batches(config: RunConfig, model: TwoTowers) -> TrainingBatches:
    batch_size, world = config.training.batch_size, distributed.world()
    if batch_size % world.size:
        raise ValueError(f"--batch-size {batch_size} cannot be shared evenly by {world.size} ranks.")
    if not distributed.is_node_leader():
        distributed.host_barrier()  # the leader makes the indexes of the shards, the others read them
    pool, order = open_pool(config.data)
    if distributed.is_node_leader():
        distributed.host_barrier()
    if order.epoch_size < batch_size:
        raise ValueError(
            f"--batch-size {batch_size} is more than the {order.epoch_size} samples of an epoch; "
            f"use at most {order.epoch_size}, or more data."
        )
    data = config.data
    transform = TrainTransform(model.image_size, data.crop, data.flip, data.max_pixels)
    order = replace(order, seed=config.training.seed)
    return TrainingBatches(pool, order, batch_size, transform, model.tokenize, world)


def steps_of(config: RunConfig, batches: TrainingBatches) -> int:
    training = config.training
    if training.samples is not None:
        return -(-training.samples // training.batch_size)
    return training.epochs * batches.steps_per_epoch


def build_objective(config: RunConfig, model: TwoTowers, batches: TrainingBatches) -> Objective:
    """With pretrained weights the temperature starts where theirs ended, unless the user sets it."""
    described = config.objective
    method, settings = described.build(), dict(described.settings)
    start = {"temperature": model.initial_temperature, "bias": model.initial_bias}
    learnable = {name: value for name, value in start.items() if value is not None and name not in settings}
    settings.update({name: value for name, value in learnable.items() if name in settings_of(method)})
    context = Context(
        width=model.width,
        num_samples=batches.order.num_samples,
        chunk=described.loss_chunk,
        seed=config.training.seed,
        table_dtype=getattr(torch, described.table_dtype),
        table_storage=described.table_storage,
        dataset=batches.pool.fingerprint,
    )
    return Objective(replace(described, settings=settings).build(), context)


def make_state(
    config: RunConfig, model: TwoTowers, batches: TrainingBatches, device: torch.device
) -> tuple[TrainingState, torch.nn.Module]:
    """What the run remembers, and the model as the ranks call it."""
    training = config.training
    model.to(device)
    if training.compile:
        model.compile()
    wrap = towers.copied if training.parallel == "ddp" else towers.sharded
    wrapped = wrap(model, device)
    objective = build_objective(config, model, batches).to(device)
    state = TrainingState(
        model=model,
        average=None if training.ema is None else WeightAverage(model, training.ema),
        optimizer=make_optimizer(model, config.optimizer, device),
        temperature_optimizer=make_temperature_optimizer(objective, config.optimizer),
        objective=objective,
        scaler=torch.amp.GradScaler(device.type, enabled=training.precision == "fp16"),
        position=Position(),
    )
    return state, wrapped


def announce(config: RunConfig, model: TwoTowers, batches: TrainingBatches, steps: int, display: Display) -> None:
    training, world = config.training, distributed.world()
    weights = sum(p.numel() for p in model.parameters())
    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    display.say(
        f"{config.objective.method}, {model.design.name}, {weights / 1e6:.1f} M weights, "
        f"{batches.order.num_samples:,} samples, batch {training.batch_size}{ranks}, {steps:,} steps"
    )
    if (training.micro_batch is not None or world.size > 1) and (names := batch_norm_names(model)):
        log.warning(
            "%d BatchNorm layers (%s, ...) see a micro-batch or a rank's share at a time, so the gradient is not that "
            "of the whole batch; use a model without BatchNorm for that",
            len(names),
            names[0],
        )


@contextmanager
def _logging_to(path: Path | None) -> Iterator[None]:
    """The run's log has it all, down to the name of every bad sample; the terminal only warnings."""
    if path is None:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        handler.close()


# ---------------------------------------------------------------------------------------------------------------------
# export


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds for those who use the model rather than train on."""

    model: TwoTowers
    config: RunConfig
    step: int
    temperature: float
    bias: float | None


def load_trained(path: Path, average: bool = True) -> Loaded:
    """From a run folder's last good checkpoint, or from the checkpoint at ``path``."""
    found: Path | None = path
    if not (path / checkpoint.MANIFEST).is_file():
        found = checkpoint.last_good(Folder(path).checkpoints)
    if found is None:
        raise ValueError(f"{path} is neither a run folder with a good checkpoint nor a checkpoint.")
    config = Folder(found.parent.parent).read_config()
    parts = checkpoint.read(found, ("model", "average", "objective", "position"))
    bare = replace(config.model, pretrained=None, image_weights=False, text_weights=False)
    model = build_model(bare, config.data.image_size)
    model.load_state_dict(parts["model"])
    if average and "average" in parts:
        model.load_state_dict(parts["average"], strict=False)
    learned, bias = (parts["objective"].get(name) for name in ("temperatures.both.log_temperature", "bias"))
    logged = parts["position"]["temperature"]
    temperature = math.exp(learned) if learned is not None else logged if math.isfinite(logged) else 0.07
    return Loaded(model.eval(), config, parts["position"]["step"], temperature, None if bias is None else float(bias))


def export_run(run: Path, output: Path, format: Format, average: bool = True) -> Path:
    """Write a trained model for other programs; see ``fullbatch.models.export``."""
    loaded = load_trained(run, average)
    return export(loaded.model, output, format, loaded.temperature, loaded.bias)
