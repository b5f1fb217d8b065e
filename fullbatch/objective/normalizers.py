"""Normalizers: the batch's own mean, a moving average per sample, those that keep the newest embeddings (rolling
prototypes, which learn on, and XBM's queue, which is part of the loss), and AmorLIP's, which a net predicts.  NeuCLIP's
prototypes are in prototypes.py."""

# B: anchors on this rank   N: anchors on all ranks   M: rows kept   D: width

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.config.axes import Amortized, BatchAndQueue, BatchMean, MovingAverage, Pairwise, Rolling, Scent
from fullbatch.objective.fitted_net import FittedNet, LambdaNet
from fullbatch.objective.kernel import log_mean_exp
from fullbatch.objective.log_domain import cosine_gamma, log_add, log_moving_average, log_or_minus_inf, log_scent
from fullbatch.objective.per_sample import PerSampleTable, TableOptions, log_mean_within
from fullbatch.objective.prototypes import NONE_YET, Pool
from fullbatch.objective.step import Direction, Estimate, Progress


class BatchMeanNormalizer(nn.Module):
    """alpha_i = log(epsilon + g_i(batch)); with epsilon = 1/(number of negatives) this is CLIP's InfoNCE."""

    def __init__(self, config: BatchMean) -> None:
        super().__init__()
        self.config = config

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        epsilon = 1.0 / direction.negatives if self.config.epsilon is None else self.config.epsilon
        log_total_B = log_add(direction.log_g_B, epsilon)
        return Estimate(log_total_B.detach(), log_total_B, tau_on_ratio=False, tau_on_alpha=True, fresh=True)


class MovingAverageNormalizer(nn.Module):
    """alpha_i = log u_i, the new u of NeuCLIP eq. (3), so that the gradient is eq. (4) and tau's eq. (13).  In eval
    mode u is what is remembered; a row never seen has only its batch to go by.  SCENT's gamma is a sample's own.

    ``unit_mean``: alpha_i = log u_i + log mean_j((epsilon + g_j) / u_j), so that the weights of a step have mean 1.

    ``shared``: u_i <- (1 - gamma) u_i + gamma (g1_i + g2_i) / 2 is kept, the same in the tables of both directions, and
    each divides by (1 - gamma) u_i + gamma g_i of its own.  Where images and texts have ids of their own, a pair's g
    counts for both ids.
    """

    def __init__(self, config: MovingAverage | Scent, table: TableOptions, name: str) -> None:
        super().__init__()
        self.config = config
        self.log_u = PerSampleTable(table, f"{name}.log_u")

    def gamma(self, progress: Progress) -> float | None:
        """The weight of a new value; None: every sample has its own."""
        if isinstance(self.config, Scent):
            return None
        return cosine_gamma(self.config.gamma, self.config.gamma_epochs, progress.epoch)

    def moved(self, log_u_N: Tensor, log_new_N: Tensor, progress: Progress) -> Tensor:
        if isinstance(self.config, Scent):
            return log_scent(log_u_N, log_new_N, self.config.log_step)
        gamma = cosine_gamma(self.config.gamma, self.config.gamma_epochs, progress.epoch)
        return log_moving_average(log_u_N, log_new_N, gamma)

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        ids = direction.anchor.ids
        log_new_N = log_mean_within(log_add(direction.log_g_N, self.config.epsilon), ids)
        log_old_N = self.log_u.get(ids.all_N, log_new_N.dtype)
        if progress.training:
            log_u_N = log_kept_N = self.moved(log_old_N, log_new_N, progress)
            if isinstance(self.config, MovingAverage) and self.config.shared:
                log_other_N = log_mean_within(log_add(direction.other_log_g_N, self.config.epsilon), ids)
                log_mean_N = torch.logaddexp(log_new_N, log_other_N) - math.log(2.0)
                log_kept_N = self.moved(log_old_N, log_mean_N, progress)
            self.log_u.put(ids, log_kept_N, progress)
            if isinstance(self.config, MovingAverage) and self.config.unit_mean:
                log_weight_N = log_add(direction.log_g_N, self.config.epsilon) - log_u_N
                log_u_N = log_u_N + log_weight_N.logsumexp(0) - math.log(len(log_weight_N))
        else:
            log_u_N = torch.where(torch.isnan(log_old_N), log_new_N, log_old_N)
        log_total_B = log_add(direction.log_g_B, self.config.epsilon)
        return Estimate(log_u_N[direction.rows], log_total_B, tau_on_ratio=False, tau_on_alpha=True)


def put_on_top(rows_MD: Tensor, newest_ND: Tensor) -> None:
    """The others move down, and the last fall off."""
    left = rows_MD.shape[0] - newest_ND.shape[0]
    rows_MD.copy_(torch.cat([newest_ND.to(rows_MD.dtype), rows_MD[:left]]) if left > 0 else newest_ND[: len(rows_MD)])


