"""The learning rate of a step: pure functions of the step number, so that a resumed run needs no state for them."""

from __future__ import annotations

import math

from typing_extensions import assert_never

from fullbatch.config.optimization import Optimizer, Schedule, ScheduleKind

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
