"""AmorLIP: a net per direction predicts log lambda_i, the log of the sum over the others."""

# B: anchors on this rank   N: anchors on all ranks   D: width

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from fullbatch.config.axes import Amortized
from fullbatch.objective.fitted_net import FittedNet
from fullbatch.objective.log_domain import log_or_minus_inf
from fullbatch.objective.step import Direction, Estimate, Progress


class LambdaNet(nn.Module):
    """linear-ReLU-LayerNorm, twice, then the input added, ReLU and a linear layer to one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width),
            nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width),
        )  # fmt: skip
        self.head = nn.Linear(width, 1)

    def forward(self, x_ND: Tensor) -> Tensor:
        value_N1: Tensor = self.head(torch.relu(self.blocks(x_ND) + x_ND))
        return value_N1


def blend_share(config: Amortized, epoch: float) -> float:
    """beta_z: 0 in epoch 0, rising to ``blend`` by a cosine."""
    share = min(epoch / config.blend_epochs, 1.0)
    return config.blend * 0.5 * (1.0 - math.cos(math.pi * share))


class AmortizedNormalizer(nn.Module):
    """alpha_i = log lambda_i - s_ii / tau - log(number of negatives), lambda without gradient.

    So exp(log_total - alpha) is AmorLIP's sum over lambda, and alpha's gradient its -s_ii / tau.  In eval mode lambda
    is the net's answer, which does not look at the batch.
    """

    counters = ("steps",)

    def __init__(self, config: Amortized, width: int, name: str) -> None:
        super().__init__()
        self.config, self.tag = config, 0 if name == "image" else 1
        self.net, self.average, self.previous = (
            FittedNet(partial(LambdaNet, width), "adam", config.net_lr, config.net_clip) for _ in range(3)
        )
        self.epoch, self.steps = -1, 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.epoch, self.steps])

    def set_extra_state(self, state: Tensor) -> None:
        self.epoch, self.steps = (int(value) for value in state)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        """An epoch's first step starts a net; the averaged net follows every few steps."""
        return None if progress.epoch != self.epoch else (self.steps % self.config.ema_every,)

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        if progress.training and progress.epoch != self.epoch:
            self._start_epoch(progress)
        log_count = math.log(direction.negatives)
        log_weight = math.log(self.config.positive_weight) - log_count
        log_positive_B = (direction.positive_B - direction.reference_B) / direction.tau_B
        log_positive_N = (direction.positive_N - direction.reference_N) / direction.tau_N
        log_total_B = torch.logaddexp(direction.log_g_B, log_positive_B + log_weight)
        log_total_N = torch.logaddexp(direction.log_g_N, log_positive_N + log_weight)
        log_sum_N = log_total_N + log_count + direction.reference_N / direction.tau_N
        log_target_N = self._blend(direction.anchor.all_ND, log_sum_N, progress)
        if progress.training:
            self._fit(direction.anchor.all_ND, log_target_N)
        if self.config.divide_by == "target" and progress.training:
            log_lambda_B = log_target_N[direction.rows]
        else:
            log_lambda_B = self.net(direction.anchor.local_BD.detach())
        alpha_B = log_lambda_B.detach() - direction.reference_B / direction.tau_B - log_count
        return Estimate(alpha_B, log_total_B, tau_on_ratio=False, tau_on_alpha=False)

    def _start_epoch(self, progress: Progress) -> None:
        """Last epoch's averaged net is kept for the targets; net, average and optimizer start anew."""
        self.previous.follow(self.average, keep=0.0)
        seed = progress.seed + 2 * progress.epoch + self.tag
        self.net.restart(seed)
        self.average.restart(seed)
        self.epoch = progress.epoch

    def _blend(self, anchor_ND: Tensor, log_sum_N: Tensor, progress: Progress) -> Tensor:
        """log(beta_z previous + (1 - beta_z) sum); in epoch 0 there is no previous net."""
        share = blend_share(self.config, progress.epoch)
        if share == 0.0:
            return log_sum_N
        with torch.no_grad():
            previous_N = self.previous(anchor_ND)
        return torch.logaddexp(previous_N + math.log(share), log_sum_N + log_or_minus_inf(1.0 - share))

    def _fit(self, anchor_ND: Tensor, log_target_N: Tensor) -> None:
        """Adam on the mean squared error of the logs, then the averaged net follows."""

        def loss_of(log_lambda_N: Tensor) -> Tensor:
            return (log_lambda_N - log_target_N).square().mean()

        self.net.fit(anchor_ND, loss_of, self.config.updates)
        self.steps += 1
        if self.steps % self.config.ema_every == 0:
            self.average.follow(self.net, keep=self.config.ema)
