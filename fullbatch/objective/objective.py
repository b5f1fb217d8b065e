"""One objective for every method: embeddings of a batch in, a loss with the method's own gradient and metrics out."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import logging
import math
import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_never

from fullbatch import distributed
from fullbatch.config import (
    Amortized,
    BatchMean,
    Constant,
    LearnedScale,
    Method,
    Mlp,
    MovingAverage,
    NoNormalizer,
    PerSample,
    Predicted,
    Prototypes,
    RobustGlobal,
    RobustPositives,
    Sigmoid,
    VarianceCovariance,
    rho_of_direction,
    temperature_bounds,
)
from fullbatch.kernels.log_mean_exp import Reduced, Table, log_mean_exp_of_batch
from fullbatch.objective import checks
from fullbatch.objective.amortized import AmortizedNormalizer
from fullbatch.objective.fitted_net import build_seeded
from fullbatch.objective.log_domain import raise_stale
from fullbatch.objective.moments import cycle_consistency, variance_covariance
from fullbatch.objective.moving_average import BatchMeanNormalizer, MovingAverageNormalizer
from fullbatch.objective.per_sample import TableOptions
from fullbatch.objective.positives import PositiveWeights
from fullbatch.objective.prototypes import MlpNormalizer, PrototypeNormalizer
from fullbatch.objective.sigmoid import sigmoid_loss
from fullbatch.objective.step import DIRECTIONS, Batch, Direction, Estimate, Progress, Rows, gather_batch
from fullbatch.objective.temperature import GlobalTemperature, PerSampleTemperature, PredictedTemperature

log = logging.getLogger("fullbatch")

# Reading a number off a GPU makes the host wait, so checks that need it run on every call on the CPU, and elsewhere
# on the first calls and then this often.
CHECK_EVERY = 256


@dataclass(frozen=True)
class Output:
    """loss      call ``.backward()`` on it; its gradient is the method's estimator, its value estimates the full loss
    metrics   detached numbers that are equal on all ranks; tensors stay on the device until you read them
    """

    loss: Tensor
    metrics: dict[str, Tensor | float]


@dataclass(frozen=True)
class Context:
    """What an objective is told about its surroundings."""

    width: int | None = None
    num_samples: int | None = None
    chunk: int | None = None
    seed: int = 0
    table_dtype: torch.dtype = torch.float32
    table_storage: str = "auto"
    dataset: str | None = None


class Objective(nn.Module):
    """pairwise x normalizer x temperature.  Learnable temperatures are its parameters, all else is in state_dict()."""

    def __init__(self, method: Method, context: Context) -> None:
        super().__init__()
        self.method, self.context = method, context
        self.step, self.samples_seen, self.epoch_set = 0, 0, -1
        _check_context(method, context)
        self.temperatures = nn.ModuleDict(_make_temperatures(method, context))
        self.normalizers = nn.ModuleDict(_make_normalizers(method, context))
        pairwise = method.pairwise
        self.bias = nn.Parameter(torch.tensor(pairwise.bias)) if isinstance(pairwise, Sigmoid) else None
        self.positives = PositiveWeights(pairwise) if isinstance(pairwise, RobustPositives) else None
        self._notices: dict[str, int] = {}
        if context.num_samples is not None and not isinstance(method.normalizer, BatchMean):
            self._warn_if_rho_unreachable(context.num_samples, "the data set")

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        if self.epoch_set >= 0:
            return self.epoch_set
        return self.samples_seen // self.context.num_samples if self.context.num_samples else 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, for the schedules, instead of counting samples against ``num_samples``."""
        self.epoch_set = int(epoch)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.step, self.samples_seen, self.epoch_set, _fingerprint(self.context.dataset)])

    def set_extra_state(self, state: Tensor) -> None:
        self.step, self.samples_seen, self.epoch_set, saved = (int(value) for value in state)
        own = _fingerprint(self.context.dataset)
        if self.method.needs_ids and saved and own and saved != own:
            raise ValueError(
                f"This state was saved for another data set than dataset={self.context.dataset!r}; its per-sample "
                "memory would be assigned to the wrong samples. Start with a new objective."
            )

    # -- one step ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        image_embeddings: Tensor,
        text_embeddings: Tensor,
        sample_ids: checks.SampleIds | None = None,
    ) -> Output:
        """``image_embeddings`` and ``text_embeddings`` are unit rows; row i of both is a pair.

        ``sample_ids`` (one tensor, or a pair for images and texts) are needed by methods with per-sample memory only.
        In eval mode no state changes.
        """
        progress = Progress(self.step, self.epoch, self.context.seed, self.training)
        checks.check_shapes(image_embeddings, text_embeddings, self.context.width)
        look = self._may_look(image_embeddings)
        if look:
            distributed.check_equal_rows(image_embeddings.shape[0], image_embeddings.device)
            checks.check_unit_rows("image_embeddings", image_embeddings)
            checks.check_unit_rows("text_embeddings", text_embeddings)
        ids_B2 = self._take_ids(sample_ids, image_embeddings, look)
        with torch.autocast(image_embeddings.device.type, enabled=False):
            wide = torch.float64 if image_embeddings.dtype == torch.float64 else torch.float32
            batch = gather_batch(image_embeddings.to(wide), text_embeddings.to(wide), ids_B2)
            match self.method.pairwise:
                case Sigmoid():
                    output = self._sigmoid(batch, progress)
                case VarianceCovariance() as config:
                    output = _simple_output(variance_covariance(batch, config), batch, progress)
                case _:
                    output = self._contrast(batch, progress)
            if self.method.penalty is not None:
                penalty = cycle_consistency(batch, self.method.penalty)
                output.metrics["penalty"] = penalty.detach()
                output = Output(output.loss + penalty, output.metrics)
        if look:
            self._watch(output.metrics, batch)
        if self.training:
            self.step += 1
            self.samples_seen += batch.size
        return output

    @torch.no_grad()
    def log_normalizers(
        self, image_embeddings: Tensor, text_embeddings: Tensor, sample_ids: checks.SampleIds | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the method now believes log(epsilon + g_i(data set)) is, for these images and these texts as anchors.

        Nothing changes.  A method without memory (BatchMean) can only answer from the rows it is given.
        """
        if isinstance(self.method.normalizer, NoNormalizer):
            raise ValueError("This method (SigLIP, VICReg) has no normalizer to ask for.")
        progress = Progress(self.step, self.epoch, self.context.seed, training=False)
        checks.check_shapes(image_embeddings, text_embeddings, self.context.width)
        wide = torch.float64 if image_embeddings.dtype == torch.float64 else torch.float32
        ids_B2 = self._take_ids(sample_ids, image_embeddings, look=True)
        batch = gather_batch(image_embeddings.to(wide), text_embeddings.to(wide), ids_B2)
        image, text = (
            self.normalizers[direction.name](direction, progress).alpha_B
            for direction in self._directions(batch, progress)
        )
        return image, text

    def _may_look(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" or self.step < 8 or self.step % CHECK_EVERY == 0

    def _take_ids(self, sample_ids: checks.SampleIds | None, rows_BD: Tensor, look: bool) -> Tensor | None:
        ids_B2 = checks.check_ids(sample_ids, self.method.needs_ids, rows_BD.shape[0], self.context.num_samples)
        if ids_B2 is None:
            return None
        assert self.context.num_samples is not None
        if look or ids_B2.device.type == "cpu":
            checks.check_id_range(ids_B2, self.context.num_samples)
        return ids_B2.to(rows_BD.device, non_blocking=True)

    def _sigmoid(self, batch: Batch, progress: Progress) -> Output:
        temperature = self._temperature("image")
        tau_B, tau_N = temperature.read(batch.image, batch.text, batch, progress)
        assert self.bias is not None
        bias = distributed.average_gradient(self.bias).to(tau_B.dtype)
        loss = sigmoid_loss(batch, tau_B, tau_N, bias, self.context.chunk)
        return _simple_output(loss, batch, progress, tau=tau_N[0], bias=bias.detach())

    def _contrast(self, batch: Batch, progress: Progress) -> Output:
        scale = self.method.scale
        share = 1.0 if scale.directions == "sum" else 0.5
        loss = batch.positive_B.new_zeros(())
        summary = Summary()
        for direction in self._directions(batch, progress):
            name = direction.name
            estimate = self.normalizers[name](direction, progress)
            part = direction_loss(direction, estimate, scale.times_temperature)
            value = part.loss + (math.log(direction.negatives) if scale.log_of_sum else 0.0)
            penalty = self._temperature(name).rho(progress) * direction.tau_B.mean()
            penalty = penalty * (1.0 if scale.rho_terms == "each" else 0.5)
            loss = loss + share * (value + penalty)
            summary.add(direction, estimate, part, penalty)
            learning = self._learn_temperature(direction, part, progress)
            if learning is not None:
                loss = loss + (learning - learning.detach())
        positive_term = self.positives(batch, progress) if self.positives is not None else None
        if positive_term is not None:
            loss = loss + positive_term
        metrics = summary.metrics(batch, positive_term)
        metrics["epoch"] = float(progress.epoch)
        normalizer = self.normalizers[DIRECTIONS[0]]
        if isinstance(normalizer, MovingAverageNormalizer):
            metrics["gamma"] = normalizer.gamma(progress)
        return Output(loss, metrics)

    def _temperature(self, name: str) -> GlobalTemperature | PerSampleTemperature | PredictedTemperature:
        found = self.temperatures[name if name in self.temperatures else "both"]
        assert isinstance(found, (GlobalTemperature, PerSampleTemperature, PredictedTemperature))
        return found

    def _directions(self, batch: Batch, progress: Progress) -> list[Direction]:
        """Both directions; their kernel runs once, since they share the similarity matrix."""
        raw = isinstance(self.method.pairwise, RobustPositives)
        reference_B = torch.zeros_like(batch.positive_B) if raw else batch.positive_B
        reference_N = torch.zeros_like(batch.positive_N) if raw else batch.positive_N

        def table(name: str, anchor: Rows, other: Rows) -> Table:
            tau_B, tau_N = self._temperature(name).read(anchor, other, batch, progress)
            return Table(anchor.local_BD, anchor.all_ND, reference_B, reference_N, tau_B, tau_N)

        tables = [table(*direction) for direction in batch.directions()]
        return [
            Direction(
                name=name,
                anchor=anchor,
                other=other,
                rows=batch.rows,
                positive_B=batch.positive_B,
                positive_N=batch.positive_N,
                reference_B=reference_B,
                reference_N=reference_N,
                tau_B=own.tau_B,
                tau_N=own.tau_N,
                log_g_B=found.log_mean_B,
                log_g_N=found.log_mean_N,
                mean_exponent_N=found.mean_exponent_N,
                negatives=(batch.size - 1) * (2 if self.method.negatives == "both" else 1),
            )
            for (name, anchor, other), own, found in zip(
                batch.directions(), tables, self._reduce(tables, batch), strict=True
            )
        ]

    def _reduce(self, tables: list[Table], batch: Batch) -> list[Reduced]:
        """log g_i of both directions; with negatives="both" each modality's own rows are negatives as well."""
        options: dict[str, Any] = {
            "pairwise": self.method.pairwise,
            "chunk": self.context.chunk,
            "with_mean": isinstance(self.method.temperature, (PerSample, Predicted)),
        }
        image, text = tables
        across = list(log_mean_exp_of_batch(image, text, batch.rows, **options))
        if self.method.negatives == "across":
            return across
        within = [
            log_mean_exp_of_batch(own, own, batch.rows, columns_are_anchors=False, **options)[0] for own in tables
        ]
        return [_pool(*both) for both in zip(across, within, strict=True)]

    def _learn_temperature(self, direction: Direction, part: DirectionLoss, progress: Progress) -> Tensor | None:
        temperature = self._temperature(direction.name)
        if isinstance(temperature, GlobalTemperature):
            return None
        return temperature.learn(direction, distributed.gather_rows(part.alpha_B), progress)

    # -- notices ----------------------------------------------------------------------------------------------------

    def _notice(self, kind: str, message: str) -> None:
        """Log the first time and then ever more rarely."""
        count = self._notices[kind] = self._notices.get(kind, 0) + 1
        if count & (count - 1) == 0:
            log.warning("%s (step %d, seen %d times)", message, self.step, count)

    def _watch(self, metrics: dict[str, Tensor | float], batch: Batch) -> None:
        guarded = float(metrics.get("guarded", 0.0))
        if guarded > 0:
            self._notice(
                "guard",
                f"the normalizer of {guarded:.1%} of the anchors was stale by more than a factor of exp(16) and was "
                "bounded; a smaller prototype_lr or more frequent restarts help",
            )
        temperature = self.method.temperature
        if isinstance(temperature, (LearnedScale, RobustGlobal)) and "tau" in metrics:
            tau = float(metrics["tau"])
            low, _ = temperature_bounds(temperature)
            if tau <= low * (1 + 1e-5) and tau < temperature.temperature:
                self._notice(
                    "clamp",
                    f"the temperature has fallen to its lower bound {low} and stays there; a smaller rho or a smaller "
                    "learning rate for it lets it move",
                )
        if self.step == 0 and isinstance(self.method.normalizer, BatchMean):
            self._warn_if_rho_unreachable(batch.size, "the batch")

    def _warn_if_rho_unreachable(self, count: int, where: str) -> None:
        """At u = g, half of eq. (13) is rho - KL(softmax over negatives, uniform), and KL <= log(negatives)."""
        temperature = self.method.temperature
        if isinstance(temperature, (Constant, LearnedScale)) or count < 3:
            return
        rho, bound = temperature.rho, math.log(count - 1)
        if isinstance(temperature, (PerSample, Predicted)):
            rho = max(rho_of_direction(temperature, name) for name in DIRECTIONS)
        if rho >= bound:
            warnings.warn(
                f"rho={rho} is at or above log(negatives) = {bound:.2f} of {where} ({count} samples): no softmax can "
                f"use that budget, so the temperature will fall to its lower bound. Use rho below {bound:.2f}.",
                stacklevel=4,
            )


@dataclass(frozen=True)
class DirectionLoss:
    loss: Tensor
    alpha_B: Tensor
    log_ratio_B: Tensor


def direction_loss(direction: Direction, estimate: Estimate, times_temperature: bool) -> DirectionLoss:
    """tau mean_i((epsilon + g_i) / exp(alpha_i) - 1 + alpha_i): NeuCLIP eq. (6) at the method's alpha.

    Where alpha carries no gradient this is the surrogate with eq. (4)'s gradient, and its tau factors make the
    temperature's gradient eq. (13); where alpha does, it is eq. (12) itself.
    """
    tau_B = direction.tau_B if times_temperature else torch.ones_like(direction.tau_B)
    alpha_B = raise_stale(estimate.alpha_B, estimate.log_total_B)
    log_ratio_B = estimate.log_total_B - alpha_B
    ratio_tau_B = tau_B if estimate.tau_on_ratio else tau_B.detach()
    alpha_tau_B = tau_B if estimate.tau_on_alpha else tau_B.detach()
    loss = torch.mean(ratio_tau_B * (torch.exp(log_ratio_B) - 1.0) + alpha_tau_B * alpha_B)
    return DirectionLoss(loss, alpha_B.detach(), log_ratio_B.detach())


class Summary:
    """Means over this rank's anchors, direction by direction, then over ranks in one go."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}
        self.taus: list[Tensor] = []

    def add(self, direction: Direction, estimate: Estimate, part: DirectionLoss, penalty: Tensor) -> None:
        tau_B, name = direction.tau_B.detach(), direction.name
        full = torch.mean(tau_B * (torch.exp(part.log_ratio_B) - 1.0 + part.alpha_B)) + penalty.detach()
        guarded = (estimate.alpha_B.detach() < part.alpha_B).to(full.dtype).mean()
        self.means["global_loss"] = self.means.get("global_loss", 0.0) + full
        self.means["guarded"] = self.means.get("guarded", 0.0) + 0.5 * guarded
        self.means[f"log_normalizer_{name}"] = part.alpha_B.mean()
        self.means[f"log_batch_mean_{name}"] = estimate.log_total_B.detach().mean()
        self.means[f"log_ratio_{name}"] = part.log_ratio_B.mean()
        self.taus.append(direction.tau_N)

    def metrics(self, batch: Batch, positive_term: Tensor | None) -> dict[str, Tensor | float]:
        self.means["positive_similarity"] = batch.positive_B.detach().mean()
        if positive_term is not None:
            self.means["global_loss"] = self.means["global_loss"] + positive_term.detach()
        values = distributed.mean_over_ranks(torch.stack(list(self.means.values())))
        metrics: dict[str, Tensor | float] = dict(zip(self.means, values.unbind(), strict=True))
        tau = torch.stack(self.taus)
        metrics.update(tau=tau.mean(), tau_min=tau.min(), tau_max=tau.max())
        return metrics


def _simple_output(loss: Tensor, batch: Batch, progress: Progress, **more: Tensor) -> Output:
    """For losses without a normalizer."""
    means = distributed.mean_over_ranks(torch.stack([loss, batch.positive_B.mean()]).detach())
    return Output(
        loss, {"global_loss": means[0], "positive_similarity": means[1], "epoch": float(progress.epoch), **more}
    )


def _pool(first: Reduced, second: Reduced) -> Reduced:
    """Two sets of negatives of equal size as one."""
    log_B = torch.logaddexp(first.log_mean_B, second.log_mean_B) - math.log(2.0)
    log_N = torch.logaddexp(first.log_mean_N, second.log_mean_N) - math.log(2.0)
    if first.mean_exponent_N is None or second.mean_exponent_N is None:
        return Reduced(log_B, log_N, None)
    share_N = torch.sigmoid(first.log_mean_N - second.log_mean_N)
    return Reduced(log_B, log_N, torch.lerp(second.mean_exponent_N, first.mean_exponent_N, share_N))


# ---------------------------------------------------------------------------------------------------------------------
# building the parts


def _fingerprint(dataset: str | None) -> int:
    return 0 if dataset is None else zlib.crc32(dataset.encode()) + 1


def _check_context(method: Method, context: Context) -> None:
    n = context.num_samples
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 2):
        raise ValueError(f"num_samples must be the number of training pairs, a whole number of at least 2, got {n!r}.")
    if n is None and (method.needs_ids or method.needs_epochs):
        why = "keeps a value for every sample" if method.needs_ids else "follows a schedule in epochs"
        raise ValueError(f"This method {why}: give num_samples, the number of training pairs.")
    if method.needs_width and (not isinstance(context.width, int) or context.width < 1):
        raise ValueError(
            f"This method learns from embeddings of a known size: give width, e.g. width=512, got {context.width!r}."
        )
    chunk = context.chunk
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk must be a number of rows of at least 1, or None for all at once, got {chunk!r}.")


def _make_temperatures(method: Method, context: Context) -> dict[str, nn.Module]:
    match method.temperature:
        case Constant() | LearnedScale() | RobustGlobal() as config:
            return {"both": GlobalTemperature(config)}
        case PerSample() as config:
            return {name: PerSampleTemperature(config, _table(context), name) for name in DIRECTIONS}
        case Predicted() as config:
            assert context.width is not None
            width, seed = context.width, context.seed
            return {name: build_seeded(partial(PredictedTemperature, config, width, name), seed) for name in DIRECTIONS}
        case _ as unknown:
            assert_never(unknown)


def _make_normalizers(method: Method, context: Context) -> dict[str, nn.Module]:
    if isinstance(method.normalizer, NoNormalizer):
        return {}
    return {name: _make_normalizer(method, context, name) for name in DIRECTIONS}


def _make_normalizer(method: Method, context: Context, name: str) -> nn.Module:
    width = context.width or 0
    match method.normalizer:
        case BatchMean() as config:
            return BatchMeanNormalizer(config)
        case MovingAverage() as config:
            return MovingAverageNormalizer(config, _table(context), name)
        case Prototypes() as config:
            return PrototypeNormalizer(config, method.pairwise, width, context.chunk, name)
        case Mlp() as config:
            return MlpNormalizer(config, method.pairwise, width, name)
        case Amortized() as config:
            return AmortizedNormalizer(config, width, name)
        case NoNormalizer():
            raise AssertionError("nothing to make")
        case _ as unknown:
            assert_never(unknown)


def _table(context: Context) -> TableOptions:
    assert context.num_samples is not None
    return TableOptions(context.num_samples, context.table_dtype, context.table_storage)
