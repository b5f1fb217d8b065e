"""Blocks of remote files that coming batches need, fetched while earlier batches are made.

The order is a pure function, so every process that makes batches knows what comes.  Some threads of it walk ahead and
have blocks put into the cache that all processes of the machine share; the blocks are dealt out among those processes,
so that none is fetched twice.  A thread fetches one block at a time: that bounds the bytes in flight.  The walk ends
where a quarter of the cache is to be filled, so it never pushes out what is being read.  A block that cannot be fetched
is no news here: the batch that needs it asks again, and says what is wrong."""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from torch.utils.data import get_worker_info

from fullbatch.data.block_cache import BLOCK_BYTES, block_cache
from fullbatch.data.sample import Remote
from fullbatch.distributed import World

_IN_FLIGHT = 32  # blocks, by all processes of a rank together
_SHARE = 0.25  # of the cache
_IDLE = 10.0  # seconds after which a thread that has nothing to do ends

# the blocks of a batch; None: there is no such batch
Coming = Callable[[int], Iterable[Remote] | None]


def ranks_here(world: World) -> range:
    """The ranks of this machine, as torchrun numbers them.  A run of one rank may have LOCAL_RANK alone, for its GPU;
    where nothing says who else is here, a rank is by itself."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world.size > 1 else 1
    first = world.rank - (int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0)
    return range(first, first + count)


class ReadingAhead:
    """Of one process; in one that it was copied into, it begins anew."""

    def __init__(self, coming: Coming, most_batches: int, world: World = World()) -> None:
        self._coming, self._most_batches, self._world = coming, most_batches, world
        self._process = self._reached = self._walked = self._threads = self._most_threads = 0

    def __reduce__(self) -> tuple[type[ReadingAhead], tuple[Coming, int, World]]:
        return type(self), (self._coming, self._most_batches, self._world)

    def reached(self, batch: int) -> None:
        """This batch is made now."""
        if self._process != os.getpid():
            self._begin(batch)
        with self._changed:
            if not self._reached <= batch <= self._walked:
                self._walked = batch
                self._queue.clear()
                self._known.clear()  # of what was in the queue nothing has come
            self._reached = batch
            while self._ahead and not batch < self._ahead[0][0] < self._walked:
                self._bytes_ahead -= self._ahead.popleft()[1]
            for _ in range(self._most_threads - self._threads):
                threading.Thread(target=self._fetch, name="reading ahead", daemon=True).start()
            self._threads = self._most_threads
            self._changed.notify_all()

    def _begin(self, batch: int) -> None:
        self._process, cache = os.getpid(), block_cache()
        worker, ranks = get_worker_info(), ranks_here(self._world)
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        self._shares, self._share = len(ranks) * workers, ranks.index(self._world.rank) * workers + number
        self._most_bytes = 0 if cache is None else int(_SHARE * cache.bound)
        # a batch is fetched whole only if all workers walk up to it, also while the others are two batches further on
        self._horizon = max(self._most_batches, 2 * workers - 1)
        self._changed = threading.Condition()
        self._reached, self._walked, self._bytes_ahead = batch, batch, 0
        self._queue: deque[Remote] = deque()
        self._ahead: deque[tuple[int, int]] = deque()  # batch, and the bytes that it is the first to need
        self._known: OrderedDict[Remote, None] = OrderedDict()  # those that lately came along
        self._threads, self._most_threads = 0, max(2, _IN_FLIGHT // workers) if self._most_bytes else 0
        if self._most_bytes:
            self._walk()  # here, not in many threads at once, indexes are opened

    def _fetch(self) -> None:
        while True:
            with self._changed:
                if not self._queue and self._may_walk():
                    self._walk()  # one at a time, for the batch that is being made waits for the lock
                elif not self._queue and not self._changed.wait(_IDLE) and not (self._queue or self._may_walk()):
                    self._threads -= 1
                    return
                if not self._queue:
                    continue
                block = self._queue.popleft()
            with suppress(Exception):
                block.keep()

    def _may_walk(self) -> bool:
        near = self._walked < self._reached + self._horizon
        return near and self._bytes_ahead < self._most_bytes

    def _walk(self) -> None:
        """One batch on."""
        coming = None
        with suppress(Exception):  # as for a block: the batch that is made says what is wrong
            coming = self._coming(self._walked)
        if coming is None:
            self._walked = self._reached + self._horizon
            return
        fresh = [block for block in coming if block not in self._known]
        self._known.update(dict.fromkeys(fresh))
        while len(self._known) > 2 * self._most_bytes // BLOCK_BYTES:
            self._known.popitem(last=False)
        self._queue += [block for block in fresh if zlib.crc32(block.name.encode()) % self._shares == self._share]
        size = sum(block.size for block in fresh)
        self._ahead.append((self._walked, size))
        self._bytes_ahead += size
        self._walked += 1