class NewestRows(nn.Module):
    """Keeps the newest embeddings, newest first, so that the batch's own are at the top in their order.  They need no
    sample ids and, as all ranks hold all gathered embeddings, no communication."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.active = places, 0  # rows there are, rows in use

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.active)

    def set_extra_state(self, state: Tensor) -> None:
        self.active = int(state)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        return (self.active,) if self.active == self.places else None


class RollingNormalizer(NewestRows):
    """NeuCLIP's prototypes, renewed in every step: the batch's embeddings take the places of the oldest.  Until all
    places are taken it is a queue."""

    prototypes_MD: Tensor
    accumulator_MD: Tensor

    def __init__(self, config: Rolling, pairwise: Pairwise, width: int, products: Mapping[str, Any]) -> None:
        super().__init__(config.prototypes)
        self.config, self.pool = config, Pool(config, pairwise, products)
        for name in ("prototypes_MD", "accumulator_MD"):
            self.register_buffer(name, torch.zeros(config.prototypes, width))

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        leaves_out = progress.training and self.config.own_positive == "left_out"
        if progress.training:
            with torch.no_grad():
                self._roll(direction.other.all_ND)
                if self._learns(direction.other.all_ND.shape[0]):
                    self.pool.fit(direction, self.prototypes_MD, self.accumulator_MD, 0 if leaves_out else None)
        elif self.active == 0:
            raise ValueError(NONE_YET)
        first_pair = direction.rows.start if leaves_out else None
        return self.pool.estimate(direction, self.pool.alpha(direction, self.prototypes_MD[: self.active], first_pair))

    def _learns(self, count: int) -> bool:
        """Not before all places are taken, since a new place has no accumulator yet, whose first AdaGrad step would be
        large; nor where the batch alone fills them, and is its own exact mean."""
        total = self.config.prototypes
        return self.active == total and (self.config.own_positive == "kept" or total > count)

    def _roll(self, other_ND: Tensor) -> None:
        count, total = other_ND.shape[0], self.config.prototypes
        if count > total:
            raise ValueError(
                f"A batch of {count} pairs does not fit into {total} rolling prototypes; set prototypes to at least "
                f"{count}."
            )
        put_on_top(self.prototypes_MD, other_ND)
        if self.config.updates:
            put_on_top(self.accumulator_MD, (1.0 - float(self.config.reset_accumulator)) * self.accumulator_MD[-count:])
        self.active = min(self.active + count, total)


class BatchAndQueueNormalizer(NewestRows):
    """log(epsilon + mean over the batch's negatives and the queue), as BatchMean has it of the batch alone.  The queue
    holds the batches before this one, so an anchor's own positive is not in it; it carries no gradient, the anchor
    does.  In eval mode the queue stays as it is."""

    queue_MD: Tensor

    def __init__(self, config: BatchAndQueue, pairwise: Pairwise, width: int, products: Mapping[str, Any]) -> None:
        super().__init__(config.queue)
        self.config, self.pairwise, self.products = config, pairwise, products
        self.register_buffer("queue_MD", torch.zeros(config.queue, width))

    def rows_in_use(self, step: int) -> int:
        return self.active if step >= self.config.starts_after else 0

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        key = super().replay_key(progress)
        return None if key is None else (*key, self.rows_in_use(progress.step))

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        used, log_mean_B = self.rows_in_use(progress.step), direction.log_g_B
        negatives = direction.negatives + used
        if used:
            log_queue_B = self.log_mean_of_queue(direction.anchor.local_BD, direction.reference_B, direction.tau_B)
            log_mean_B = self.with_queue(log_mean_B, log_queue_B, direction.negatives)
        epsilon = 1.0 / negatives if self.config.epsilon is None else self.config.epsilon
        log_total_B = log_add(log_mean_B, epsilon)
        if progress.training:
            with torch.no_grad():
                put_on_top(self.queue_MD, direction.other.all_ND)
            self.active = min(self.active + direction.other.all_ND.shape[0], self.config.queue)
        return Estimate(log_total_B.detach(), log_total_B, False, True, negatives, fresh=True)

    def log_mean_of_queue(self, anchor_BD: Tensor, reference_B: Tensor, tau_B: Tensor) -> Tensor:
        queue_MD = self.queue_MD[: self.active].to(tau_B.dtype, copy=True)  # the backward pass wants it as it is now
        return log_mean_exp(anchor_BD, queue_MD, reference_B, tau_B, pairwise=self.pairwise, **self.products)

    def with_queue(self, log_mean_B: Tensor, log_queue_B: Tensor, negatives: int) -> Tensor:
        """The log of one mean over ``negatives`` of the batch and all of the queue, from the logs of both means."""
        total = negatives + self.active
        return torch.logaddexp(log_mean_B + math.log(negatives / total), log_queue_B + math.log(self.active / total))


def blend_share(config: Amortized, epoch: float) -> float:
    """beta_z: 0 in epoch 0, rising to ``blend`` by a cosine."""
    share = min(epoch / config.blend_epochs, 1.0)
    return config.blend * 0.5 * (1.0 - math.cos(math.pi * share))


class AmortizedNormalizer(nn.Module):
    """alpha_i = log lambda_i - s_ii / tau - log(number of negatives), lambda without gradient.  So exp(log_total -
    alpha) is AmorLIP's sum over lambda, and alpha's gradient its -s_ii / tau.  In eval mode lambda is the net's answer,
    which does not look at the batch."""

    counters = ("steps",)

    def __init__(self, config: Amortized, width: int, name: str, operands: str) -> None:
        super().__init__()
        self.config, self.tag = config, 0 if name == "image" else 1
        self.net, self.average, self.previous = (
            FittedNet(partial(LambdaNet, width), "adam", config.net_lr, operands, config.net_clip) for _ in range(3)
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
