"""One objective for every method: embeddings of a batch in, a loss with the method's own gradient and metrics out."""

# B: rows on this rank   N: rows on all ranks   D: width

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.config import axes
from fullbatch.config.checks import is_whole
from fullbatch.config.methods import AXES, Method, method_with
from fullbatch.models.two_towers import being_recorded
from fullbatch.objective import advice
from fullbatch.objective.kernel import Reduced, log_mean_exp_of_batch
from fullbatch.objective.loss import Metrics, Summary, direction_loss, raw_positive
from fullbatch.objective.normalizers import MovingAverageNormalizer
from fullbatch.objective.other_losses import PositiveWeights, cycle_consistency, sigmoid_loss, variance_covariance
from fullbatch.objective.pairs import Table
from fullbatch.objective.parts import Context, check_context, fingerprint, make_normalizers, make_temperatures
from fullbatch.objective.recorded import Replayer
from fullbatch.objective.step import DIRECTIONS, Batch, Direction, Progress, gather_batch
from fullbatch.objective.temperature import AnchorTemperature, GlobalTemperature

# Reading a number off a GPU makes the host wait, so checks that need it run on every call on the CPU, and elsewhere
# on the first calls and then this often.
CHECK_EVERY = 256


@dataclass(frozen=True)
class Output:
    """What an objective makes of a batch."""

    # call ``.backward()`` on it; its gradient is the method's estimator, its value estimates the full loss
    loss: Tensor
    metrics: Metrics  # detached numbers that are equal on all ranks; tensors stay on the device until you read them


