import errno
import logging
import os
import random
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from fullbatch.data import block_cache as block_cache_module
from fullbatch.data.block_cache import BlockCache, block_cache
from fullbatch.data.cache_folder import write_atomically
from tests.waiting import HANG

BLOCK = random.Random(0).randbytes(200_000)
SIZE = len(BLOCK) + 4 * 4  # with its checksums


def used(folder):
    return sum(entry.stat().st_size for entry in os.scandir(folder) if not entry.name.startswith(".lock"))


def blocks_in(folder):
    return sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))


def test_any_part_of_a_block_comes_back(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 10**9)
    assert cache.get("a", len(BLOCK), 0, 1) is None
    cache.put("a", BLOCK)
    for start, stop in [(0, 1), (0, len(BLOCK)), (65_535, 65_537), (65_536, 131_072), (199_999, 200_000)]:
        assert cache.get("a", len(BLOCK), start, stop) == BLOCK[start:stop]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "zeros", "empty"])
def test_damage_is_seen_and_the_block_dropped(tmp_path, damage, caplog):
    cache = BlockCache(tmp_path / "blocks", 10**9)
    cache.put("a", BLOCK)
    path = cache.folder / "a"
    raw = bytearray(path.read_bytes())
    raw[70_000] ^= 1
    changed = {"flip": raw, "cut": raw[:-1], "grow": raw + b"x", "zeros": bytes(len(raw)), "empty": b""}[damage]
    path.write_bytes(changed)
    with caplog.at_level(logging.WARNING, "fullbatch"):
        assert cache.get("a", len(BLOCK), 66_000, 80_000) is None
    assert "damaged" in caplog.text and not path.exists()


def test_the_least_recently_used_go(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 10 * SIZE)
    for number in range(10):
        cache.put(str(number), BLOCK)
        os.utime(cache.folder / str(number), (number, number))
    assert len(blocks_in(cache.folder)) == 10
    assert cache.get("0", len(BLOCK), 0, 1)  # notes the use
    cache.put("new", BLOCK)
    assert blocks_in(cache.folder) == ["0", "3", "4", "5", "6", "7", "8", "9", "new"]


def test_a_block_that_is_asked_about_is_not_the_next_to_go(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 3 * SIZE)
    for number in range(3):
        cache.put(str(number), BLOCK)
        os.utime(cache.folder / str(number), (number, number))
    assert cache.holds("0", len(BLOCK)) and not cache.holds("1", len(BLOCK) - 1) and not cache.holds("9", len(BLOCK))
    cache.put("new", BLOCK)
    assert blocks_in(cache.folder) == ["0", "new"]


def test_a_block_larger_than_the_bound_is_not_kept(tmp_path):
    cache = BlockCache(tmp_path / "blocks", SIZE - 1)
    assert cache.keeps
    cache.put("a", BLOCK)
    assert blocks_in(cache.folder) == [] and used(cache.folder) == 0
    assert not cache.keeps, "for a minute nothing is tried"


def test_what_another_user_owns_may_have_to_stay(tmp_path, monkeypatch):
    """In a folder whose files only their owners may remove: it counts, and others go in its place."""
    cache, unlink = BlockCache(tmp_path / "blocks", 4 * SIZE), Path.unlink
    for number in range(4):
        cache.put(str(number), BLOCK)
        os.utime(cache.folder / str(number), (number, number))
    writer = cache._reserve(SIZE)
    assert blocks_in(cache.folder) == ["2", "3"]
    theirs, opened = {"2", os.path.basename(writer.name)}, os.open
    writer.close()

    def refuse(path):
        if os.path.basename(path) in theirs:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", lambda path, **options: refuse(path) or unlink(path, **options))
    monkeypatch.setattr(os, "open", lambda path, *mode: refuse(path) or opened(path, *mode))
    cache = BlockCache(tmp_path / "blocks", 4 * SIZE)
    for name in "abc":
        cache.put(name, BLOCK)
        assert used(cache.folder) <= 4 * SIZE and cache.keeps
    assert "2" in blocks_in(cache.folder) and "c" in blocks_in(cache.folder) and "3" not in blocks_in(cache.folder)


