"""NeuCLIP's normalizer-prediction network (NPN): prototypes, or the MLP it is compared with.

It keeps nothing per sample and needs no sample ids.  All ranks hold all gathered embeddings, so each computes the
identical update itself and nothing is communicated for it.
"""

# B: anchors on this rank   N: anchors on all ranks   M: prototypes   D: width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fullbatch.config.axes import Mlp, Pairwise, Prototypes, Rolling, SquaredHinge
from fullbatch.distributed import average_gradient
from fullbatch.objective.chunked import gradient_to_others, tf32_products
from fullbatch.objective.fitted_net import FittedNet, LambdaNet
from fullbatch.objective.kernel import fused_kernels, log_mean_exp
from fullbatch.objective.log_domain import bounded_exp, log_add, log_or_minus_inf
from fullbatch.objective.step import Direction, Estimate, Progress


def is_restart(config: Prototypes | Mlp, steps: int) -> bool:
    """Line 3 of Algorithm 1; with ``restart_every`` None or 0 only the first step."""
    return steps == 0 or bool(config.restart_every and steps % config.restart_every == 0)


def fit_gradient(
    config: Prototypes | Rolling | Mlp, alpha_N: Tensor, log_total_N: Tensor, tau_N: Tensor, guard: float
) -> Tensor:
    """d/d alpha_i of anchor i's term in what the NPN minimises the mean of: eq. (12), or half the squared log error."""
    if config.fit == "separate":
        return alpha_N - log_total_N
    return tau_N * (1.0 - bounded_exp(log_total_N - alpha_N, guard))


# ---------------------------------------------------------------------------------------------------------------------
# what prototypes say, and how they learn; rolling ones do the same


def adagrad_update(
    pool: Pool,
    used_MD: Tensor,
    accumulator_MD: Tensor,
    anchor_ND: Tensor,
    reference_N: Tensor,
    tau_N: Tensor,
    log_total_N: Tensor,
    guard: float,
    first_pair: int | None,
) -> None:
    """One update of the prototypes: d/dW of eq. (12), through alpha, the log-sum-exp pool and W's normalisation."""
    config = pool.config
    wide_MD = used_MD.to(log_total_N.dtype)
    norm_M1 = wide_MD.norm(dim=1, keepdim=True).clamp_min(1e-12)
    unit_MD = wide_MD / norm_M1

    def to_value(log_mean_R: Tensor, here: slice) -> Tensor:
        alpha_R = log_add(log_mean_R, config.epsilon)
        to_alpha_R = fit_gradient(config, alpha_R, log_total_N[here], tau_N[here], guard)
        share_R = torch.sigmoid(log_mean_R - log_or_minus_inf(config.epsilon))
        return to_alpha_R * share_R / log_total_N.shape[0]

    options: dict[str, Any] = {"pairwise": pool.pairwise, "chunk": pool.products["chunk"], "first_pair": first_pair}
    to_unit_MD = gradient_to_others(anchor_ND, unit_MD, reference_N, tau_N, to_value, **options)
    radial_M1 = (to_unit_MD * unit_MD).sum(dim=1, keepdim=True)
    gradient_MD = torch.addcmul(to_unit_MD, radial_M1, unit_MD, value=-1.0).div_(norm_M1).to(used_MD.dtype)
    accumulator_MD.addcmul_(gradient_MD, gradient_MD)
    rate = config.lr_for(used_MD.shape[1])
    used_MD.addcdiv_(gradient_MD, accumulator_MD.sqrt().add_(1e-10), value=-rate)  # epsilon as in torch


