"""Optimizers: of the encoders and of what the objective learns; their learning rates; an average of the weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_never

from fullbatch.config.optimization import Optimizer, Schedule, ScheduleKind
from fullbatch.distributed import towers
from fullbatch.objective.prototypes import PrototypeNormalizer
from fullbatch.objective.temperature import PredictedTemperature
from fullbatch.training.layerwise import Lars, NovoGrad
from fullbatch.training.stages import Stages

Groups = list[dict[str, Any]]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters in two lists: those that decay, those that do not.  Gains, biases and other tensors of
    fewer than two dimensions do not, nor what the model or a part of it lists in ``no_weight_decay()``, as timm and
    open_clip do: position and class embeddings."""
    patterns = set[str]()
    for prefix, module in model.named_modules():
        listing = getattr(module, "no_weight_decay", None)
        if callable(listing):
            patterns |= {f"{prefix}.{name}" if prefix else name for name in listing()}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or any(fnmatch(name, pattern) for pattern in patterns)
            (undecayed if spared else decayed).append(parameter)
    if not decayed and not undecayed:
        raise ValueError("The model has no trainable parameter (requires_grad is False everywhere): unfreeze a part.")
    return decayed, undecayed


def _muon_groups(
    model: nn.Module, decayed: list[nn.Parameter], undecayed: list[nn.Parameter], config: Optimizer
) -> Groups:
    """Rows of an embedding table are no linear map to orthogonalise: they, gains and biases are left to AdamW."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    by_adamw = {"use_fallback": True, "eps": config.eps}
    maps = {"params": [p for p in decayed if id(p) not in tables], "weight_decay": config.weight_decay}
    rows = {"params": [p for p in decayed if id(p) in tables], "weight_decay": config.weight_decay, **by_adamw}
    others = {"params": undecayed, "weight_decay": 0.0, **by_adamw}
    return [group for group in (maps, rows, others) if group["params"]]


def _timm(name: str, groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    try:
        kind = getattr(importlib.import_module("timm.optim"), name)
    except (ImportError, AttributeError):
        raise ValueError(
            f"This optimizer is timm's {name}, which is not here; `pip install --upgrade timm`, or take adamw."
        ) from None
    made = kind(groups, **settings)
    assert isinstance(made, torch.optim.Optimizer)
    return made


def make_optimizer(model: nn.Module, config: Optimizer, device: torch.device | str) -> torch.optim.Optimizer:
    """The optimizer ``config`` names for the model's trainable parameters, which are on ``device``."""
    decayed, undecayed = split_parameters(model)
    matrices = {"params": decayed, "weight_decay": config.weight_decay}
    others = {"params": undecayed, "weight_decay": 0.0}
    groups = [group for group in (matrices, others) if group["params"]]
    betas, momentum = (config.beta1, config.beta2), config.momentum
    adam: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps}
    fused: dict[str, Any] = {"fused": True} if torch.device(device).type == "cuda" else {}
    # LARS and LAMB scale matrices by their norms, decayed or not; gains and biases take the plain step.
    scaled = [{**group, "always_adapt": group is matrices} for group in groups]
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, **adam, **fused)
        case "adam":
            return torch.optim.Adam(groups, **adam, **fused)
        case "radam":
            return torch.optim.RAdam(groups, **adam, decoupled_weight_decay=True)  # as its authors' code has it
        case "novograd":
            return NovoGrad(groups, **adam)
        case "nvnovograd":
            if any(towers.is_sharded(weight) for weight in (*decayed, *undecayed)):
                raise ValueError("--optimizer nvnovograd cannot step what --parallel fsdp shards; take novograd.")
            return _timm("NvNovoGrad", groups, **adam)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=config.lr, alpha=config.beta2, eps=config.eps, momentum=momentum)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, **fused)
        case "lamb":
            return _timm("Lamb", scaled, **adam, max_grad_norm=None)  # clip_norm is the only clipping
        case "lars":
            return Lars(scaled, config.lr, momentum)
        case "lion":
            return _timm("Lion", groups, lr=config.lr, betas=betas)
        case "muon":
            parts = _muon_groups(model, decayed, undecayed, config)
            # Its steps are scaled to the length of AdamW's, so AdamW's learning rates carry over.
            scale = "match_rms_adamw"
            return _timm("Muon", parts, lr=config.lr, momentum=momentum, betas=betas, adjust_lr_fn=scale)
        case "adopt":
            return _timm("Adopt", groups, **adam, decoupled=True)
        case name:
            raise AssertionError(f"OPTIMIZERS lists {name!r}, but it is not made here")


