import io
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fullbatch.data import sample, tar_shards
from fullbatch.data.sample import BadSample
from fullbatch.data.tar_shards import TarShards
from tests.data.making import captioned, jpeg, png, read_all, write_members, write_shard
from tests.waiting import HANG


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FULLBATCH_CACHE", str(folder))
    return folder


def opened(path, **options):
    return TarShards([str(path)], **options)


def test_what_img2dataset_writes(tmp_path):
    samples = opened(write_shard(tmp_path / "00003.tar", captioned(5)))
    assert len(samples) == 5
    for number in range(5):
        sample = samples.read(number)
        assert sample.image == jpeg(seed=number)
        assert sample.captions == (f"picture {number}",)
        assert sample.name == f"{tmp_path.name}/00003.tar:{number:09d}"


def test_many_shards_are_one_list(tmp_path, cache):
    paths = [str(write_shard(tmp_path / f"{s}.tar", captioned(s + 1, first=10 * s))) for s in range(4)]
    samples = TarShards(paths)
    wanted = [f"picture {10 * s + n}" for s in range(4) for n in range(s + 1)]
    assert [samples.read(i).captions[0] for i in range(len(samples))] == wanted
    assert isinstance(samples._index, np.memmap)
    assert len(list(cache.glob("*.npy"))) == 5  # a shard each and all joined
    with pytest.raises(IndexError, match="0 to 9"):
        samples.read(10)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders(tmp_path, tar_format):
    folder = "/".join(["folder.with.dots"] * 5)
    keys = [f"{folder}/{letter * 90}" for letter in "ab"]
    if tar_format != tarfile.USTAR_FORMAT:
        keys += ["x" * 300 + "/y", "größe/ü"]
    members = [m for key in keys for m in ((f"{key}.jpg", jpeg()), (f"{key}.txt", key.encode()))]
    good, bad = read_all(opened(write_members(tmp_path / "a.tar", members, tar_format)))
    assert not bad and [good[i].captions[0] for i in range(len(keys))] == keys


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar")
def test_times_of_gnu_tar_are_no_part_of_a_name(tmp_path):
    """An incremental archive keeps them where other formats keep the first part of a long name."""
    for time, (name, content) in enumerate((("a.jpg", jpeg()), ("a.txt", b"an apple")), start=10**9):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
        os.utime(tmp_path / "in" / name, (time, 10**9))
    command = [
        "tar",
        "--format=gnu",
        "-g",
        tmp_path / "snapshot",
        "-cf",
        tmp_path / "a.tar",
        "-C",
        tmp_path / "in",
        ".",
    ]
    subprocess.run(command, check=True)
    good, bad = read_all(opened(tmp_path / "a.tar"))
    assert not bad and [sample.captions for sample in good.values()] == [("an apple",)]


def test_captions_of_json_and_txt(tmp_path):
    def record(**fields):
        return json.dumps(fields).encode()

    members = [
        ("a.PNG", png()), ("a.json", record(caption="one")),
        ("b.webp", b"x"), ("b.json", record(captions=["one", " two ", "", None])),
        ("c.jpeg", b"x"), ("c.txt", b"\xef\xbb\xbftext"), ("c.json", record(caption="record")),
        ("d.jpg", b"x"), ("d.json", record(alt="alt", caption=None)),
        ("e.txt", b"apart"), ("f.jpg", b"x"), ("f.txt", b"six"), ("e.jpg", b"x"), ("README.md", b"no sample"),
    ]  # fmt: skip
    path = write_members(tmp_path / "a.tar", members)
    good, bad = read_all(opened(path))
    assert {i: s.captions for i, s in good.items()} == {
        0: ("one",), 1: ("one", "two"), 2: ("text",), 4: ("apart",), 5: ("six",)
    }  # fmt: skip
    assert bad[3].reason == "the caption is empty"
    assert opened(path, captions=("alt",)).read(3).captions == ("alt",)
    assert opened(path, captions=("alt", "caption")).read(2).captions == ("record",)
    assert "PNG" in str(opened(path, image="PNG").read(0).image[:4])
    assert len(opened(path, image="png")) == 6 and opened(path, image="png").fingerprint != opened(path).fingerprint


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.jpg", b"x")], r"no caption member \(.txt or .json\)"),
        ([("a.txt", b"x")], r"no image member \(.jpg, .png"),
        ([("a.json", b"{}")], "no image member"),
        ([("a.jpg", b""), ("a.txt", b"x")], "zero bytes"),
        ([("a.jpg", b"x"), ("a.txt", b" \n")], "caption is empty"),
        ([("a.jpg", b"x"), ("a.txt", b"\xff\xfe")], "not valid UTF-8"),
        ([("a.jpg", b"x"), ("a.txt", b"a\0b")], "NUL"),
        ([("a.jpg", b"x"), ("a.json", b"{")], "json is not readable"),
        ([("a.jpg", b"x"), ("a.json", b"[" * 100_000)], "json is not readable"),
        ([("a.jpg", b"x"), ("a.json", b"[]")], "no field 'captions' or 'caption'"),
        ([("a.jpg", b"x"), ("a.json", b'{"caption": 7}')], "not text but int"),
        ([("a.jpg", b"x"), ("a.json", b'{"caption": "\\ud800"}')], "surrogate"),
    ],
)
def test_bad_samples_keep_their_place(tmp_path, members, reason):
    members = [("0.jpg", b"x"), ("0.txt", b"first"), *members, ("z.jpg", b"x"), ("z.txt", b"last")]
    samples = opened(write_members(tmp_path / "a.tar", members))
    assert [samples.read(i).captions[0] for i in (0, 2)] == ["first", "last"]
    with pytest.raises(BadSample, match=reason) as problem:
        samples.read(1)
    assert problem.value.name == f"{tmp_path.name}/a.tar:a"
    assert str(pickle.loads(pickle.dumps(problem.value))) == str(problem.value)


