"""Two (or more) real gloo processes that run functions side by side; started once a test session."""

from __future__ import annotations

import io
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.waiting import HANG


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            answer = io.BytesIO()
            torch.save(function(rank, *args), answer)  # as bytes: tables in shared memory do not pass through pipes
            pipe.send((True, answer.getvalue()))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """``run(function, *args)`` calls ``function(rank, *args)`` on every rank and returns what each returned."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        rendezvous = str(Path(tempfile.mkdtemp(prefix="fullbatch-test-")) / "rendezvous")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, rendezvous, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(HANG):
                raise TimeoutError(f"rank {rank} did not answer {function.__name__} within {HANG:g} s")
            answers.append(pipe.recv())
        for ok, answer in answers:
            if not ok:
                raise AssertionError(f"a rank failed:\n{answer}")
        return [torch.load(io.BytesIO(answer), weights_only=False) for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