def make_temperature_optimizer(objective: nn.Module, config: Optimizer) -> torch.optim.Optimizer | None:
    """AdamW without decay for what the objective learns; None if it learns nothing.  The groups say what they hold in
    ``group["learns"]``: "temperature" (log tau, SigLIP's bias), "temperature_net" (TempNet), "prototypes" (NeuCLIP's
    Algorithm 3, at the method's own ``prototype_lr``)."""
    modules = list(objective.modules())
    nets = [p for module in modules if isinstance(module, PredictedTemperature) for p in module.parameters()]
    normalizers = [module for module in modules if isinstance(module, PrototypeNormalizer)]
    prototypes = [p for normalizer in normalizers for p in normalizer.parameters()]
    known = {id(p) for p in (*nets, *prototypes)}
    learned = [
        ("temperature", [p for p in objective.parameters() if id(p) not in known], temperature_peak(config)),
        ("temperature_net", nets, temperature_net_learning_rate(config, epoch=0)),
        *(("prototypes", prototypes, normalizer.lr) for normalizer in normalizers[:1]),
    ]
    groups = [
        {"params": trainable, "learns": name, "peak": peak, "lr": peak}
        for name, parameters, peak in learned
        if (trainable := [p for p in parameters if p.requires_grad])
    ]
    if not groups:
        return None
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.0)


