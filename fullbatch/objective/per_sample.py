"""A value per sample: the table that moving averages and per-sample temperatures are kept in; it gets and puts rows.
It lies on each rank's device ("rank": no waiting for the host), once a node in shared host memory ("node") or in a
memory-mapped file (a folder); "auto" is "rank" up to 256 MB a table, "node" beyond."""

# N: rows on all ranks

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from fullbatch import distributed
from fullbatch.objective.step import Ids, Progress

AUTO_LIMIT_BYTES = 256 * 2**20
_DTYPES = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TableOptions:
    num_samples: int
    dtype: torch.dtype = torch.float32
    storage: str | os.PathLike[str] = "auto"

    def __post_init__(self) -> None:
        place = self.storage
        names_folder = isinstance(place, os.PathLike) or (
            isinstance(place, str) and (os.path.isdir(place) or os.sep in place)
        )
        if place not in ("auto", "rank", "node") and not names_folder:
            raise ValueError(
                f"table_storage must be 'auto', 'rank', 'node' or a folder (./name for a new one), "
                f"got {self.storage!r}."
            )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"table_dtype must be torch.float32 or torch.float16 (torch.float64 for tests), got {self.dtype!r}."
            )

    @property
    def place(self) -> str:
        if self.storage != "auto":
            return os.path.expanduser(self.storage)
        return "rank" if self.num_samples * self.dtype.itemsize <= AUTO_LIMIT_BYTES else "node"


