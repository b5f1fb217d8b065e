"""What every trainer has in common: an optimizer that it saves.  The objective's temperature becomes a group of that
optimizer, and its tables travel in the optimizer's state_dict()."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.objective.objective import Objective
from fullbatch.objective.prototypes import PrototypeNormalizer
from fullbatch.objective.temperature import GlobalTemperature
from fullbatch.training.optimizer import TEMPERATURE_SHARE

STATE = "fullbatch_objectives"  # the key in the optimizer's state_dict()
_carried: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Objective]] = weakref.WeakKeyDictionary()


def carry_state(
    optimizer: torch.optim.Optimizer, *objectives: Objective, temperature_lr: float | None = None
) -> torch.optim.Optimizer:
    """Let ``optimizer`` learn what the objectives learn, without weight decay, and let its ``state_dict()`` hold all
    that they remember.  Call it before a schedule is made for the optimizer and before a checkpoint is loaded.

    ``temperature_lr`` is by default the eighth of the optimizer's own rate that ``fullbatch train`` takes.
    """
    if optimizer in _carried:
        if [id(objective) for objective in _carried[optimizer]] == [id(objective) for objective in objectives]:
            return optimizer
        raise ValueError("This optimizer carries another objective already; make a new optimizer.")
    rate = TEMPERATURE_SHARE * float(optimizer.defaults["lr"]) if temperature_lr is None else temperature_lr
    for objective in objectives:
        _move_to_own_groups(optimizer, objective, rate)
    _carried[optimizer] = list(objectives)
    optimizer.register_state_dict_post_hook(_add_state)
    optimizer.register_load_state_dict_pre_hook(_take_state)
    return optimizer


def _move_to_own_groups(optimizer: torch.optim.Optimizer, objective: Objective, temperature_lr: float) -> None:
    """Trainers that find the parameters themselves may have given them the encoders' rate and decay."""
    own = {id(parameter) for parameter in objective.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    normalizers = [module for module in objective.modules() if isinstance(module, PrototypeNormalizer)]
    prototypes = [parameter for normalizer in normalizers for parameter in normalizer.parameters()]
    known = {id(parameter) for parameter in prototypes}
    others = [parameter for parameter in objective.parameters() if id(parameter) not in known]
    for parameters, rate in ((others, temperature_lr), (prototypes, normalizers[0].lr if normalizers else 0.0)):
        if learned := [parameter for parameter in parameters if parameter.requires_grad]:
            optimizer.add_param_group({"params": learned, "lr": rate, "weight_decay": 0.0})


def _add_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, STATE: [dict(objective.state_dict()) for objective in _carried[optimizer]]}


def _take_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    objectives = _carried[optimizer]
    if len(state.get(STATE, ())) != len(objectives):
        raise ValueError(
            "This checkpoint's optimizer holds no state of the objective, so it was saved by a training without it; "
            "start a new training from its weights instead of resuming it."
        )
    for objective, saved in zip(objectives, state[STATE], strict=True):
        try:
            objective.load_state_dict(saved)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"The checkpoint's objective does not fit this one's settings: {reason}") from None
    return {key: value for key, value in state.items() if key != STATE}


def check_carried(objective: Objective, advice: str) -> None:
    """Every parameter must be learned and all state saved by some optimizer that is still in use."""
    if not any(any(one is objective for one in objectives) for objectives in _carried.values()):
        raise ValueError(
            f"No optimizer learns this objective's temperature or saves its tables, which a resumed training would "
            f"miss; {advice}"
        )


# -- the model's own temperature ---------------------------------------------------------------------------------------


def freeze_temperature(model: nn.Module) -> None:
    """The temperature is the objective's; the model's own would get no gradient, and DDP would wait for it."""
    for name in ("logit_scale", "logit_bias"):
        parameter = getattr(model, name, None)
        if isinstance(parameter, nn.Parameter):
            parameter.requires_grad_(False)


def log_temperature(objective: Objective) -> Tensor | None:
    """As it is now; None where every sample has its own."""
    temperature = next(iter(objective.temperatures.values()))
    if not isinstance(temperature, GlobalTemperature):
        return None
    learned = temperature.log_temperature
    return torch.tensor(math.log(temperature.config.temperature)) if learned is None else learned.detach()


@torch.no_grad()
def write_temperature(model: nn.Module, objective: Objective) -> None:
    """Into the model's ``logit_scale`` and ``logit_bias``, which are saved and used with the model."""
    scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
    log_tau = log_temperature(objective)
    if isinstance(scale, Tensor) and log_tau is not None:
        scale.copy_(-log_tau.reshape(scale.shape))
    if isinstance(bias, Tensor) and objective.bias is not None:
        bias.copy_(objective.bias.reshape(bias.shape))