def set_learning_rates(
    encoders: torch.optim.Optimizer,
    objective: torch.optim.Optimizer | None,
    config: Optimizer,
    schedule: Schedule,
    stages: Stages,
    step: int,
    temperature: float | None = None,
) -> float:
    """Give every group the rate of step ``step`` and return the encoders'.  ``temperature`` is tau now, or lately: see
    ``temperature_learning_rate``.  In a recovery the rate is 0: an optimizer gathers its moments and moves nothing.
    What describes the frozen model rather than being part of it, NeuCLIP's prototypes and TempNet's net, learns on at
    its peak rate: it is new, and settles in this stage as the tables do."""
    frozen, trained = stages.recovers(step), stages.trained(step)
    clock = (trained, stages.training, stages.steps_per_epoch)
    rate = 0.0 if frozen else learning_rate(schedule, config.lr, *clock)
    for group in encoders.param_groups:
        _set_rate(group, rate)
    for group in objective.param_groups if objective is not None else ():
        match group["learns"]:
            case "temperature":
                own = 0.0 if frozen else temperature_learning_rate(schedule, config, *clock, temperature)
            case "temperature_net":
                own = temperature_net_learning_rate(config, epoch=trained // stages.steps_per_epoch)
            case "prototypes":
                own = group["peak"] if frozen else group["peak"] * rate / config.lr
            case other:
                raise AssertionError(f"a group that learns {other!r} has no rate")
        _set_rate(group, own)
    return rate


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """In place where the rate lies on the device, since a recorded step reads it there."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """The norm of the whole gradient, as it was; gradients are scaled to ``max_norm`` if longer.  The host waits not.
    With gradients that are not finite the norm is not finite either, and they stay broken: look at it when you log."""
    parameters = list(parameters)
    if max_norm is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) if gradients else torch.zeros(())


class WeightAverage:
    """w_bar <- decay w_bar + (1 - decay) w, of the weights that learn; decay is smaller in the first steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step number ``step`` (the first is 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        for name, weight in self.weights.items():
            kept = weight.detach().clone()
            weight.copy_(self.averages[name])
            self.averages[name].copy_(kept)
        towers.forget_gathered(self.model)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model holds the averages meanwhile."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, average in self.averages.items():
            average.copy_(towers.held_like(state[name], average))


# -- learning rates: pure functions of the step number, so that a resumed run needs no state for them ------------------


TANH = (-7.0, 3.0)  # timm's bounds; the descent ends at tanh(3), 0.25 % of the way above min_lr
ALBEF_TANH = (-6.0, 4.0)  # timm's until 2021
ALBEF_TICK = 100  # steps of the first epoch
TEMPERATURE_SHARE = 1 / 8  # NeuCLIP, section B.1: of the encoders' rate
LOW_TEMPERATURE_DIVISOR = 3.0  # FastCLIP
TEMPERATURE_NET_LR, TEMPERATURE_NET_DECAY = 3e-5, 0.9  # TempNet; the decay is an epoch's


def _steps(steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    return steps if steps is not None else round((epochs or 0.0) * steps_per_epoch)


def phases(schedule: Schedule, total_steps: int, steps_per_epoch: int) -> tuple[int, int, int]:
    """Steps of the warm-up, the descent and the cool-down; a run too short for them is refused.  ALBEF's clock fits
    into any run: what does not fit of its warm-up is left out."""
    if schedule.clock == "albef":
        ticks = schedule.warmup_epochs or 0.0
        warmup = min(round(ticks * ALBEF_TICK), steps_per_epoch, total_steps)
        cooldown = min(round(ticks * steps_per_epoch), total_steps - warmup)
        return warmup, total_steps - warmup - cooldown, cooldown
    warmup = _steps(schedule.warmup_steps, schedule.warmup_epochs, steps_per_epoch)
    warmup += round((schedule.warmup_share or 0.0) * total_steps)
    cooldown = _steps(schedule.cooldown_steps, schedule.cooldown_epochs, steps_per_epoch)
    if warmup + cooldown > total_steps:
        raise ValueError(
            f"Schedule: a warm-up of {warmup} steps and a cool-down of {cooldown} do not fit into a run of "
            f"{total_steps} steps; shorten them (--warmup-steps, --cooldown-steps) or train longer."
        )
    return warmup, total_steps - warmup - cooldown, cooldown


def remaining_share(kind: ScheduleKind, progress: float, tanh: tuple[float, float] = TANH) -> float:
    """How much of the way from min_lr to the peak is left after this share of the descent."""
    match kind:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "tanh":
            return 0.5 * (1.0 - math.tanh(tanh[0] * (1.0 - progress) + tanh[1] * progress))
        case "linear":
            return 1.0 - progress
        case "constant":
            return 1.0
        case _:
            assert_never(kind)


def learning_rate(schedule: Schedule, peak: float, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """The rate of step ``step`` (the first is 0) in a run of ``total_steps``; after its end it stays as it ended.

    Warm-up and cosine are open_clip's: the warm-up's first step has peak / warmup, its last the peak.

    >>> [learning_rate(Schedule(warmup_steps=2), 1.0, step, 6, 3) for step in (0, 1, 2, 4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if schedule.min_lr > peak:
        raise ValueError(f"Schedule.min_lr must be at most the peak rate ({peak}), got {schedule.min_lr}.")
    if schedule.clock == "albef":
        return _albef_rate(schedule, peak, step, total_steps, steps_per_epoch)
    warmup, descent, cooldown = phases(schedule, total_steps, steps_per_epoch)
    if step < warmup:
        return schedule.warmup_from + (peak - schedule.warmup_from) * (step + 1) / warmup
    if cooldown and step >= warmup + descent:
        return schedule.min_lr
    progress = min((step - warmup) / descent, 1.0) if descent else 1.0
    return schedule.min_lr + remaining_share(schedule.schedule, progress) * (peak - schedule.min_lr)


def _albef_rate(schedule: Schedule, peak: float, step: int, total_steps: int, steps_per_epoch: int) -> float:
    epochs, warmup = total_steps / steps_per_epoch, schedule.warmup_epochs or 0.0
    epoch = step // steps_per_epoch
    tick = epoch + warmup if epoch else min(max(step - 1, 0) // ALBEF_TICK, warmup)

    def descent(tick: float) -> float:
        share = remaining_share(schedule.schedule, tick / epochs, ALBEF_TANH) if tick < epochs else 0.0
        return schedule.min_lr + share * (peak - schedule.min_lr)

    if tick >= warmup:
        return descent(tick)
    top = descent(warmup) if schedule.schedule == "tanh" else peak
    return schedule.warmup_from + (top - schedule.warmup_from) * tick / warmup


def temperature_peak(optimizer: Optimizer) -> float:
    given = optimizer.temperature_lr
    return TEMPERATURE_SHARE * optimizer.lr if given is None else given


def temperature_learning_rate(
    schedule: Schedule,
    optimizer: Optimizer,
    step: int,
    total_steps: int,
    steps_per_epoch: int,
    temperature: float | None = None,
) -> float:
    """The rate of log tau: the encoders' path, scaled to its own peak.  ``temperature`` is tau now, needed for
    ``temperature_lr_drop_below`` only (reading it off a GPU makes the host wait, so an old value, such as the last one
    logged, is fine)."""
    share = temperature_peak(optimizer) / optimizer.lr
    rate = share * learning_rate(schedule, optimizer.lr, step, total_steps, steps_per_epoch)
    below = optimizer.temperature_lr_drop_below
    low = below is not None and temperature is not None and temperature <= below
    return rate / LOW_TEMPERATURE_DIVISOR if low else rate


def temperature_net_learning_rate(optimizer: Optimizer, epoch: int) -> float:
    """TempNet's: no warm-up, 0.9 of the last epoch's in each."""
    start = TEMPERATURE_NET_LR if optimizer.temperature_lr is None else optimizer.temperature_lr
    return start * TEMPERATURE_NET_DECAY**epoch