def test_long_captions_are_cut_and_large_members_refused(tmp_path, monkeypatch):
    members = [("a.jpg", b"x" * 100), ("a.txt", b"y" * 20_000), ("b.jpg", b"x" * 101), ("b.txt", b"y")]
    samples = opened(write_members(tmp_path / "a.tar", members))
    monkeypatch.setattr(sample, "MAX_IMAGE_BYTES", 100)
    monkeypatch.setattr(tar_shards, "MAX_IMAGE_BYTES", 100)
    assert len(samples.read(0).captions[0]) == 10_000
    with pytest.raises(BadSample, match="101 bytes, more than the limit of 100"):
        samples.read(1)


def test_links_folders_and_devices_are_no_samples(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("link.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("a.jpg", "a.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    assert len(opened(tmp_path / "a.tar")) == 1


def damaged(path, how):
    """The third sample's image damaged; where its header lies."""
    raw = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        third = tar.getmembers()[6].offset
    how(raw, third)
    path.write_bytes(raw)
    return third


def resum(raw, at):
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])


def size_field(value):
    def how(raw, at):
        raw[at + 124 : at + 136] = value
        resum(raw, at)

    return how


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda raw, at: raw.__setitem__(at + 3, 7), "bad checksum"),
        (lambda raw, at: raw.__delitem__(slice(at + 100, None)), "ends inside a header"),
        (lambda raw, at: raw.__delitem__(slice(at, None)), "without an end mark"),
        (lambda raw, at: raw.__delitem__(slice(at + 600, None)), "claims"),
        (size_field(b"77777777777\0"), "claims 8,589,934,591 bytes"),
        (size_field(b"\x80" + b"\x7f" * 11), "claims"),
        (size_field(b"\xff" * 12), "claims -1 bytes"),
        (size_field(b"-0000000001\0"), "claims -1 bytes"),
        (size_field(b"garbage!!!!\0"), "invalid header"),
    ],
)
def test_a_damaged_tail_costs_only_itself(tmp_path, caplog, how, message):
    path = write_shard(tmp_path / "a.tar", captioned(5))
    third = damaged(path, how)
    with caplog.at_level(logging.WARNING, "fullbatch"):
        good, bad = read_all(opened(path))
    assert sorted(good) == [0, 1] and not bad
    assert f"a.tar is damaged at byte {third}" in caplog.text and message in caplog.text


def test_an_absent_key_begins_no_sample_and_a_second_image_another(tmp_path):
    members = [
        ("a.jpg", b"1"),
        ("a.txt", b"one"),
        ("a.jpg", b"2"),
        ("a.txt", b"two"),
        (".jpg", b"x"),
        ("._b.jpg", b"x"),
    ]
    good, bad = read_all(opened(write_members(tmp_path / "a.tar", members)))
    assert [(s.image, s.captions) for s in good.values()] == [(b"1", ("one",)), (b"2", ("two",))] and not bad


