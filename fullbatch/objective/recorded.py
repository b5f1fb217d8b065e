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
    from fullbatch.objective.objective import Objective, Output

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

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.known: dict[Hashable, Recorded[T]] = {}
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # they share their memory: one is replayed at a time, and what each leaves to be read stays its own
        self.pool = torch.cuda.graph_pool_handle()
        self.counters = [(module, name) for module in objective.modules() for name in getattr(module, "counters", ())]

    def replay(self, key: tuple[Hashable, ...], step: Callable[[], T], before: Callable[[], None] = lambda: None) -> T:
        """Replay the recording of this key, made now if there is none; counters are moved on.  ``before``: what is to
        be done between the two."""
        recorded = self.known.get(key)
        if recorded is None:
            if not any(known[0] == key[0] for known in self.known):  # type: ignore[index]
                self.known.clear()  # another epoch: the old recordings will not be asked for again
                self.pool = torch.cuda.graph_pool_handle()  # the last of them took the old one along
            recorded = self.known[key] = self._record(step)
        else:
            for module, name, move in recorded.moves:
                setattr(module, name, getattr(module, name) + move)
        before()
        with torch.cuda.device(self.device):
            recorded.graph.replay()
        return recorded.result

    def _record(self, step: Callable[[], T]) -> Recorded[T]:
        before = [getattr(module, name) for module, name in self.counters]
        try:
            graph, result = self._captured(step)
        except BaseException as error:
            for (module, name), old in zip(self.counters, before, strict=True):
                setattr(module, name, old)
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                cause = error.__context__ or error  # ending a recording that broke off raises another error on top
                raise CannotRecord(str(cause).partition("\n")[0]) from error
            raise
        moves = [
            (module, name, getattr(module, name) - old)
            for (module, name), old in zip(self.counters, before, strict=True)
        ]
        return Recorded(graph, result, tuple(move for move in moves if move[2]))

    def _captured(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),  # comes back also where recording breaks off
            torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
        ):
            result = step()
        return graph, result


# ---------------------------------------------------------------------------------------------------------------------
# the objective alone


LARGEST_BATCH = 16_384  # beyond it the GPU has more to do than the host
MOST_SHAPES = 4  # a loop whose batches are never alike records these, and runs the others plainly


@dataclass(frozen=True)
class _Step:
    """What a replayed step leaves."""

    loss: Tensor
    gradients: Sequence[Tensor | None]  # of the loss, to the embeddings in full precision and to the parameters
    names: tuple[str, ...]  # of the metrics that are tensors
    numbers: Tensor  # those
    others: Metrics


