"""Temperatures: one for all (constant, learned, robust), one a sample (iSogCLR), one predicted an anchor (TempNet)."""

# B: anchors on this rank   N: anchors on all ranks   C: centers   D: width

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fullbatch.config import axes
from fullbatch.distributed import average_gradient
from fullbatch.objective.log_domain import bounded_exp
from fullbatch.objective.per_sample import PerSampleTable, TableOptions, mean_within
from fullbatch.objective.step import Batch, Direction, Ids, Progress, Rows


def temperature_gradient(direction: Direction, alpha_N: Tensor, rho: float) -> Tensor:
    """d/d tau_i of tau_i (log(epsilon + g_i) + rho) at the estimate alpha_i of the log.  iSogCLR; NeuCLIP eq. (13)."""
    assert direction.mean_exponent_N is not None
    weight_N = bounded_exp(direction.log_g_N - alpha_N, direction.guard)
    return alpha_N + rho - weight_N * direction.mean_exponent_N


class AnchorTemperature(nn.Module):
    """``read`` gives tau for the anchors here and, detached, for those of all ranks; ``learn`` is called when the
    normalizer is known and returns what its learning adds to the loss (nothing, unless it is TempNet's)."""

    rho_value = 0.0

    def read(self, anchor: Rows, other: Rows, batch: Batch, progress: Progress) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def learn(self, direction: Direction, alpha_N: Tensor, progress: Progress) -> Tensor | None:
        raise NotImplementedError

    def factor(self, tau_B: Tensor) -> Tensor:
        """tau where it multiplies the loss."""
        return tau_B

    def rho(self, progress: Progress) -> float:
        return self.rho_value


class GlobalTemperature(AnchorTemperature):
    """One temperature for all anchors.  What is learned is log tau, clamped to its bounds before each use."""

    log_temperature: nn.Parameter | None

    def __init__(self, config: axes.Constant | axes.LearnedScale | axes.RobustGlobal) -> None:
        super().__init__()
        self.config = config
        learned = not isinstance(config, axes.Constant)
        start = torch.tensor(math.log(config.temperature))
        self.log_temperature = nn.Parameter(start) if learned else None

    def _apply(self, fn: Any, recurse: bool = True) -> GlobalTemperature:
        """As ever, but ``.double()`` gives a temperature that has not moved yet its start in full precision."""
        if self.log_temperature is None:
            return self
        start, value = math.log(self.config.temperature), self.log_temperature.item()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if value == float(torch.tensor(start)):
            self.log_temperature.data.fill_(start)
        return self

    def read(self, anchor: Rows, other: Rows, batch: Batch, progress: Progress) -> tuple[Tensor, Tensor]:
        if self.log_temperature is None or isinstance(self.config, axes.Constant):
            tau = anchor.all_ND.new_full((), self.config.temperature)
        else:
            low, high = (math.log(bound) for bound in axes.temperature_bounds(self.config))
            if progress.training:
                with torch.no_grad():
                    self.log_temperature.clamp_(low, high)
            log_tau = average_gradient(self.log_temperature).to(anchor.all_ND.dtype)
            tau = (log_tau if progress.training else log_tau.clamp(low, high)).exp()
        return tau.expand(anchor.local_BD.shape[0]), tau.detach().repeat(batch.size)

    def factor(self, tau_B: Tensor) -> Tensor:
        """With half its gradient there, the whole of it inside g counts twice."""
        released = isinstance(self.config, axes.RobustGlobal) and self.config.rule == "released"
        return torch.lerp(tau_B.detach(), tau_B, 0.5) if released else tau_B

    def rho(self, progress: Progress) -> float:
        return self.config.rho_at(progress.epoch) if isinstance(self.config, axes.RobustGlobal) else 0.0


