"""A run folder has one training at a time, and whatever a killed process or a bad disk left in it, the run goes on."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fullbatch.cli import main
from fullbatch.run import train
from fullbatch.training.run_folder import Folder, alone_in
from tests.training.small import differences, renamed, saved_state, small_config

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
        with pytest.raises(ZeroDivisionError), alone_in(tmp_path / "run", lambda: 1 // 0):
            pass


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
        patched.setattr("fullbatch.run.write_design", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    run = tmp_path / "run"
    assert main(["train", "--resume", str(run)]) == 0
    assert differences(saved_state(whole, 20), saved_state(run, 20)) == []
    assert json.loads((run / "model" / "design.json").read_text()) == json.loads(
        (whole / "model" / "design.json").read_text()
    )