@dataclass(frozen=True)
class Pool:
    """alpha_i = log(epsilon + mean_k exp(loss(cos(e_i, W_k) - s_ii) / tau)) and its fit.  NeuCLIP eq. (10), (11).

    ``first_pair`` is the place of the first anchor's own positive among the prototypes, where the batch's own rows lie
    there in order and are to be left out.
    """

    config: Prototypes | Rolling
    pairwise: Pairwise
    products: Mapping[str, Any]  # the kernel's chunk and operands

    def alpha(self, direction: Direction, used_MD: Tensor, first_pair: int | None = None) -> Tensor:
        log_mean_B = log_mean_exp(
            normalize(direction.anchor.local_BD, dim=1),  # a cosine, so its gradient is tangential
            normalize(used_MD.to(direction.log_g_B.dtype), dim=1),
            direction.reference_B,
            direction.tau_B,
            pairwise=self.pairwise,
            first_pair=first_pair,
            **self.products,
        )
        return log_add(log_mean_B, self.config.epsilon)

    def fit(self, direction: Direction, used_MD: Tensor, accumulator_MD: Tensor, first_pair: int | None = None) -> None:
        """T_u AdaGrad updates on this batch with the encoders fixed.

        On a GPU float32 products, where they are asked for, run in TF32 here: the updates are the costly part of a
        step, and no gradient passes through them.  What that changes is less than what bf16 towers do (docs/speed.md).
        """
        config = self.config
        if config.updates == 0:
            return
        log_total_N = log_add(direction.log_g_N, config.epsilon)
        anchor_ND = normalize(direction.anchor.all_ND, dim=1)
        tables = (used_MD, accumulator_MD, anchor_ND, direction.reference_N, direction.tau_N, log_total_N)
        fused = fused_kernels(anchor_ND, self.products["operands"]) if used_MD.dtype == torch.float32 else None
        if fused is not None:
            rate, log_epsilon = config.lr_for(used_MD.shape[1]), log_or_minus_inf(config.epsilon)
            fit = fused.Fit(config.updates, rate, log_epsilon, direction.guard, separate=config.fit == "separate")
            fused.fit_prototypes(fit, *tables, first_pair=first_pair, pairwise=self.pairwise, **self.products)
            return
        with tf32_products(anchor_ND):
            for _ in range(config.updates):
                adagrad_update(self, *tables, direction.guard, first_pair)

    def estimate(self, direction: Direction, alpha_B: Tensor) -> Estimate:
        log_total_B = log_add(direction.log_g_B, self.config.epsilon)
        if self.config.prototype_gradient == "detached":
            alpha_B = alpha_B.detach()
        return Estimate(alpha_B, log_total_B, tau_on_ratio=True, tau_on_alpha=True)


NONE_YET = (
    "This objective has no prototypes yet: they come from the first training batch. "
    "Call it in training mode once, or load a state_dict, before eval()."
)


class PrototypeNormalizer(nn.Module):
    """Prototypes that restart every T_r steps from the other modality's embeddings of this batch.

    A batch larger than M gives a random subset; a smaller one is topped up with the embeddings of the batches before
    it, and while fewer than M have been seen at all, every new batch is appended.  With ``restart_from="batch"`` a
    smaller batch stands alone until the next restart.
    """

    counters = ("seen", "steps")
    prototypes_MD: Tensor
    accumulator_MD: Tensor
    recent_MD: Tensor
    cursor: Tensor

    def __init__(self, config: Prototypes, pairwise: Pairwise, width: int, products: Mapping[str, Any]) -> None:
        super().__init__()
        self.config, self.pool = config, Pool(config, pairwise, products)
        self.lr = config.lr_for(width)  # which the optimizer is told where the prototypes are its parameters
        self.forget = float(config.reset_accumulator)
        shape = (config.prototypes, width)
        if config.schedule == "simultaneous":
            self.prototypes_MD = nn.Parameter(torch.zeros(shape))
        else:
            self.register_buffer("prototypes_MD", torch.zeros(shape))
            self.register_buffer("accumulator_MD", torch.zeros(shape))
        self.register_buffer("recent_MD", torch.zeros(shape))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64), persistent=False)  # seen, on the device
        self.active = 0  # prototypes in use
        self.seen = 0  # rows ever written to recent_MD, a ring
        self.steps = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.active, self.seen, self.steps])

    def set_extra_state(self, state: Tensor) -> None:
        self.active, self.seen, self.steps = (int(value) for value in state)
        self.cursor.fill_(self.seen)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        """A restart, and a batch that is appended, happen once."""
        return None if is_restart(self.config, self.steps) or self._grows else (self.active,)

    @property
    def _grows(self) -> bool:
        return self.config.restart_from == "recent" and self.active < self.config.prototypes

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        if progress.training:
            with torch.no_grad():
                self._refresh(direction.other.all_ND, progress)
                if self.config.schedule == "alternating":
                    self.pool.fit(direction, self.prototypes_MD[: self.active], self.accumulator_MD[: self.active])
            self.steps += 1
        elif self.active == 0:
            raise ValueError(NONE_YET)
        used_MD = self.prototypes_MD[: self.active]
        if self.config.schedule == "simultaneous":
            used_MD = average_gradient(self.prototypes_MD)[: self.active]
        return self.pool.estimate(direction, self.pool.alpha(direction, used_MD))

    def _refresh(self, other_ND: Tensor, progress: Progress) -> None:
        self._remember(other_ND)
        simultaneous = self.config.schedule == "simultaneous"  # Algorithm 3 has no restarts
        if self.steps == 0 or (is_restart(self.config, self.steps) and not simultaneous):
            self._restart(other_ND, progress)
        elif self._grows:
            self._append(other_ND)

    def _remember(self, other_ND: Tensor) -> None:
        newest = other_ND[-self.config.prototypes :]
        place = (self.cursor + torch.arange(newest.shape[0], device=other_ND.device)) % self.config.prototypes
        self.recent_MD[place] = newest.to(self.recent_MD.dtype)
        self.seen += newest.shape[0]
        self.cursor.add_(newest.shape[0])

    def _restart(self, other_ND: Tensor, progress: Progress) -> None:
        total = self.config.prototypes
        if other_ND.shape[0] > total:
            generator = progress.generator(3)  # the same pairs in both directions, on any device
            chosen = torch.randperm(other_ND.shape[0], generator=generator)[:total]
            fresh_MD = other_ND[chosen.to(other_ND.device, non_blocking=True)]
        elif self.config.restart_from == "batch":
            fresh_MD = other_ND
        else:
            fresh_MD = self.recent_MD[: min(self.seen, total)]
        self.active = fresh_MD.shape[0]
        self.prototypes_MD.data[: self.active] = fresh_MD.to(self.prototypes_MD.dtype)
        if self.config.schedule == "alternating":
            self.accumulator_MD.mul_(1.0 - self.forget)

    def _append(self, other_ND: Tensor) -> None:
        count = min(other_ND.shape[0], self.config.prototypes - self.active)
        self.prototypes_MD.data[self.active : self.active + count] = other_ND[:count].to(self.prototypes_MD.dtype)
        self.active += count


