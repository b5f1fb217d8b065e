"""Reading ahead: what coming batches need is fetched before they are made, once, and only so far."""

import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from fullbatch.config.data import Data
from fullbatch.data import ahead
from fullbatch.data.ahead import ReadingAhead
from fullbatch.data.images import EvalTransform, TrainTransform
from fullbatch.data.loader import EvaluationBatches, TrainingBatches, load, open_pool
from fullbatch.distributed import World
from tests.data.test_remote_shards import server, shards  # noqa: F401  (fixtures)
from tests.waiting import HANG, wait_for

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


@dataclass
class Fetched:
    """Batch n needs pieces n and n + 1."""

    names: list = field(default_factory=list)
    last: int = 10**9
    lock: threading.Lock = field(default_factory=threading.Lock)

    def coming(self, batch):
        return None if batch > self.last else [Piece(self, f"{batch + more:05d}") for more in (0, 1)]


@dataclass(frozen=True)
class Piece:
    fetched: Fetched = field(hash=False, compare=False)
    name: str
    size = 4 << 20

    def keep(self):
        with self.fetched.lock:
            self.fetched.names.append(self.name)
        if self.name.endswith("7"):
            raise OSError("the store is down")


@dataclass(frozen=True)
class Held(Piece):
    """Under way until its gate opens."""

    gate: threading.Event = field(hash=False, compare=False)

    def keep(self):
        self.gate.wait(HANG)
        super().keep()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


def bound(monkeypatch, blocks):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", str(blocks * 4 * (4 << 20) / 1e9 + 1e-9))


@pytest.mark.parametrize(("blocks", "batches", "pieces"), [(1000, 10, 11), (6, 100, 8), (1000, 1, 2)])
def test_only_so_far_and_each_once(cache, monkeypatch, blocks, batches, pieces):
    bound(monkeypatch, blocks)
    fetched = Fetched()
    reading = ReadingAhead(fetched.coming, batches)
    reading.reached(0)
    wait_for(lambda: len(fetched.names) == pieces)
    for batch in range(1, 6):
        reading.reached(batch)
        wait_for(lambda more=batch: len(fetched.names) == pieces + more)
    time.sleep(0.05)
    assert sorted(fetched.names) == [f"{number:05d}" for number in range(pieces + 5)]


def test_another_place_and_the_end(cache, monkeypatch):
    bound(monkeypatch, 1000)
    fetched = Fetched(last=52)
    reading = ReadingAhead(fetched.coming, 3)
    reading.reached(0)
    wait_for(lambda: len(fetched.names) == 4)
    reading.reached(50)
    wait_for(lambda: len(fetched.names) == 8)
    reading.reached(52)
    time.sleep(0.05)
    assert set(fetched.names[4:]) == {"00050", "00051", "00052", "00053"}


def test_what_was_given_up_for_another_place_comes_when_it_is_needed_after_all(cache, monkeypatch):
    bound(monkeypatch, 1000)
    fetched, gates = Fetched(), [threading.Event()]
    names = [f"{number:05d}" for number in range(100)]
    reading = ReadingAhead(lambda batch: [Held(fetched, f"{batch}-{name}", gates[-1]) for name in names], 1)
    reading.reached(0)
    for batch in (500, 0):
        gates.append(threading.Event())
        reading.reached(batch)
        gates[-2].set()  # else each thread might have a piece, and none be free to walk on
        wait_for(lambda batch=batch: reading._walked == batch + 1)
    gates[-1].set()
    wait_for(lambda: {f"0-{name}" for name in names} <= set(fetched.names))