def test_the_index_is_built_once_and_again_when_the_shard_changes(tmp_path, monkeypatch, cache):
    path = write_shard(tmp_path / "a.tar", captioned(3))
    first = opened(path)
    built = []
    build = tar_shards.build_index
    monkeypatch.setattr(tar_shards, "build_index", lambda *a: built.append(a) or build(*a))
    assert opened(path).fingerprint == first.fingerprint and not built
    write_shard(path, captioned(4))
    assert len(opened(path)) == 4 and len(built) == 1
    for file in cache.glob("*.npy"):
        file.write_bytes(b"broken")
    assert len(opened(path)) == 4 and len(built) == 2
    assert opened(path).fingerprint != first.fingerprint


def test_a_damaged_index_is_built_again_and_never_believed(tmp_path, monkeypatch, cache):
    paths = [str(write_shard(tmp_path / f"{name}.tar", captioned(3))) for name in "ab"]
    whole = read_all(TarShards(paths))
    built = []
    build = tar_shards.build_index
    monkeypatch.setattr(tar_shards, "build_index", lambda *a: built.append(a) or build(*a))
    for file in sorted(cache.glob("*.npy")):
        raw = file.read_bytes()
        for damaged in (raw[:-60] + b"\7" + raw[-59:], raw[:-1], raw + b"x", raw[:-4], b""):
            file.write_bytes(damaged)
            assert read_all(TarShards(paths)) == whole and file.read_bytes() == raw
    assert len(built) == 10
    assert read_all(TarShards(paths)) == whole and len(built) == 10


def test_a_packed_shard_with_a_spoilt_stream(tmp_path, cache):
    path = write_shard(tmp_path / "a.tar.gz", captioned(3))
    raw = bytearray(path.read_bytes())
    raw[20:60] = bytes(40)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"Cannot unpack .*a\.tar\.gz.*get the file again"):
        opened(path)


def test_the_fingerprint_knows_no_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    here = opened(write_shard(tmp_path / "a.tar", captioned(3)))
    os.rename(tmp_path / "a.tar", tmp_path / "elsewhere" / "a.tar")
    assert opened(tmp_path / "elsewhere" / "a.tar").fingerprint == here.fingerprint


def test_an_unwritable_cache_keeps_the_index_in_memory_and_says_so_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "file"))
    paths = [str(write_shard(tmp_path / f"{s}.tar", captioned(2))) for s in range(3)]
    with caplog.at_level(logging.WARNING, "fullbatch"):
        samples = TarShards(paths)
        packed = opened(write_shard(tmp_path / "p.tar.gz", captioned(2)))
    assert caplog.text.count("not writable") == 1
    assert len(read_all(pickle.loads(pickle.dumps(samples)))[0]) == 6
    assert len(read_all(packed)[0]) == 2


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.xz"])
def test_packed_shards_are_unpacked_once(tmp_path, cache, ending):
    path = write_shard(tmp_path / f"a{ending}", captioned(3))
    for _ in range(2):
        good, bad = read_all(opened(path))
        assert len(good) == 3 and not bad and good[0].name == f"{tmp_path.name}/a{ending}:000000000"
    assert len(list(cache.glob("*.tar"))) == 1
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="Cannot unpack"):
        opened(path)
    assert not list(cache.glob(".writing*"))


def test_few_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_shards, "_OPEN_FILES", 3)
    samples = TarShards([str(write_shard(tmp_path / f"{s}.tar", captioned(2, first=2 * s))) for s in range(8)])
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: samples.read(i % 16).captions[0], range(320)))
    assert found == [f"picture {i % 16}" for i in range(320)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def _read(samples, index, answers):
    answers.put(samples.read(index).captions)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_hold_copies(tmp_path, start):
    samples = TarShards([str(write_shard(tmp_path / f"{s}.tar", captioned(2, first=2 * s))) for s in range(2)])
    samples.read(0)
    assert len(pickle.dumps(samples)) < 2000
    context = multiprocessing.get_context(start)
    answers = context.Queue()
    worker = context.Process(target=_read, args=(samples, 3, answers))
    worker.start()
    assert answers.get(timeout=HANG) == ("picture 3",)
    worker.join()


def test_a_shard_cut_after_it_was_indexed_is_bad_not_fatal(tmp_path):
    path = write_shard(tmp_path / "a.tar", captioned(3))
    samples = opened(path)
    os.truncate(path, 1000)
    good, bad = read_all(samples)
    assert len(bad) == 3 and not good and "shorter than when it was indexed" in str(bad[2])
    os.remove(path)
    assert "cannot read the shard" in str(read_all(pickle.loads(pickle.dumps(opened_again(samples))))[1][0])


def opened_again(samples):
    samples._index = np.array(samples._rows())  # in memory, as where there is no cache
    return samples