# ---------------------------------------------------------------------------------------------------------------------
# the MLP


class MlpNormalizer(nn.Module):
    """alpha_i = MLP(stopgrad e_i) - s_ii / tau with AmorLIP's net; with a hinge, which has no such linear part,
    alpha_i = MLP(e_i)."""

    counters = ("steps",)

    def __init__(self, config: Mlp, pairwise: Pairwise, width: int, name: str, operands: str) -> None:
        super().__init__()
        self.config, self.tag = config, 0 if name == "image" else 1
        self.linear_part = not isinstance(pairwise, SquaredHinge)
        self.net = FittedNet(partial(LambdaNet, width), "adagrad", config.prototype_lr, operands)
        self.steps = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = int(state)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        return None if is_restart(self.config, self.steps) else ()

    def _shift(self, reference: Tensor, tau: Tensor) -> Tensor:
        return -reference / tau if self.linear_part else torch.zeros_like(tau)

    def forward(self, direction: Direction, progress: Progress) -> Estimate:
        if progress.training:
            if is_restart(self.config, self.steps):
                self.net.restart(seed=progress.seed + 2 * self.steps + self.tag)
            self._fit(direction)
            self.steps += 1
        alpha_B = self.net(direction.anchor.local_BD.detach()) + self._shift(direction.reference_B, direction.tau_B)
        if self.config.prototype_gradient == "detached":
            alpha_B = alpha_B.detach()
        log_total_B = log_add(direction.log_g_B, self.config.epsilon)
        return Estimate(alpha_B, log_total_B, tau_on_ratio=True, tau_on_alpha=True)

    def _fit(self, direction: Direction) -> None:
        log_total_N = log_add(direction.log_g_N, self.config.epsilon)
        shift_N = self._shift(direction.reference_N, direction.tau_N)

        def loss_of(value_N: Tensor) -> Tensor:
            alpha_N = value_N + shift_N
            gradient_N = fit_gradient(self.config, alpha_N.detach(), log_total_N, direction.tau_N, direction.guard)
            return (gradient_N * alpha_N).mean()

        self.net.fit(direction.anchor.all_ND, loss_of, self.config.updates)