def test_a_reader_reads_on_while_its_block_is_removed(tmp_path, monkeypatch):
    cache = BlockCache(tmp_path / "blocks", 10**9)
    cache.put("a", BLOCK)
    status = os.fstat

    def removed_meanwhile(file):
        (cache.folder / "a").unlink(missing_ok=True)
        return status(file)

    monkeypatch.setattr(os, "fstat", removed_meanwhile)
    assert cache.get("a", len(BLOCK), 0, 1000) == BLOCK[:1000]
    monkeypatch.undo()
    assert cache.get("a", len(BLOCK), 0, 1000) is None


def test_what_a_killed_writer_left_counts_and_goes(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 2 * SIZE)
    cache.put("a", BLOCK)
    writer = cache._reserve(SIZE)
    assert used(cache.folder) == 2 * SIZE
    cache.put("b", BLOCK)  # the writer is alive: only "a" can go
    assert blocks_in(cache.folder) == ["b"] and used(cache.folder) == 2 * SIZE
    writer.close()  # as death does
    cache.put("c", BLOCK)
    assert blocks_in(cache.folder) == ["b", "c"] and used(cache.folder) == 2 * SIZE


def test_a_wrong_total_is_put_right_by_the_next_process(tmp_path):
    BlockCache(tmp_path / "blocks", 2 * SIZE).put("a", BLOCK)
    for wrong in (b"", b"\0" * 8, b"\xff" * 8, b"\xff" * 100):
        (tmp_path / "blocks" / ".lock").write_bytes(wrong)
        cache = BlockCache(tmp_path / "blocks", 2 * SIZE)
        for name in "bcd":
            cache.put(name, BLOCK)
            assert used(cache.folder) <= 2 * SIZE


def test_a_folder_that_takes_nothing_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = BlockCache(tmp_path / "file" / "blocks", 10**9)
    with caplog.at_level(logging.WARNING, "fullbatch"):
        cache.put("a", BLOCK)
        cache.put("b", BLOCK)
        with cache.fetching("a"):
            assert cache.get("a", len(BLOCK), 0, 1) is None
    assert len(caplog.messages) == 1 and "cannot be kept" in caplog.text


def test_a_full_disk_leaves_no_half_block(tmp_path, monkeypatch, caplog):
    cache = BlockCache(tmp_path / "blocks", 10**9)

    def full(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.put("a", BLOCK)
    assert used(cache.folder) == 0 and "No space left" in caplog.text


def test_a_disk_or_a_quota_that_is_full_makes_the_cache_give_way(tmp_path, monkeypatch, caplog):
    cache = BlockCache(tmp_path / "blocks", 10**9)
    for number in range(10):
        cache.put(str(number), BLOCK)
        os.utime(cache.folder / str(number), (number, number))
    replace = os.replace

    def full(*names):
        if used(cache.folder) > 10 * SIZE:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        replace(*names)

    monkeypatch.setattr(os, "replace", full)
    cache.put("new", BLOCK)
    assert blocks_in(cache.folder) == ["2", "3", "4", "5", "6", "7", "8", "9", "new"] and not caplog.records
    assert used(cache.folder) == 9 * SIZE


def test_some_of_the_disk_stays_free(tmp_path, monkeypatch, caplog):
    """For checkpoints; where others take that, the cache gives way."""
    cache, others = BlockCache(tmp_path / "blocks", 10**9), []

    def disk(folder):
        free = 1000 * SIZE - others[-1] - used(cache.folder)
        return os.statvfs_result((1, 1, 1000 * SIZE, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", disk)
    for taken, most, least in [(970 * SIZE, 10, 9), (975 * SIZE, 5, 4), (990 * SIZE, 0, 0), (970 * SIZE, 10, 9)]:
        others.append(taken)
        for number in range(15):
            cache.put(str(number), BLOCK)
        assert least * SIZE <= used(cache.folder) <= most * SIZE
        assert ("cannot be kept" in caplog.text) == (most == 0)
        caplog.clear()


def test_files_are_counted_once_after_a_start_of_the_machine(tmp_path, monkeypatch):
    """Not by every process."""
    BlockCache(tmp_path / "blocks", 10 * SIZE).put("a", BLOCK)
    counted, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: counted.append(folder) or scan(folder))
    for name in "bcd":
        BlockCache(tmp_path / "blocks", 10 * SIZE).put(name, BLOCK)
    assert not counted
    (tmp_path / "blocks" / ".lock").write_bytes((SIZE).to_bytes(8, "little") + b"of another start")
    cache = BlockCache(tmp_path / "blocks", 10 * SIZE)
    for name in "efghijkl":
        cache.put(name, BLOCK)
    assert len(counted) == 2, "at first, and at the bound"


def test_an_index_has_its_name_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("synced") or sync(file))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("named") or replace(*names))
    write_atomically(tmp_path / "index", lambda file: file.write(b"x"))
    assert done == ["synced", "named"] and (tmp_path / "index").read_bytes() == b"x"


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        BlockCache(tmp_path / "blocks", 10**9).put("a", BLOCK)
        write_atomically(tmp_path / "index", lambda file: file.write(b"x"))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "blocks" / "a", tmp_path / "index")] == [0o644] * 2