class Objective(nn.Module):
    """pairwise x normalizer x temperature.  Learnable temperatures are its parameters, all else is in state_dict()."""

    counters = ("step", "samples_seen")  # what Python counts, and a replayed step moves on
    clock: Tensor  # the step once more, on the device

    def __init__(self, method: Method, context: Context) -> None:
        super().__init__()
        check_context(method, context)
        if isinstance(method.temperature, axes.RobustGlobal):  # which may leave its budget open
            method = replace(method, temperature=method.temperature.for_samples(context.num_samples))
        self.method, self.context = method, context
        self.step, self.samples_seen, self.epoch_set = 0, 0, -1
        self.register_buffer("clock", torch.zeros((), dtype=torch.int32), persistent=False)
        self.temperatures = nn.ModuleDict(make_temperatures(method, context))
        self.normalizers = nn.ModuleDict(make_normalizers(method, context))
        pairwise = method.pairwise
        self.bias = nn.Parameter(torch.tensor(float(pairwise.bias))) if isinstance(pairwise, axes.Sigmoid) else None
        self.positives = PositiveWeights(pairwise) if isinstance(pairwise, axes.RobustPositives) else None
        self._notices = advice.Notices(method)
        self._replayer: Replayer | None = None
        if context.num_samples is not None and not isinstance(method.normalizer, (axes.BatchMean, axes.Amortized)):
            self._notices.warn_if_rho_unreachable(context.num_samples, "the data set")

    def _apply(self, fn: Any, recurse: bool = True) -> Objective:
        """What ``.half()`` or ``.to(torch.bfloat16)`` does to a model, but for state that would not survive it."""

        def move(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < min(4, tensor.dtype.itemsize)
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call, no-any-return]

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        if self.epoch_set >= 0:
            return self.epoch_set
        return self.samples_seen // self.context.num_samples if self.context.num_samples else 0

    def progress(self, training: bool) -> Progress:
        return Progress(self.step, self.epoch, self.context.seed, training, self.clock)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, for the schedules, instead of counting samples against ``num_samples``."""
        if not is_whole(epoch, 0):
            raise ValueError(f"set_epoch takes a whole number of at least 0, got {epoch!r}.")
        self.epoch_set = int(epoch)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.step, self.samples_seen, self.epoch_set, fingerprint(self.context.dataset)])

    def set_extra_state(self, state: Tensor) -> None:
        step, samples_seen, epoch_set, saved = (int(value) for value in state)
        own = fingerprint(self.context.dataset)
        if self.method.needs_ids and saved and own and saved != own:
            raise ValueError(
                f"This state was saved for another data set than dataset={self.context.dataset!r}; its per-sample "
                "memory would be assigned to the wrong samples. Start with a new objective."
            )
        self.step, self.samples_seen, self.epoch_set = step, samples_seen, epoch_set
        self.clock.fill_(step)

    # -- recorded steps ---------------------------------------------------------------------------------------------

    def replay_key(self) -> tuple[Hashable, ...] | None:
        """What besides tensors decides what the next training step does; the epoch first, if it matters.  Two steps
        with equal keys run the same kernels on the same memory, so the one may be recorded and replayed for the other.
        None: the next step must be run plainly."""
        progress = self.progress(training=True)
        if self._looks_now():
            return None
        others = [module for module in self.modules() if module is not self]
        parts = [module.replay_key(progress) for module in others if hasattr(module, "replay_key")]  # type: ignore[operator]
        return None if None in parts else (self.epoch if self.method.needs_epochs else 0, *parts)

    def record(self) -> None:
        """Let training steps on one GPU be recorded as CUDA graphs, forward and backward pass, and replayed: small
        batches then wait for no launches.  Numbers and state are the same.  What it cannot record it runs as ever."""
        self._replayer = Replayer()

    def replayed(self, metrics: Metrics) -> None:
        """Call it after a replay with the metrics of the recorded step."""
        self._notices.remember(metrics)

    # -- one step ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        image_embeddings: Tensor,
        text_embeddings: Tensor,
        sample_ids: advice.SampleIds | None = None,
        log_correction: Tensor | None = None,
    ) -> Output:
        """``image_embeddings`` and ``text_embeddings`` are unit rows; row i of both is a pair.  ``sample_ids`` (one
        tensor, or a pair for images and texts) are needed by methods with per-sample memory only.  In eval mode no
        state changes.

        ``log_correction``, (B, 2), is for batches that were selected: log g_i of a uniform batch less log g_i of this
        one, as far as it is known, for images and for texts as anchors.  Normalizers that remember take it into
        account; to the others a batch is all there is, and it changes nothing.  The pairs' own weights stay those of
        the batch, so that hard pairs keep their emphasis, unless the objective was made with ``correct_weights``."""
        ids = sample_ids if self.method.needs_ids else None
        correction = log_correction if self.method.remembers else None
        if isinstance(correction, Tensor):
            correction = correction.detach()  # a known number, whatever it was computed from
        given = image_embeddings, text_embeddings, ids, correction
        replayed = None
        if self._replayer is not None and self.training:
            replayed = self._replayer(self, *given)
        return self.plain_step(*given) if replayed is None else Output(*replayed)

    def plain_step(
        self,
        image_embeddings: Tensor,
        text_embeddings: Tensor,
        sample_ids: advice.SampleIds | None = None,
        log_correction: Tensor | None = None,
    ) -> Output:
        """``forward``, kernel by kernel."""
        progress = self.progress(self.training)
        on_cpu = not isinstance(image_embeddings, Tensor) or image_embeddings.device.type == "cpu"
        look = on_cpu or self._looks_now()
        batch = self._take_batch(image_embeddings, text_embeddings, sample_ids, look, log_correction)
        with torch.autocast(batch.positive_B.device.type, enabled=False):
            match self.method.pairwise:
                case axes.Sigmoid():
                    output = self._sigmoid(batch, progress)
                case axes.VarianceCovariance() as config:
                    output = _simple_output(variance_covariance(batch, config), batch, progress)
                case _:
                    output = self._contrast(batch, progress)
            if self.method.penalty is not None:
                penalty = cycle_consistency(batch, self.method.penalty)
                output.metrics["penalty"] = penalty.detach()
                output = Output(output.loss + penalty, output.metrics)
        if look:
            self._notices.watch(output.metrics, self.step, batch.size)
        elif not being_recorded(output.loss):
            self._notices.remember(output.metrics)
        if self.training:
            self.step += 1
            self.clock += 1
            self.samples_seen += batch.size
        return output

    @torch.no_grad()
    def log_normalizers(
        self, image_embeddings: Tensor, text_embeddings: Tensor, sample_ids: advice.SampleIds | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the method now believes log(epsilon + g_i(data set)) is, for these images and these texts as anchors.
        Nothing changes.  A method without memory (BatchMean) can only answer from the rows it is given."""
        if isinstance(self.method.normalizer, axes.NoNormalizer):
            raise ValueError("This method (SigLIP, VICReg) has no normalizer to ask for.")
        progress = self.progress(training=False)
        batch = self._take_batch(image_embeddings, text_embeddings, sample_ids, look=True)
        with torch.autocast(batch.positive_B.device.type, enabled=False):
            image, text = (
                self.normalizers[direction.name](direction, progress).alpha_B
                for direction in self._directions(batch, progress)
            )
        return image, text

    @torch.no_grad()
    def anchor_temperatures(
        self, image_embeddings: Tensor, text_embeddings: Tensor, sample_ids: advice.SampleIds | None = None
    ) -> tuple[Tensor, Tensor]:
        """The temperatures of these images and of these texts as anchors, as they now are.  Nothing changes."""
        progress = self.progress(training=False)
        batch = self._take_batch(image_embeddings, text_embeddings, sample_ids, look=True)
        image, text = (
            self._temperature(name).read(anchor, other, batch, progress)[0]
            for name, anchor, other in batch.directions()
        )
        return image, text

    def _take_batch(
        self,
        image: Tensor,
        text: Tensor,
        sample_ids: advice.SampleIds | None,
        look: bool,
        log_correction: Tensor | None = None,
    ) -> Batch:
        """Check what was handed over and bring all ranks' together, in float32 at least."""
        advice.check_shapes(image, text, self.context.width)
        if look:
            distributed.check_equal_rows(image.shape[0], image.device)
            advice.check_unit_rows("image_embeddings", image)
            advice.check_unit_rows("text_embeddings", text)
        ids_BK = None
        if self.method.needs_ids:
            ids_BK = advice.check_ids(sample_ids, image, self.context.num_samples or 0, look)
        wide = torch.float64 if image.dtype == torch.float64 else torch.float32
        if log_correction is not None:
            log_correction = advice.check_correction(log_correction, image, look).to(wide)
        return gather_batch(image.to(wide), text.to(wide), ids_BK, log_correction)

    def _looks_now(self) -> bool:
        return self.step < 8 or self.step % CHECK_EVERY == 0

    def _sigmoid(self, batch: Batch, progress: Progress) -> Output:
        temperature = self._temperature("image")
        tau_B, tau_N = temperature.read(batch.image, batch.text, batch, progress)
        assert self.bias is not None
        bias = distributed.average_gradient(self.bias).to(tau_B.dtype)
        loss = sigmoid_loss(batch, tau_B, tau_N, bias, **self.context.products)
        return _simple_output(loss, batch, progress, tau=tau_N[0], bias=bias.detach())

    def _contrast(self, batch: Batch, progress: Progress) -> Output:
        scale = self.method.scale
        share = 1.0 if scale.directions == "sum" else 0.5
        values, learned, summary = [], [], Summary()
        for direction in self._directions(batch, progress):
            temperature = self._temperature(direction.name)
            estimate = self.normalizers[direction.name](direction, progress)
            part = direction_loss(direction, estimate, scale.times_temperature)
            value = part.loss + (math.log(estimate.negatives or direction.negatives) if scale.log_of_sum else 0.0)
            if isinstance(self.method.pairwise, axes.RawSimilarity):
                value = value + raw_positive(direction, scale.times_temperature)
            summary.add(direction, estimate, part)
            if rho := temperature.rho(progress):
                penalty = rho * (1.0 if scale.rho_terms == "each" else 0.5) * direction.factor_B.mean()
                value = value + penalty
                summary.add_term(f"rho_{direction.name}", penalty)
            values.append(value)
            if not isinstance(temperature, GlobalTemperature):
                learned.append(temperature.learn(direction, distributed.gather_rows(part.alpha_B), progress))
        loss = share * (values[0] + values[1])
        for learning in learned:
            loss = loss if learning is None else loss + (learning - learning.detach())
        positive_term = self.positives(batch, progress) if self.positives is not None else None
        if positive_term is not None:
            loss = loss + positive_term
        elif isinstance(self.method.pairwise, axes.RawSimilarity):
            positive_term = -2.0 * batch.positive_B.mean()  # in the loss already, on the loss's own scale
        if positive_term is not None:
            summary.add_term("positives", positive_term)
        metrics = summary.metrics(batch)
        metrics["epoch"] = float(progress.epoch)
        normalizer = self.normalizers[DIRECTIONS[0]]
        if isinstance(normalizer, MovingAverageNormalizer) and (gamma := normalizer.gamma(progress)) is not None:
            metrics["gamma"] = gamma
        return Output(loss, metrics)

    def _temperature(self, name: str) -> AnchorTemperature:
        temperature = self.temperatures[name if name in self.temperatures else "both"]
        assert isinstance(temperature, AnchorTemperature)
        return temperature

    def _directions(self, batch: Batch, progress: Progress) -> list[Direction]:
        """Both directions; their kernel runs once, since they share the similarity matrix."""
        raw = isinstance(self.method.pairwise, axes.RAW)
        reference_B = torch.zeros_like(batch.positive_B) if raw else batch.positive_B
        reference_N = torch.zeros_like(batch.positive_N) if raw else batch.positive_N

        tables = [
            Table(anchor.local_BD, anchor.all_ND, reference_B, reference_N, *taus)
            for (_, anchor, _), taus in zip(batch.directions(), self._read_temperatures(batch, progress), strict=True)
        ]
        reduced = self._reduce(tables, batch)
        if batch.log_correction_N2 is not None:
            reduced = [
                reduction.corrected(log_c_N, batch.rows, table.tau_B, self.context.correct_weights)
                for reduction, log_c_N, table in zip(reduced, batch.log_correction_N2.unbind(1), tables, strict=True)
            ]
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
                factor_B=self._temperature(name).factor(own.tau_B),
                tau_N=own.tau_N,
                log_g_B=reduction.log_mean_B,
                log_g_N=reduction.log_mean_N,
                other_log_g_N=opposite.log_mean_N,
                mean_exponent_N=reduction.mean_exponent_N,
                negatives=(batch.size - 1) * (2 if self.method.negatives == "both" else 1),
                guard=self.context.guard,
            )
            for (name, anchor, other), own, reduction, opposite in zip(
                batch.directions(), tables, reduced, reversed(reduced), strict=True
            )
        ]

    def _read_temperatures(self, batch: Batch, progress: Progress) -> list[tuple[Tensor, Tensor]]:
        """Of the anchors of each direction, here and on all ranks; one for all is read once."""
        (first, image, text), (second, _, _) = batch.directions()
        taus = self._temperature(first).read(image, text, batch, progress)
        if isinstance(self._temperature(second), GlobalTemperature):
            return [taus, taus]
        return [taus, self._temperature(second).read(text, image, batch, progress)]

    def _reduce(self, tables: list[Table], batch: Batch) -> list[Reduced]:
        """log g_i of both directions; with negatives="both" each modality's own rows are negatives as well."""
        options: dict[str, Any] = {
            "pairwise": self.method.pairwise,
            **self.context.products,
            "with_mean": isinstance(self.method.temperature, (axes.PerSample, axes.Predicted))
            or batch.log_correction_N2 is not None,
        }
        image, text = tables
        across = list(log_mean_exp_of_batch(image, text, batch.rows, **options))
        if self.method.negatives == "across":
            return across
        within = [
            log_mean_exp_of_batch(own, own, batch.rows, columns_are_anchors=False, **options)[0] for own in tables
        ]
        return [_pool(*both) for both in zip(across, within, strict=True)]


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


_CONTEXT = tuple(field.name for field in fields(Context))


def make_objective(name: str, **settings: Any) -> Objective:
    """An objective by its method's name, changed by settings.

    A setting is a field of one of the method's parts (``rho=6.5``, ``gamma=0.3``, ``prototypes=4096``), a whole part
    (``pairwise=SquaredHinge(0.1)``), or one of the surroundings: width, num_samples, chunk (rows at a time), operands
    (of products on a GPU: "float16", "split" or "float32"), seed, table_dtype, table_storage ("auto", "rank", "node" or
    a folder), dataset (a fingerprint kept with the state) and correct_weights (see ``forward``).

    >>> objective = make_objective("sogclr", num_samples=1000, temperature=0.05)
    >>> objective.method.temperature
    Constant(temperature=0.05)
    """
    context = {key: settings.pop(key) for key in _CONTEXT if key in settings}
    # ``temperature=0.07`` is a setting, ``temperature=PerSample(...)`` a part
    given = [axis for axis in AXES if axis in settings]
    parts = {axis: settings.pop(axis) for axis in given if axis != "temperature" or is_dataclass(settings[axis])}
    return Objective(method_with(name, parts, settings, _CONTEXT), Context(**context))
