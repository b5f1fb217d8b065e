"""Steps as CUDA graphs: what the host would launch kernel by kernel is recorded once and replayed in one go.

A step may be recorded where nothing but tensors decides what it does: the objective says so with a key
(``Objective.replay_key``); None: it must be run plainly (NeuCLIP's restarts, the checks every few steps).  Counters
that Python keeps move on at each replay as they moved while recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fullbatch import distributed

if TYPE_CHECKING:
    from fullbatch.objective.advice import SampleIds
    from fullbatch.objective.loss import Metrics
    from fullbatch.objective.objective import Objective

log = logging.getLogger("fullbatch")
T = TypeVar("T")
REHEARSALS = 3  # plain steps before one is recorded: libraries set themselves up in them


class CannotRecord(ValueError):
    """Something is done in a step that a CUDA graph cannot hold, such as waiting for a number."""


@dataclass(frozen=True)
class Recorded(Generic[T]):
    graph: torch.cuda.CUDAGraph
    result: T  # what a replay leaves to be read, always in the same memory
    moves: tuple[tuple[Any, str, int], ...]  # counter by counter, how far a step moves it


class Recordings(Generic[T]):
    """By key, whose first part is the epoch, where it matters."""

    def __init__(self, objective: Objective) -> None:
        self.known: dict[Hashable, Recorded[T]] = {}
        # they share their memory: one is replayed at a time, and what each leaves to be read stays its own
        self.pool = torch.cuda.graph_pool_handle()
        self.counters = [(module, name) for module in objective.modules() for name in getattr(module, "counters", ())]

    def take(self, key: tuple[Hashable, ...], step: Callable[[], T], stream: torch.cuda.Stream | None) -> Recorded[T]:
        """The recording of this key, made now if there is none, and to be replayed; counters are moved on."""
        recorded = self.known.get(key)
        if recorded is not None:
            for module, name, move in recorded.moves:
                setattr(module, name, getattr(module, name) + move)
            return recorded
        if not any(known[0] == key[0] for known in self.known):  # type: ignore[index]
            self.known.clear()  # another epoch: the old recordings will not be asked for again
            self.pool = torch.cuda.graph_pool_handle()  # the last of them took the old one along
        recorded = self.known[key] = self._record(step, stream)
        return recorded

    def _record(self, step: Callable[[], T], stream: torch.cuda.Stream | None) -> Recorded[T]:
        before = [getattr(module, name) for module, name in self.counters]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
                result = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            for (module, name), old in zip(self.counters, before, strict=True):
                setattr(module, name, old)
            cause = error.__context__ or error  # ending a recording that broke off raises another error on top
            raise CannotRecord(str(cause).splitlines()[0]) from error
        moves = [
            (module, name, getattr(module, name) - old)
            for (module, name), old in zip(self.counters, before, strict=True)
        ]
        return Recorded(graph, result, tuple(move for move in moves if move[2]))


# ---------------------------------------------------------------------------------------------------------------------
# the objective alone


LARGEST_BATCH = 16_384  # beyond it the GPU has more to do than the host
MOST_SHAPES = 4  # a loop whose batches are never alike records these, and runs the others plainly


@dataclass(frozen=True)
class _Step:
    """What a replayed step leaves."""

    loss: Tensor
    gradients: Sequence[Tensor | None]  # of the loss, to the leaves
    names: tuple[str, ...]  # of the metrics that are tensors
    numbers: Tensor  # those
    others: Metrics


class _Hand(torch.autograd.Function):
    """The loss of a replayed step, and on the way back its gradients, which are known already."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *leaves: Tensor) -> Tensor:
        ctx.gradients = [None if gradient is None else gradient.clone() for gradient in step.gradients]
        return step.loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *(None if gradient is None else gradient * grad.to(gradient.dtype) for gradient in ctx.gradients)


class Replayer:
    """Stands for an objective's training steps on one GPU."""

    def __init__(self) -> None:
        self.rehearsed = 0
        self.recordings: Recordings[_Step] | None = None
        self.inputs: dict[Hashable, list[Tensor]] = {}
        self.off = False

    def __reduce__(self) -> tuple[type[Replayer], tuple[()]]:
        """A copy begins anew."""
        return Replayer, ()

    def __call__(
        self, objective: Objective, image: Tensor, text: Tensor, ids: SampleIds | None
    ) -> tuple[Tensor, Metrics] | None:
        """Loss and metrics, or None where the step must be run plainly."""
        given = [image, text, *(ids if isinstance(ids, (tuple, list)) else [] if ids is None else [ids])]
        key = objective.replay_key() if self._takes(objective, given) else None
        if key is None or self.rehearsed < REHEARSALS:
            self.rehearsed += key is not None
            return None
        shape = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in given)
        if shape not in self.inputs:
            if len(self.inputs) == MOST_SHAPES:
                return None
            self.inputs[shape] = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        inputs = self.inputs[shape]
        with torch.no_grad():
            for kept, new in zip(inputs, given, strict=True):
                kept.copy_(new)
        own = [p for p in objective.parameters() if p.requires_grad]
        if self.recordings is None:
            self.recordings = Recordings(objective)
        try:
            recorded = self.recordings.take((*key, shape), partial(_whole_step, objective, inputs, own), None)
        except CannotRecord as reason:
            log.warning("the loss is not recorded (%s)", reason)
            self.off = True
            return None
        recorded.graph.replay()
        found = recorded.result
        loss: Tensor = _Hand.apply(found, *(t for t in given if t.requires_grad), *own)
        numbers: Metrics = dict(zip(found.names, found.numbers.clone().unbind(), strict=True))
        objective.replayed(numbers)
        return loss, {**found.others, **numbers, "epoch": float(objective.epoch)}

    def _takes(self, objective: Objective, given: Sequence[Any]) -> bool:
        if self.off or not all(isinstance(t, Tensor) and t.is_cuda for t in given):
            return False
        if objective.method.needs_ids and len(given) == 2:  # about which the plain step has a word to say
            return False
        alone = distributed.world().size == 1 and torch.is_grad_enabled()
        return alone and given[0].shape[0] <= LARGEST_BATCH and not torch.cuda.is_current_stream_capturing()


def _whole_step(objective: Objective, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> _Step:
    image, text, *ids = inputs
    output = objective.plain_step(image, text, tuple(ids) if len(ids) == 2 else ids[0] if ids else None)  # type: ignore[arg-type]
    leaves = [*(t for t in inputs if t.requires_grad), *parameters]
    gradients = torch.autograd.grad(output.loss, leaves, allow_unused=True)
    numbers = {name: value for name, value in output.metrics.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in output.metrics.items() if name not in numbers}
    stacked = torch.stack([value.to(output.loss.dtype) for value in numbers.values()])
    return _Step(output.loss.detach(), gradients, tuple(numbers), stacked, others)