class PerSampleTemperature(AnchorTemperature):
    """iSogCLR's tau_i.  A step's encoder gradient uses the tau_i it found; the move below shows from the next on."""

    def __init__(self, config: axes.PerSample, table: TableOptions, name: str) -> None:
        super().__init__()
        self.config, self.rho_value = config, axes.rho_of_direction(config, name)
        self.tau = PerSampleTable(table, f"{name}.tau")
        wide = replace(table, dtype=torch.promote_types(table.dtype, torch.float32))  # moments can be tiny
        self.first = PerSampleTable(wide, f"{name}.tau_first_moment")
        if config.rule == "adam":
            self.second = PerSampleTable(wide, f"{name}.tau_second_moment")

    def read(self, anchor: Rows, other: Rows, batch: Batch, progress: Progress) -> tuple[Tensor, Tensor]:
        tau_N = self.tau.get_or(anchor.ids.all_N, self.config.temperature, anchor.all_ND.dtype)
        return tau_N[batch.rows], tau_N

    def learn(self, direction: Direction, alpha_N: Tensor, progress: Progress) -> Tensor | None:
        if not progress.training:
            return None
        ids = direction.anchor.ids
        gradient_N = temperature_gradient(direction, alpha_N, self.rho_value)
        if self.config.clip is not None:
            gradient_N = gradient_N.clamp(-self.config.clip, self.config.clip)
        gradient_N = mean_within(gradient_N, ids)
        move_N = self._move(gradient_N, ids, progress) * self.config.temperature_lr
        tau_N = (direction.tau_N - move_N).clamp(*axes.temperature_bounds(self.config))
        self.tau.put(ids, tau_N, progress)
        return None

    def _move(self, gradient_N: Tensor, ids: Ids, progress: Progress) -> Tensor:
        first_N = self.first.get_or(ids.all_N, 0.0, gradient_N.dtype)
        if self.config.rule == "momentum":
            first_N = (1.0 - self.config.beta) * first_N + self.config.beta * gradient_N
            self.first.put(ids, first_N, progress)
            return first_N
        second_N = self.second.get_or(ids.all_N, 0.0, gradient_N.dtype)
        keep_first, keep_second = (0.9, 0.999) if progress.epoch > 0 else (0.0, 0.0)
        first_N = keep_first * first_N + (1.0 - keep_first) * gradient_N
        second_N = keep_second * second_N + (1.0 - keep_second) * gradient_N.square()
        self.first.put(ids, first_N, progress)
        self.second.put(ids, second_N, progress)
        visits = progress.epoch + 1  # a sample is seen once an epoch
        unbiased_first_N = first_N / (1.0 - keep_first**visits)
        unbiased_second_N = second_N / (1.0 - keep_second**visits)
        return unbiased_first_N / (unbiased_second_N.sqrt() + 1e-8)


class PredictedTemperature(AnchorTemperature):
    """TempNet.  Every rank predicts for all ranks' anchors, so its gradient is the same everywhere."""

    def __init__(self, config: axes.Predicted, width: int, name: str) -> None:
        super().__init__()
        self.config, self.rho_value = config, axes.rho_of_direction(config, name)
        self.tag = 1 if name == "image" else 2
        self.projection = nn.Linear(width, width)
        self.centers_CD = nn.Parameter(torch.zeros(config.centers, width))
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(0.01)))
        self.head = nn.Linear(config.centers, 1)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.started = False
        self._predicted_N: Tensor | None = None

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.started)

    def set_extra_state(self, state: Tensor) -> None:
        self.started = bool(state)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        """Its first batch starts it."""
        return () if self.started else None

    def predict(self, x_ND: Tensor, progress: Progress) -> Tensor:
        dtype = x_ND.dtype
        hidden_ND = torch.sigmoid(x_ND @ self.projection.weight.to(dtype).T + self.projection.bias.to(dtype))
        if progress.training and self.config.dropout > 0.0:
            keep = 1.0 - self.config.dropout
            noise_ND = progress.uniform(hidden_ND.numel(), 7, self.tag).view_as(hidden_ND)
            hidden_ND = hidden_ND * (noise_ND < keep) / keep
        product_NC = hidden_ND @ normalize(self.centers_CD.to(dtype), dim=1).T
        share_NC = torch.softmax(product_NC / self.log_sharpness.to(dtype).exp(), dim=1)
        pooled_NC = (share_NC - 1.0 / self.config.centers) * torch.sigmoid(product_NC)
        raw_N = pooled_NC @ self.head.weight.to(dtype)[0] + self.head.bias.to(dtype)
        low, high = self.config.temperature_min, self.config.temperature_max
        return low + (high - low) * torch.sigmoid(raw_N)

    def read(self, anchor: Rows, other: Rows, batch: Batch, progress: Progress) -> tuple[Tensor, Tensor]:
        if not self.started and progress.training:
            # the centers are the first batch of the other modality, over again where it has fewer rows
            rows = torch.arange(self.config.centers, device=other.all_ND.device) % other.all_ND.shape[0]
            with torch.no_grad():
                self.centers_CD.copy_(other.all_ND[rows])
            self.started = True
        self._predicted_N = self.predict(anchor.all_ND, progress)
        tau_N = self._predicted_N.detach()
        return tau_N[batch.rows], tau_N

    def learn(self, direction: Direction, alpha_N: Tensor, progress: Progress) -> Tensor | None:
        """mean_i stopgrad(d tau_i) tau_i, whose gradient trains the net."""
        predicted_N, self._predicted_N = self._predicted_N, None
        assert predicted_N is not None
        gradient_N = temperature_gradient(direction, alpha_N, self.rho_value)
        return (gradient_N * predicted_N).mean()
