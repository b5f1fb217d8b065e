"""A whole training step as a CUDA graph, for batches so small that a GPU waits for the host to launch kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fullbatch.data.loader import LoadedBatch, known_size
from fullbatch.objective.objective import Objective, Output
from fullbatch.objective.recorded import REHEARSALS, CannotRecord, Recordings
from fullbatch.training.layerwise import Lars


@dataclass(frozen=True)
class Computed:
    """What a step leaves to be read: the objective's output, and the norm of the gradient where it was measured."""

    output: Output
    norm: Tensor | None


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
        self.rehearsed = 0
        self.rehearsed_sizes = set[Hashable]()  # of captions: what is compiled for one is compiled in a plain step
        self.inputs: LoadedBatch | None = None
        self.recordings: Recordings[Computed] = Recordings(objective, device)
        self.stream = self.recordings.stream
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
        key, size = self.objective.replay_key(), known_size(batch.tokens, batch.lengths)
        if key is None or self.rehearsed < REHEARSALS or size not in self.rehearsed_sizes:
            self.rehearsed += 1
            self.rehearsed_sizes.add(size)
            return self.compute(batch)
        inputs = self._taken(batch)
        key = (*key, *size)
        try:
            computed = self.recordings.replay(key, partial(self.compute, inputs), partial(self.seed, step))
        except CannotRecord as reason:
            raise CannotRecord(f"A step of this model cannot be recorded ({reason}); leave --graphs out.") from reason
        self.objective.replayed(computed.output.metrics)
        return computed

    def _taken(self, batch: LoadedBatch) -> LoadedBatch:
        """In the memory that recordings read from."""
        if self.inputs is None:
            self.inputs = batch.moved(torch.clone)
        else:
            for name, tensor in batch.tensors.items():
                self.inputs.tensors[name].copy_(tensor, non_blocking=True)
        self.inputs = replace(self.inputs, lengths=batch.lengths)
        return self.inputs


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