class _Hand(torch.autograd.Function):
    """The loss of a replayed step, and on the way back its gradients, which are known already."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *leaves: Tensor) -> Tensor:
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        ctx.save_for_backward(*(None if gradient is None else gradient.clone() for gradient in step.gradients))
        return step.loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(None if gradient is None else (gradient * grad).to(dtype) for gradient, dtype in found)


class Replayer:
    """Stands for an objective's training steps on one GPU."""

    def __init__(self) -> None:
        self.rehearsed = 0
        self.rehearsed_shapes = set[Hashable]()  # a kernel for another one may have to be compiled, or loaded, first
        self.off = False
        self.recordings: Recordings[_Step] | None = None
        self.inputs: dict[Hashable, list[Tensor]] = {}
        self.memory: tuple[int, ...] = ()  # where what the recordings read and write lies

    def __reduce__(self) -> tuple[type[Replayer], tuple[()]]:
        """A copy begins anew."""
        return Replayer, ()

    def __call__(
        self,
        objective: Objective,
        image: Tensor,
        text: Tensor,
        ids: SampleIds | None,
        log_correction: Tensor | None = None,
    ) -> tuple[Tensor, Metrics] | None:
        """Loss and metrics, or None where the step must be run plainly."""
        more = [] if log_correction is None else [log_correction]
        given = [image, text, *more, *(ids if isinstance(ids, (tuple, list)) else [] if ids is None else [ids])]
        key = objective.replay_key() if self._takes(objective, given, ids) else None
        if key is None:
            return None
        parameters = [p for p in objective.parameters() if p.requires_grad]
        shape = tuple((t.shape, t.dtype, t.requires_grad) for t in given), len(parameters), bool(more)
        if self.rehearsed < REHEARSALS or shape not in self.rehearsed_shapes:
            self.rehearsed += 1
            self.rehearsed_shapes.add(shape)
            return None
        memory = tuple(t.data_ptr() for t in (*objective.parameters(), *objective.buffers()))
        if self.recordings is None or memory != self.memory:
            self.recordings, self.memory = Recordings(objective, image.device), memory
        if len({*self.inputs, shape}) > MOST_SHAPES:
            return None
        inputs = self.inputs.get(shape) or [t.detach().clone() for t in given]
        for kept, new in zip(inputs, given, strict=True):
            kept.copy_(new.detach())
        learns = [t.requires_grad for t in given]
        epoch = float(objective.epoch)
        try:
            found = self.recordings.replay((*key, shape), partial(_whole_step, objective, inputs, learns, bool(more)))
        except (CannotRecord, torch.OutOfMemoryError) as reason:
            log.warning("the loss's steps are not recorded: %s", str(reason).partition("\n")[0])
            self.off, self.recordings = True, None
            return None
        self.inputs[shape] = inputs
        loss: Tensor = _Hand.apply(found, *(t for t in given if t.requires_grad), *parameters)
        numbers: Metrics = dict(zip(found.names, found.numbers.clone().unbind(), strict=True))
        objective.replayed(numbers)
        return loss, {**found.others, **numbers, "epoch": epoch}

    def _takes(self, objective: Objective, given: Sequence[Any], ids: SampleIds | None) -> bool:
        if self.off or not torch.is_grad_enabled() or distributed.world().size > 1:
            return False
        if not all(isinstance(t, Tensor) for t in given) or (objective.method.needs_ids and ids is None):
            return False  # about which the plain step has a word to say
        image = given[0]
        together = is_on_gpu(image) and all(t.device == image.device for t in given)
        small = together and image.ndim == 2 and image.shape[0] <= LARGEST_BATCH
        learns = any(t.requires_grad for t in (*given, *objective.parameters()))
        return small and learns and not torch.cuda.is_current_stream_capturing()


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _Plain(torch.nn.Module):
    """An objective that computes kernel by kernel, as ``functional_call`` wants it."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *given: Any) -> Output:
        return self.objective.plain_step(*given)


def _whole_step(objective: Objective, inputs: Sequence[Tensor], learns: Sequence[bool], corrected: bool) -> _Step:
    """Forward and backward pass; embeddings in full precision, so that 16 bits are a matter of who hands them over.
    Parameters by a name of this step's own: a loss that is still held ties theirs to the stream it was computed on."""
    plain = _Plain(objective)
    parameters = {name: p.detach().requires_grad_() for name, p in plain.named_parameters() if p.requires_grad}
    rows = [t.to(torch.promote_types(t.dtype, torch.float32)).detach() for t in inputs[:2]]
    leaves = [row.requires_grad_() for row, learn in zip(rows, learns, strict=False) if learn]
    log_correction, ids = (inputs[2], inputs[3:]) if corrected else (None, inputs[2:])
    with torch.autocast(rows[0].device.type, enabled=False):
        given = *rows, tuple(ids) if len(ids) > 1 else ids[0] if ids else None, log_correction
        output: Output = torch.func.functional_call(plain, parameters, given)
        gradients = torch.autograd.grad(output.loss, [*leaves, *parameters.values()], allow_unused=True)
    numbers = {name: value for name, value in output.metrics.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in output.metrics.items() if name not in numbers}
    stacked = torch.stack([value.to(output.loss.dtype) for value in numbers.values()])
    return _Step(output.loss.detach(), gradients, tuple(numbers), stacked, others)
