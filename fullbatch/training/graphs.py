"""A whole training step as a CUDA graph, for batches so small that a GPU waits for the host to launch kernels.  A step
is recorded once and replayed as long as nothing but tensors decides what it does: the objective says so with a key
(``Objective.replay_key``); None: the step must be run plainly (NeuCLIP's restarts, the checks every few steps).
Counters that Python keeps move on at each replay as they moved in the recorded step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullbatch.data.loader import LoadedBatch, known_size
from fullbatch.objective.objective import Objective, Output
from fullbatch.training.layerwise import Lars

REHEARSALS = 3  # plain steps before one is recorded: libraries set themselves up in them


class CannotRecord(ValueError):
    """The model does something in a step that a CUDA graph cannot hold, such as waiting for a number."""


@dataclass(frozen=True)
class Computed:
    """What a step leaves to be read: the objective's output, and the norm of the gradient where it was measured."""

    output: Output
    norm: Tensor | None


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    computed: Computed
    moves: tuple[tuple[Any, str, int], ...]  # counter by counter, how far a step moves it


class StepGraphs:
    """Stands for ``compute``, which takes a batch through gradient and update."""

    def __init__(
        self,
        compute: Callable[[LoadedBatch], Computed],
        seed: Callable[[int], None],
        objective: Objective,
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self.compute, self.seed, self.objective = compute, seed, objective
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.rehearsed = 0
        self.inputs: LoadedBatch | None = None
        self.recorded: dict[Hashable, _Recorded] = {}
        # recordings share their memory: one is replayed at a time, and what each leaves to be read stays its own
        self.pool = torch.cuda.graph_pool_handle()
        self.counters = [(module, name) for module in objective.modules() for name in getattr(module, "counters", ())]
        for optimizer in optimizers:
            make_capturable(optimizer, device)

    def __call__(self, batch: LoadedBatch, step: int) -> Computed:
        """On a stream of its own, as recording demands; what comes before and after waits its turn."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            computed = self._step(batch, step)
        here.wait_stream(self.stream)
        return computed

    def _step(self, batch: LoadedBatch, step: int) -> Computed:
        key = self.objective.replay_key()
        if key is None or self.rehearsed < REHEARSALS:
            self.rehearsed += 1
            return self.compute(batch)
        self._take(batch)
        key = (*key, *known_size(batch.tokens, batch.lengths))
        recorded = self.recorded.get(key)
        if recorded is None:
            if not any(known[0] == key[0] for known in self.recorded):  # type: ignore[index]
                self.recorded.clear()  # another epoch: the old recordings will not be asked for again
                self.pool = torch.cuda.graph_pool_handle()  # the last of them took the old one along
            recorded = self.recorded[key] = self._record()
        else:
            for module, name, move in recorded.moves:
                setattr(module, name, getattr(module, name) + move)
        self.seed(step)
        recorded.graph.replay()
        self.objective.replayed(recorded.computed.output.metrics)
        return recorded.computed

    def _take(self, batch: LoadedBatch) -> None:
        """Into the memory that recordings read from."""
        if self.inputs is None:
            self.inputs = replace(
                batch, ids=batch.ids.clone(), images=batch.images.clone(), tokens=batch.tokens.clone()
            )
        else:
            for name in ("ids", "images", "tokens"):
                getattr(self.inputs, name).copy_(getattr(batch, name), non_blocking=True)
        self.inputs = replace(self.inputs, lengths=batch.lengths)

    def _record(self) -> _Recorded:
        assert self.inputs is not None
        before = [getattr(module, name) for module, name in self.counters]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                computed = self.compute(self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # ending a recording that broke off raises another error on top
            reason = str(cause).splitlines()[0]
            raise CannotRecord(f"A step of this model cannot be recorded ({reason}); leave --graphs out.") from error
        moves = [
            (module, name, getattr(module, name) - old)
            for (module, name), old in zip(self.counters, before, strict=True)
        ]
        return _Recorded(graph, computed, tuple(move for move in moves if move[2]))


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates and step counts on the device, where a replayed step finds them."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, Lars)):
        raise ValueError(f"--graphs works with the optimizers adam, adamw and lars, not {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    if isinstance(optimizer, Lars):  # which counts no steps
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    for state in optimizer.state.values():
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(device)
    optimizer._warned_capturable_if_run_uncaptured = True  # plain steps are meant
