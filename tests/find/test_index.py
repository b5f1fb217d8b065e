"""An index follows its folder, whatever happens to either; what it holds is what the model says of the files."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fullbatch.find import index as index_module
from fullbatch.find.index import Changes, PictureIndex
from fullbatch.find.nearest import Finder
from fullbatch.find.thumbnails import Thumbnails
from fullbatch.training.run_folder import LOCK, alone_in
from tests.find.making import picture, write_hostile, write_pictures


@pytest.fixture
def folder(tmp_path):
    write_pictures(tmp_path / "pictures", 14)
    return tmp_path / "pictures"


@pytest.fixture
def opened(encoder, tmp_path):
    def make(place=tmp_path / "index", folder=tmp_path / "pictures"):
        return PictureIndex(folder, encoder, place)

    return make


def counts(changes):
    return {**vars(changes), "bad": len(changes.bad)}


def only(**some):
    return counts(Changes(**some))


def rows_by_path(index):
    rows = index.embeddings
    return {entry.path: rows[entry.row] for entry in index.pictures}


def assert_same(one, other):
    """The same files with the same contents, and the same embeddings but for the rounding of other batches."""
    contents = [{path: (entry.digest, entry.bad) for path, entry in index.entries.items()} for index in (one, other)]
    assert contents[0] == contents[1]
    rows, others = rows_by_path(one), rows_by_path(other)
    assert rows.keys() == others.keys()
    for path, row in rows.items():
        torch.testing.assert_close(row, others[path], rtol=1e-5, atol=1e-6)


def assert_as_the_model_says(index, folder, encoder):
    rows = rows_by_path(index)
    expected = encoder.encode_image([folder / path for path in rows])
    torch.testing.assert_close(torch.stack(list(rows.values())), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def embedded(encoder, monkeypatch):
    """How many pictures each call embedded."""
    seen = []
    honest = type(encoder).embed_squares

    def counted(self, squares):
        seen.append(len(squares))
        return honest(self, squares)

    monkeypatch.setattr(type(encoder), "embed_squares", counted)
    return seen


# -- following a folder ------------------------------------------------------------------------------------------------


def test_it_holds_what_the_model_says(folder, encoder, opened):
    index, told = opened(), []
    assert index.pictures == [] and index.embeddings.shape == (0, encoder.width)
    assert counts(index.update(lambda *at: told.append(at))) == counts(Changes(embedded=14)) | {"bad": 0}
    assert told == [(0, 14), (4, 14), (8, 14), (12, 14), (14, 14)]
    assert [entry.path for entry in index.pictures] == sorted(entry.path for entry in index.pictures)
    assert_as_the_model_says(index, folder, encoder)
    assert_same(index, opened())


def test_what_is_unchanged_is_not_read(folder, encoder, opened, monkeypatch):
    index = opened()
    index.update()
    monkeypatch.setattr(index_module, "read_file", lambda *_: pytest.fail("read a file that has not changed"))
    assert counts(opened().update()) == only(unchanged=14)


def test_new_changed_moved_copied_touched_and_removed_files(folder, encoder, opened, embedded):
    index = opened()
    index.update()
    assert embedded == [4, 4, 4, 2]
    embedded.clear()
    write_pictures(folder, 1, start=14)
    picture(99).save(folder / "0000.png")
    shutil.move(folder / "0001.png", folder / "below" / "moved.png")
    shutil.copy(folder / "0003.png", folder / "copy.png")
    os.utime(folder / "0004.png", ns=(1, 1))
    (folder / "0006.png").unlink()
    changes = index.update()
    assert counts(changes) == only(embedded=2, known=3, unchanged=10, gone=2)
    assert sum(embedded) == 2
    assert_as_the_model_says(index, folder, encoder)
    assert "0006.png" not in rows_by_path(opened())
    assert_same(index, opened())


def test_equal_files_have_one_row(tmp_path, encoder, opened, embedded):
    for name in ("a.png", "b.png", "sub/c.png"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(1).save(tmp_path / "pictures" / name)
    index = opened()
    index.update()
    assert embedded == [1] and len(index.embeddings) == 1 and len(index.pictures) == 3


def test_a_file_that_comes_back_is_not_embedded_again(folder, encoder, opened, embedded):
    index = opened()
    index.update()
    shutil.move(folder / "0000.png", folder.parent / "aside.png")
    index.update()
    shutil.move(folder.parent / "aside.png", folder / "0000.png")
    embedded.clear()
    assert index.update().known == 1 and embedded == []


def test_bad_pictures_are_named_and_do_not_stop_it(folder, encoder, opened, monkeypatch):
    (folder / "words.png").write_text("no picture at all")
    (folder / "empty.jpg").touch()
    (folder / "cut.png").write_bytes((folder / "0000.png").read_bytes()[:60])
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(folder / "nowhere.png")
    index = opened()
    changes = index.update()
    reasons = {entry.path: entry.bad for entry in changes.bad}
    assert reasons.keys() == {"words.png", "empty.jpg", "cut.png", "pipe.png", "link.png"}
    assert "not a JPEG" in reasons["words.png"] and "zero bytes" in reasons["empty.jpg"]
    assert "cannot be decoded" in reasons["cut.png"] and "not a regular file" in reasons["pipe.png"]
    assert "No such file" in reasons["link.png"]
    again = index.update()
    assert len(again.bad) == 5 and again.unchanged == 14, "pictures are counted, not files"
    picture(50).save(folder / "words.png")
    picture(51).save(folder / "nowhere.png")
    changes = index.update()
    assert changes.embedded == 2 and {entry.path for entry in changes.bad} == {"empty.jpg", "cut.png", "pipe.png"}
    assert_as_the_model_says(index, folder, encoder)


def test_folders_that_cannot_be_read_are_named(folder, encoder, opened, monkeypatch):
    honest = os.scandir

    def denied(path):
        if str(path).endswith(locked):
            raise PermissionError(13, "Permission denied", path)
        return honest(path)

    monkeypatch.setattr(os, "scandir", denied)
    locked = "/below"
    index = opened()
    changes = index.update()
    assert [entry.path for entry in changes.bad] == ["below"] and changes.embedded == 10
    locked = "/nothing"
    assert counts(index.update()) == only(embedded=4, unchanged=10)
    locked = "/pictures"
    with pytest.raises(ValueError, match=r"The folder .*pictures cannot be read \(Permission denied\)"):
        index.update()


def test_any_name_is_kept(tmp_path, encoder, opened):
    paths = write_hostile(tmp_path / "pictures")
    raw = os.fsencode(tmp_path / "pictures") + b"/\xff\xfe not utf-8.png"
    shutil.copy(paths[0], raw)
    index = opened()
    index.update()
    assert {entry.path for entry in opened().pictures} == {
        *(path.name for path in paths),
        os.fsdecode(raw).split("/")[-1],
    }
    assert opened().update().unchanged == len(paths) + 1


def test_another_folder_with_equal_sizes_and_times_is_read(folder, encoder, opened, tmp_path):
    for number in range(3):
        picture(number).save(folder / f"same{number}.bmp")
    index = opened()
    index.update()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    before = (other / "same0.bmp").stat()
    shutil.copy(folder / "same1.bmp", other / "same0.bmp")
    os.utime(other / "same0.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    index = opened(folder=other)
    changes = index.update()
    assert changes.embedded == 0 and changes.known == 17 and changes.unchanged == 0
    assert_as_the_model_says(index, other, encoder)
    assert index.update().unchanged == 17


def test_an_index_within_its_folder_does_not_find_itself(folder, encoder, opened):
    index = opened(folder / "my index")
    index.update()
    thumbnails = Thumbnails(index)
    assert all(thumbnails.small(entry).startswith(b"\xff\xd8") for entry in index.pictures)
    assert index.update().unchanged == 14


# -- killed ------------------------------------------------------------------------------------------------------------


def test_whatever_a_kill_leaves_the_next_run_goes_on(folder, encoder, opened, tmp_path):
    """The files cut at every place where a kill could have cut them: rows are written before their lines."""
    shutil.copy(folder / "0000.png", folder / "copy.png")
    (folder / "bad.png").write_text("bad")
    whole = opened()
    whole.update()
    lines, rows = ((whole.place / name).read_bytes() for name in ("files.jsonl", "embeddings.f32"))
    wide, place = 4 * encoder.width, tmp_path / "cut"
    ends = [at + 1 for at, letter in enumerate(lines) if letter == ord("\n")]
    for end in [0, 1, *ends, *(end - 7 for end in ends)]:
        said = [json.loads(line)["row"] for line in lines[: lines[:end].rfind(b"\n") + 1].splitlines()]
        needed = wide * (max((row for row in said if row is not None), default=-1) + 1)
        for there in {needed, min(needed + wide // 2, len(rows)), len(rows)}:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            shutil.copy(whole.place / "index.json", place)
            (place / "files.jsonl").write_bytes(lines[:end])
            (place / "embeddings.f32").write_bytes(rows[:there])
            left = opened(place)
            changes = left.update()
            assert changes.unchanged == sum(row is not None for row in said)
            assert_same(left, whole)
            assert_same(opened(place), whole)


def test_damage_within_is_repaired(folder, encoder, opened):
    whole = opened()
    whole.update()
    place = whole.place
    lines = (place / "files.jsonl").read_text().splitlines(keepends=True)
    lines[3], lines[5] = "#####\n", json.dumps({"path": "x.png", "row": 10**9}) + "\n"
    (place / "files.jsonl").write_text("".join(lines))
    os.truncate(place / "embeddings.f32", 4 * encoder.width * 12)  # a power cut, on a disk that does as it likes
    again = opened()
    assert len(again.pictures) == 10
    assert again.update().embedded == 4
    assert_as_the_model_says(again, folder, encoder)


KILLER = """
import os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)  # so that a forked process may compute
import fullbatch as fb
from fullbatch.find.index import PictureIndex
run, folder, place, *moments = sys.argv[1:]
encoder = fb.load(run, device="cpu", batch_size=4)
honest = type(encoder).embed_squares
type(encoder).embed_squares = lambda self, squares: (time.sleep(0.02), honest(self, squares))[1]  # too slow to end
for moment in map(float, moments):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        tell = lambda done, total: os.write(theirs, b"!")
        PictureIndex(Path(folder), encoder, Path(place)).update(tell)
        os._exit(0)
    os.read(ours, 1)  # it has begun
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(len(PictureIndex(Path(folder), encoder, Path(place)).pictures), flush=True)
"""


@pytest.mark.slow
def test_killed_at_random_moments(trained, encoder, opened, tmp_path):
    kills = 60
    folder = tmp_path / "pictures"
    write_pictures(folder, 50 * kills)
    random_ones = random.Random(kills)
    moments = [str(random_ones.uniform(0.0, 0.3)) for _ in range(kills)]
    command = [sys.executable, "-c", KILLER, str(trained), str(folder), str(tmp_path / "index"), *moments]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    survived = [int(line) for line in told.split()]
    assert len(survived) == kills and survived == sorted(survived) and survived[-1] > 0
    index = opened()
    assert index.update().unchanged == survived[-1]
    undisturbed = opened(tmp_path / "undisturbed")
    undisturbed.update()
    assert_same(index, undisturbed)
    assert_same(opened(), undisturbed)
    sizes = [(place / "embeddings.f32").stat().st_size for place in (index.place, undisturbed.place)]
    assert sizes[0] == sizes[1], "nothing is kept twice"


def test_a_full_disk_is_said_and_costs_a_batch(folder, encoder, opened, monkeypatch):
    index, honest, calls = opened(), os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(28, "No space left on device")
        honest(descriptor)

    monkeypatch.setattr(index_module.os, "fsync", full)
    with pytest.raises(OSError, match=r"The disk is full: .* could not be written"):
        index.update()
    monkeypatch.undo()
    again = opened()
    assert 0 < len(again.pictures) < 14
    again.update()
    assert_as_the_model_says(again, folder, encoder)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(folder, encoder, opened):
    index = opened()
    index.update()
    with pytest.raises(ValueError, match="is the index of another model, or of another --precision; name another"):
        PictureIndex(folder, replace(encoder, precision="bf16"), index.place)


def test_what_is_no_index_is_left_alone(folder, opened, tmp_path):
    with pytest.raises(ValueError, match="is no index, and not empty: name a new folder"):
        opened(folder)
    with pytest.raises(ValueError, match=r"0000.png is a file; name a folder"):
        opened(folder / "0000.png")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"index.json is damaged \(.*\); remove .* to index anew"):
        opened()


def test_what_is_no_folder_of_pictures_is_named(tmp_path, encoder, opened):
    (tmp_path / "none").mkdir()
    (tmp_path / "file").touch()
    cases = {"There is no folder .*absent": "absent", "file is not a folder": "file", "none holds no pictures": "none"}
    for message, name in cases.items():
        with pytest.raises(ValueError, match=message):
            opened(folder=tmp_path / name).update()
    assert not (tmp_path / "index").exists()


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


def test_one_writes_at_a_time_while_others_read(folder, encoder, opened):
    index = opened()
    index.update()
    with alone_in(index.place), pytest.raises(ValueError, match="Another process is writing the index"):
        opened().update()
    command = [sys.executable, "-c", HOLDER, str(index.place / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match=r"Another process is writing the index .*; wait for it, or stop it"):
            opened().update()
        assert len(opened().pictures) == 14
        other.send_signal(signal.SIGKILL)
    assert opened().update().unchanged == 14


def test_embeddings_that_are_not_finite_are_refused(folder, encoder, opened, monkeypatch):
    monkeypatch.setattr(type(encoder), "embed_squares", lambda self, squares: torch.full((len(squares), 12), torch.nan))
    with pytest.raises(ValueError, match=r"not finite for 4 of 4 pictures \(first: 0000.png\)"):
        opened().update()


def test_it_lies_in_the_cache_folder_unless_told(folder, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    places = [
        PictureIndex(folder, encoder).place,
        PictureIndex(folder / "below", encoder).place,
        PictureIndex(folder, replace(encoder, precision="bf16")).place,
    ]
    assert len(set(places)) == 3 and {place.parent for place in places} == {tmp_path / "cache" / "find"}
    monkeypatch.setattr(index_module, "cache_folder", lambda: None)
    with pytest.raises(ValueError, match="say with --index where the index is to lie"):
        PictureIndex(folder, encoder)


def test_rows_of_pictures_that_are_gone_are_not_found(folder, encoder, opened):
    index = opened()
    index.update()
    reader = Finder(opened())
    query = reader.query("a cat")
    before = reader.find(query, 20)
    for path in sorted(folder.glob("*.png"))[:8]:
        path.unlink()
    index.update()
    assert len(Finder(index).find(query, 20)) == 6 == len(index.pictures)
    assert reader.find(query, 20) == before, "who has it open keeps what it has"