def test_processes_share_the_pieces(cache, monkeypatch):
    bound(monkeypatch, 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    every = [Fetched() for _ in range(3)]
    for rank, fetched in enumerate(every):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ReadingAhead(fetched.coming, 300, World(rank, 3)).reached(0)
    wait_for(lambda: sum(len(fetched.names) for fetched in every) >= 301)
    assert min(len(fetched.names) for fetched in every) > 60
    assert sorted(name for fetched in every for name in fetched.names) == [f"{number:05d}" for number in range(301)]


@pytest.mark.parametrize("batches", [1, 3])
def test_workers_that_take_turns_have_their_batches_fetched_by_all(cache, monkeypatch, batches):
    """However few batches hold all the samples that are to be read ahead."""
    bound(monkeypatch, 1000)
    every = [Fetched() for _ in range(4)]
    readings = [ReadingAhead(fetched.coming, batches) for fetched in every]
    for batch in range(9):
        monkeypatch.setattr(ahead, "get_worker_info", lambda batch=batch: SimpleNamespace(num_workers=4, id=batch % 4))
        reading = readings[batch % 4]
        reading.reached(batch)
        wait_for(lambda reading=reading: reading._walked == reading._reached + 7)  # outrun, it leaves batches out
    wait_for(lambda: {f"{n:05d}" for n in range(3, 12)} <= {name for fetched in every for name in fetched.names})
    names = [name for fetched in every for name in fetched.names]
    assert len(names) == len(set(names))


def test_a_run_of_one_rank_on_the_last_gpu_reads_ahead(cache, monkeypatch):
    """As a trial's: LOCAL_RANK says which GPU is its own, and nobody else is there."""
    bound(monkeypatch, 1000)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for sizes in ({}, {"LOCAL_WORLD_SIZE": "4"}):
        for name, value in sizes.items():
            monkeypatch.setenv(name, value)
        fetched = Fetched()
        ReadingAhead(fetched.coming, 10).reached(0)
        wait_for(lambda fetched=fetched: len(fetched.names) == 11)


def test_what_goes_wrong_in_a_walk_is_the_batchs_to_say(cache, monkeypatch):
    """And the threads go on when it has passed."""
    bound(monkeypatch, 1000)
    fetched, broken, told = Fetched(), [False], []
    ours = {"reading ahead"}  # threads that other tests left behind are none of this one's
    monkeypatch.setattr(threading, "excepthook", lambda args: args.thread.name in ours and told.append(args.exc_value))

    def coming(batch):
        if broken[0]:
            raise OSError("the index is gone")
        return fetched.coming(batch)

    reading = ReadingAhead(coming, 3)
    reading.reached(0)
    wait_for(lambda: len(fetched.names) == 4)
    broken[0] = True
    for batch in range(1, 4):
        reading.reached(batch)
        wait_for(lambda batch=batch: reading._walked == batch + 3)
    broken[0] = False
    for batch in range(10, 13):
        reading.reached(batch)
    wait_for(lambda: "00015" in fetched.names)
    assert not told


def test_no_cache_no_reading_ahead(cache, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    fetched = Fetched()
    ReadingAhead(fetched.coming, 300).reached(0)
    assert not started and not fetched.names


@pytest.fixture
def batches(server):  # noqa: F811
    pool, order = open_pool(Data(data=(f"{server.url}/data/shards/{{00000..00002}}.tar",)))
    return TrainingBatches(pool, order, 4, TrainTransform(8), lambda texts: texts)


def test_a_machine_reads_ahead_for_its_own_ranks(batches, monkeypatch):
    """Four ranks on two machines: what the two of each need is read there, and all of it together is the batch."""
    asked = []
    monkeypatch.setattr(type(batches.pool), "remote_pieces", lambda pool, ids: asked.append(ids.tolist()) or [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    evaluation = EvaluationBatches(batches.pool, 2, EvalTransform(8), None)
    for of, whole in ((batches, batches.ids(1)), (evaluation, list(range(8, 16)))):
        for rank in range(4):
            monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
            replace(of, world=World(rank, 4))._pieces(1)
        assert [*asked[0], *asked[2]] == whole and asked[0] == asked[1] and asked[2] == asked[3]
        asked.clear()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    replace(batches, world=World(3, 4))._pieces(1)
    assert asked == [batches.ids(1)[3:]], "alone, as far as it knows"


def test_nothing_is_read_ahead_of_the_runs_end(batches, monkeypatch):
    asked, pieces = {}, TrainingBatches._pieces
    monkeypatch.setattr(
        TrainingBatches,
        "_pieces",
        lambda self, step: asked.setdefault(step, pieces(self, step)),
    )
    stream = batches.stream([range(2), range(2, 5)], 0, None, 5)
    next(stream)
    wait_for(lambda: 5 in asked)  # a batch that is made before its turn in the walk is left out there
    assert len(list(stream)) == 4
    assert all(asked[step] for step in range(5))
    assert not any(asked[step] for step in asked if step >= 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_find_their_blocks_in_the_cache(server, batches, monkeypatch, tmp_path, workers):  # noqa: F811
    """The index read all shards, and the cache is emptied since: each block is fetched again, once, and the first batch
    is enough to have all of them come."""
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 4096)
    pool, order = batches.pool, batches.order
    assert order.blocks is not None
    for block in (tmp_path / "cache" / "blocks").iterdir():
        if not block.name.startswith("."):
            block.unlink()
    before = server.count("GET")
    whole = len(pool.remote_pieces(np.arange(len(pool))))
    assert whole == len({piece.name for piece in pool.remote_pieces(np.arange(len(pool)))}) > 25
    if workers == 0:
        batches[0]
        wait_for(lambda: server.count("GET") - before == whole)
    assert len([*load(batches, range(9), workers, None)]) == 9
    assert server.count("GET") - before == whole