class PerSampleTable(nn.Module):
    """Rows start as NaN, "never seen"; reading them is the owner's affair."""

    values: Tensor

    def __init__(self, options: TableOptions, name: str) -> None:
        super().__init__()
        self.name, self.dtype = name, options.dtype
        self.world = distributed.world() if options.place != "rank" else None  # the ranks that share the table
        if self.world is None:
            values = torch.full((options.num_samples,), math.nan, dtype=options.dtype)
        else:
            values = map_shared(options.place, name, options.num_samples, options.dtype, owner=self)
        self.register_buffer("values", values)

    def replay_key(self, progress: Progress) -> tuple[int, ...] | None:
        """A table on the host is written by the host."""
        return None if self.world is not None else ()

    def get(self, ids_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows as they are; NaN where never put."""
        return self.values[ids_N.to(self.values.device)].to(ids_N.device, dtype)

    def get_or(self, ids_N: Tensor, start: float, dtype: torch.dtype) -> Tensor:
        return self.get(ids_N, dtype).nan_to_num(start, math.inf, -math.inf)

    def put(self, ids: Ids, new_N: Tensor, progress: Progress) -> None:
        """Rows with the same id must bring the same value (see ``mean_within``)."""
        if self.values.dtype == torch.float16:
            new_N = round_stochastically(new_N, ids.group_N, progress)
        places_N, new_N = ids.all_N.to(self.values.device), new_N.to(self.values.device, self.values.dtype)
        if self.world is None:
            self.values[places_N] = new_N
            return
        if self.world != distributed.world():
            raise ValueError(
                f"The table {self.name!r} was made for {self.world.size} rank(s) and there are "
                f"{distributed.world().size} now; make the objective after torch.distributed.init_process_group."
            )
        distributed.host_barrier()  # everyone has read
        if distributed.is_node_leader():
            self.values[places_N] = new_N
        distributed.host_barrier()  # everyone sees the new rows

    def _apply(self, fn: Any, recurse: bool = True) -> PerSampleTable:
        """A table in host memory stays there; elsewhere it moves, and keeps its precision unless it is widened."""
        if self.world is None:
            like = fn(torch.empty(0, dtype=self.values.dtype, device=self.values.device))
            wider = torch.float64 if like.dtype == torch.float64 else self.values.dtype
            self.values = self.values.to(like.device, wider)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PerSampleTable:
        """A copy is private to its rank."""
        options = TableOptions(self.values.shape[0], self.dtype, "rank")
        twin = memo[id(self)] = PerSampleTable(options, self.name)
        twin.values = self.values.clone()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickled, too, it becomes private."""
        return {**self.__dict__, "world": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "values")
        if saved is not None and saved.shape != self.values.shape:
            raise ValueError(
                f"The saved table {self.name!r} holds {saved.shape[0]} samples and this objective was made for "
                f"num_samples={self.values.shape[0]}: it belongs to another data set. Load it with the num_samples it "
                "was trained with, or start with a new objective."
            )
        mapped = self.values
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.world is not None:
            if self.values is not mapped:  # assign=True would leave the memory that is shared
                mapped.copy_(self.values)
                self.values = mapped
            distributed.host_barrier()


def round_stochastically(values_N: Tensor, group_N: Tensor, progress: Progress) -> Tensor:
    """float32 to float16, up or down with the odds that keep the mean: small moves add up instead of being lost."""
    low_bits = 13  # what float16's mantissa has fewer than float32's
    exact_N = values_N.to(torch.float32)
    noise_N = (progress.uniform(len(exact_N), 16) * 2**low_bits).to(exact_N.device, torch.int32)
    bits_N = exact_N.view(torch.int32) + noise_N[group_N]
    rounded_N = (bits_N & -(2**low_bits)).view(torch.float32)
    return torch.where(torch.isfinite(exact_N), rounded_N, exact_N).to(torch.float16)


# -- the same id more than once in a batch: one id, one value ----------------------------------------------------------


def mean_within(values_N: Tensor, ids: Ids) -> Tensor:
    """Each row's value replaced by the mean over the rows with its id."""
    total_N = torch.zeros_like(values_N).index_add_(0, ids.group_N, values_N)
    return total_N[ids.group_N] / ids.count_N


def log_mean_within(log_N: Tensor, ids: Ids) -> Tensor:
    """``mean_within`` for values given by their logs."""
    peak_N = torch.full_like(log_N, -torch.inf).scatter_reduce_(0, ids.group_N, log_N, "amax")[ids.group_N]
    return mean_within(torch.exp(log_N - peak_N), ids).log() + peak_N


# -- one mapping that all ranks of a node share: nameless in memory, or a file in a folder, both scratch space ---------


def map_shared(place: str, name: str, count: int, dtype: torch.dtype, owner: object) -> Tensor:
    """``count`` values, NaN at first.  ``place`` is "node", or a folder whose file is locked while ``owner`` lives."""
    lock = None
    if place == "node":
        handle, path = tempfile.mkstemp(prefix="fullbatch-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.close(handle)
    else:
        path, lock = _choose_file(Path(place), name)
    shared_path = distributed.share_from_leader(path)
    if path != shared_path:
        os.unlink(path)  # only the leader's is used
    if distributed.is_node_leader():
        _reserve(path, count * dtype.itemsize)
    distributed.host_barrier()
    values = torch.from_file(shared_path, shared=True, size=count, dtype=dtype)
    if distributed.is_node_leader():
        values.fill_(math.nan)
    distributed.host_barrier()
    if place == "node" and distributed.is_node_leader():
        os.unlink(path)  # the mapping lives on; a killed run leaves nothing behind
    if lock is not None:
        weakref.finalize(owner, _release, lock)
    return values


def _release(lock: IO[bytes]) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # also for forked children, which hold the same open file
    lock.close()


def _choose_file(folder: Path, name: str) -> tuple[str, IO[bytes] | None]:
    path = folder / f"{name}.table"
    if not distributed.is_node_leader():
        return str(path), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(f"{path}.lock", "wb")  # noqa: SIM115  (held while the table lives)
    except OSError as error:
        raise ValueError(f"table_storage={str(folder)!r} cannot be used as a folder: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"The table {path} is in use by another objective; give each its own folder as table_storage, or del the "
            "old objective first."
        ) from None
    path.unlink(missing_ok=True)  # a new file: what still maps the old one keeps it
    return str(path), lock


def _reserve(path: str, size: int) -> None:
    """Take the space now: a mapping that turns out too large later would kill the process."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            os.unlink(path)
            raise ValueError(
                f"A per-sample table needs {size / 2**20:.0f} MiB in {os.path.dirname(path)} and there is not enough "
                "room; give table_storage a folder on a larger disk, or enlarge the shared memory."
            ) from error