def test_a_lock_that_nobody_lets_go_of_is_waited_for_and_then_not(tmp_path, monkeypatch):
    cache = BlockCache(tmp_path / "blocks", 10**9)
    monkeypatch.setattr(block_cache_module, "_PATIENCE", 0.05)
    with cache.fetching("a"), cache.fetching("a"):
        pass
    with block_cache_module._held(cache.folder / ".lock"):
        cache.put("a", BLOCK)
    assert blocks_in(cache.folder) == []
    cache.put("a", BLOCK)
    assert blocks_in(cache.folder) == ["a"]


def _use(folder, bound, seed, until):
    """Reads and writes blocks at random; each says in its bytes which one it is."""
    cache, rng = BlockCache(folder, bound), random.Random(seed)
    while time.time() < until:
        number = rng.randrange(40)
        block = bytes([number]) * 100_000
        there = cache.get(str(number), len(block), 10, 99_990)
        if there is None:
            with cache.fetching(str(number)):
                cache.put(str(number), block)
        elif there != block[10:99_990]:
            os._exit(1)


@pytest.mark.slow
def test_many_processes_some_of_them_killed_keep_the_bound(tmp_path):
    folder, bound, until = tmp_path / "blocks", 1_000_000, time.time() + HANG
    context, rng, processes, most, killed = get_context("fork"), random.Random(0), [], 0, 0
    while killed < 25 or (most <= 0.5 * bound and time.time() < until):
        while len(processes) < 4:
            process = context.Process(target=_use, args=(folder, bound, rng.random(), until + 60))
            process.start()
            processes.append(process)
        for _ in range(20):
            time.sleep(0.005)
            if folder.exists():
                most = max(most, _used_at_a_moment(folder))
        victim = processes.pop(rng.randrange(4))
        assert victim.exitcode is None, "a reader found another block's bytes"
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        killed += 1
    for process in processes:
        assert process.exitcode is None
        process.kill()
        process.join()
    assert 0.5 * bound < most <= bound
    cache = BlockCache(folder, bound)
    for name in blocks_in(folder):
        assert cache.get(name, 100_000, 0, 100_000) == bytes([int(name)]) * 100_000


def _used_at_a_moment(folder):
    """While nobody can add, remove or rename."""
    with block_cache_module._held(folder / ".lock"):
        return used(folder)


def test_the_bound_is_a_number_of_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path))
    assert block_cache().bound == 32 * 10**9 and block_cache().folder == tmp_path / "blocks"
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0.5")
    assert block_cache().bound == 5 * 10**8
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    assert block_cache() is None
    for wrong in ("x", "-1", "inf", "nan"):
        monkeypatch.setenv("FULLBATCH_CACHE_GB", wrong)
        with pytest.raises(ValueError, match=f"FULLBATCH_CACHE_GB must be a number of gigabytes.*'{wrong}'"):
            block_cache()
