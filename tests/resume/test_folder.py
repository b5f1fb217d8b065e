"""A run folder has one training at a time, and whatever a killed process or a bad disk left in it, the run goes on."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.tree import write_yaml
from fullbatch.data.cache_folder import cache_folder
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder, alone_in, replace_text
from fullbatch.training_run import train
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state, small_config
from tests.waiting import HANG

pytestmark = pytest.mark.filterwarnings("ignore:rho=")

# ---------------------------------------------------------------------------------------------------------------------
# one training at a time

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('ok', flush=True); input()"


@contextmanager
def another_process_in(run):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ok\n"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_second_training_is_refused_until_the_first_is_gone(tmp_path):
    config = small_config(tmp_path, "openclip")
    run = train(config).folder
    before = (run / "metrics.jsonl").read_text()
    longer = replace(config, training=replace(config.training, samples=8 * 24))
    with another_process_in(run), pytest.raises(ValueError, match=f"Another process is training in {run}; wait for it"):
        train(longer, resume=run)
    assert (run / "metrics.jsonl").read_text() == before
    train(longer, resume=run)  # the other was killed: its lock died with it


def test_so_is_one_that_begins_there(tmp_path):
    config = small_config(tmp_path, "openclip")
    (tmp_path / "run").mkdir()
    with another_process_in(tmp_path / "run"), pytest.raises(ValueError, match="Another process is training in"):
        train(config)


def test_so_is_one_in_another_thread(tmp_path):
    config = small_config(tmp_path, "openclip")
    said = []

    def begin():
        try:
            train(config)
        except ValueError as error:
            said.append(str(error))

    with alone_in(tmp_path / "run"):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        train(renamed(config, "other"))
    assert said == [f"Another process is training in {tmp_path / 'run'}; wait for it, or stop it."]


def test_who_holds_the_folder_may_train_in_it(tmp_path):
    config = small_config(tmp_path, "openclip")
    with alone_in(tmp_path / "run"):
        train(config)
        assert (tmp_path / "run" / ".lock").exists()
        with pytest.raises(ZeroDivisionError), alone_in(tmp_path / "run", lambda: 1 // 0):
            pass


def test_a_lock_whose_file_is_gone_is_none(tmp_path, monkeypatch):
    """Its holder ended, and took the file along, between the two moments in which another opened and locked it."""
    locking, asked = fcntl.lockf, []

    def late(file, how):
        asked.append(file.name)
        if len(asked) == 1:
            os.unlink(file.name)
        return locking(file, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with alone_in(tmp_path):
        assert len(asked) == 2 and (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A data worker outlives a killed training by some seconds."""
    ready, go = os.pipe(), os.pipe()
    with alone_in(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    free = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert subprocess.run([sys.executable, "-c", free, str(tmp_path / ".lock")]).returncode == 0
    os.write(go[1], b"x")
    os.waitpid(child, 0)


# ---------------------------------------------------------------------------------------------------------------------
# killed before there was anything to go on with


def test_killed_before_its_config_a_run_starts_again(tmp_path, monkeypatch):
    config = small_config(tmp_path, "openclip")
    whole = train(renamed(config, "whole")).folder

    def killed(folder, config):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write_config", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    run = tmp_path / "run"
    assert run.is_dir() and not (run / "config.yaml").exists()
    with pytest.raises(ValueError, match="starts again with the command that began it"):
        Folder(run).read_config()
    train(config)
    assert differences(saved_state(whole, 20), saved_state(run, 20)) == []


def test_killed_before_its_design_a_run_goes_on(tmp_path, monkeypatch):
    config = small_config(tmp_path, "openclip")
    whole = train(renamed(config, "whole")).folder

    def killed(model, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fullbatch.training_run.write_design", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    run = tmp_path / "run"
    assert main(["train", "--resume", str(run)]) == 0
    assert differences(saved_state(whole, 20), saved_state(run, 20)) == []
    assert json.loads((run / "model" / "design.json").read_text()) == json.loads(
        (whole / "model" / "design.json").read_text()
    )


# ---------------------------------------------------------------------------------------------------------------------
# damaged files


def measured_run(tmp_path):
    config = small_config(tmp_path, "openclip")
    tasks = (f"retrieval:{config.data.data[0]}",)
    return train(replace(config, evaluation=replace(config.evaluation, evaluate=tasks))).folder


def test_a_config_that_was_cut_is_not_believed(tmp_path, capsys):
    run = train(small_config(tmp_path, "openclip")).folder
    whole = (run / "config.yaml").read_text()
    lines = whole.splitlines(keepends=True)
    for kept in (*range(1, len(lines) - 2, 9), len(lines) - 2):
        cut = "".join(lines[:kept])
        (run / "config.yaml").write_text(cut)
        for command in ("train --resume", "export", "evaluate"):
            more = [str(tmp_path / "out")] if command == "export" else []
            assert main([*command.split(), str(run), *more]) == 1, command
            assert f"{run / 'config.yaml'} was cut off" in capsys.readouterr().err, command
        assert (run / "config.yaml").read_text() == cut
    assert main(["report", str(run), "--no-pictures"]) == 0
    assert "config.yaml was cut off" in (run / "report.html").read_text()
    (run / "config.yaml").write_text(whole)
    assert main(["train", "--resume", str(run)]) == 0


def test_a_config_of_an_earlier_version_has_no_end_mark(tmp_path):
    run = train(small_config(tmp_path, "openclip")).folder
    before = Folder(run).read_config()
    (run / "config.yaml").write_text((run / "config.yaml").read_text().removesuffix("...\n"))
    assert Folder(run).read_config() == before


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    replaced = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: order.append("replace") or replaced(path, target))
    replace_text(tmp_path / "file", "text")
    assert order[1:] == ["replace", str(tmp_path)] and order[0].startswith(str(tmp_path / ".file"))


DAMAGE = {"cut": lambda raw: raw[: len(raw) // 2], "nothing": lambda raw: b"", "noise": lambda raw: b"\0\xff" * 9}


@pytest.mark.parametrize("damage", first(["cut"], of=DAMAGE))
@pytest.mark.parametrize("name", ["results.json", "model/design.json", "metrics.jsonl"])
def test_a_finished_run_goes_on_past_a_damaged_file(tmp_path, capsys, caplog, name, damage):
    run = measured_run(tmp_path)
    before, path = saved_state(run, 20), run / name
    results = json.loads((run / "results.json").read_text())
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert main(["report", str(run), "--no-pictures"]) == 0, capsys.readouterr().err
    caplog.clear()
    assert main(["train", "--resume", str(run)]) == 0, capsys.readouterr().err
    if (name, damage) != ("metrics.jsonl", "nothing"):
        assert str(path) in caplog.text
    assert differences(before, saved_state(run, 20)) == []
    again = json.loads((run / "results.json").read_text())
    assert again["results"] == results["results"]
    assert main(["export", str(run), str(tmp_path / "out")]) == 0


def test_a_damaged_design_is_named(tmp_path, capsys):
    run = train(small_config(tmp_path, "openclip")).folder
    path = run / "model" / "design.json"
    for text in ("{", "[]", '{"kind": "open_clip"}', '{"kind": "x", "design": {}}', "[" * 100_000):
        path.write_text(text)
        assert main(["export", str(run), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert str(path) in said and "is damaged" in said and f"--resume {run} writes it anew" in said


def resigned(folder):
    """The manifest as if the files had been written as they are."""
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: checkpoint._describe(folder / name) for name in manifest["files"]}
    path.write_text(json.dumps(manifest))


CONTENTS = {
    "noise": lambda path: path.write_bytes(b"no pickle"),
    "nothing": lambda path: path.write_bytes(b""),
    "a list": lambda path: torch.save([1, 2], path),
    "another dict": lambda path: torch.save({"x": 1}, path),
}


@pytest.mark.parametrize("content", first(["a list"], of=CONTENTS))
def test_a_checkpoint_with_the_right_sums_of_something_else(tmp_path, capsys, content):
    run = train(small_config(tmp_path, "openclip")).folder
    newest = checkpoint.checkpoints(run / "checkpoints")[-1]
    CONTENTS[content](newest / "model.pt")
    resigned(newest)
    commands = (["train", "--resume"], ["export"], ["evaluate"], ["audit"], ["finetune", "--model"])
    for command in commands:
        more = {
            "export": [str(tmp_path / "out")],
            "finetune": ["--runs", str(tmp_path), "--data", str(tmp_path / "shard.tar")],
        }.get(command[0], [])
        assert main([*command, str(run), *more]) == 1, command
        said = capsys.readouterr().err
        wrong = (f"fullbatch: {newest}", "fullbatch: The checkpoint's model does not fit this run's settings")
        assert any(words in said for words in wrong), command


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "{}",
        '{"step": 20, "files": []}',
        '{"step": 20, "files": {"position.pt": 1}}',
        '{"step": "x", "files": {"position.pt": {}}}',
        '{"step": 20, "seconds": "x", "files": {"position.pt": {}}}',
        '{"step": 20, "files": {"position.pt": {}, "../../../secret.pt": {}}}',
        "[" * 100_000,
    ],
)
def test_an_odd_manifest_is_a_damaged_checkpoint(tmp_path, caplog, manifest):
    for step in (10, 20):
        checkpoint.write(tmp_path, step, checkpoint.Captured({"position": {"step": step}}), keep=2)
    (tmp_path / "step-odd").mkdir()
    (checkpoint.folder_of(tmp_path, 20) / checkpoint.MANIFEST).write_text(manifest)
    assert checkpoint.last_good(tmp_path) == checkpoint.folder_of(tmp_path, 10)
    assert "step-000000020 is damaged" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# a full disk, and what a killed process leaves


def test_a_full_disk_names_the_file_and_what_is_safe(tmp_path, capsys):
    config = small_config(tmp_path, "openclip")
    config = replace(config, run=replace(config.run, tensorboard=True))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    said = rf"The disk is full: {run / 'metrics.jsonl'} could not be written, [\d,.]+ MB are free. What was saved"
    with pytest.raises(OSError, match=said):
        train(config)
    (run / "metrics.jsonl").unlink()
    train(config, resume=run)


@pytest.mark.parametrize("lines", [0, 30])
def test_a_full_disk_for_tensorboard_and_the_log_is_no_traceback(tmp_path, capsys, caplog, monkeypatch, lines):
    config = small_config(tmp_path, "openclip")
    config = replace(config, run=replace(config.run, tensorboard=True))
    written = []
    writes = "tensorboard.summary.writer.record_writer.RecordWriter.write"
    monkeypatch.setattr(writes, lambda *record: written.append(record) if len(written) < lines else no_room())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").symlink_to("/dev/full")
    run = train(config).folder
    assert "TensorBoard files are written: No space left on device" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=f"The disk is full: {tmp_path / 'file'} could not be written"):
        replace_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    config = small_config(tmp_path, "openclip")
    run = tmp_path / "run"

    def leave(resumed):
        (run / "checkpoints" / ".writing-000000010").mkdir(parents=True)
        (run / ".config.yaml.4711").write_text("half a")
        train(config, resume=run if resumed else None)
        assert not list(run.rglob(".*"))

    leave(resumed=False)
    leave(resumed=True)


def test_the_cache_is_swept_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path))
    for name, age in (("old", 7200), ("young", 60)):
        path = tmp_path / f".writing-{name}"
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    assert cache_folder() == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [".writing-young"]


SLOW_START = """
import sys, time
import fullbatch.training_run
def assemble(*_):
    print("assembling", flush=True)
    time.sleep(60)
fullbatch.training_run.assemble = assemble
from fullbatch.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sigterm_before_the_first_step_is_said_too(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(small_config(tmp_path, "openclip")))
    command = [sys.executable, "-c", SLOW_START, "train", "--config", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "assembling\n"
    process.terminate()
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1].startswith("fullbatch: stopped at once, by SIGTERM. What was saved before is kept")
    assert "Traceback" not in said and not (tmp_path / "run").exists()
