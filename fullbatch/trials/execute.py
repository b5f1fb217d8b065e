"""One run of a comparison in this process, from wherever it stands to its end.  A failure is a result too."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from fullbatch.config.run import RunConfig
from fullbatch.run import train
from fullbatch.training.interruption import Interrupted
from fullbatch.training.run_folder import LOCK, Folder, alone_in, replace_text

Status = Literal["done", "failed", "open"]
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended; outcome.json in its folder.

    error        of a failed one
    again        whether another try may end otherwise: a full disk, a killed process
    memory_gib   the most main memory its process held, data workers not counted
    """

    status: Status
    error: str = ""
    again: bool = False
    memory_gib: float | None = None

    def write(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / OUTCOME, json.dumps(asdict(self), indent=1))


def outcome_of(run: Path) -> Outcome:
    """What is known of a run from its folder; "open" if it has not ended."""
    try:
        return Outcome(**json.loads((run / OUTCOME).read_text()))
    except (OSError, ValueError, TypeError):
        return Outcome("open")


def execute(config: RunConfig) -> Outcome:
    """Train to the end, going on where the folder stands; Interrupted goes through to the caller."""
    folder = Folder.of(config)
    with alone_in(folder.path):
        known = outcome_of(folder.path)
        if known.status == "done":
            return known
        forget_earlier_runs()
        try:
            train(config, folder.begun)
            outcome = Outcome("done", memory_gib=_most_memory())
        except Interrupted:
            raise
        except torch.OutOfMemoryError as error:
            outcome = Outcome("failed", out_of_memory(error), memory_gib=_most_memory())
        except OSError as error:
            outcome = Outcome("failed", str(error), again=True)
        except ValueError as error:
            outcome = Outcome("failed", str(error), memory_gib=_most_memory())
        outcome.write(folder.path)
        return outcome


def out_of_memory(error: Exception) -> str:
    advice = "; the same gradient in less memory: --micro-batch, and fewer runs side by side: --jobs"
    return str(error).split(".")[0] + advice


def throw_away(run: Path) -> None:
    """Clear a run's folder, once no other process is at work in it."""
    with alone_in(run):
        clear(run)


def clear(run: Path, but: Collection[str] = ()) -> None:
    """All but the lock, which is the caller's, and the files of these names."""
    for path in run.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK and path.name not in but:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# several runs in one process: each starts clean, and is charged its own memory


def forget_earlier_runs() -> None:
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else a later model would meet the limit on recompilations
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux: the high-water mark falls to what is held now
        Path("/proc/self/clear_refs").write_text("5")


def _most_memory() -> float:
    """GiB.  Without Linux's resettable mark it is the most of all runs of this process so far."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
