"""One command in a process of its own, forked from one that has imported everything; and what it says it has finished.

Processes that it would start afresh are forked from a copy of it that was made before it began: the same code, without
the seconds that importing takes.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import torch
from fault_layer import Fault

from fullbatch.trials import storage

LIMIT = 300.0  # seconds after which a command hangs
PATIENCE = 3.0  # seconds that a search waits for a study that cannot be written, in place of a minute
_SUBREAPER = 36  # of prctl: whoever loses its parent becomes a child of this process


@dataclass(frozen=True)
class Struck:
    """What happens to a command beside the fault of its files."""

    after: float | None = None  # seconds until it is killed
    planner: int = 0  # the piece of a plan at which the planner that makes it is killed; 0: none
    worker: int = 0  # the batch at which the data worker that makes it is killed; 0: none


@dataclass(frozen=True)
class Ended:
    status: int  # as waitpid has it: negative for a signal
    said: str  # on the terminal
    seconds: float
    hung: bool


def run(arguments: list[str], fault: Fault, struck: Struck, folder: Path, beside: Path) -> Ended:
    """Run the command to its end, however that comes; files about it are written ``beside`` the folder it works in."""
    begun = time.monotonic()
    said = beside / "said.txt"
    said.write_text("")
    child = os.fork()
    if not child:
        try:
            _in_child(arguments, fault, struck, folder, beside, said)
        finally:
            os._exit(70)
    moment = begun + (LIMIT if struck.after is None else struck.after)
    status = _waited(child, moment)
    hung = status is None and struck.after is None
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = _waited(child, time.monotonic() + 10)
    if fault.kind == "power" or hung:
        _kill_below()
    orphans = time.monotonic() + 30  # they end by themselves: workers save first
    while _below() and time.monotonic() < orphans:
        _reap()
        time.sleep(0.01)
    _kill_below()
    return Ended(status or 0, said.read_text(errors="replace"), time.monotonic() - begun, hung)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _waited(child: int, until: float) -> int | None:
    """Its status; None: it is still at work."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.005)


def _below(process: int = 0) -> list[int]:
    """The children of a process and theirs."""
    found: list[int] = []
    pid = process or os.getpid()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_below() -> None:
    while there := _below():
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.002)


# -- in the child -----------------------------------------------------------------------------------------------------


def _in_child(arguments: list[str], fault: Fault, struck: Struck, folder: Path, beside: Path, said: Path) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
    torch.set_num_threads(1)
    _tell(beside / "events.jsonl")
    _strike(struck)
    replace_in(storage.patiently, __defaults__=(PATIENCE,))
    fault.arm(beside / "log", folder)
    _fork_in_place_of_spawning()
    sys.argv = ["fullbatch", *arguments]
    from fullbatch.cli import main

    status = 1
    try:
        status = main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    (beside / "modules.txt").write_text("\n".join(sys.modules))
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()  # as at the end of any Python
    os._exit(status)


def _fork_in_place_of_spawning() -> None:
    """By multiprocessing's own fork server, itself forked here and now."""
    fresh, afresh = multiprocessing.get_context, util.spawnv_passfds

    def forked(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        if "forkserver" not in arguments[-1]:
            return afresh(path, arguments, descriptors)
        child = os.fork()
        if not child:
            for other in map(int, os.listdir("/proc/self/fd")):
                if other > 2 and other not in descriptors:  # above all the one whose end tells it to end
                    with suppress(OSError):
                        os.close(other)
            exec(arguments[-1], {})
            os._exit(0)
        return child

    replace_in(util, spawnv_passfds=forked)
    forkserver.ensure_running()
    replace_in(multiprocessing, get_context=lambda method=None: fresh("forkserver" if method == "spawn" else method))


def replace_in(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def _tell(events: Path) -> None:
    """Have the library tell what it has finished, and where it goes on."""
    from fullbatch.find.index import PictureIndex
    from fullbatch.training import checkpoint
    from fullbatch.training.trainer import Trainer
    from fullbatch.trials import trial

    def note(**event: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    write, start, save = checkpoint.write, Trainer.run, Trainer.save

    def written(root: Path, step: int, *rest: Any, **more: Any) -> Path:
        final = write(root, step, *rest, **more)
        note(saved=step, of=root.parent.name)
        return final

    def started(trainer: Trainer) -> None:
        note(begins=trainer.state.position.step, of=trainer.folder.path.name)
        start(trainer)

    def saved(trainer: Trainer) -> None:
        begun = time.monotonic()
        save(trainer)
        note(blocked=1e3 * (time.monotonic() - begun))

    replace_in(checkpoint, write=written)
    replace_in(Trainer, run=started, save=saved)

    end, close = trial.Outcome.write, trial.Trial.close

    def ended(outcome: trial.Outcome, place: Path) -> None:
        end(outcome, place)
        note(finished=outcome.status, of=place.name)

    def closed(one: trial.Trial, score: Any) -> None:
        close(one, score)
        note(finished=score.status, of=one.folder.path.name)

    replace_in(trial.Outcome, write=ended)
    replace_in(trial.Trial, close=closed)

    append, add = PictureIndex._append, PictureIndex._add

    def appended(index: PictureIndex, *rest: Any) -> None:
        append(index, *rest)
        note(saved=len(index.pictures), of="index")

    def added(index: PictureIndex, *rest: Any) -> int:
        note(begins=len(index.pictures), of="index")
        return add(index, *rest)

    replace_in(PictureIndex, _append=appended, _add=added)


def _strike(struck: Struck) -> None:
    """Planners and data workers that die at their work."""
    from fullbatch.data.loader import TrainingBatches
    from fullbatch.selection import planning

    def dying(work: Callable[..., Any], at: int) -> Callable[..., Any]:
        calls, owner = multiprocessing.get_context("fork").Value("i", 0), os.getpid()

        def worked(*given: Any) -> Any:
            with calls.get_lock():
                calls.value += 1
                due = calls.value == at and os.getpid() != owner
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*given)

        worked.__qualname__, worked.__module__, worked.__name__ = work.__qualname__, work.__module__, work.__name__
        return worked

    if struck.planner:
        replace_in(planning, planned=dying(planning.planned, struck.planner))
    if struck.worker:
        replace_in(TrainingBatches, __getitem__=dying(TrainingBatches.__getitem__, struck.worker))
